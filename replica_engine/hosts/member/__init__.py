"""A worker's side of the connection to the coordinator, and its look at the other workers' machines."""

from replica_engine.hosts.member.member import BATCH, Member, member_of

__all__ = ["BATCH", "Member", "member_of"]
