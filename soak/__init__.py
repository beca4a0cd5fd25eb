"""Many faults and much load: measures the figures in docs/reliability.md. `python -m soak --help`."""
