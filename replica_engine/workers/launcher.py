"""N processes of one program on this machine: started, watched, ended together, and started again.

The coordinator of the job is on a thread here, so no worker's death can end it, and every worker's exit status is
known. One loop on the main thread reads what the workers print, and hears of ended processes and of signals.

What it guarantees:

- Each worker is in a session of its own. Ending a worker ends its process group, so nothing that it started stays.
- The first failure decides: the others get ten seconds to raise by themselves, then SIGTERM, then SIGKILL.
- Ctrl-C, SIGTERM and SIGHUP are passed on to all, which get the `grace` of the plan to save; a second one kills.
- The exit status is that of the first failure, and what failed first is printed last. An output that is closed or
  full ends no worker (`Output`); a pipe that nobody reads ends all.
- A failure that comes again at once, before the job has made a second step, says that a worker is lost for good: the
  next start has one worker less, down to the fewest of the plan.

Process managers (honcho, circus) and torchrun were considered. The first end all workers when any of them ends
well, and know no first failure; the last comes with PyTorch. What is needed here is `subprocess` and one loop.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TextIO

from replica_engine.errors import ReplicaEngineError, WorkerLostError, WorkerRow, base, worker_errors
from replica_engine.workers import job, joining
from replica_engine.workers.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from replica_engine.workers.messages import Failure
from replica_engine.workers.server import Coordinator

RESTART = "REPLICA_ENGINE_RESTART"
"""How often the workers were started before: 0 at first. Scripts may read it."""

GRACE = 10.0  # seconds after the first failure for the other workers to end by themselves
SIGNAL_GRACE = 30.0  # seconds after a signal, as Kubernetes and Slurm give them, for the workers to save and end
KILL_AFTER = 5.0  # seconds from SIGTERM to SIGKILL
_AT_ONCE = 1  # the step of a worker that has failed in its first step
_LAST_LINES = 20  # of the first failure that are printed again at the end
_LONGEST_LINE = 1 << 16
_READ = 1 << 16
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NUMBERS = frozenset(int(each) for each in signal.Signals)
_NAME = "replica-engine launch"


@dataclass(frozen=True)
class LaunchPlan:
    """What to launch.

    Attributes:
        workers: the number of workers.
        command: the program and its arguments.
        limits: how long to wait for workers.
        max_restarts: how often all workers are started again after a failure.
        fewest: how many go on at least when others are lost; None if none may be.
        grace: seconds that the workers have to end after a signal to the launcher.
    """

    workers: int
    command: Sequence[str]
    limits: job.Limits = field(default_factory=job.Limits)
    max_restarts: int = 0
    fewest: int | None = None
    grace: float = SIGNAL_GRACE

    def environment(self, worker: int, workers: int, restart: int, address: str, token: str) -> dict[str, str]:
        """The variables that one of so many workers gets besides those of this process."""
        variables = {
            PROCESS_ID: str(worker),
            NUM_PROCESSES: str(workers),
            COORDINATOR: address,
            worker_errors.TOKEN: token,
            worker_errors.LAUNCHED: "1",
            RESTART: str(restart),
            joining.JOIN_TIMEOUT: f"{self.limits.join:g}",
            joining.HEARTBEAT_TIMEOUT: f"{self.limits.heartbeat:g}",
        }
        if "PYTHONUNBUFFERED" not in os.environ:  # a killed worker's last lines would be lost
            variables["PYTHONUNBUFFERED"] = "1"
        return variables


def launch(plan: LaunchPlan) -> int:
    """Runs all workers to their end; to be called on the main thread.

    Args:
        plan: what to launch.

    Returns:
        The exit status: 0 if all workers ended well, 128 plus the number of a signal that ended this launcher or the
        first worker that failed, otherwise the exit status of that worker.
    """
    out, err = outputs(_NAME)
    workers = plan.workers
    restarts = 0
    in_a_row = 0  # failures without steps between them, of which the first may come after many
    with _signals() as woken:
        for start in itertools.count():
            attempt = _Attempt(plan, workers, start, restarts == plan.max_restarts, woken, out, err)
            status = attempt.run()
            if not status or attempt.signalled:
                break
            if attempt.preempted and plan.max_restarts:  # no failure, so it uses up no restart
                in_a_row = 0
                _say(err, "all workers start again")
                continue
            if restarts == plan.max_restarts:
                break
            restarts += 1
            again = f"restart {restarts} of {plan.max_restarts}"
            in_a_row = in_a_row + 1 if attempt.failed_at_once else 1
            # `kill -9`, or a loss of memory, does not come again at once.
            if in_a_row > 1 and workers > (plan.fewest or plan.workers):
                workers, in_a_row = workers - 1, 0
                _say(err, f"{again}: a worker has failed again at once, so {workers} of {plan.workers} workers start")
            else:
                _say(err, f"{again}: all workers start again")
    for each in (out, err):
        with contextlib.suppress(BrokenPipeError):
            each.end()
    return status


class _WorkerProcess:
    """A process, and what it prints."""

    def __init__(self, index: int, process: subprocess.Popen[bytes]):
        self.index = index
        self.process = process
        self.tail: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.ended_here = False  # by a signal of this launcher, so its status says nothing

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def signal_group(self, number: int) -> None:
        """Sends a signal to the worker and to all that it started and that did not leave its process group."""
        self.ended_here |= self.running
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the second of a group of zombies
            os.killpg(self.process.pid, number)


class _Stream:
    """Passes the lines of one of a worker's outputs on, each with the worker's name before it."""

    def __init__(self, worker: _WorkerProcess, source: IO[bytes], target: Output):
        self.worker = worker
        self.source = source
        self._target = target
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def pass_on(self) -> bool:
        """Passes on what there is; returns False at the end of the output."""
        try:
            data = os.read(self.source.fileno(), _READ)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE or not data:
            lines += [self._rest] if self._rest else []
            self._rest = b""
        # A progress bar writes over its line; what would be seen in the end is printed.
        lines = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        self.worker.tail.extend(lines)
        self._target.write(b"".join(b"[worker %d] %s\n" % (self.worker.index, line) for line in lines))
        return bool(data)

    def drain(self) -> None:
        """Passes on what is left of a worker that has ended, without waiting for others that hold its output open."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.source, selectors.EVENT_READ)
            while selector.select(0):
                if not self.pass_on():
                    break
        self.source.close()


