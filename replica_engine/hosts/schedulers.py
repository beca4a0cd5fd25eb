"""Where the coordinator of a job is that Slurm or Open MPI started.

Neither tells its processes an address to meet at. Each process computes the same one from what it is told: the host of
the first task, and a port drawn from the number of the job, so that two jobs on one machine have two ports.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator, Mapping

from replica_engine.errors import ClusterConfigError

STEP_NODES = "SLURM_STEP_NODELIST"
STEP_TASKS = "SLURM_STEP_NUM_TASKS"

_MPI_URI = "OMPI_MCA_orte_hnp_uri"
_MPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_FIRST_PORT, _PORTS = 61_000, 4_500  # above the ports that Linux gives to outgoing connections (32768 to 60999)
_MOST_NODES = 100_000
_NODES = r"(?:[\w.-]|\[[^][]*\])+"  # a name, which may have brackets
_WANTED = 'a list of nodes as Slurm writes it: "node1,node2" or "node[1-3,07]"'


def slurm_address(environ: Mapping[str, str]) -> str:
    """The coordinator's address in a step of Slurm: on the first node of the step, where task 0 runs."""
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return f"{node_names(environ[STEP_NODES])[0]}:{_port(job)}"


def node_names(text: str) -> list[str]:
    """The names in a list of nodes as Slurm writes it.

    Args:
        text: names with commas between them. Brackets stand for numbers and ranges of numbers, which keep their
            leading zeros; a name may have several.

    Raises:
        ClusterConfigError: it is not such a list.

    Example:
        >>> node_names("login,node[1-3,07]")
        ['login', 'node1', 'node2', 'node3', 'node07']
    """
    try:
        if not re.fullmatch(rf"\s*{_NODES}\s*(?:,\s*{_NODES}\s*)*", text):
            raise ValueError("not names with commas between them")
        every = (name for part in re.findall(_NODES, text) for name in _expanded(part))
        found = list(itertools.islice(every, _MOST_NODES + 1))
        if len(found) > _MOST_NODES:
            raise ValueError("too many")
    except ValueError:
        raise ClusterConfigError.bad_value(STEP_NODES, text, _WANTED) from None
    return found


def open_mpi_address(environ: Mapping[str, str], size: int) -> str:
    """The coordinator's address of a job of Open MPI: this machine, or that of mpirun, where rank 0 runs by default."""
    uri = environ.get(_MPI_URI, "")
    port = _port(uri.partition(";")[0] or environ.get("PMIX_NAMESPACE", ""))
    if environ.get(_MPI_LOCAL_SIZE) == str(size):
        return f"127.0.0.1:{port}"
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911" or "1314521088.0;tcp6://[fe80::2,2620::3]:43370"
    found = re.search(r";tcp://([\w.-]+)", uri) or re.search(r";tcp6://(\[[^],]+)", uri)
    if found is None:
        raise ClusterConfigError.missing(
            "REPLICA_ENGINE_COORDINATOR",
            "OMPI_COMM_WORLD_SIZE",
            'the address "host:port" of a free port on the host of rank 0, which Open MPI does not tell; '
            "pass it with mpirun -x REPLICA_ENGINE_COORDINATOR=host:port",
        )
    return f"{found[1]}]:{port}" if found[1].startswith("[") else f"{found[1]}:{port}"


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _expanded(part: str) -> Iterator[str]:
    """The names that one part stands for, with its brackets expanded from the left."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, after = rest.partition("]")
    for each in inside.split(","):
        numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", each.strip(), re.ASCII)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise ValueError("neither a number nor a range of numbers")
        for number in range(int(first), int(last) + 1):
            yield from _expanded(f"{before}{number:0{len(first)}d}{after}")
