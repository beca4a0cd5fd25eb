"""Connections of TensorFlow's server that a short outage of the network does not break.

gRPC has the system end each connection of a server on which nothing was confirmed for 20 seconds. The other side may
not notice, and waits for ever. So while a machine does not answer, the connections of this process' server get more
time: if the network comes back within the heartbeat limit, the collectives go on where they were. A longer outage is a
failure of the job.

Only Linux tells a process its connections; elsewhere they stay as gRPC has made them.
"""

from __future__ import annotations

import contextlib
import os
import socket

_OWN = "/proc/self/fd"
_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


def outlast(port: int, seconds: float) -> None:
    """Gives the connections that came to a port of this process at least so many seconds without a confirmation.

    Args:
        port: the port of a server in this process that sets a limit of its own for them.
        seconds: how many.
    """
    if _TIMEOUT is None or not os.path.isdir(_OWN):
        return
    for name in os.listdir(_OWN):
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            _outlast(int(name), port, _TIMEOUT, int(1000 * seconds))


def _outlast(descriptor: int, port: int, option: int, milliseconds: int) -> None:
    """As `outlast`, for one descriptor, through a copy: the descriptor stays its owner's.

    Raises:
        OSError: the descriptor is no socket.
    """
    copy = os.dup(descriptor)
    try:
        sock = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
            return
        if 0 < sock.getsockopt(socket.IPPROTO_TCP, option) < milliseconds:
            sock.setsockopt(socket.IPPROTO_TCP, option, milliseconds)
