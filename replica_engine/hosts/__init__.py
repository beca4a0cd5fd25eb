"""The name of `replica_engine.workers` until 0.3, for one release more."""

from replica_engine.workers import Cluster, Member, Program, find_cluster, join

__all__ = ["Cluster", "Member", "Program", "find_cluster", "join"]
