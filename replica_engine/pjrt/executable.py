"""A program compiled for a group of devices, and its launches.

A launch gives the old values of variables to the program, and the new ones must be stored: an exception between the two
would lose both. A signal handler may raise one, and another thread may raise one here
(`PyThreadState_SetAsyncExc`). Python looks for either only between two of its instructions. So the launch and all that
it stores are one call of functions in C, in which no Python runs: `deque(map(setattr, objects, names, values), 0)`,
where asking for the first value launches the program.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import operator
import os
import pathlib
import platform
import re
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from replica_engine._version import __version__
from replica_engine.errors.worker_errors import JOB_FAILURES
from replica_engine.pjrt import jaxlib, rewrites
from replica_engine.pjrt.device_group import Array, Computed, DeviceGroup, held_off
from replica_engine.pjrt.plan import Memory, Plan, exchanges_in_branches, hlo_text, make_plan, read_memory
from replica_engine.pjrt.stablehlo import markers, mlir
from replica_engine.pjrt.stablehlo.markers import expand_markers
from replica_engine.pjrt.stablehlo.partition_local import WHOLE, Axes
from replica_engine.pjrt.stablehlo.partition_program import partition
from replica_engine.process import interrupts, sums_are_ordered, threads
from replica_engine.process.memory import keep_freed_memory
from replica_engine.workers import Program
from replica_engine.workers.member import Leave

_SHORTEST, _LONGEST = 2e-5, 5e-3  # seconds between checks whether a program has ended
_LATE = 0.02  # how late a check may notice the end, as a fraction of the time so far
_EXPECTED = 0.95  # fraction of the time of earlier launches; before it, checks are rare
_LARGE_PART = 1 << 15  # bytes of a device's parts, on average; models of smaller ones step up to 1.2 times slower apart
_AWAKE = 1e-3  # seconds of checks without a sleep: to be woken takes longer than a small program runs
_SHORTER = 0.8  # fraction of the time that a program is expected to take after it has ended in the first sleep


class Stores:
    """Where the results of launches go.

    Args:
        writes: objects, and for each the index of the result that becomes its attribute `on_devices`.
        patience: the attribute.
        by: what their attribute `written_by` becomes at the same instant; None leaves it.

    Attributes:
        objects: the objects.
        targets, names, notes: what `setattr` gets: objects, names of attributes, and the values behind the results.
        patience: seconds that an interrupted launch waits for the program to end, so that it can call `launched`.
    """

    def __init__(self, writes: Sequence[tuple[Any, int]] = (), patience: float = 0.0, by: Computed | None = None):
        self.objects = [each for each, _ in writes]
        self.patience = patience
        count = len(self.objects)
        noted = 0 if by is None else count
        self.targets = self.objects + self.objects[:noted]
        self.names = ["on_devices"] * count + ["written_by"] * noted
        self.notes = [by] * noted
        indices = [index for _, index in writes]
        self.of_launch = operator.itemgetter(slice(None), 0, *indices)  # all, the first one, and one for each object
        self._values = operator.itemgetter(*indices, slice(0))  # a slice too: the getter of one index makes no tuple

    def store(self, results: list[Array]) -> None:
        """Stores results that a launch with other `Stores` made: all or none, as a launch does."""
        values = itertools.chain(self._values(results)[:-1], self.notes)
        deque(map(setattr, self.targets, self.names, values), 0)

    def launched(self) -> None:
        """Completes on the host what new values of variables mean there. May be called again after an exception."""
        for variable in self.objects:
            variable.launched()

    def invalidate(self) -> None:
        """Marks the variables as lost: the program that was given their old values has failed."""
        for variable in self.objects:
            variable.invalidate()


_NAMES = ("results", "running")

NO_STORES = Stores()
"""Those of a program that is given no old values of variables."""


class Executable:
    """A StableHLO program, compiled for the replicas of a group.

    Args:
        program: the text of the module.
        devices: the devices; one replica runs on each.
        results: shape and dtype of each result.
        axes: how each result is divided over the devices of a replica; none if a replica has one device.
        host_calls: functions that the program calls, by their index. Each gets and returns arrays, of exactly the
            dtypes and shapes that the program declares. They should never raise: other replicas would wait forever.
        compiled: the bytes of this program, compiled before (`serialized`) for the same `circumstances`.
        compared: the program as `agreed` gives it, if it concerns other workers; each launch is compared with theirs.
        limits: seconds that a launch may take, and the wait for other workers at the first one, or None for no limit;
            and seconds until a warning about that wait.
        is_given_all: whether the next launches may be given all results, as values of variables.

    Raises:
        jax.errors.JaxRuntimeError: `compiled` is not a program.
        UntransferableError: a host call has a value that cannot be sent between these devices and the host.

    Attributes:
        bytes_needed: bytes on each device for intermediate values and results, in addition to the arguments.
        seconds: how long compiling it took, or reading it.
        waits: whether `wait` waits for the end in a process on its own; otherwise a program need only be queued.
        end: the number of a result that nobody is given and that is ready at the end of a launch; None without one.
        compared: the program as the workers compare it; None if it concerns no other worker.
        limits: the argument.
    """

    def __init__(
        self,
        program: str,
        devices: DeviceGroup,
        results: Sequence[tuple[tuple[int, ...], np.dtype]],
        host_calls: Sequence[Callable[..., tuple[np.ndarray, ...]]] = (),
        compiled: bytes | None = None,
        compared: Program | None = None,
        limits: tuple[float | None, float | None] = (None, None),
        axes: Sequence[Axes] | None = None,
        is_given_all: bool = False,
    ):
        self.compared = compared
        self.limits = limits
        self._is_first = True
        self._calls_host = bool(host_calls)
        on_one_cpu = devices.platform == "cpu" and len(devices.devices) == 1
        # XLA:CPU runs a program that calls the host on a single device inside the call that starts it. With several
        # workers, nothing could end that call when another worker is lost, so another thread makes it.
        self._runs_in_launch = self._calls_host and devices.member is not None and on_one_cpu
        self._launching: threads.LeftCall[None] | None = None
        self._took = 0.0  # seconds that a launch takes: about the shortest of the recent ones
        if compared is not None:
            self._is_compared_again = _has_other_orders(program)
        self._devices = devices
        self.waits = not devices.has_queue or bool(host_calls) or limits[0] is not None
        # A result tells when a launch has ended. jaxlib's token of a program without results can only be waited for.
        works_more = not results or (devices.member is not None and on_one_cpu) or (is_given_all and not self.waits)
        self.end = len(results) if works_more and not self.waits else None
        self._results = len(results) + (self.end is not None)
        each_axes = axes or [WHOLE] * len(results)
        client, on = devices.devices[0].client, jaxlib.DeviceList(devices.everywhere)
        options = _options(devices, apart=_is_better_apart(devices, results, each_axes))
        began = time.perf_counter()
        called: list[Any] = list(host_calls)
        if devices.platform == "cpu":
            keep_freed_memory()
        transfers = bool(host_calls) and jaxlib.HOST_CALL_TARGETS[devices.platform] == jaxlib.BY_TRANSFERS
        if compiled is None or transfers:
            module = prepared(program, devices.platform)
            if works_more:
                markers.add_work(module)
        if transfers:
            made = markers.convert(module)
            called = [markers.callback(client, each, host_calls[each.index]) for each in made]
        if compiled is None:
            self._executable = client.compile_and_load(module, on, options, called)
        else:
            self._executable = client.deserialize_executable(compiled, on, options, called)
        self.seconds = time.perf_counter() - began
        divided = [
            (devices.stored(shape, each), dtype, devices.make_sharding(each))
            for (shape, dtype), each in zip(results, each_axes, strict=True)
        ]
        if works_more:
            divided.append((*markers.WORK, devices.sharding))
        memory = self._executable.get_compiled_memory_stats()
        self.bytes_needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        handlers = [
            jaxlib.result_handler(jaxlib.ShapedArray(shape, dtype), sharding) for shape, dtype, sharding in divided
        ]
        self._take = operator.methodcaller("consume_with_handlers", handlers)

    def serialized(self) -> bytes | None:
        """The compiled program as bytes; None if it cannot leave the process."""
        if self._calls_host and not jaxlib.READS_HOST_CALLS:
            return None
        try:
            return jaxlib.serialized_executable(self._devices.devices[0].client, self._executable)
        except jaxlib.RUNTIME_ERRORS:
            return None

    def plan(self, name: str, chip: int | None) -> Plan:
        """What the compiler says of the program.

        Args:
            name: the name of the body.
            chip: the bytes of memory of each device, or None.
        """
        devices = self._devices
        platform = devices.platform.upper()
        return make_plan(self._executable, name, devices.replicas, platform, chip, self.seconds, devices.devices_each)

    def exchanges_in_branches(self) -> bool:
        """Whether devices of several replicas wait for each other inside a branch or loop."""
        return exchanges_in_branches(hlo_text(self._executable))

    def memory(self, chip: int | None) -> Memory:
        """The memory of `plan`, for devices with so many bytes of memory each, or None."""
        return read_memory(self._executable, chip)

    def launch(self, arrays: list[Array], stores: Stores = NO_STORES, compared: Program | None = None) -> list[Array]:
        """Starts the program on all replicas. The caller holds `DeviceGroup.in_flight` and calls `wait` next.

        Arrays that the program donates are gone afterwards; the results replace them, ready or not. An exception that
        a signal handler or another thread raises comes before all this or after it: when `stores` have their results,
        and `DeviceGroup.running` has the program.

        The caller calls `wait_for_turn` before, and launches what other workers launch too by `Agreement.launch`. Then
        it holds off signals here: a launch that was told and not made would leave them alone in its collectives.

        Returns:
            The results, ready or not. Of a program that calls the host on one CPU, beside other workers, the list is
            empty until `wait` has returned.

        Raises:
            WorkerLostError or another failure of the job of several workers: the arrays may be gone, so `stores` are
                invalid.
        """
        devices = self._devices
        if devices.agreement is not None and compared is not None:
            devices.agreement.launches(compared, self._is_compared_again)
        if not self._runs_in_launch:
            return self._start(arrays, stores)
        results: list[Array] = []  # filled before the thread ends

        def start() -> None:
            results.extend(self._start(arrays, stores))

        self._launching = threads.LeftCall(start, f"launch of {devices.running_name}", lambda: None)
        devices.leave_to(self._launching)
        threads.start(self._launching)
        return results

    def _start(self, arrays: list[Array], stores: Stores) -> list[Array]:
        devices, launched = self._devices, types.SimpleNamespace()  # for the results
        try:
            made = map(self._take, map(self._executable.execute_sharded, (arrays,)))
            values = itertools.chain(itertools.chain.from_iterable(map(stores.of_launch, made)), stores.notes)
            objects = itertools.chain((launched, devices), stores.targets)
            names = itertools.chain(_NAMES, stores.names)
            devices.interrupted = True  # until `wait` has waited for it
            try:
                deque(map(setattr, objects, names, values), 0)
            except jaxlib.RUNTIME_ERRORS as error:
                if devices.member is not None:
                    devices.member.explain(error)
                raise
        except JOB_FAILURES:
            stores.invalidate()
            raise
        return launched.results[: self._results]  # without that of `add_work` where the caller waits

    def wait_for_turn(self) -> None:
        """Waits for its turn on the devices, and before the first launch for the other workers.

        Gloo gives a connection up after 30 s. That the workers began to compile together is not enough, since compiling
        may take one longer than another. The caller does not hold off Ctrl-C, which ends the wait.

        Raises:
            StuckProgramError: an earlier program, whose wait was interrupted, has not ended.
            WorkerLostError or another failure of the job of several workers.
        """
        member = self._devices.member
        if member is not None:
            member.check()
        self._devices.wait_for_interrupted()
        if member is not None and self.compared is not None and self._is_first:
            member.meet(f"the first launch of {self.compared.words}", *self.limits)
            self._is_first = False

    def wait(self, left: Leave | None = None) -> None:
        """Waits for the end of the program, if it `waits`. Otherwise the program need only be queued.

        If the wait is interrupted, for example by Ctrl-C, `DeviceGroup.interrupted` stays set: the next launch must not
        begin before this program has ended.

        Args:
            left: an event that ends the wait. With it, the wait polls instead of blocking in jaxlib: if the program
                never ends, a thread that blocks in jaxlib would bring the process down at its exit. With several
                workers it polls too.

        Raises:
            WorkerLostError or another failure of the job of several workers: the program may never end.
        """
        devices = self._devices
        member, launching = devices.member, self._launching
        self._launching = None
        running: Any = launching or devices.running  # read once: another thread may see the end, and reset it
        if running is not None and (self.waits or member is not None):
            ident = threading.get_ident()
            try:
                if member is not None:
                    member.waiting.add(ident)
                if (left is not None or member is not None) and not self._poll(running, left):
                    return
            finally:
                if member is not None:
                    member.waiting.discard(ident)
            try:
                if launching is None:
                    running.block_until_ready()
                else:
                    launching.result()
            except jaxlib.RUNTIME_ERRORS as error:
                if member is not None:
                    member.explain(error)
                raise
        devices.running, devices.interrupted = None, False

    def _poll(self, running: Any, left: Leave | None) -> bool:
        """Waits until the program has ended, and returns True; or until `left` is set, or the job fails, which raises.

        A program that calls the host needs the interpreter lock, so this thread sleeps between its checks.

        A program that ends while this thread sleeps was not measured: the sleep was. Since it is a fraction of the time
        that is expected, and to be woken takes time too, a small program would be expected to take 2 to 3 ms forever.
        """
        member = self._devices.member
        began, early = time.perf_counter(), 0.0
        while not running.is_ready():
            waited = time.perf_counter() - began
            early = _EXPECTED * self._took - waited if self._took > _AWAKE else 0.0
            if early <= 0 and waited < self._took + _AWAKE and not self._calls_host:
                _give_way()
                pause = 0.0
            else:
                pause = min(max(_SHORTEST, early, _LATE * waited), _LONGEST)
            if left is not None and left.wait(0.0 if member is not None else pause):
                return False
            if member is not None and (member.failed.wait(pause) if pause else member.failed.is_set()):
                member.check()
        waited = time.perf_counter() - began
        self._took = min(waited, 1.05 * self._took) if self._took else waited
        if early > 0:
            self._took *= _SHORTER
        return True


class Starter:
    """Starts an executable for a caller that holds `DeviceGroup.in_flight`, and may wait for it on another thread.

    Args:
        executable: what is launched.
        devices: where it runs.
        name: what messages call the program.
        compared: the launch as the workers compare it; None takes `executable.compared`.

    Attributes:
        executable: what is launched; it also waits for the end.
    """

    __slots__ = ("_compared", "_devices", "_name", "executable")

    def __init__(self, executable: Executable, devices: DeviceGroup, name: str, compared: Program | None = None):
        self.executable = executable
        self._compared = compared or executable.compared
        self._devices = devices
        self._name = name

    def start(
        self,
        arrays: list[Array],
        stores: Stores = NO_STORES,
        relied_on: bool = True,
        left: Leave | None = None,
    ) -> list[Array]:
        """Waits until the program may start, which Ctrl-C ends, and starts it.

        Args:
            arrays: as for `Executable.launch`.
            stores: as for `Executable.launch`.
            relied_on: whether other workers, threads or host calls rely on the launch: then it holds off signals.
            left: an event that ends the wait for other workers.

        Returns:
            The results, ready or not.

        Raises:
            ProgramDisagreementError: another worker launches another program.
            NobodyWaits: `left` is set.
        """
        executable, devices = self.executable, self._devices
        launch = functools.partial(executable.launch, arrays, stores, self._compared)
        if devices.member is not None and devices.agreement is not None and self._compared is not None:
            agreed_launch = functools.partial(self._agreed_launch, self._compared, launch, left)
            return devices.member.telling_left(agreed_launch, left)
        executable.wait_for_turn()
        devices.running_name = self._name
        return held_off().around(launch) if relied_on else launch()

    def _agreed_launch(self, program: Program, launch: Callable[[], list[Array]], left: Leave | None) -> list[Array]:
        """Starts the program once all workers are about to do so."""
        executable, devices = self.executable, self._devices
        assert devices.agreement is not None, "asked before"
        executable.wait_for_turn()
        devices.running_name = self._name
        try:
            return devices.agreement.launch(program, executable.limits, launch, left)
        finally:  # after a launch no comparison is left, and this does nothing
            devices.agreement.leave_to(devices)

    def apart(self, launch: Callable[[], list[Array]], woken: threading.Event, left: Leave) -> list[Array] | None:
        """Starts the program and waits for it on another thread, which the calling one can leave at any point.

        Args:
            launch: starts the program, and waits for its end.
            woken: ends the wait for the other thread, which sets it at its end.
            left: is set if nobody needs what `launch` returns.

        Returns:
            What `launch` returned; None if `woken` was set before.
        """
        thread = threads.LeftCall(launch, f"launch of {self._name}", woken.set)
        self._devices.leave_to(thread)
        self._devices.running_name = self._name
        is_left = True  # also by an exception that comes between any two lines here
        try:
            threads.start(thread)
            interrupts.wait_for_ever(woken.wait)
            is_left = not thread.has_result
        finally:
            if is_left:
                left.why = sys.exception()
                left.set()
                thread.leave()
        return None if is_left else thread.result()


def agreed(
    program: str,
    devices: DeviceGroup,
    name: tuple[str, ...],
    limits: tuple[float | None, float | None] = (None, None),
) -> Program | None:
    """Waits until all workers are about to compile the same program, or to read what was compiled of it before.

    Called once for each program, whether it is compiled or read: the workers count their meetings.

    Args:
        program: the text of the module.
        devices: the devices that it is for.
        name: the name of its function, the line of it, and perhaps the arguments as text.
        limits: as for `Executable`.

    Returns:
        The program as the other workers know it; None if there is one worker.

    Raises:
        ProgramDisagreementError: another worker compiles another program, or does something else.
        WorkersMissingError: other workers did not come in time.
        WorkerLostError: another worker is lost.
    """
    if devices.member is None:
        return None
    # A sum in the order of the replicas is another exchange: it must not meet one of another worker in any order.
    if sums_are_ordered():
        program += "ordered"
        body, *rest = name
        name = (f"{body} (REPLICA_ENGINE_ORDERED_SUMS=1)", *rest)
    compared = Program(hashlib.sha256(program.encode()).hexdigest()[:16], *name)
    devices.member.compile(compared, *limits)
    return compared


def prepared(program: str, platform: str) -> jaxlib.ir.Module:
    """The module of a program as the compiler of a platform gets it."""
    module = expand_markers(program, platform)
    if rewrites.enabled():
        rewrites.rewrite(module, platform)
    if sums_are_ordered():
        rewrites.order_sums(module)
    mlir.as_by_kernels(module, platform)
    mlir.keep(module)
    partition(module)
    return module


def circumstances(devices: DeviceGroup) -> dict[str, str]:
    """What a compiled program depends on besides its text, as names and values."""
    client, flags = devices.devices[0].client, os.environ.get("XLA_FLAGS", "").split()
    return {
        "the devices": ", ".join(sorted({device.device_kind for device in devices.devices})),
        "the version of the devices": client.platform_version,
        "the worker": f"{client.process_index()} of {len({device.process_index for device in devices.everywhere})}",
        "the CPU": _cpu(),
        "the rewrites for CPU": str(rewrites.VERSION) if rewrites.enabled() else "off",
        "the order of sums": "by replica" if sums_are_ordered() else "any",
        "the forms of markers": str(markers.VERSION),
        "the forms of conversions": str(mlir.VERSION),
        "the version of jaxlib": jaxlib.JAXLIB_VERSION,
        "the version of replica_engine": __version__,
        "XLA_FLAGS": " ".join(sorted(flags)),
        "the compile options": hashlib.sha256(_options(devices).SerializeAsString()).hexdigest()[:16],
    }


def _options(devices: DeviceGroup, apart: bool = False) -> jaxlib.CompileOptions:
    options = jaxlib.compile_options(devices.grid, devices.mesh is not None)
    if devices.platform == "cpu":
        options.env_option_overrides = [*jaxlib.CPU_OPTIONS, *([jaxlib.APART] if apart else [])]
    return options


def _is_better_apart(
    devices: DeviceGroup, results: Sequence[tuple[tuple[int, ...], np.dtype]], axes: Sequence[Axes]
) -> bool:
    """Whether nearly all results, the weights of a step and what the optimizer keeps of them, are divided, and large.

    Then a device has more bytes of the gradients, which are reduced whole, than of all the rest. If only the
    optimizer's are divided, or if they are small, one all-reduce for many gradients is faster. Beside other replicas
    it also needs less memory.
    """
    if devices.mesh is None or devices.replicas > 1:
        return False
    sizes = [
        (each != WHOLE, math.prod(devices.on_each(shape, each)) * dtype.itemsize)
        for (shape, dtype), each in zip(results, axes, strict=True)
    ]
    divided = [size for is_divided, size in sizes if is_divided]
    whole = sum(size for is_divided, size in sizes if not is_divided)
    return sum(divided) > 2 * whole and sum(divided) >= _LARGE_PART * len(divided)


@functools.cache
def _cpu() -> str:
    """The CPU's architecture and features: XLA compiles for those, and other CPUs would fail at an instruction."""
    features = platform.processor()
    file = pathlib.Path("/proc/cpuinfo")
    if file.exists():
        lines = file.read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), features)
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(features.split())).encode()).hexdigest()[:16]}"


def _has_other_orders(program: str) -> bool:
    """Whether a collective of a program may have its replicas in another order than their own; see `Agreement`."""
    groups = itertools.chain.from_iterable(map(json.loads, _GROUPS.findall(program)))
    return any(group != sorted(group) for group in groups)


_GROUPS = re.compile(r"groups\W[^\[\]]{0,10}(\[\[[\d, \[\]-]*?\]\])")  # of StableHLO, and of the JSON of a marker
_give_way = getattr(os, "sched_yield", lambda: None)  # to programs' threads; not every system has it
