"""Which worker this process is, of how many, and where their coordinator is: read from the environment.

What starts the processes of a job tells each of them its place in environment variables, and each launcher has its
own. `find_cluster` looks for them in a fixed order, and the first that is there counts:

1. `replica-engine launch`, or the same variables set by hand;
2. `TF_CONFIG` (Kubernetes' TFJob, Ray Train, programs for tf.distribute);
3. `KERAS_DISTRIBUTION_*`;
4. `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` (Kubeflow Trainer, programs for `jax.distributed`);
5. torchrun, or the same variables set by hand;
6. a step of Slurm;
7. Open MPI.

All processes of a job must come to the same coordinator address without talking to each other. So it is computed from
what all of them are told. REPLICA_ENGINE_COORDINATOR says another address in each of the cases.

Nothing is guessed. A variable that is set and wrong raises a ClusterConfigError that names it, and so does a place that
is incomplete. Where a variable shows that there are other processes, and none gives a place, a warning says once that
this process runs alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from replica_engine.errors import ClusterConfigError, base, worker_errors

# Where the coordinator of a job is that Slurm or Open MPI started.
#
# Neither tells its processes an address to meet at. Each process computes the same one from what it is told: the host
# of the first task, and a port drawn from the number of the job, so that two jobs on one machine have two ports.

STEP_NODES = "SLURM_STEP_NODELIST"
STEP_TASKS = "SLURM_STEP_NUM_TASKS"

_MPI_URI = "OMPI_MCA_orte_hnp_uri"
_MPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_FIRST_PORT, _PORTS = 61_000, 4_500  # above the ports that Linux gives to outgoing connections (32768 to 60999)
_MOST_NODES = 100_000
_NODES = r"(?:[\w.-]|\[[^][]*\])+"  # a name, which may have brackets
_WANTED = 'a list of nodes as Slurm writes it: "node1,node2" or "node[1-3,07]"'


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


def _open_mpi_address(environ: Mapping[str, str], size: int) -> str:
    """The coordinator's address of a job of Open MPI: this machine, or that of mpirun, where rank 0 runs by default."""
    if given := _given(environ):
        return given
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


# Under which address the other workers of a job reach this process.


def own_host(coordinator: str, reached: str = "") -> str:
    """The host under which the other workers reach this machine.

    It is the one from which this machine reaches the coordinator. On the coordinator's own machine that may be
    127.0.0.1, which leads the others nowhere, and so may the name of the machine: it is 127.0.1.1 there by default on
    Debian. So there it is the host that the others came to, or the coordinator's as long as that is not known.

    Args:
        coordinator: the coordinator's address, as "host:port".
        reached: the host under which the other workers reach the coordinator's machine; "" if it is not known.

    Example:
        >>> own_host("127.0.0.1:2222")
        '127.0.0.1'
    """
    host, port = split_address(coordinator)
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(there)  # sends nothing; it only looks the way up
        own = asked.getsockname()[0]
    return (reached or host) if is_loopback(own) else own


def is_loopback(host: str) -> bool:
    """Whether a numeric host is one that only processes of the same machine reach."""
    return ipaddress.ip_address(plain_host(host)).is_loopback


