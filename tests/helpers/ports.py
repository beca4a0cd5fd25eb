"""Ports that nobody listens at, for servers that a test has started later."""

import itertools
import os
import socket

# The system gives none of these to a connection, or to a server that asks for any port: on Linux those begin at 32768.
_PORTS = range(20_000, 32_000)
_next = itertools.count(40 * os.getpid())  # the tests that run beside these, in another process, have others


def unused(count: int) -> list[int]:
    """So many ports of this machine, each of which is given once."""
    found: list[int] = []
    while len(found) < count:
        port = _PORTS[next(_next) % len(_PORTS)]
        try:
            with socket.create_server(("127.0.0.1", port)):
                found.append(port)
        except OSError:  # somebody listens there
            continue
    return found
