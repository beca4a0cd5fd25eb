"""The address under which other workers reach a process."""

import platform
import re
import socket
import struct
import sys

import pytest

from replica_engine.workers.cluster import held_address, split_address

KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) if sys.platform == "linux" else ()
PORTS_OF_SOCKET = 51  # IP_LOCAL_PORT_RANGE of Linux 6.3, which Python has no name for


def test_a_server_gets_the_port_by_its_number():
    address, held = held_address("127.0.0.1:2222")
    host, port = split_address(address)
    assert host == "127.0.0.1"
    with held, socket.create_server((host, port)), socket.create_connection((host, port)):
        pass


@pytest.mark.skipif(KERNEL < (6, 3), reason="no other system lets a socket ask for any port of so few")
def test_nobody_else_gets_the_port_before_the_server_does():
    """Neither one that shares its ports nor one that connects: with a range of one port, it is taken."""
    address, held = held_address("127.0.0.1:2222")
    _, port = split_address(address)
    with held, socket.socket() as other, socket.create_server(("127.0.0.1", 0)) as server:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        other.setsockopt(socket.IPPROTO_IP, PORTS_OF_SOCKET, struct.pack("=I", port << 16 | port))
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            other.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="requested address"):
            other.connect(server.getsockname())


def test_the_coordinators_own_machine_is_called_as_the_others_call_it():
    """Its name may lead to 127.0.0.1 on the machine itself, which would lead the others nowhere."""
    address, held = held_address("localhost:2222")
    held.close()
    assert address.rpartition(":")[0] == "localhost"