class _Attempt:
    """One start of all workers, until all have ended.

    Attributes:
        signalled: the signal that ended it; None if there was none.
        preempted: whether it has made steps, and all workers have ended well because of a signal.
        failed_at_once: whether no worker had reported a second step when it ended.
    """

    def __init__(
        self, plan: LaunchPlan, size: int, start: int, is_last: bool, woken: socket.socket, out: Output, err: Output
    ):
        self._plan = plan
        self._size = size
        self._start_number = start
        self._is_last = is_last
        self._woken = woken
        self._out, self._err = out, err
        self._workers: list[_WorkerProcess] = []
        self._first: _WorkerProcess | None = None  # the first that exited with a status other than 0
        self._deadlines: list[tuple[float, int]] = []  # when to send which signal to those that are left
        self.signalled: int | None = None
        self.preempted = self.failed_at_once = False

    def run(self) -> int:
        """Starts the workers, and returns the exit status when all have ended."""
        token = secrets.token_hex(16)
        with (
            selectors.DefaultSelector() as selector,
            Coordinator(
                self._size,
                token,
                limits=self._plan.limits,
                knows_statuses=True,
                # It wakes the loop up, as the end of a process does.
                on_failure=lambda _: os.kill(os.getpid(), signal.SIGCHLD),
            ) as coordinator,
        ):
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                self._start(selector, coordinator.address, token)
                while any(worker.running for worker in self._workers):
                    self._wait(selector)
                    self._reap(selector, coordinator)
                    self._escalate(coordinator.failure)
            finally:
                # Also after an exception here: no process of a worker may outlive the launcher.
                for worker in self._workers:
                    worker.signal_group(signal.SIGKILL)
                    worker.process.wait()
        # Once it is closed: before that, its thread may not have read yet what the workers said before they ended.
        self.failed_at_once = coordinator.steps <= _AT_ONCE
        self.preempted = coordinator.failure is None and not self.failed_at_once and self._signal is not None
        return self._result(coordinator.failure)

    def _start(self, selector: selectors.BaseSelector, address: str, token: str) -> None:
        for index in range(self._size):
            environment = self._plan.environment(index, self._size, self._start_number, address, token)
            process = subprocess.Popen(
                self._plan.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **environment},
            )
            worker = _WorkerProcess(index, process)
            self._workers.append(worker)
            assert process.stdout is not None
            assert process.stderr is not None
            for source, target in ((process.stdout, self._out), (process.stderr, self._err)):
                selector.register(source, selectors.EVENT_READ, _Stream(worker, source, target))

    def _wait(self, selector: selectors.BaseSelector) -> None:
        """Waits for output, for the end of a process, for a signal or for a deadline."""
        soonest = min((at for at, _ in self._deadlines), default=None)
        patience = None if soonest is None else max(soonest - time.monotonic(), 0.0)
        for key, _ in selector.select(patience):
            if isinstance(key.data, _Stream):
                try:
                    more = key.data.pass_on()
                except BrokenPipeError:  # `replica-engine launch ... | head`: what they print goes nowhere
                    self._pass_signal(signal.SIGPIPE)
                    continue
                if not more:
                    selector.unregister(key.fileobj)
                    key.data.source.close()
            else:
                for number in self._woken.recv(_READ):
                    if number in _SIGNALS:
                        self._pass_signal(number)
                    elif number == signal.SIGUSR1:  # it brought workers back in 0.3; who sends it must not end the job
                        _say(self._err, "SIGUSR1 does nothing. For more workers, end this launcher and start it again")

    def _pass_signal(self, number: int) -> None:
        again, now = self.signalled is not None, time.monotonic()
        self.signalled = self.signalled or number
        for worker in self._workers:
            if worker.running:
                sent = signal.SIGKILL if again else signal.SIGTERM if number == signal.SIGPIPE else number
                worker.signal_group(sent)
        self._deadlines = [(now + self._plan.grace, signal.SIGKILL)]

    def _reap(self, selector: selectors.BaseSelector, coordinator: Coordinator) -> None:
        """Takes note of the processes that have ended."""
        for worker in self._workers:
            if not worker.running or worker.process.poll() is None:
                continue
            worker.signal_group(signal.SIGKILL)  # at once: later the number may be another process'
            for key in list(selector.get_map().values()):
                if isinstance(key.data, _Stream) and key.data.worker is worker:
                    selector.unregister(key.fileobj)
                    try:
                        key.data.drain()
                    except BrokenPipeError:
                        self._pass_signal(signal.SIGPIPE)
            status = worker.process.returncode
            coordinator.exited(worker.index, status)
            if status and self._first is None:
                self._first = worker

    def _escalate(self, failure: Failure | None) -> None:
        """After the first failure, gives the workers that are left some time, and then ends them."""
        now = time.monotonic()
        left = [worker for worker in self._workers if worker.running]
        if not self._deadlines and (failure is not None or self._first is not None):
            self._deadlines = [(now + GRACE, signal.SIGTERM), (now + GRACE + KILL_AFTER, signal.SIGKILL)]
        is_lost = False  # and does not raise by itself
        if failure is not None and [each.index for each in left] == [failure.worker]:
            is_lost = failure.is_silence or failure.is_stall
            if failure.is_silence:
                self._deadlines[-1] = (now, signal.SIGKILL)
            elif failure.is_stall and self._deadlines[0][1] == signal.SIGTERM:
                self._deadlines = [(now, signal.SIGTERM), (now + KILL_AFTER, signal.SIGKILL)]
        due = [number for at, number in self._deadlines if at <= now]
        if due and left and self.signalled is not None and not is_lost:
            names = ", ".join(str(worker.index) for worker in left)
            _say(self._err, f"killed after {self._plan.grace:g} seconds, which --grace changes: worker {names}")
        for number in due:
            for worker in left:
                worker.signal_group(number)
        if due:
            # The last one is repeated: a process may have been started while the signal was sent.
            later = [each for each in self._deadlines if each[0] > now]
            self._deadlines = later or [(now + KILL_AFTER, signal.SIGKILL)]

    def _result(self, failure: Failure | None) -> int:
        """Prints how it ended, if it did not end well, and returns the exit status."""
        if self.signalled is not None:
            _say(self._err, f"ended by {signal.Signals(self.signalled).name}; all workers have ended")
            return 128 + self.signalled
        first = self._first
        if failure is not None:
            first = None if failure.worker is None else self._workers[failure.worker]
        elif first is None:
            return 0
        elif (signalled := self._signal) is not None:
            again = "" if self._plan.max_restarts else " `--max-restarts 1` starts them again."
            name = signalled.name
            _say(self._err, f"the job was preempted: all workers have ended with the status of {name}.{again}")
            return 128 + signalled
        else:  # it was no member, or had said goodbye
            row = WorkerRow(first.index, len(self._workers), socket.gethostname(), first.process.pid)
            failure = Failure.from_exit(row, first.process.returncode)
        error = failure.error()
        status = 1  # of a failure that is nobody's own, or of a worker that this launcher had to end
        if first is not None:
            if first.tail:
                did = "ended" if failure.is_end else "failed"
                _say(self._err, f"worker {first.index} {did} first; its last lines:")
            for line in first.tail:
                self._err.write(b"[worker %d] %s\n" % (first.index, line))
            if first.process.returncode and not first.ended_here:
                status = _shell_status(first.process.returncode)
        _say(self._err, f"{error}{self._advice(error)}\n{_NAME}: exit status {status}")
        return status

    @property
    def _signal(self) -> signal.Signals | None:
        """The signal that every worker's exit status reports, as after saving; None if the statuses differ."""
        (status, *others) = {worker.process.returncode for worker in self._workers}
        return signal.Signals(status - 128) if not others and status - 128 in _NUMBERS else None

    def _advice(self, error: ReplicaEngineError) -> str:
        """What to do after a failure, unless this launcher does it now."""
        if not isinstance(error, WorkerLostError) or not error.again or not self._is_last:
            return ""
        by_itself = "" if self._plan.max_restarts else "; `--max-restarts 1` does so by itself"
        return f" Start all workers again from the last checkpoint{by_itself}."


