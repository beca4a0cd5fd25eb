"""One launch of a program: watched, limited in time if the user set a limit, and drawn on timelines.

The order of a launch, whose lower half (2 and 3) is a `Starter`:

1. The launch waits for its turn on the devices (`DeviceGroup.in_flight`). After that it may read values of variables.
2. **wait for turn**: an interrupted program has ended, and before a first launch all workers of a job are there. Ctrl-C
   ends this wait.
3. **start**: the program runs.
   If the program donates, its variables have their new values in the same instruction (`Executable.launch`): the old
   ones are gone, and an exception may come at any instant.
4. **wait** for the end. If the program fails and donates, **invalidate**: its variables no longer have a value.
5. If the program does not donate, **store** now, after it has ended well: all variables or none.
6. **launched**: the work on the host that follows new values of variables.

Two things must never happen: a variable still refers to its value after that value was donated; a launch stores after
a host call of it has failed.

**An exception may come between any two instructions**, out of the handler of a signal, or from another thread. Then the
program is launched and all its values are stored, or neither, and the devices go to the next launch. So what ends a
launch (`_end`) may be called twice: an exception in it leads to the `except` that calls it again. It is not
an `__exit__` method: such an exception could keep Python from calling that.

Devices with a queue take the program, and the launch is over; `columns` waits where somebody wants results. With a
limit the launch waits for the end there too. A host that waits for nothing would fill the devices with the batches and
results of its steps. So before a launch puts its arguments there, at most `_AHEAD` others wait behind the program that
runs (`_hold_back`).

Without a limit the calling thread launches and waits, and the watchdog only warns. With a limit the calling thread must
be able to leave a program that does not end, at any point: on one device a program runs inside the launch. So another
thread launches and waits, and the calling thread waits for that thread or for the watchdog. An abandoned program
keeps its devices. The next launch waits for it for a while and then raises an error
(`DeviceGroup.wait_for_interrupted`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine import errors
from replica_engine.diagnostics.flight_record import note_failed_run
from replica_engine.errors import timeouts, worker_errors
from replica_engine.pjrt import device_group, jaxlib
from replica_engine.pjrt.device_group import Array, Computed, DeviceGroup
from replica_engine.pjrt.executable import NO_STORES, Executable, Starter, Stores
from replica_engine.process import interrupts, shutdown
from replica_engine.upstream.graphs import xla_ops
from replica_engine.values import variable_numbers
from replica_engine.watch import timeline, watchdog
from replica_engine.workers.member import Leave, no_calls
from replica_engine.xla.arguments import view
from replica_engine.xla.body import Body
from replica_engine.xla.host_calls.session import Session, SessionCall
from replica_engine.xla.stages.body_graph import Column, Shape, column, count, list_column_tensors
from replica_engine.xla.stages.program import BodyProgram
from replica_engine.xla.state.device_value import Borrowed, find_launch_value, find_patience

Slots = Sequence[Sequence[np.ndarray]]
"""For each slot, one value for all replicas or one value for each."""

_RUNNING = "waiting for the program"
_logger = logging.getLogger("replica_engine")

_LARGE = 1 << 20
"""Bytes of a result in each replica that other devices than CPUs keep until somebody reads it.

