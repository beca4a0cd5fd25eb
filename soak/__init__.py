"""Faults and load, many of them: what docs/reliability.md says was counted here. `python -m soak --help`."""