def _shell_status(status: int) -> int:
    """An exit status as shells report it."""
    return 128 - status if status < 0 else status


def _say(err: Output, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # what is said to nobody ends nothing
        err.write(f"{_NAME}: {text}\n".encode())


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Has the numbers of signals arrive at a socket, instead of ending this process."""
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(True)
    before = {each: signal.signal(each, lambda *_: None) for each in (*_SIGNALS, signal.SIGUSR1, signal.SIGCHLD)}
    # A full buffer needs no warning: its first byte wakes the loop, and a second signal of a kind says nothing new.
    old = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])  # who started this process may have blocked it
    try:
        yield woken
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(old)
        for each, handler in before.items():
            signal.signal(each, handler)
        wake.close()
        woken.close()


class Output:
    """One of the standard outputs of this process. One that is closed, or a full disk behind it, ends no job.

    Lines that cannot be written are counted, and the other output says how many. Every write is tried again, since a
    disk may have room again. Nothing is kept in a buffer, which could be neither written nor thrown away later. Only a
    pipe that nobody reads any more is the caller's matter: `BrokenPipeError`.

    Args:
        descriptor: its number: 1 or 2.
        name: what it is called in messages.
        program: what messages begin with.
    """

    def __init__(self, descriptor: int, name: str, program: str):
        self._descriptor = descriptor
        self._name, self._program = name, program
        self._other: Output | None = None
        self._lost = 0  # lines
        self._is_cut = False  # in the middle of a line
        self._is_unread = False
        self._reason = ""

    def write(self, data: bytes) -> None:
        """Writes whole lines, or counts them as lost.

        Raises:
            BrokenPipeError: nobody reads any more; raised once, and what comes then is dropped.
        """
        if self._is_unread:
            return
        left = memoryview(b"\n" + data if self._is_cut else data)
        try:
            while left:
                left = left[self._written(left) :]
            self._is_cut = False
        except BrokenPipeError:
            self._is_unread = True
            raise
        except OSError as error:
            # Without the end of a line that is counted already.
            self._lost += bytes(left[max(0, len(left) - len(data)) :]).count(b"\n")
            self._is_cut |= 0 < len(left) < len(data)
            if not self._reason:
                self._reason = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
                self._tell(f"{self._name} cannot be written: {self._reason}. The workers go on.")

    def end(self) -> None:
        """Tells how much was lost."""
        if self._lost:
            lines = base.plural(self._lost, "line")
            self._tell(f"{lines} could not be written to {self._name}: {self._reason}")

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program has made it so
            select.select([], [self._descriptor], [])
            return 0

    def _tell(self, text: str) -> None:
        if self._other is not None:
            self._other.write(f"{self._program}: {text}\n".encode())


def outputs(program: str) -> tuple[Output, Output]:
    """The standard output and the standard error of this process.

    Args:
        program: what their messages about each other begin with.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed: a socket would get this number, and what something prints would go there
            os.open(os.devnull, os.O_RDONLY)  # writing to it fails as to one that is closed
    out = Output(_descriptor(sys.stdout, 1), "standard output", program)
    err = Output(_descriptor(sys.stderr, 2), "standard error", program)
    out._other, err._other = err, out
    return out, err


def _descriptor(stream: TextIO | None, usual: int) -> int:
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, as those of notebooks
        if stream is not None:
            stream.flush()
            return stream.fileno()
    return usual
