"""What runs the course: recipes, engines (MaxText, Tunix, vLLM), losses, runs, report, training, command line."""
