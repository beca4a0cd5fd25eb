"""Benchmarks: replica_engine beside its peers, in one process and one run, as ratios."""
