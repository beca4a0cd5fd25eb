"""What tests of jobs share. Only those of strategies need TensorFlow."""

import contextlib
import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port of this machine that nobody listens at, and that no outgoing connection gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def unused_ports():
    """Makes a list of ports that nobody listens at."""

    def ports(count: int) -> list[int]:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
            return [server.getsockname()[1] for server in servers]

    return ports