def plain_host(host: str) -> str:
    """A numeric host; an IPv4 address that a socket for both kinds shows as one of IPv6 is IPv4's again."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped) if mapped is not None else host


def check_free(address: str) -> None:
    """Raises ClusterConfigError if a server could not listen at the port of an address, at all hosts of this machine.

    A server that shares its ports, as TensorFlow's does, would not notice another one that does so too.
    """
    _, port = split_address(address)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended do no harm
            asking.bind(("", port))
    except OSError as error:
        raise ClusterConfigError.about(
            "TF_CONFIG.cluster",
            f"TensorFlow's server of this worker cannot listen at the port of {address}: {error.strerror}. Another "
            "process has it, such as a worker of an earlier run. End that process, or give this worker another port, "
            "in the cluster that all workers are told.",
        ) from None


def held_address(coordinator: str, reached: str = "") -> tuple[str, socket.socket]:
    """An address of this machine that the other workers reach, and a socket that keeps its port for a server.

    Until the socket is closed, the system gives the port to nobody who asks for any port. A port that was merely free a
    moment ago may be another process' when the server starts; and servers that share their ports, as TensorFlow's does,
    would not even notice. The socket does not listen, so the server can still have the port, by its number.

    Args:
        coordinator: the coordinator's address, as "host:port".
        reached: as for `own_host`.
    """
    host = own_host(coordinator, reached)
    family, _, _, _, here = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with contextlib.ExitStack() as stack:  # until it is returned, nobody else knows of the socket
        held = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):  # a server that sets either of them gets the port
            if hasattr(socket, option):
                held.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        held.bind(here)
        address = join_address(host, held.getsockname()[1])
        stack.pop_all()
    return address, held


# Signs of other processes in an environment that does not tell this process its place among them.
#
# Such a process would run alone without a word, and so would each of the others: every one of them trains a model of
# its own and writes over the files of the others. The variables here are set by launchers whose place is not read, or
# are a part of what a launcher sets whose place is read. A variable of one process alone is no sign.


def _index(value: str) -> bool:
    return value.isascii() and value.isdecimal()


def _later(value: str) -> bool:
    """Whether it is the index of a process that is not the first one; 0 may be that of the only one."""
    return _index(value) and value.strip("0") != ""


def _several(value: str) -> bool:
    return _index(value) and len(value) < 10 and int(value) > 1


def _names(value: str) -> bool:
    """Whether it is a list of more than one host, as JSON or with commas."""
    with contextlib.suppress(ValueError, RecursionError):
        value = ",".join(map(str, json.loads(value))) if value.startswith("[") else value
    return len([name for name in value.split(",") if name.strip()]) > 1


def _is_second_task(value: str) -> bool:
    """Whether it is a TF_CONFIG without a cluster, of a task that is not the first one."""
    with contextlib.suppress(ValueError, RecursionError):
        config = json.loads(value)
        task = config.get("task") if isinstance(config, dict) else None
        return isinstance(task, dict) and _later(str(task.get("index")))
    return False


_SIGNS: dict[str, Callable[[str], bool]] = {
    "REPLICA_ENGINE_COORDINATOR": bool,
    "TF_CONFIG": _is_second_task,
    "KERAS_DISTRIBUTION_JOB_ADDRESSES": bool,
    "JAX_COORDINATOR_ADDRESS": bool,
    "WORLD_SIZE": _several,
    "RANK": _index,
    "MASTER_ADDR": lambda value: value not in ("", "localhost", "127.0.0.1", "::1"),
    "LOCAL_WORLD_SIZE": _several,
    "LOCAL_RANK": _later,
    "JOB_COMPLETION_INDEX": bool,  # an Indexed Job of Kubernetes, which does not tell how many there are
    "TPU_WORKER_HOSTNAMES": _names,
    "TPU_WORKER_ID": _later,
    "TPU_PROCESS_ADDRESSES": _names,
    "MEGASCALE_NUM_SLICES": _several,
    "PMI_SIZE": _several,  # MPICH, Intel MPI
    "PMI_RANK": _later,
    "PMIX_RANK": _later,  # PRRTE, and others that use PMIx
    "PALS_SIZE": _several,  # HPE Cray
    "MV2_COMM_WORLD_SIZE": _several,  # MVAPICH
    "FLUX_JOB_SIZE": _several,
    "JSM_NAMESPACE_SIZE": _several,  # jsrun of LSF
    "HOROVOD_SIZE": _several,
    "SM_HOSTS": _names,  # SageMaker
    "AWS_BATCH_JOB_NUM_NODES": _several,
}


# The place of this process in its job.

LOGGER = logging.getLogger("replica_engine")

PROCESS_ID = "REPLICA_ENGINE_PROCESS_ID"
NUM_PROCESSES = "REPLICA_ENGINE_NUM_PROCESSES"
COORDINATOR = "REPLICA_ENGINE_COORDINATOR"

_TF_CONFIG = "TF_CONFIG"
_ROLES = ("chief", "master", "worker")  # in the order of their indices; TFJob calls the chief Master too
_KERAS = "KERAS_DISTRIBUTION_"
_SLURM_ID = "SLURM_PROCID"


_warned: list[str] = []  # the sign of other processes that this process has warned of


@dataclass(frozen=True)
class Cluster:
    """The place of this process in its job.

    Attributes:
        process_id: the index of this worker, from 0; messages call it "worker 1".
        num_processes: the number of workers.
        coordinator: the address of the coordinator, as "host:port"; "" in a job of one process that nobody launched.
        tasks: what the launcher calls each worker, by index: "chief 0", "rank 1", "task 2".
        source: what it was read from; "" if there was nothing to read.
        addresses: the address of each worker, as "host:port", by index; () if the launcher does not tell.
    """

    process_id: int
    num_processes: int
    coordinator: str
    tasks: tuple[str, ...]
    source: str
    addresses: tuple[str, ...] = ()


_Reader = Callable[[Mapping[str, str]], Cluster | None]
_FindsAddress = Callable[[Mapping[str, str], int], str]


def find_cluster(environ: Mapping[str, str] | None = None) -> Cluster:
    """Reads the place of this process in its job from environment variables.

    Args:
        environ: the variables; None takes those of the process.

    Returns:
        The place; that of a job of one process if no launcher's variables are set.

    Raises:
        ClusterConfigError: a variable is wrong, or another is missing that it makes necessary.

    Example:
        >>> address = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
        >>> here = find_cluster({"RANK": "1", "WORLD_SIZE": "2", **address})
        >>> here.process_id, here.num_processes, here.coordinator, here.source
        (1, 2, 'node-a:29500', 'torchrun')
    """
    environ = os.environ if environ is None else environ
    for read in _READERS:
        cluster = read(environ)
        if cluster is not None:
            address = _given(environ) if cluster.num_processes > 1 or environ.get(worker_errors.LAUNCHED) == "1" else ""
            return replace(cluster, coordinator=_address(COORDINATOR, address)) if address else cluster
    _warn_of_others(environ)
    return Cluster(0, 1, "", ("process 0",), "")


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of an address "host:port"; an IPv6 host is in brackets there.

    Raises:
        ValueError: it is not such an address.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address needs brackets")
    if not colon or not host or not (port.isascii() and port.isdecimal()) or not 0 <= int(port) < 2**16:
        raise ValueError("not an address")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The address of a host and a port: "host:port", or "[host]:port" for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tf_config(environ: Mapping[str, str]) -> Cluster | None:
    text = environ.get(_TF_CONFIG, "")
    if not text.strip():
        return None
    try:
        config = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ClusterConfigError.about(
            _TF_CONFIG,
            f"{_TF_CONFIG} is not JSON ({error}): {base.shown(text)}. Write, for two workers: "
            '{"cluster": {"worker": ["host-a:2222", "host-b:2222"]}, "task": {"type": "worker", "index": 0}}',
        ) from None
    if not isinstance(config, dict):
        raise ClusterConfigError.bad_value(_TF_CONFIG, config, "an object with the fields `cluster` and `task`")
    if config.get("sparseCluster"):
        raise ClusterConfigError.about(
            f"{_TF_CONFIG}.sparseCluster",
            f"{_TF_CONFIG}.sparseCluster tells a worker its own address and not how many workers there are. A TFJob "
            "with `enableDynamicWorker: true` writes it: take that out of the TFJob.",
        )
    if not config.get("cluster"):
        return None  # as TensorFlow has it: no cluster, one process
    addresses = _tf_addresses(config["cluster"])
    kind, index = _tf_task(config.get("task"), addresses)
    names = [(each, at) for each in _ROLES for at in range(len(addresses.get(each, ())))]
    every = tuple(address for each in _ROLES for address in addresses.get(each, ()))
    if len(set(every)) < len(every):
        raise ClusterConfigError.bad_value(f"{_TF_CONFIG}.cluster", config["cluster"], "one address for each task")
    coordinator, tasks = _beside(every) if len(every) > 1 else "", tuple(f"{each} {at}" for each, at in names)
    return Cluster(names.index((kind, index)), len(every), coordinator, tasks, _TF_CONFIG, every)


def _tf_addresses(cluster: object) -> dict[str, list[str]]:
    """The addresses of each kind of task, checked."""
    field = f"{_TF_CONFIG}.cluster"
    if not isinstance(cluster, dict):
        raise ClusterConfigError.bad_value(field, cluster, 'an object such as {"worker": ["host-a:2222"]}')
    for kind, addresses in cluster.items():
        if kind not in _ROLES:
            raise ClusterConfigError.wrong_task(field, kind)
        if not isinstance(addresses, list) or not addresses:
            raise ClusterConfigError.bad_value(f"{field}.{kind}", addresses, 'a list of addresses "host:port"')
        for at, address in enumerate(addresses):
            _address(f"{field}.{kind}[{at}]", address)
        if kind != "worker" and len(addresses) > 1:
            raise ClusterConfigError.bad_value(f"{field}.{kind}", addresses, "a list of one address: one chief")
    if "chief" in cluster and "master" in cluster:
        raise ClusterConfigError.bad_value(field, sorted(cluster), "with either `chief` or `master`, and not with both")
    return cluster


def _tf_task(task: object, addresses: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    """The kind and the index of this process' task, checked."""
    field = f"{_TF_CONFIG}.task"
    wanted = 'an object such as {"type": "worker", "index": 0}'
    if task is None:
        raise ClusterConfigError.missing(field, f"{_TF_CONFIG}.cluster", wanted)
    if not isinstance(task, dict):
        raise ClusterConfigError.bad_value(field, task, wanted)
    kind = str(task.get("type"))
    if kind not in _ROLES:
        raise ClusterConfigError.wrong_task(f"{field}.type", kind)
    if kind not in addresses:
        there = f"one that the cluster has: {', '.join(sorted(addresses))}"
        raise ClusterConfigError.bad_value(f"{field}.type", kind, there)
    index = _whole(f"{field}.index", task.get("index"), least=0)
    if index >= len(addresses[kind]):
        raise ClusterConfigError.out_of_range(
            f"{field}.index", index, len(addresses[kind]), f"{_TF_CONFIG}.cluster.{kind}"
        )
    return kind, index


