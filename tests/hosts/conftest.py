"""What tests of jobs share. Only those of strategies need TensorFlow."""

import contextlib

import pytest

from replica_engine.hosts.addresses import held_address
from replica_engine.hosts.cluster import split_address


@pytest.fixture
def unused_ports():
    """Makes a list of ports that nobody listens at.

    They are held until the end of the test: nobody who asks for any port gets one of them, but a server that asks for
    it by its number does.
    """
    with contextlib.ExitStack() as stack:

        def ports(count: int) -> list[int]:
            held = [held_address("127.0.0.1:1") for _ in range(count)]
            for _, each in held:
                stack.enter_context(each)
            return [split_address(address)[1] for address, _ in held]

        yield ports


@pytest.fixture
def unused_port(unused_ports) -> int:
    """A port of this machine that nobody listens at, and that nobody gets who asks for any."""
    return unused_ports(1)[0]
