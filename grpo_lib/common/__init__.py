"""Common: errors, atomic files, the environment, colours."""
