"""The lifelines of the service by which the PJRT clients of several workers find each other."""

import contextlib
import itertools
import platform
import re
import selectors
import socket
import struct
import subprocess
import sys
import threading

import pytest
from helpers.jobs import until

from replica_engine.pjrt import jaxlib_service
from replica_engine.workers.cluster import split_address

KERNEL = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2]) if sys.platform == "linux" else ()
PORTS_OF_SOCKET = 51  # IP_LOCAL_PORT_RANGE of Linux 6.3, which Python has no name for
LONG = jaxlib_service._PATIENCE / 2  # seconds; a stranger is dropped only after twice as long

WORKER = """
import os, signal, stat, sys
from replica_engine.workers import server as serve
from replica_engine.pjrt import jaxlib_service


class Last:
    def __del__(self, fstat=os.fstat, is_socket=stat.S_ISSOCK, write=os.write):
        found = 0
        for descriptor in range(3, 64):
            try:
                found += is_socket(fstat(descriptor).st_mode)
            except OSError:
                pass
        write(1, b"at the end of Python: %d\\n" % found)


sys.last = Last()  # ends after all modules but this one
place = jaxlib_service.start(1, "127.0.0.1")
os.kill(serve.started[0].pid, signal.SIGTERM)  # as Slurm does, which sends it to all processes of a job
jaxlib_service.hold(place)
print(place["lifeline"], place["address"], flush=True)
os.read(0, 1)
if os.fork() == 0:
    os.read(0, 1)
    print("the child lives", flush=True)
    os._exit(0)
"""


def test_the_service_ends_with_its_workers_and_not_before():
    """Not with the Python of the worker, which jaxlib outlives; and although a forked child lives."""
    command = [sys.executable, "-c", WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        lifeline, service = (split_address(each) for each in worker.stdout.readline().split())
        socket.create_connection(service, LONG).close()  # it listens at its port, which is held
        with socket.create_connection(lifeline, LONG) as stranger:
            worker.stdin.write("x")
            worker.stdin.flush()
            assert worker.wait(LONG) == 0
            assert stranger.recv(1) == b""  # the service has ended
        assert worker.communicate("x")[0] == "at the end of Python: 1\nthe child lives\n"


@pytest.mark.skipif(
    KERNEL < (6, 3), reason="older kernels, and those of macOS, give all sockets the same range of ports"
)
def test_two_services_never_get_one_port():
    """A port that one holds is free for nobody who asks for any, though jaxlib's service shares its ports."""
    with jaxlib_service.held_port("127.0.0.1") as held, socket.socket() as other:
        port = held.getsockname()[1]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.setsockopt(socket.IPPROTO_IP, PORTS_OF_SOCKET, struct.pack("=I", port << 16 | port))  # no other port
        with pytest.raises(OSError, match=r"[Aa]ddress already in use"):
            other.bind(("127.0.0.1", 0))


@pytest.fixture
def waiting():
    """Lifelines that a thread waits for, one of which is held."""
    lifelines = jaxlib_service._Lifelines("127.0.0.1")
    host, port = lifelines.address.split(":")
    thread = threading.Thread(target=lifelines.wait)
    with socket.create_connection((host, int(port)), LONG) as held:
        thread.start()
        held.sendall(lifelines.secret.encode())
        with socket.create_connection((host, int(port)), LONG) as liar:  # heard after the one that is held
            liar.sendall(b"?" * len(lifelines.secret))
            assert liar.recv(1) == b""
        yield (host, int(port))
    thread.join(LONG)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="the names of the settings")
def test_a_lifeline_over_a_network_that_is_cut_ends_within_minutes():
    """The end of its worker does not get through then; by default the system asks after two hours."""
    lifelines = jaxlib_service._Lifelines("127.0.0.1")
    with socket.create_connection(split_address(lifelines.address), LONG), selectors.DefaultSelector() as selector:
        until(lambda: lifelines._accept(selector) or lifelines._read)
        (sock,) = lifelines._read
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        assert idle + interval * count <= 120
        lifelines._drop(selector, sock)


def test_strangers_are_limited(waiting):
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(waiting, LONG))
            for _ in range(jaxlib_service._MOST_STRANGERS + 2)
        ]
        assert strangers[0].recv(1) == b""


def test_without_descriptors_a_stranger_gives_way(waiting, monkeypatch):
    """Otherwise the selector would return at once, again and again."""
    accept, calls = socket.socket.accept, itertools.count()

    def accept_but_the_second(self):
        if next(calls) == 1:
            raise OSError(24, "Too many open files")
        return accept(self)

    with socket.create_connection(waiting, LONG) as first:
        monkeypatch.setattr(socket.socket, "accept", accept_but_the_second)
        with socket.create_connection(waiting, LONG), socket.create_connection(waiting, LONG):
            assert first.recv(1) == b""
