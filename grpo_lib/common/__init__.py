"""Common: errors, files that survive an interruption, cells of a spreadsheet, the environment."""