A loop seldom reads its losses and metrics, which are smaller. Larger results are predictions: a loop that collects them
would fill the devices' memory, so they are fetched at once.
"""


_AHEAD = 2
"""The most programs that devices with a queue have besides the one that runs."""


class Awaited(NamedTuple):
    """What it takes to wait for the results of a program, when others may have been launched since.

    Attributes:
        body: the replicas it is for.
        devices: the devices.
        program: which program it is.
    """

    body: Body
    devices: DeviceGroup
    program: Computed

    def wait_for(self, results: Sequence[Array], describe: Callable[[float], str] | None = None) -> None:
        """Waits for results. Devices with a queue may have them later; with a limit, the launch has waited for them.

        Raises:
            ProgramError: the program failed while it ran.
        """
        try:
            self.devices.wait_for(*results, describe=describe, of=self.program)
        except BaseException as error:  # whatever has ended the wait: the program may still run
            device_group.add(self.devices)
            note_failed_run(error, self.body.records, None)
            raise

    def find_failure(self, result: Array) -> errors.ProgramError | None:
        """Waits for the end of the program, of which this is a result; returns its error if it failed."""
        try:
            if not result.is_ready():
                self.wait_for([result])
            result.block_until_ready()
        except errors.ProgramError as error:
            return error
        except jaxlib.RUNTIME_ERRORS as error:
            return errors.ProgramError.failed(str(self.program), self.devices.names, str(error))
        return None

    def tensors(self, shape: Shape, array: Array) -> list[tf.Tensor]:
        """The values of the replicas of a result that somebody looks at."""
        with shutdown.running():  # perhaps on a daemon thread
            self.wait_for([array])
            return list_column_tensors(self.devices.fetch_all(array, shape))


class Launchable:
    """A body compiled for devices, as a launch sees it: how it takes arguments and returns results.

    Args:
        program: the data of the lowered body.
        devices: the devices; one replica runs on each.
        executable: the program compiled for these devices.
        branches: for each replica, which branch of the program it takes; empty if the program has none for shares.

    Attributes:
        programs: for each replica, the data of the body lowered for its share.
        executable: the program compiled for these devices.
        variables: the values of the captured variables on the devices.
        starter: starts the program.
        awaited: waits for its results.
        end: the number of a result by which a launch waits for an earlier one; None where each waits for its own end.
        is_queued: whether a launch returns before the program has run; see `DeviceGroup.has_queue`.
        stores: the variables that it writes.
        itself: what the body keeps as the reference to its last program.
    """

    def __init__(
        self, program: BodyProgram, devices: DeviceGroup, executable: Executable, branches: Sequence[int] = ()
    ):
        self.program = program
        self.programs = [program.shares[branch] for branch in branches] or [program] * devices.size
        self._branches = [devices.put([np.array(branch, np.int32) for branch in branches])] if branches else []
        self.devices = devices
        self.executable = executable
        compared, traced = executable.compared, program.traced
        if compared is not None:  # functions and models of one shape may share the executable, but not the launch
            compared = dataclasses.replace(compared, body=program.name, where=traced.where)
            compared = variable_numbers.using(compared, variable_numbers.numbers(traced.handles), traced.compared)
        self.starter = Starter(executable, devices, program.name, compared)
        computed = Computed(program.name, program.traced.where, takes=bool(program.traced.handles))
        self.awaited = Awaited(program.body, devices, computed)
        self.is_queued = devices.has_queue
        self.itself = weakref.ref(self)
        self.variables = [find_launch_value(handle, devices) for handle in program.traced.handles]
        writes = [(self.variables[variable], result) for variable, result in program.writes]
        patience = find_patience([variable for variable, _ in writes]) if program.donates else 0.0
        self.stores = Stores(writes, patience, computed if self.is_queued else None)
        self._constants: list[Array] | None = None
        self._axes = program.axes
        returned = program.results[: program.returned]
        self._columns: list[Callable[[Array], Column] | None] = [None] * len(returned)  # None: it is fetched at once
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in returned]
        self.end = executable.end
        # The smallest that the body returned. If all are large, they are fetched at once, and not kept for this.
        if self.end is None and not executable.waits and min(sizes, default=_LARGE) < _LARGE:
            self.end = sizes.index(min(sizes))
        if devices.mesh is not None and program.traced.is_users:
            _tell_of_whole(program, self.variables)
        if program.shares:
            return
        # A replica alone returns tensors, which nothing can stand for, but to a caller that knows. A sparse tensor,
        # say, is made of all its values at once.
        if self.is_queued and (devices.size > 1 or program.traced.reads_late) and program.traced.is_plain:
            later = functools.partial(functools.partial, self.awaited.tensors)
            self._columns = [
                None if size > _LARGE else functools.partial(later, shape)
                for size, (shape, _) in zip(sizes, returned, strict=True)
            ]
        elif not self.is_queued and program.layout is None:
            self._columns = [column(*each) for each in returned]

    def prepared(self, slots: Slots, captured: Sequence[np.ndarray] | None) -> Callable[[], list[Array]]:
        """Puts arguments on the devices; returns what adds the values of variables, once it is the launch's turn."""
        program, put = self.program, self.devices.put
        if program.host_slots:
            slots = [values for index, values in enumerate(slots) if index not in program.host_slots]
        if program.shares:
            shapes = [tuple(each.shape) for each in program.parameters]
            slots = [[_fitted(value, shape) for value in values] for values, shape in zip(slots, shapes, strict=True)]
        arguments = list(map(put, slots, self._axes))
        if captured is not None:
            arguments += [put([captured[index]]) for index in program.captured]
        else:
            if self._constants is None:
                self._constants = [put([program.traced.tensors[index].numpy()]) for index in program.captured]
            arguments += self._constants
        return lambda: [*arguments, *[variable.array() for variable in self.variables], *self._branches]

    def columns(self, launch: Launch, results: list[Array], as_arrays: bool) -> list[Column]:
        """See `Launch.columns`: the results that come from the devices."""
        program = self.program
        makes: Sequence[Callable[[Array], Column] | None]
        makes = [None] * program.returned if as_arrays else self._columns
        now = [array for make, array in zip(makes, results, strict=False) if make is None]
        if now:
            launch.wait_for(now)
        if program.shares:
            fetched = [self.devices.fetch_all(array) for array in results[: program.returned]]
            return [
                [_taken(value, each.results[index][0]) for value, each in zip(values, self.programs, strict=True)]
                for index, values in enumerate(fetched)
            ]
        return [
            self.devices.fetch_all(array, shape) if make is None else make(array)
            for make, array, (shape, _) in zip(makes, results, program.results, strict=False)
        ]


