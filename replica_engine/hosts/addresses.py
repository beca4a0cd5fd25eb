"""Under which address the other workers of a job reach this process."""

from __future__ import annotations

import ipaddress
import socket

from replica_engine.errors import ClusterConfigError
from replica_engine.hosts.cluster import join_address, split_address


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
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in ("SO_REUSEADDR", "SO_REUSEPORT"):  # a server that sets either of them gets the port
            if hasattr(socket, option):
                held.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
        held.bind(here)
    except BaseException:
        held.close()
        raise
    return join_address(host, held.getsockname()[1]), held
