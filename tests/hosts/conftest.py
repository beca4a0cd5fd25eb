"""What tests of jobs share. Neither they nor their workers need TensorFlow."""

import socket

import pytest


@pytest.fixture
def unused_port() -> int:
    """A port of this machine that nobody listens at, and that no outgoing connection gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
