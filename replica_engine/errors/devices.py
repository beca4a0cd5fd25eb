"""Devices that cannot be used, and the jax backend that provides them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, shown, with_more

_CAUSES = (
    "Another process may use the devices, the driver may not fit the installed package, or a lock file of an earlier "
    "process may be left. Mend that, and start the process again."
)


@with_more
def warn_not_started(platform: str, reason: str, instead: str) -> str:
    """The warning that a platform could not start, and that another one is taken because none was asked for."""
    return (
        f"jax could not start the {platform.upper()} platform, so this process runs on {instead.upper()} devices: "
        f"{reason.strip()}\n{_CAUSES} To make it an error, ask for it: xla.PjrtClusterResolver({platform!r}). "
        f"To take {instead.upper()} devices without this warning, ask for those: xla.PjrtClusterResolver({instead!r})."
    )


class DeviceError(ReplicaEngineError, ValueError, AssertionError):
    """Devices do not exist, do not fit together, or cannot do what was asked.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError for such devices.
    """

    @classmethod
    def missing(cls, missing: Sequence[str], present: Sequence[str], kind: str) -> DeviceError:
        """TensorFlow has no device of this name."""
        more = (
            "To make more CPU devices, call replica_engine.logical_devices(n) before TensorFlow starts"
            if kind == "CPU"
            else f"tf.config.list_physical_devices({kind!r}) lists the {kind} devices that TensorFlow finds"
        )
        return cls(f"No such device: {', '.join(missing)}. This process has {', '.join(present)}. {more}.")

    @classmethod
    def duplicated(cls, devices: Sequence[str]) -> DeviceError:
        """The list names a device more than once."""
        return cls(
            f"No duplicates allowed in `devices`: {', '.join(devices)}. One replica runs on each device, so name each "
            "device once. For several replicas on one CPU, make logical devices: "
            "replica_engine.logical_devices(n)."
        )

    @classmethod
    def mixed(cls, kinds: Sequence[str]) -> DeviceError:
        """The list has devices of several kinds."""
        return cls(
            f"`devices` mixes kinds ({', '.join(kinds)}), so the slowest kind would delay every step. "
            "Pass devices of one kind."
        )

    @classmethod
    def unreadable(cls, device: object) -> DeviceError:
        """An entry does not name a device."""
        return cls(
            f'Not a device: {shown(device)}. `devices` is a list of names such as "CPU:0" or "/device:GPU:1", or of '
            'tf.config.LogicalDevice objects. Example: ["CPU:0", "CPU:1"].'
        )

    @classmethod
    def not_shared(cls, count: int, processes: int) -> DeviceError:
        """The number of devices of all workers cannot be shared out evenly."""
        less, more = max(count // processes, 1) * processes, (count // processes + 1) * processes
        choice = f"{more}" if less == more else f"{less} or {more}"
        return cls(
            f"num_cores={count} counts the devices of all workers, and {processes} workers cannot have equally many. "
            f"Write num_cores={choice}, or leave it out: then each worker takes all that it has."
        )

    @classmethod
    def too_few_in_job(cls, count: int, kind: str, present: int) -> DeviceError:
        """The workers have fewer devices than asked for, or fewer than the first strategy took."""
        return cls(
            f"{count} {kind} devices were asked for, and all workers together have {present}. The first TPUStrategy of "
            "a process settles how many CPU devices each worker has: make the one with the most devices first."
        )

    @classmethod
    def bad_count(cls, count: object) -> DeviceError:
        """The number of devices is not a positive int."""
        return cls(f"The number of devices must be a positive int; got {shown(count)}.")

    @classmethod
    def bad_kind(cls, kind: object) -> DeviceError:
        """Logical devices of this kind cannot be made."""
        return cls(f'`kind` of logical devices must be "CPU" or "GPU"; got {shown(kind)}.')

    @classmethod
    def one_a_replica(cls, method: str, argument: str, given: object) -> DeviceError:
        """The call asks for model parallelism over several devices of one replica."""
        return cls(
            f"{method} was called with {argument}={shown(given)}, but each replica has one device, number 0. Model "
            "parallelism over several devices of one replica is not supported. Remove the call."
        )

    @classmethod
    def no_cross_device_ops(cls, given: object) -> DeviceError:
        """`cross_device_ops` is not a `tf.distribute.CrossDeviceOps`."""
        return cls(
            "`cross_device_ops` must be a tf.distribute.CrossDeviceOps, such as tf.distribute.ReductionToOneDevice(), "
            f"or None; got {shown(given)}."
        )

    @classmethod
    def no_host_calls(cls, platform: str) -> DeviceError:
        """Programs of this platform cannot call the host."""
        return cls(
            f"outside_compilation works on CPU and GPU devices; programs for {platform.upper()} devices cannot call "
            "Python functions yet. Do the host work before and after the run."
        )

    @classmethod
    def too_few(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """There are fewer devices of this kind than replicas."""
        return cls(
            f"{wanted} replicas need {wanted} {kind} devices, but this process has {present}. Ask for {present} or "
            "fewer, or run on CPU devices, which are made in the number that you ask for: "
            f"TPUStrategy(xla.PjrtClusterResolver('cpu'), num_cores={min(wanted, 1024)})."
        )

    @classmethod
    def too_many(cls, wanted: int, most: int) -> DeviceError:
        """More CPU devices were requested than the library makes."""
        return cls(
            f"{wanted} replicas on CPU devices are too many for one machine; at most {most} are made. More replicas "
            "than cores do not run faster."
        )

    @classmethod
    def no_group(cls, given: object) -> DeviceError:
        """`devices` is not a group of devices."""
        return cls(
            "`devices` must be a group of devices, such as xla.PjrtClusterResolver('cpu').devices, or None for the "
            f"first devices of the best platform; got {shown(given)}."
        )

    @classmethod
    def other_size(cls, given: int, wanted: int) -> DeviceError:
        """The number of devices differs from the number of replicas that the body was traced for."""
        return cls(
            f"The body was traced for {wanted} replicas and cannot be compiled for {given} devices. Trace it with one "
            "list of arguments for each device: xla.lower(fn, inputs=[[x0], [x1], ...]).compile(devices)."
        )

    @classmethod
    def unknown_platform(cls, platform: object, known: Sequence[str]) -> DeviceError:
        """The platform is unknown."""
        return cls(
            f"No such platform: {shown(platform)}. Pass one of {', '.join(known)}, or None for the first of these that "
            "has devices."
        )

    @classmethod
    def none_of_platform(cls, platform: str, present: Sequence[str]) -> DeviceError:
        """jax finds no device of this platform."""
        return cls(
            f"jax finds no {platform.upper()} device. This process has: {', '.join(present)}. For GPUs install "
            '"replica-engine[cuda]", for TPUs "replica-engine[tpu]".'
        )

    @classmethod
    def not_started(cls, platform: str, reason: str, present: Sequence[str]) -> DeviceError:
        """The platform is installed, and jax could not start it."""
        return cls(
            f"jax could not start the {platform.upper()} platform: {reason.strip()}\n{_CAUSES} This process has: "
            f"{', '.join(present)}."
        )

    @classmethod
    def too_late(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """Logical devices were requested after TensorFlow had made its devices."""
        return cls(
            f"{wanted} logical {kind} devices were requested, but TensorFlow has already started with {present}. "
            "Logical devices must be made before TensorFlow runs anything: call "
            f"replica_engine.logical_devices({wanted}) at the top of the program, before a strategy is made."
        )

    @classmethod
    def none_of_kind(cls, kind: str) -> DeviceError:
        """The machine has no physical device of this kind that could be divided into logical devices."""
        return cls(
            f"This machine has no {kind} device that could be divided into logical devices. Every machine has a CPU: "
            "logical_devices(n)."
        )


class ForkedError(ReplicaEngineError, RuntimeError):
    """A run in a process that was forked after TensorFlow had started."""

    @classmethod
    def of_process(cls, child: int, parent: int) -> ForkedError:
        """Names the child process and its parent."""
        return cls(
            f"Process {child} was forked from process {parent}, in which TensorFlow had already started. A forked "
            "process has none of its parent's threads, so any code that waits for those threads, replicas included, "
            "would wait for ever. Start a new process instead, multiprocessing.get_context('spawn').Process(...), or "
            "fork before the first op of TensorFlow. The parent process is not affected."
        )


class BackendMissingError(ReplicaEngineError, ImportError):
    """Compiled programs run through jax, and jax is missing, or jax or TensorFlow has a version that does not work."""

    @classmethod
    def not_installed(cls) -> BackendMissingError:
        """jax is not installed."""
        needs = " (It takes Python 3.11 or newer.)" if sys.version_info < (3, 11) else ""
        return cls(
            "TPUStrategy and replica_engine.xla run programs through jax, which is not installed. Install it with\n"
            f'    pip install "replica-engine[xla]"     # CPU; [cuda] for GPUs, [tpu] for TPUs{needs}'
        )

    @classmethod
    def unsupported(cls, version: str, oldest: str) -> BackendMissingError:
        """The installed jax is too old."""
        return cls(
            f"jax {version} is installed; replica_engine needs {oldest} or newer. Install it with\n"
            '    pip install --upgrade "replica-engine[xla]"'
        )

    @classmethod
    def no_stablehlo(cls, version: str, oldest: str) -> BackendMissingError:
        """The installed TensorFlow cannot lower a function to StableHLO."""
        return cls(
            f"TensorFlow {version} is installed; TPUStrategy and replica_engine.xla need {oldest} or newer, which "
            "lowers functions to StableHLO. MirroredStrategy works with this version. Install a newer one with\n"
            f'    pip install --upgrade "tensorflow>={oldest}" "replica-engine[xla]"     # or tensorflow-cpu'
        )

    @classmethod
    def name_vanished(cls, version: str, error: BaseException) -> BackendMissingError:
        """The installed jax lacks a name that the library uses."""
        return cls(
            f"jax {version} lacks a name that replica_engine uses ({error}). Install a version that replica_engine "
            'was tested with:\n    pip install "jax==0.10.2" "jaxlib==0.10.2"'
        )
