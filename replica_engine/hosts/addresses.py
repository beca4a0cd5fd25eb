"""Under which address the other workers of a job reach this process."""

from __future__ import annotations

import ipaddress
import socket

from replica_engine.hosts.cluster import join_address, split_address


def own_host(coordinator: str) -> str:
    """The host under which the other workers reach this machine.

    It is the one from which this machine reaches the coordinator. On the coordinator's own machine that may be
    127.0.0.1, which leads the others nowhere: there it is the coordinator's host.

    Args:
        coordinator: the coordinator's address, as "host:port".

    Example:
        >>> own_host("127.0.0.1:2222")
        '127.0.0.1'
    """
    host, port = split_address(coordinator)
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(there)  # sends nothing; it only looks the way up
        own = asked.getsockname()[0]
    return host if ipaddress.ip_address(own).is_loopback else own


def held_address(coordinator: str) -> tuple[str, socket.socket]:
    """An address of this machine that the other workers reach, and a socket that keeps its port for a server.

    Until the socket is closed, the system gives the port to nobody who asks for any port. A port that was merely free a
    moment ago may be another process' when the server starts; and servers that share their ports, as TensorFlow's does,
    would not even notice. The socket does not listen, so the server can still have the port, by its number.

    Args:
        coordinator: the coordinator's address, as "host:port".
    """
    host = own_host(coordinator)
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