def _beside(addresses: Sequence[str]) -> str:
    """An address on the host of worker 0 that no worker has: TensorFlow's own server listens on those."""
    host, port = split_address(addresses[0])
    taken = {split_address(address)[1] for address in addresses if split_address(address)[0] == host}
    while port in taken or port >= 2**16:
        port = port + 1 if port + 1 < 2**16 else 1024
    return join_address(host, port)


def _our_address(environ: Mapping[str, str], size: int) -> str:
    return _address(COORDINATOR, _present(environ, COORDINATOR, NUM_PROCESSES, _ADDRESS))


def _keras_address(environ: Mapping[str, str], size: int) -> str:
    jobs, wanted = f"{_KERAS}JOB_ADDRESSES", '"host:port" of worker 0, or of all workers with commas between them'
    given = _present(environ, jobs, f"{_KERAS}NUM_PROCESSES", wanted)
    addresses = [_address(f"{jobs}[{at}]", each.strip()) for at, each in enumerate(given.split(","))]
    if len(addresses) not in (1, size):
        raise ClusterConfigError.bad_value(jobs, given, f"{wanted}: 1 or {size} addresses")
    return addresses[0]


def _jax_address(environ: Mapping[str, str], size: int) -> str:
    coordinator = "JAX_COORDINATOR_ADDRESS"
    return _given(environ) or _address(coordinator, _present(environ, coordinator, "JAX_NUM_PROCESSES", _ADDRESS))


