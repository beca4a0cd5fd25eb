"""Small faults, put into the library one at a time, to see which tests find them: `python -m tests.mutants`."""
