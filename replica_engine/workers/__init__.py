"""Jobs of several workers: processes, on one machine or on many, that run one program together.

This package knows nothing of TensorFlow or jax, and imports the standard library only. It says which worker this
process is, and tells every worker which other one is lost, missing or different. The modules, from the top layer down:

    launch_command `replica-engine launch`
    launcher       N processes on this machine: starts, watches, ends and restarts them
    joining        `join`: takes this process into its job
    saving         which worker writes files, and where the workers meet
    server         the coordinator: its sockets, connections that are not proved yet, its child process
    child_process  how this library starts its own child processes
    job            what the coordinator knows and decides
    stalls         members that are alive and do not go on
    member         a worker's side: what it does
    connection     a worker's side: questions and answers, the thread, whether the other machines answer
    program_log    what the workers launched, compared
    messages       messages, the proof of the token, and the first failure of a job
    cluster        which worker this process is, and where the coordinator is: from environment variables

`replica_engine.errors.worker_errors` words what can go wrong; docs/many_hosts.md is the guide.
"""

from replica_engine.workers.cluster import Cluster, find_cluster
from replica_engine.workers.joining import join
from replica_engine.workers.member import Member
from replica_engine.workers.program_log import Program

__all__ = ["Cluster", "Member", "Program", "find_cluster", "join"]
