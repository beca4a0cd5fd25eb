"""`join`: takes this process into its job, and starts the coordinator where that is this process' task."""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Mapping

from replica_engine import errors
from replica_engine._version import __version__
from replica_engine.errors import ClusterConfigError, ReplicaEngineError, WorkersMissingError
from replica_engine.errors.worker_errors import LAUNCHED, TOKEN, tries_again
from replica_engine.workers import messages as wire
from replica_engine.workers import server
from replica_engine.workers.cluster import Cluster, find_cluster, is_loopback, split_address
from replica_engine.workers.connection import Welcome
from replica_engine.workers.job import Limits
from replica_engine.workers.member import Member, find_member
from replica_engine.workers.messages import BadMessageError, Message, MessageReader

LOGGER = logging.getLogger("replica_engine")

JOIN_TIMEOUT = "REPLICA_ENGINE_JOIN_TIMEOUT"
HEARTBEAT_TIMEOUT = "REPLICA_ENGINE_HEARTBEAT_TIMEOUT"
STALL_TIMEOUT = "REPLICA_ENGINE_STALL_TIMEOUT"
LISTEN = "REPLICA_ENGINE_LISTEN"

SHORTEST_TOKEN = 16
"""Characters that the token of a job has at least."""

EARLIER_RUN = 45.0
"""Seconds to try again where an earlier run seems not to be over; its coordinator ends 30 seconds after a failure."""

_READ = 1 << 16
_PAUSES = (0.05, 1.0)  # seconds between attempts to connect: the first, and the longest


def join(
    cluster: Cluster | None = None,
    *,
    versions: Mapping[str, str] | None = None,
    replicas: int = 1,
    environ: Mapping[str, str] | None = None,
) -> Member:
    """Joins the job that this process is a worker of, and waits until all workers have joined.

    Worker 0 starts the coordinator in a child process first, unless `replica-engine launch` has one.

    Args:
        cluster: the place of this process in the job; None reads it from the environment.
        versions: the versions of packages that must be equal on all workers, such as {"tensorflow": "2.21.0"}. Ours
            and Python's are added.
        replicas: the number of replicas of this worker, which must be equal on all workers.
        environ: the environment variables; None takes those of the process.

    Returns:
        The connection to the job.

    Raises:
        ClusterConfigError: the environment is wrong, the token is missing or another, or it has joined already.
        WorkersMissingError: a worker did not join within the join limit.
        WorkerVersionError: the workers differ in a version or in the number of replicas.
        WorkerLostError: a worker ended before all had joined.
    """
    environ = os.environ if environ is None else environ
    cluster = find_cluster(environ) if cluster is None else cluster
    check_joins_once(cluster)
    limits = read_limits(environ)
    token = environ.get(TOKEN, "")
    if not token:
        raise ClusterConfigError.about(
            TOKEN,
            f"{TOKEN} is not set. The coordinator at {cluster.coordinator or '127.0.0.1'} lets in only workers that "
            f"know the job's token. Set it to the same secret text for all workers: export {TOKEN}=$(openssl rand -hex "
            "16), before the job starts. `replica-engine launch` makes one by itself.",
        )
    if len(token.strip()) < SHORTEST_TOKEN:
        raise ClusterConfigError.about(
            TOKEN,
            f"{TOKEN} has {len(token.strip())} characters, and must have at least {SHORTEST_TOKEN}: who reaches the "
            "coordinator could guess a shorter one. Make one for all workers with "
            f"export {TOKEN}=$(openssl rand -hex 16), or with python -c "
            '"import secrets; print(secrets.token_hex(16))".',
        )
    address = cluster.coordinator
    launched = environ.get(LAUNCHED) == "1"  # the coordinator runs in the launcher, so worker 0 starts none
    again = 0.0 if launched else min(EARLIER_RUN, limits.join)  # our launcher begins again when all have ended
    if cluster.process_id == 0 and not launched:
        where = environ.get(LISTEN) or address or "127.0.0.1:0"
        listening = server.start(cluster.num_processes, token, where, limits, again)
        asked = split_address(where)[0]
        if asked != "localhost" and not _is_number(asked) and is_loopback(split_address(listening)[0]):
            LOGGER.warning(
                f"The coordinator listens at {listening}, since the name {asked} leads there on its own machine: "
                "workers on other machines cannot reach it. If there are any, set "
                f"REPLICA_ENGINE_LISTEN=0.0.0.0:{listening.rpartition(':')[2]} for worker 0, which listens at all "
                "addresses of the machine."
            )
        address = address or listening
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    about = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "versions": {"replica_engine": __version__, "python": python, **(versions or {})},
        "replicas": replicas,
    }
    hello = [cluster.process_id, cluster.num_processes, about]
    return _joined(address, token, hello, limits.join, launched, again)


