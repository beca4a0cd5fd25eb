"""Jobs of several workers: processes, on one machine or on many, that run one program together.

This package knows nothing of TensorFlow or jax, and imports the standard library only. It says which worker this
process is, and tells every worker which other one is lost, missing or different. The modules, from the top layer down:

    cli           `replica-engine launch`
    launcher      N processes on this machine: starts, watches, ends and restarts them
    joining       `join`: takes this process into its job
    serve         the coordinator as a child process of worker 0
    child_process how this library starts its own child processes
    coordinator   the sockets of the coordinator
    job           what the coordinator knows and decides
    strangers     connections that have not proved that they know the token
    member        a worker's side: `member` what it does, `channel` questions and answers, `connection` the thread,
                  `links` whether the other machines answer
    saving        which worker writes files, and where the workers meet
    launch_log    what the workers launched, compared
    failure       the first failure of a job, as data
    wire          messages, and the proof of the token
    addresses     the address under which the other workers reach this process
    cluster       which worker this process is, from environment variables
    signs         signs of other processes, where no place is told
    schedulers    the coordinator's address in jobs of Slurm and Open MPI

`replica_engine.errors.hosts` words what can go wrong; docs/many_hosts.md is the guide.
"""

from replica_engine.hosts.cluster import Cluster, find_cluster
from replica_engine.hosts.joining import join
from replica_engine.hosts.launch_log import Program
from replica_engine.hosts.member import Member

__all__ = ["Cluster", "Member", "Program", "find_cluster", "join"]