def _torchrun(environ: Mapping[str, str]) -> Cluster | None:
    if not {"RANK", "WORLD_SIZE"} <= set(environ):
        return None  # one of the two alone does not show who started the process
    return _place(environ, "WORLD_SIZE", "RANK", "rank", "torchrun", _torchrun_address)


def _torchrun_address(environ: Mapping[str, str], size: int) -> str:
    host = _present(environ, "MASTER_ADDR", "WORLD_SIZE", "the name of the host of rank 0")
    port = _whole("MASTER_PORT", _present(environ, "MASTER_PORT", "WORLD_SIZE", "a port"), least=1, most=2**16 - 2)
    # torchrun itself may listen at that port, and then says so.
    return join_address(host, port + (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"))


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    # mpirun in a job starts its daemons as a step: what the ranks inherit of Slurm is the place of their daemon, not
    # their own.
    if "OMPI_COMM_WORLD_RANK" in environ:
        return None
    # Outside of a step (in the batch script itself) there is one process, of index 0, and no variable of a step.
    if not {STEP_NODES, STEP_TASKS} & set(environ):
        if _number(environ.get(_SLURM_ID, "")) > 0:
            raise ClusterConfigError.missing(STEP_TASKS, _SLURM_ID, "the number of tasks of the step")
        return None
    return _place(environ, STEP_TASKS, _SLURM_ID, "task", "Slurm", _slurm_address)


def _slurm_address(environ: Mapping[str, str], size: int) -> str:
    """The coordinator's address in a step of Slurm: on the first node of the step, where task 0 runs."""
    if given := _given(environ):
        return given
    nodes = _present(environ, STEP_NODES, STEP_TASKS, "the nodes of the step, as Slurm writes them")
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return f"{node_names(nodes)[0]}:{_port(job)}"


def _numbered(sizes: str, indices: str, kind: str, source: str, address: _FindsAddress) -> _Reader:
    """A reader of what tells the number of workers and the index of this one; see `_place`."""
    return lambda environ: (
        _place(environ, sizes, indices, kind, source, address) if {sizes, indices} & set(environ) else None
    )


def _place(
    environ: Mapping[str, str], sizes: str, indices: str, kind: str, source: str, address: _FindsAddress
) -> Cluster:
    """The place that two variables tell, checked.

    Args:
        environ: the variables.
        sizes: the name of the one with the number of workers.
        indices: the name of the one with the index of this worker.
        kind: what the launcher calls a worker.
        source: what the place is read from.
        address: finds the address of the coordinator, for the number of workers, if they are several.
    """
    wanted = "the number of workers, the same for all"
    size = _whole(sizes, _present(environ, sizes, indices, wanted), least=1)
    index = _whole(indices, _present(environ, indices, sizes, "the worker's index, from 0"), least=0)
    if index >= size:
        raise ClusterConfigError.out_of_range(indices, index, size, sizes)
    coordinator = address(environ, size) if size > 1 else ""  # first: the names of a wrong size may fill the memory
    return Cluster(index, size, coordinator, tuple(f"{kind} {each}" for each in range(size)), source)


_READERS: tuple[_Reader, ...] = (
    _numbered(NUM_PROCESSES, PROCESS_ID, "process", PROCESS_ID, _our_address),
    _tf_config,
    _numbered(f"{_KERAS}NUM_PROCESSES", f"{_KERAS}PROCESS_ID", "process", f"{_KERAS}PROCESS_ID", _keras_address),
    _numbered("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "process", "JAX_PROCESS_ID", _jax_address),
    _torchrun,
    _slurm,
    _numbered("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "rank", "Open MPI", _open_mpi_address),
)

_ADDRESS = 'the address of the coordinator, as "host:port": a free port on the host of worker 0'


def _present(environ: Mapping[str, str], field: str, given: str, wanted: str) -> str:
    if not environ.get(field):
        raise ClusterConfigError.missing(field, given, wanted)
    return environ[field]


def _warn_of_others(environ: Mapping[str, str]) -> None:
    """Warns once if a variable shows a job of several processes, and none gives this process its place in it."""
    sign = next((name for name, is_sign in _SIGNS.items() if is_sign(environ.get(name, "").strip())), None)
    if sign is not None and not _warned:
        _warned.append(sign)
        LOGGER.warning(worker_errors.runs_alone(sign, environ[sign]))


def _number(text: str) -> int:
    """A whole number that is given as text; -1 for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _whole(field: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number that is given as a number or as text."""
    wanted = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    number = value if type(value) is int else _number(value.strip()) if isinstance(value, str) else -1
    if number < least or (most is not None and number > most):
        raise ClusterConfigError.bad_value(field, value, wanted)
    return number


def _address(field: str, address: object) -> str:
    try:
        split_address(address if isinstance(address, str) else "")
    except ValueError:
        raise ClusterConfigError.bad_value(field, address, 'an address "host:port"; [host]:port for IPv6') from None
    return str(address)


def _given(environ: Mapping[str, str]) -> str:
    """The coordinator's address, if the user says it: then it need not be found out, which may not be possible."""
    return environ.get(COORDINATOR, "")
