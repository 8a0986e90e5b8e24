"""The course: execute the notebooks, and choose the model that they examine."""