def _joined(address: str, token: str, hello: Message, patience: float, launched: bool, again: float) -> Member:
    """The connection to the job, once all have joined.

    A coordinator that refuses this worker may be that of an earlier run: one that has failed, and whose workers have
    not all ended. So the worker tries again for some time, in case all workers are being started again.
    """
    deadline: float | None = None
    refusal: ReplicaEngineError | None = None
    while True:
        try:
            member = _connected(address, token, hello, patience, launched)
        except WorkersMissingError as error:
            raise (refusal or error) from None
        member.hook_exceptions()
        try:
            member.wait_for_all()
            member.watch_links()
            return member
        except BaseException as error:  # also Ctrl-C: the job would count a worker that nobody has
            member.close()
            now = time.monotonic()
            deadline = now + again if deadline is None else deadline
            if not isinstance(error, ReplicaEngineError) or not member.refused or not _may_be_earlier(error):
                raise
            if now >= deadline:
                raise
            if refusal is None:
                LOGGER.warning(tries_again(str(error), again))
            refusal = error
        patience = max(deadline - now, 0.0)
        threading.Event().wait(min(server.PAUSE, patience))


def _may_be_earlier(error: BaseException) -> bool:
    """Whether the coordinator of an earlier run, which is about to end, may refuse a worker with this error."""
    taken = isinstance(error, ClusterConfigError) and error.field == "process_id"
    return taken or isinstance(error, (errors.WorkerLostError, WorkersMissingError))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def check_joins_once(cluster: Cluster) -> None:
    """Raises ClusterConfigError if this process is that worker of that job already."""
    if cluster.coordinator and find_member(cluster.coordinator, cluster.process_id) is not None:
        raise ClusterConfigError.about(
            "process_id",
            f"This process has joined the job at {cluster.coordinator} already, as worker {cluster.process_id}. A "
            "process joins its job once: use either MultiWorkerMirroredStrategy or TPUStrategy in it, or workers.join "
            "without them. Several strategies of one kind share what the first one has joined.",
        )


def read_limits(environ: Mapping[str, str]) -> Limits:
    """How long to wait, from the variables of these names."""
    limits = Limits()
    return Limits(
        _seconds(environ, JOIN_TIMEOUT, limits.join),
        _seconds(environ, HEARTBEAT_TIMEOUT, limits.heartbeat),
        _seconds(environ, STALL_TIMEOUT, limits.stall),
    )


def welcome(
    connection: socket.socket, token: str, hello: Message, address: str
) -> tuple[float, MessageReader, list[Message]]:
    """Proves to the coordinator that this process knows the token, and that the coordinator does.

    Args:
        connection: the connection, with a timeout.
        token: the secret of the job.
        hello: the worker, the number of workers, and what is known of this process.
        address: where the connection leads, for messages.

    Returns:
        The heartbeat limit of the job, the reader of what comes next, and the messages that came with the welcome.

    Raises:
        ClusterConfigError: the token is another.
        OSError: the connection broke, or nothing came in time.
    """
    lines, messages = MessageReader(), list[Message]()

    def next_message() -> Message:
        while not messages:
            data = connection.recv(_READ)
            if not data:
                raise ConnectionError("the connection was closed")
            messages.extend(lines.feed(data))
        return messages.pop(0)

    try:
        _, theirs = next_message()
        ours = wire.nonce()
        connection.sendall(wire.encode(["hello", ours, wire.proof(token, wire.MEMBER, theirs, ours), *hello]))
        kind, *rest = next_message()
        if kind == "welcome" and wire.is_proof(rest[0], token, wire.COORDINATOR, theirs, ours):
            return float(rest[1]), lines, messages
    except (BadMessageError, TypeError, ValueError, IndexError) as error:
        raise ConnectionError(f"a program that is not a coordinator answers there ({error})") from None
    raise ClusterConfigError.about(
        TOKEN,
        f"The coordinator at {address} has another {TOKEN}. Either the variable differs between workers, or the "
        "address is that of another job.",
    )


def _seconds(environ: Mapping[str, str], field: str, default: float) -> float:
    text = environ.get(field, "")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ClusterConfigError.bad_value(field, text, "a number of seconds above 0")
    return seconds


def _connected(address: str, token: str, hello: Message, patience: float, launched: bool) -> Member:
    """Connects to the coordinator, which may not listen yet, and is welcomed by it."""
    deadline, pause = time.monotonic() + patience, _PAUSES[0]
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection(split_address(address), timeout=max(left, _PAUSES[0]))
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                heartbeat, lines, early = welcome(connection, token, hello, address)
                told = Welcome(hello[0], hello[1], address, heartbeat, launched)
                return Member(connection, lines, told, early)
            except BaseException:  # also Ctrl-C: the coordinator would wait for a worker that has given up
                connection.close()
                raise
        except OSError as error:
            if left <= 0:
                worker, size, about = hello
                row = errors.WorkerRow(worker, size, about["host"], about["pid"])
                missing = WorkersMissingError(
                    f"The coordinator at {address} was not reached within {patience:g} s by {row.name}: {error}. "
                    "Worker 0 starts it: either worker 0 does not run, or its address is wrong or blocked by a "
                    "firewall, or the name of its machine is 127.0.1.1 there (then set REPLICA_ENGINE_LISTEN for it). "
                    "Set REPLICA_ENGINE_JOIN_TIMEOUT to more seconds if it needs them."
                )
                missing.workers = (0,)
                raise missing from None
        # Not all at the same moments: a thousand workers try.
        threading.Event().wait(min(pause * random.uniform(0.5, 1.0), max(left, 0.0)))
        # Longer each time: worker 0 may be minutes away, and a thousand workers ask for it.
        pause = min(pause * 2, _PAUSES[1])
