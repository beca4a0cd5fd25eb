"""Tracing replica 0 alone, and copying its operations for the other replicas (`MirroredStrategy(trace_once=True)`)."""
