"""A program compiled for a group of devices, and launching it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.jaxlib import CompileOptions, DeviceAssignment, DeviceList, ShapedArray, array_result_handler
from replica_engine.pjrt.markers import expand_markers

# The scheduler that saves memory is also the faster one for convolutions (0.7 to 0.9 of the time), and no slower for
# matrix products.
_CPU_OPTIONS = (("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),)


_SHORTEST, _LONGEST = 2e-5, 5e-3  # seconds between looks at whether a program has ended


class Executable:
    """A StableHLO program, compiled for the replicas of a group.

    Args:
        program: the text of the module.
        devices: a replica runs on each.
        results: shape and dtype of each result.
        host_calls: functions that the program calls, by their index. Each gets and returns arrays, of exactly the
            dtypes and shapes that the program says, and should not raise: other replicas would wait for ever.

    Attributes:
        bytes_needed: on each device, for values in between and for results, beside the arguments.
    """

    def __init__(
        self,
        program: str,
        devices: DeviceGroup,
        results: Sequence[tuple[tuple[int, ...], np.dtype]],
        host_calls: Sequence[Callable[..., tuple[np.ndarray, ...]]] = (),
    ):
        options = CompileOptions()
        options.num_replicas, options.num_partitions = devices.size, 1
        ids = np.array([device.id for device in devices.devices]).reshape(devices.size, 1)
        options.device_assignment = DeviceAssignment.create(ids)
        if devices.platform == "cpu":
            options.env_option_overrides = list(_CPU_OPTIONS)
        self._devices = devices
        self._waits = devices.platform == "cpu" or bool(host_calls)
        client = devices.devices[0].client
        self._executable = client.compile_and_load(
            expand_markers(program, devices.platform), DeviceList(devices.devices), options, list(host_calls)
        )
        memory = self._executable.get_compiled_memory_stats()
        self.bytes_needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        self._handlers = [
            array_result_handler(ShapedArray(shape, dtype), devices.sharding, committed=True, _skip_checks=True)
            for shape, dtype in results
        ]

    def launch(self, arrays: list[Array]) -> list[Array]:
        """Sets the program going on all replicas; the caller holds `DeviceGroup.in_flight` and calls `wait` next.

        Arrays that the program donates are gone afterwards; the results take their place, ready or not. The caller
        holds off Ctrl-C (`interrupts.held_off`) until they have.

        Raises:
            StuckProgramError: a program that was interrupted before has not ended.
        """
        devices = self._devices
        devices.wait_for_interrupted()
        if self._handlers:
            results = self._executable.execute_sharded(arrays).consume_with_handlers(self._handlers)
            devices.running, devices.interrupted = results[0], True  # until somebody waits for it
            return results
        running = self._executable.execute_sharded(arrays, with_tokens=True)
        devices.running, devices.interrupted = running.consume_token(), True
        return []

    def wait(self, left: threading.Event | None = None) -> None:
        """On CPU, and if it calls the host, waits for the end of the program; else it is queued, and that is enough.

        Interrupted, by Ctrl-C say, it leaves the next launch a note, which must not begin before.

        Args:
            left: ends the wait when it is set. Then the wait asks again and again: a thread that jaxlib has wait
                would, if the program never ends, take the process down at its exit.
        """
        devices = self._devices
        if self._waits:
            pause = _SHORTEST
            while left is not None and not devices.running.is_ready():
                if left.wait(pause):
                    return
                pause = min(2 * pause, _LONGEST)
            devices.running.block_until_ready()
        devices.running, devices.interrupted = None, False