def _tell_of_whole(program: BodyProgram, variables: Sequence[Any]) -> None:
    """Warns, once a strategy, of variables that were made outside of its scope: they are divided over no devices."""
    pairs = zip(program.traced.handles, variables, strict=True)
    borrowed = [xla_ops.variable_name(handle) for handle, variable in pairs if isinstance(variable, Borrowed)]
    if borrowed and "made outside" not in program.body.told:
        program.body.told.add("made outside")
        text = (
            f"`{program.name}` uses variables that were made outside of the strategy's scope ({len(borrowed)}, such as "
            f"{borrowed[0]!r}). They are not divided: each device gets them whole, and they are sent there for each "
            "run. Make the model and its optimizer under `with strategy.scope():`."
        )
        _logger.warning(text)


def _fitted(value: np.ndarray, shape: Shape) -> np.ndarray:
    """A value in the shape that a program with branches has for it; see `lowered_module.fitting`."""
    return value if value.shape == shape else np.pad(value.ravel(), (0, shape[0] - value.size))


def _taken(value: np.ndarray, shape: Shape) -> np.ndarray:
    """The value of a branch out of that of the program."""
    return value if value.shape == shape else value[: math.prod(shape)].reshape(shape)


class Launch:
    """One launch, which waits for its turn on the devices.

    Args:
        compiled: what is launched.
        step: the first step of a device loop that it runs, from 0; None outside of a loop.

    Attributes:
        results: the results where they are, on the devices, until they are taken; those with a queue may still be
            computing them.
        end: becomes ready when the program ends; None if it has ended, or its results are fetched at once.
    """

    results: list[Array]
    end: Array | None = None

    def __init__(self, compiled: Launchable, step: int | None = None):
        self.compiled = compiled
        self._program = program = compiled.program
        self._body = program.body
        self._devices = compiled.devices
        self._step = step
        self._thread = threading.current_thread()
        timeout, warn_after = program.body.limits
        if timeout is None:
            self._watch = watchdog.Wait(self._describe, warn_after)
        else:
            self._woken = threading.Event()
            self._watch = watchdog.Wait(self._describe, warn_after, timeout, late=self._late, breaker=self._woken.set)

    # The state of a launch that nothing has happened to; most launches leave it so.
    _stored: Sequence[dict[int, Any]] = ()
    _run: Session | None = None  # of the host calls, if the program has any
    _state = timeouts.FOR_ITS_TURN
    _woken: threading.Event | None = None  # the program has ended, or time has run out; None without a limit
    _nobody_waits: Leave | None = None
    _turn: watchdog.Wait | None = None  # of the wait for the devices, if another launch had them

    def __call__(self, slots: Slots, captured: Sequence[np.ndarray] | None = None) -> Launch:
        """Makes the launch, and waits for its end, within the limit; devices with a queue may still work on it then.

        Args:
            slots: the arguments.
            captured: values of the captured tensors; None if they are eager, and so the same at each launch.

        Raises:
            ReplicaTimeoutError: the program did not end in time, and meanwhile no host call began or returned.
            ProgramError: the program failed while it ran.
            Exception: a host call raised it. Then no variable has a new value.
        """
        program, stores = self._program, self.compiled.stores
        failed = None if self.compiled.executable.waits else self._hold_back()
        count("launches")
        self._body.last_program = self.compiled.itself
        prepare = self.compiled.prepared(slots, captured)
        arrays = None
        with self._devices.in_flight.turn(self._take_turn):
            try:
                self._begin(slots)
                try:
                    arrays = prepare()
                except errors.LostVariableError as lost:
                    raise failed or lost  # which says why
                self._watch.beat()
                self._state = _RUNNING
                results = self._execute(arrays) if self._woken is None else self._within_limit(arrays, self._woken)
                if self.compiled.end is not None:
                    self.end = results[self.compiled.end]
                    self._devices.ahead.append((self.compiled.awaited.find_failure, self.end))
                if not program.donates:
                    stores.store(results)
                stores.launched()
                self._end(None, None)
            except BaseException as error:  # whatever it is, the devices must go to the next launch
                self._end(error, None if arrays is None else stores)
                raise
        self.results = results
        return self

    def columns(self, as_arrays: bool | None = False) -> list[Column]:
        """Waits for the results of the body, and takes them: the launch must not keep them alive afterwards.

        Args:
            as_arrays: whether the values of the replicas are wanted as arrays; None if only the end is, which devices
                with a queue wait for then, and perhaps the values later.

        Returns:
            For each tensor that the body returned, the values of the replicas, on the host, or what makes them.

        Raises:
            ProgramError: the program failed while it ran.
        """
        results, self.results = self.results, []
        if as_arrays is None and self.end is not None:
            self.wait_for([self.end])
        columns = self.compiled.columns(self, results, bool(as_arrays))
        for index in sorted(self._program.host_results):  # the branches for shares have their own numbers for them
            numbers = [program.host_results[index] for program in self.compiled.programs]
            columns.insert(index, [view(values[number]) for values, number in zip(self._stored, numbers, strict=True)])
        return columns

    def _hold_back(self) -> errors.ProgramError | None:
        """Waits until the devices have at most `_AHEAD` programs besides the one that runs.

        Returns:
            The error of an earlier program, if one has failed. It concerns this launch if that takes a value from it:
            so then this launch looks at all values that it takes.
        """
        ahead, failed = self._devices.ahead, None
        while len(ahead) > _AHEAD:
            try:
                find_failure, end = ahead.popleft()
            except IndexError:  # another thread waits for it
                break
            if (error := find_failure(end)) is not None:
                failed = error
                self._devices.interrupted = True  # see `DeviceValue.array`
        return failed

    def _take_turn(self, taken: list[bool]) -> None:
        limit, order = self._body.limits.timeout, self._devices.in_flight
        if order.enter_now(taken):
            return
        self._turn = watchdog.Wait(self._describe, self._body.limits.warn_after)
        if limit is None:
            interrupts.around(self._turn, lambda: order.enter(taken))
        else:
            interrupts.around(self._turn, lambda: order.enter_within(limit, self._timed_out, taken))

    def _begin(self, slots: Slots) -> None:
        self._watch.__enter__()
        if self._program.traced.host_calls.calls:
            run = self._run = self._program.traced.host_calls.begin(self._devices, self._step, self._beat)
            run.arguments = {index: slots[index] for index in self._program.host_slots}
            self._stored = [kept.on_host for kept in run.kept]
            if self._devices.member is not None:
                self._devices.member.host_calls = run.running_calls
            if timeline.recording():
                run.draw = self._draw_host_call
            if not interrupts.reach_this_thread():
                self._nobody_waits = Leave()  # the session has no other way to end the wait after a failure
                run.wake = self._nobody_waits.set

    def _end(self, error: BaseException | None, stores: Stores | None) -> None:
        """Ends the launch, before the devices go to the next one. May be called again if an exception comes in it."""
        try:
            if error is not None:
                device_group.add(self._devices)
                note_failed_run(error, self._body.records, None)
                if stores is not None and self._devices.ends_within(stores.patience):
                    # An exception of a signal may have come before `launched`: this makes up for it.
                    with contextlib.suppress(errors.ReplicaEngineError, *jaxlib.RUNTIME_ERRORS):
                        stores.launched()
        finally:
            try:
                if self._run is not None:
                    if self._devices.member is not None:
                        self._devices.member.host_calls = no_calls
                    self._program.traced.host_calls.end(self._run, self._devices, failed=error is not None)
            finally:
                try:
                    self._watch.__exit__(None, None, None)  # also if it was not entered
                finally:  # a second time: an exception may have come in the line above
                    self._watch.__exit__(None, None, None)
                self._watch.error = None  # whose traceback has the arguments

    def _execute(self, arrays: list[Array]) -> list[Array]:
        """Starts the program and waits for its end."""
        program, starter, run = self._program, self.compiled.starter, self._run
        given = self.compiled.stores if program.donates else NO_STORES
        relied_on = self._devices.member is not None or run is not None
        end = self._wait if run is None else functools.partial(run.end, self._wait)
        began, launched = time.perf_counter(), 0.0
        if self._devices.member is not None:
            self._tell_progress()
        try:
            if timeline.recording():
                with timeline.profiled(f"launch {program.name}"):
                    results = starter.start(arrays, given, relied_on, self._nobody_waits)
                launched = time.perf_counter()
                with timeline.profiled(f"run {program.name}"):
                    end()
                self._draw(began, launched, time.perf_counter())
            else:
                results = starter.start(arrays, given, relied_on, self._nobody_waits)
                launched = time.perf_counter()
                end()
        except jaxlib.RUNTIME_ERRORS as error:
            if launched:
                raise  # a host call raised it
            raise self._failed(error) from error
        finally:
            self._body.note_launch(program.traced.collectives, began, time.perf_counter())
            if program.traced.collectives and program.traced.is_users and self._step is None:
                self._body.steps += 1
        return results

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

    def _wait(self) -> None:
        try:
            self.compiled.starter.executable.wait(self._nobody_waits)
        except (*jaxlib.RUNTIME_ERRORS, *worker_errors.JOB_FAILURES) as error:
            if self._program.donates:
                self.compiled.stores.invalidate()
            if isinstance(error, jaxlib.RUNTIME_ERRORS):
                raise self._failed(error) from error
            raise

    def wait_for(self, results: Sequence[Array]) -> None:
        """See `Awaited.wait_for`; a warning says where the replicas are."""
        self.compiled.awaited.wait_for(results, self._describe)

    def _within_limit(self, arrays: list[Array], woken: threading.Event) -> list[Array]:
        """Has another thread start the program and wait, and raises an error when time has run out."""
        run, self._nobody_waits = self._run, Leave()
        if run is not None:
            run.wake = woken.set
        if self._devices.wait_for_interrupted():  # the limit is for this program alone
            self._watch.beat()
        results = self.compiled.starter.apart(functools.partial(self._execute, arrays), woken, self._nobody_waits)
        if results is not None:
            return results
        if run is not None:
            if self._watch.error is None:
                run.end(lambda: None)  # a host call failed, and the program did not end after that
            run.give_up()
            for ident in run.threads_in_calls():
                interrupts.raise_in(ident, errors.ReplicaUnwound)
        raise self._watch.error or self._timed_out()

    def _failed(self, error: BaseException) -> errors.ProgramError:
        """What an error of the runtime becomes."""
        program = str(self.compiled.awaited.program) if self.compiled.is_queued else f"`{self._program.name}`"
        return errors.ProgramError.failed(program, self._devices.names, str(error))

    def _draw(self, began: float, launched: float, ended: float) -> None:
        """Adds a finished launch to the timeline."""
        name, size = self._program.name, self._devices.size
        track = timeline.Track(self._body.name, "launch", order=-2)
        timeline.add(track, name, "launch", began, launched, {"replicas": size})
        for replica in range(size):
            timeline.add(self._track(replica), name, "run", began, ended)  # it may begin before `start` returns

    def _draw_host_call(self, replica: int, call: SessionCall, began: float, ended: float) -> None:
        timeline.add(self._track(replica), call.describe(), "host call", began, ended)

    def _beat(self) -> None:
        self._watch.beat()
        self._devices.in_flight.beat()

    def _describe(self, waited: float) -> str:
        given_up = self._devices.held_by
        return timeouts.slow_program(self._program.name, waited, *self._stand(), self._meetings(), given_up)

    def _late(self) -> errors.ReplicaTimeoutError | None:
        return None if self._devices.held_by else self._timed_out()

    def _timed_out(self) -> errors.ReplicaTimeoutError:
        rows, coordinator = self._stand()
        return errors.ReplicaTimeoutError.after(self._body.limits.timeout or 0.0, rows, coordinator, self._meetings())

    def _meetings(self) -> list[str]:
        """Where its replicas may wait for each other, as text."""
        return [] if self._state == timeouts.FOR_ITS_TURN else self._program.traced.meetings

    def _stand(self) -> tuple[list[errors.ReplicaRow], errors.CoordinatorRow]:
        """Where all replicas and the calling thread are now."""
        turn = self._turn  # once, as the state: the launch goes on
        state = timeouts.FOR_GIVEN_UP if self._devices.held_by else self._state
        waited = (turn if state == timeouts.FOR_ITS_TURN and turn is not None else self._watch).waited
        waits = state in (timeouts.FOR_ITS_TURN, timeouts.FOR_GIVEN_UP)
        rows = [self._row(replica, name, waited, waits) for replica, name in enumerate(self._devices.names)]
        return rows, errors.CoordinatorRow(self._thread.name, state, waited)

    def _row(self, replica: int, device: str, waited: float, is_waiting: bool) -> errors.ReplicaRow:
        size, number = self._devices.replicas, self._devices.first + replica
        if is_waiting:
            return errors.ReplicaRow(number, size, device, "not started", 0, "", points="host call")
        made, last, inside = (0, "", None) if self._run is None else self._run.find_last_call(replica)
        if inside is None:
            state = "finished" if self._devices.has_ended(replica) else "running on the device"
            return errors.ReplicaRow(number, size, device, state, made, last, waited, points="host call")
        ident, since = inside
        seconds = time.perf_counter() - since
        return errors.ReplicaRow(
            number,
            size,
            device,
            "in a host call",
            made,
            last,
            seconds,
            watchdog.format_thread_stack(ident),
            "host call",
        )

    def _track(self, replica: int) -> timeline.Track:
        number, size = self._devices.first + replica, self._devices.replicas
        name = f"replica {number} of {size} ({self._devices.names[replica]})"
        return timeline.Track(self._body.name, name, id(self._devices), replica + 1)
