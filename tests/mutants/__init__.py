"""Small faults, put into the library one at a time, and which tests find them: `python -m tests.mutants`."""
