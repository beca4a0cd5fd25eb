"""The address under which other workers reach a process."""

import socket

from replica_engine.hosts.addresses import free_address
from replica_engine.hosts.cluster import split_address


def test_the_port_is_free():
    host, port = split_address(free_address("127.0.0.1:2222"))
    assert host == "127.0.0.1"
    with socket.create_server((host, port)):
        pass


def test_the_coordinators_own_machine_is_called_as_the_others_call_it():
    """Its name may lead to 127.0.0.1 on the machine itself, which would lead the others nowhere."""
    assert free_address("localhost:2222").rpartition(":")[0] == "localhost"
