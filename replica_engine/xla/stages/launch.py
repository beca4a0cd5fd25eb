"""One launch of a program: watched, limited in time if the user set a limit, and drawn on timelines.

The order of a launch, whose parts an `Execution` carries out:

1. The launch waits for its turn on the devices (`DeviceGroup.in_flight`). After that it may read values of variables.
2. **wait for turn**: an interrupted program has ended, and before a first launch all workers of a job are there. Ctrl-C
   ends this wait.
3. **start**: the program runs.
   If the program donates, its variables have their new values in the same instruction (`Executable.launch`): the old
   ones are gone, and an exception may come at any instant.
4. **wait** for the end. If the program fails and donates, **invalidate**: its variables no longer have a value.
5. If the program does not donate, **commit** now, after it has ended well: all variables or none.
6. **launched**: what is to be done on the host once variables have new values.

Two things must never happen: a variable still refers to its value after that value was donated; a launch commits after
a host call of it has failed.

**An exception may come between any two instructions**, out of the handler of a signal, or from another thread. Then the
launch has been made with all that it stores, or not at all, and the devices go to the next launch. So what ends a
launch (`_end`) may be called twice: an exception in it leads to the `except` that calls it again. It is not
an `__exit__` method: such an exception could keep Python from calling that.

Devices with a queue take the program, and the launch is over; `wait_for` waits where somebody wants results. With a
limit the launch waits for the end there too.

Without a limit the calling thread launches and waits, and the watchdog only warns. With a limit the calling thread must
be able to leave a program that does not end, at any point: on one device a program runs inside the launch. So another
thread launches and waits, and the calling thread waits for that thread or for the watchdog. An abandoned program
keeps its devices. The next launch waits for it for a while and then raises an error
(`DeviceGroup.wait_for_interrupted`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replica_engine.diagnostics.failed_run import note_failed_run
from replica_engine.diagnostics.flight_record import SyncPointRecord, launch_records
from replica_engine.errors import (
    CoordinatorRow,
    ProgramError,
    ReplicaEngineError,
    ReplicaRow,
    ReplicaTimeoutError,
    ReplicaUnwound,
)
from replica_engine.errors.hosts import JOB_FAILURES
from replica_engine.errors.timeouts import FOR_GIVEN_UP, FOR_ITS_TURN, slow_program
from replica_engine.pjrt import abandoned
from replica_engine.pjrt.executable import Executable, Stores
from replica_engine.pjrt.group import Array, DeviceGroup, held_off
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.process import interrupts, threads
from replica_engine.process.interrupts import raise_in, wait_for_ever
from replica_engine.telemetry import timeline
from replica_engine.telemetry.stacks import stack_of
from replica_engine.telemetry.watchdog import Watch
from replica_engine.xla.host_calls.session import Call, NoCalls, Session
from replica_engine.xla.signature.arguments import view
from replica_engine.xla.stages.program import BodyProgram

Results = Any
"""The results of a launch: arrays on the devices."""

_RUNNING = "waiting for the program"


class Execution:
    """The parts of one launch: here of one executable. `uneven` has the other kind.

    Args:
        executable: the executable.
        arguments: its arguments.
        stores: the variables that the program writes.
        donates: whether their old values are given to the program.
        patience: the attribute.

    Attributes:
        patience: seconds that an interrupted launch waits for the program to end, so that it can call `launched`.
        wait_for_turn: waits until the program may start.
        wait: waits for the end of the program, or until an event is set.
    """

    __slots__ = ("_arguments", "_donates", "_executable", "_stores", "patience", "wait", "wait_for_turn")

    def __init__(self, executable: Executable, arguments: list[Array], stores: Stores, donates: bool, patience: float):
        self._executable = executable
        self._donates = donates
        self._arguments = arguments
        self._stores = stores
        self.patience = patience
        self.wait_for_turn = executable.wait_for_turn
        self.wait = executable.wait

    def start(self) -> Results:
        """Starts the program, and returns its results, ready or not."""
        if not self._donates:
            return self._executable.launch(self._arguments)
        try:
            return self._executable.launch(self._arguments, self._stores)
        except JOB_FAILURES:
            self.invalidate()
            raise

    def commit(self, results: Results) -> None:
        """Gives the variables their new values, from the results of a program that does not donate."""
        self._stores.store(results)

    def launched(self) -> None:
        """Completes on the host what new values of variables mean there. May be called again after an exception."""
        for variable in self._stores.objects:
            variable.launched()

    def invalidate(self) -> None:
        """Marks the variables as lost: the program that was given their old values has failed."""
        for variable in self._stores.objects:
            variable.invalidate()


class Launch:
    """One launch, which waits for its turn on the devices.

    Args:
        program: the program to launch.
        devices: the devices it runs on.
        step: the first step of a device loop that it runs, from 0; None outside of a loop.
        on_host: values of the arguments that no device can have, by the index of the argument.
    """

    def __init__(
        self,
        program: BodyProgram,
        devices: DeviceGroup,
        step: int | None = None,
        on_host: Mapping[int, Sequence[Any]] | None = None,
    ):
        self._program = program
        self._body = program.body
        self._devices = devices
        self._step = step
        self._on_host = on_host or {}
        self._thread = threading.current_thread()
        timeout, warn_after = program.body.limits
        if timeout is not None:
            self._woken = threading.Event()
        self._watch = Watch(self._describe, warn_after, timeout, self._expire)

    # The state of a launch that nothing has happened to; most launches leave it so.
    _stored: Sequence[dict[int, Any]] = ()
    _run: Session | NoCalls = NoCalls()
    _state = FOR_ITS_TURN
    _woken: threading.Event | None = None  # the program has ended, or time has run out; None without a limit
    _standstill: tuple[list[ReplicaRow], CoordinatorRow] | None = None  # when time ran out
    _nobody_waits: threading.Event | None = None
    _turn: Watch | None = None  # of the wait for the devices, if another launch had them

    def __call__(self, prepare: Callable[[], Execution]) -> Results:
        """Makes the launch, and waits for its end, within the limit.

        Args:
            prepare: reads the values of variables, once it is the launch's turn.

        Raises:
            ReplicaTimeoutError: the program did not end in time, and meanwhile no host call began or returned.
            ProgramError: the program failed while it ran.
            Exception: a host call raised it. Then nothing was committed.
        """
        execution = None
        with self._devices.in_flight.turn(self._take_turn):
            try:
                self._begin()
                execution = prepare()
                results = self._within_limit(execution)
                execution.launched()
                self._end(None, None)
            except BaseException as error:
                self._end(error, execution)
                raise
            return results

    def _take_turn(self, taken: list[bool]) -> None:
        limit = self._body.limits.timeout
        order = self._devices.in_flight
        if order.enter_now(taken):
            return
        wait = self._turn = Watch(self._describe, self._body.limits.warn_after)
        try:
            wait.__enter__()
            if limit is None:
                order.enter(taken)
            else:
                order.enter_within(limit, self._timed_out, taken)
            wait.__exit__(None, None, None)
        except BaseException:
            wait.__exit__(None, None, None)
            raise

    def _begin(self) -> None:
        self._watch.__enter__()
        if self._program.traced.host_calls.calls:
            self._run = self._program.traced.host_calls.begin(self._devices, self._step)
            self._watch.expired = 0  # what passed while it waited for an abandoned program does not count

    def _end(self, error: BaseException | None, execution: Execution | None) -> None:
        """Ends the launch, before the devices go to the next one. May be called again if an exception comes in it."""
        try:
            if error is not None:
                abandoned.add(self._devices)
                note_failed_run(error, self._records, None)
                if execution is not None and self._devices.ends_within(execution.patience):
                    # An exception of a signal or a thread may have kept it from that; it is the one to raise.
                    with contextlib.suppress(ReplicaEngineError, *RUNTIME_ERRORS):
                        execution.launched()
        finally:
            try:
                if isinstance(self._run, Session):
                    self._program.traced.host_calls.end(self._run, self._devices, failed=error is not None)
            finally:
                self._watch.__exit__(None, None, None)  # also if it was not entered

    def _records(self) -> list[SyncPointRecord]:
        return launch_records(self._body.launches, self._devices.names, self._body.KEPT)

    def _within_limit(self, execution: Execution) -> Results:
        """Launches the program and waits for its end, within the limit; see `__call__`."""
        self._watch.beat()
        self._state = _RUNNING
        if isinstance(self._run, Session):
            self._run.beat = self._beat
            self._run.arguments = self._on_host
            self._stored = [kept.on_host for kept in self._run.kept]
            if timeline.recording():
                self._run.draw = self._draw_host_call
            if not interrupts.reach_this_thread():
                self._nobody_waits = threading.Event()  # the session has no other way to end the wait after a failure
                self._run.wake = self._nobody_waits.set
        if self._body.limits.timeout is None:
            results = self._start_and_wait(execution)
        else:
            self._nobody_waits = threading.Event()
            results = self._apart(execution, self._nobody_waits)
        if not self._program.donates:
            execution.commit(results)
        return results

    def _start_and_wait(self, execution: Execution) -> Results:
        program, began = self._program, time.perf_counter()
        if self._devices.member is not None:
            self._tell_progress()
        try:
            execution.wait_for_turn()
            if timeline.recording():
                with timeline.profiled(f"launch {program.name}"):
                    results = self._start(execution)
                launched = time.perf_counter()
                with timeline.profiled(f"run {program.name}"):
                    self._run.end(self._wait, execution)
                self._draw(began, launched, time.perf_counter())
            else:
                results = self._start(execution)
                self._run.end(self._wait, execution)
        finally:
            self._body.note_launch(program.traced.collectives, began, time.perf_counter())
            if program.traced.collectives and program.traced.is_users and self._step is None:
                self._body.steps += 1
        return results

    def _start(self, execution: Execution) -> Results:
        self._devices.running_name = self._program.name
        try:
            if self._devices.member is None and not isinstance(self._run, Session):
                return execution.start()
            return held_off().around(execution.start)
        except RUNTIME_ERRORS as error:
            raise self._failed(error) from error

    def _tell_progress(self) -> None:
        """Tells the other workers how far this one is, for the message if it gets lost.

        Each worker counts the steps that it makes together with the others.
        """
        assert self._devices.member is not None, "asked before"
        if self._program.traced.collectives or self._step is not None:
            last = self._program.traced.collectives[-1:]
            points = [f"{each.kind} at {each.where}" for each in last]
            step = self._body.steps + 1 if self._program.traced.is_users else None
            self._devices.member.progress(step, *points)

    def _wait(self, execution: Execution) -> None:
        try:
            execution.wait(self._nobody_waits)
        except (*RUNTIME_ERRORS, *JOB_FAILURES) as error:
            if self._program.donates:
                execution.invalidate()
            if isinstance(error, RUNTIME_ERRORS):
                raise self._failed(error) from error
            raise

    def wait_for(self, results: Sequence[Array]) -> None:
        """Waits for results. Devices with a queue may have them later; with a limit, the launch has waited for them.

        Raises:
            ProgramError: the program failed while it ran.
        """
        try:
            self._devices.wait_for(*results, describe=self._describe)
        except BaseException as error:
            abandoned.add(self._devices)
            note_failed_run(error, self._records, None)
            raise

    def stored(self, numbers: Sequence[int]) -> list[Any]:
        """The values that the replicas left on the host: for each replica, the one under its number."""
        return [view(values[number]) for values, number in zip(self._stored, numbers, strict=True)]

    def _apart(self, execution: Execution, nobody_waits: threading.Event) -> Results:
        """Starts and waits on another thread, which learns through `nobody_waits` that its result is not needed."""
        run = self._run
        woken = self._woken
        assert woken is not None, "there is a limit"
        results: list[Results] = []
        failures: list[BaseException] = []
        if isinstance(run, Session):
            run.wake = woken.set

        def work() -> None:
            try:
                results.append(self._start_and_wait(execution))
            except BaseException as error:
                failures.append(error)
            finally:
                woken.set()

        thread = threading.Thread(target=work, name=f"replica_engine: launch of {self._program.name}", daemon=True)
        if self._devices.wait_for_interrupted():  # the limit is for this program alone
            self._watch.beat()
            self._watch.expired = 0
        self._devices.leave_to(thread)
        self._devices.running_name = self._program.name
        try:
            threads.start(thread)
            wait_for_ever(woken.wait)
        except BaseException:
            nobody_waits.set()
            raise
        if failures:
            raise failures.pop()
        if results:
            return results.pop()
        nobody_waits.set()
        if not self._watch.expired:
            run.end(lambda _: None, execution)  # a host call failed, and the program did not end after that
        if isinstance(run, Session):
            run.give_up()
            for ident in run.threads_in_calls():
                raise_in(ident, ReplicaUnwound)
        raise self._timed_out()

    def _failed(self, error: BaseException) -> ProgramError:
        """What an error of the runtime becomes."""
        return ProgramError.failed(self._program.name, self._devices.names, str(error))

    def _draw(self, began: float, launched: float, ended: float) -> None:
        """Adds a finished launch to the timeline."""
        name, size = self._program.name, self._devices.size
        timeline.add(
            timeline.Track(self._body.name, "launch", order=-2), name, "launch", began, launched, {"replicas": size}
        )
        for replica in range(size):
            timeline.add(self._track(replica), name, "run", began, ended)  # it may begin before `start` returns

    def _draw_host_call(self, replica: int, call: Call, began: float, ended: float) -> None:
        timeline.add(self._track(replica), call.describe(), "host call", began, ended)

    def _beat(self) -> None:
        self._watch.beat()
        self._devices.in_flight.beat()

    def _describe(self, waited: float) -> str:
        given_up = self._devices.held_by
        return slow_program(self._program.name, waited, *self._stand(), self._meetings(), given_up)

    def _expire(self, waited: float) -> None:
        if self._devices.held_by:
            return
        try:
            self._standstill = self._stand()
        finally:
            if self._woken is not None:
                self._woken.set()

    def _timed_out(self) -> ReplicaTimeoutError:
        rows, coordinator = self._standstill or self._stand()
        return ReplicaTimeoutError.after(self._body.limits.timeout or 0.0, rows, coordinator, self._meetings())

    def _meetings(self) -> list[str]:
        """Where its replicas may wait for each other, as text."""
        return [] if self._state == FOR_ITS_TURN else self._program.traced.meetings

    def _stand(self) -> tuple[list[ReplicaRow], CoordinatorRow]:
        """Where all replicas and the calling thread are now."""
        turn, state = self._turn, FOR_GIVEN_UP if self._devices.held_by else self._state  # once: the launch goes on
        waited = (turn if state == FOR_ITS_TURN and turn is not None else self._watch).waited
        waits = state in (FOR_ITS_TURN, FOR_GIVEN_UP)
        rows = [self._row(replica, name, waited, waits) for replica, name in enumerate(self._devices.names)]
        return rows, CoordinatorRow(self._thread.name, state, waited)

    def _row(self, replica: int, device: str, waited: float, is_waiting: bool) -> ReplicaRow:
        size, number = self._devices.replicas, self._devices.first + replica
        if is_waiting:
            return ReplicaRow(number, size, device, "not started", 0, "", points="host call")
        made, last, inside = self._run.place_of(replica)
        if inside is None:
            state = "finished" if self._devices.has_ended(replica) else "running on the device"
            return ReplicaRow(number, size, device, state, made, last, waited, points="host call")
        ident, since = inside
        seconds = time.perf_counter() - since
        return ReplicaRow(number, size, device, "in a host call", made, last, seconds, stack_of(ident), "host call")

    def _track(self, replica: int) -> timeline.Track:
        number, size = self._devices.first + replica, self._devices.replicas
        name = f"replica {number} of {size} ({self._devices.names[replica]})"
        return timeline.Track(self._body.name, name, id(self._devices), replica + 1)
