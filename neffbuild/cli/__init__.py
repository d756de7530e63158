"""The command line: one module per command; parses, prints, exits."""
