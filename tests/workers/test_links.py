"""Workers that do not reach each other, though the coordinator hears them all."""

import contextlib
import json
import queue
import select
import socket
import struct
import threading

from helpers.jobs import LONG, LONGER, until
from helpers.workers import HEAD

from replica_engine.strategies.multi_worker import outlast
from replica_engine.workers.cluster import join_address
from replica_engine.workers.connection import Links

RESET = struct.pack("ii", 1, 0)


class Machine:
    """The machine of another worker: it refuses connections until it falls silent."""

    def __init__(self):
        self._held = socket.socket()
        self._held.bind(("127.0.0.1", 0))
        self.address = join_address(*self._held.getsockname())
        self._waiting = []

    def fall_silent(self):
        """Fills the queue of a listener, which then answers nobody: as if packets came no further."""
        self._held.listen(0)
        while not self._waiting or select.select([], [self._waiting[-1]], [], 0.5)[1]:
            self._waiting.append(socket.socket())
            self._waiting[-1].setblocking(False)
            self._waiting[-1].connect_ex(self._held.getsockname())

    def close(self):
        for each in (self._held, *self._waiting):
            each.close()


def test_a_machine_is_missed_that_has_answered_before():
    """And none that never has, such as one behind a firewall."""
    reports, missed = queue.Queue(), threading.Event()
    with contextlib.ExitStack() as stack:
        never, goes, up = (stack.enter_context(contextlib.closing(Machine())) for _ in range(3))
        never.fall_silent()
        addresses = [never.address, "", goes.address, up.address]
        links = Links(1, 4, 1.0, lambda: addresses, missed.set, lambda *found: reports.put(found))
        links.start()
        until(lambda: {2, 3} <= links._answered.keys())
        assert not missed.is_set()
        goes.fall_silent()
        found = [reports.get(timeout=LONG) for _ in range(4)]
        links.close()
    assert {other for other, _ in found} == {2}
    assert found[0][1] >= 0.75
    assert missed.is_set()


def test_connections_of_a_server_get_more_time():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        clients = [socket.create_connection(each.getsockname()) for each in (server, server, other)]
        accepted = [each.accept()[0] for each in (server, server, other)]
        for sock in (accepted[0], accepted[2]):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)
        outlast(port, 120.0)
        limits = [sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for sock in (*accepted, *clients)]
        assert limits == [120_000, 0, 20_000, 0, 0, 0]
        for sock in (*clients, *accepted):
            sock.close()


class Breaking:
    """A way to an address whose connections can be reset."""

    def __init__(self, address):
        self._target = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self):
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(self._target)
                self._sockets += [inner, outer]
                for ends in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)


STEPS = """
import socket
from replica_engine.strategies import multi_worker as job

job.OVER_SERVER = ("CPU",)  # as on GPUs
strategy = KIND()


@tf.function
def step():
    return strategy.run(lambda: context().all_reduce("SUM", tf.ones([4]) * tf.cast(tf.timestamp() > 0, tf.float32)))


step()
socket.create_connection(("127.0.0.1", int(os.environ["STEPPED"]))).close()
while True:
    step()
"""


def test_a_connection_that_breaks_fails_the_job_with_both_workers(programs, unused_ports):
    """At once, and not after the heartbeat limit, and not with the text of gRPC alone."""
    ports = unused_ports(3)
    way = Breaking(("127.0.0.1", ports[1]))
    stepped, started = socket.create_server(("127.0.0.1", 0)), []
    stepped.settimeout(LONGER)
    for index in range(2):
        there = [f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1] if index else way.port}"]
        environment = {
            "TF_CONFIG": json.dumps({"cluster": {"worker": there}, "task": {"type": "worker", "index": index}}),
            "REPLICA_ENGINE_TOKEN": "a secret of the job",
            "REPLICA_ENGINE_COORDINATOR": f"127.0.0.1:{ports[2]}",
            "REPLICA_ENGINE_HEARTBEAT_TIMEOUT": str(LONGER),
            "LOCAL": "1",
            "STEPPED": str(stepped.getsockname()[1]),
        }
        started.append(programs.start(HEAD + STEPS, env=environment))
    try:
        for _ in started:
            stepped.accept()[0].close()
        way.reset()
        for process in started:
            _, err = process.communicate(timeout=LONG)
            assert process.returncode == 1
            lost = err[err.index("WorkerLostError: worker") :]
            assert "worker 1 of 2 (" in lost
            assert "is not reached by worker 0 of 2 (" in lost
            assert "their connection broke" in lost
            assert err.count("TensorFlow's server of this worker listens at port") == 1
    finally:
        stepped.close()
        for process in started:
            process.kill()
