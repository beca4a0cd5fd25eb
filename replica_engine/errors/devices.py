"""Devices that are not there, and the backend that brings them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, shown


class DeviceError(ReplicaEngineError, ValueError, AssertionError):
    """The devices given to a strategy cannot be used together. (AssertionError, as in `tf.distribute`.)"""

    @classmethod
    def missing(cls, missing: Sequence[str], present: Sequence[str], kind: str) -> DeviceError:
        """Devices that TensorFlow does not know."""
        more = (
            "more CPU devices can be made before TensorFlow starts: replica_engine.testing.logical_devices(n)"
            if kind == "CPU"
            else f"tf.config.list_physical_devices({kind!r}) lists those of this kind that TensorFlow finds"
        )
        return cls(f"No such device: {', '.join(missing)}. This process has {', '.join(present)}; {more}.")

    @classmethod
    def duplicated(cls, devices: Sequence[str]) -> DeviceError:
        """The same device more than once."""
        return cls(
            f"No duplicates allowed in `devices`, one replica runs on each: {', '.join(devices)}. Name each once; for "
            "several replicas on one machine's CPU there are replica_engine.testing.logical_devices(n)."
        )

    @classmethod
    def mixed(cls, kinds: Sequence[str]) -> DeviceError:
        """Devices of several kinds."""
        return cls(
            f"`devices` mixes kinds ({', '.join(kinds)}); the slowest would hold up every step. "
            "Pass devices of one kind."
        )

    @classmethod
    def unreadable(cls, device: object) -> DeviceError:
        """Something that does not name a device."""
        return cls(
            f'Not a device: {shown(device)}. `devices` is a list of names such as "CPU:0" or "/device:GPU:1", or of '
            'tf.config.LogicalDevices: ["CPU:0", "CPU:1"].'
        )

    @classmethod
    def bad_count(cls, count: object) -> DeviceError:
        """A number of devices that is none."""
        return cls(f"The number of devices must be a positive int; got {shown(count)}.")

    @classmethod
    def bad_kind(cls, kind: object) -> DeviceError:
        """A kind of devices that one cannot be divided into."""
        return cls(f'`kind` of logical devices is "CPU" or "GPU"; got {shown(kind)}.')

    @classmethod
    def one_a_replica(cls, method: str, argument: str, given: object) -> DeviceError:
        """Model parallelism on several devices of one replica."""
        return cls(
            f"{method} was called with {argument}={shown(given)}, and each replica has one device, number 0. Model "
            "parallelism over several devices of a replica does not exist here; leave the call out."
        )

    @classmethod
    def no_cross_device_ops(cls, given: object) -> DeviceError:
        """Nothing that reduces across devices."""
        return cls(
            "`cross_device_ops` is a tf.distribute.CrossDeviceOps, such as tf.distribute.ReductionToOneDevice(), or "
            f"None; got {shown(given)}."
        )

    @classmethod
    def no_host_calls(cls, platform: str) -> DeviceError:
        """A platform whose programs cannot call the host."""
        return cls(
            f"outside_compilation works on CPU and GPU devices; programs for {platform.upper()} cannot call Python "
            "functions here yet. Do the host work before and after the run."
        )

    @classmethod
    def too_few(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """More replicas than there can be devices."""
        return cls(
            f"{wanted} replicas need {wanted} {kind} devices, and this process has {present}. Ask for {present} or "
            "fewer, or run on CPU devices, of which there are as many as you ask for: "
            f"TPUStrategy(xla.PjrtClusterResolver('cpu'), num_cores={min(wanted, 1024)})."
        )

    @classmethod
    def too_many(cls, wanted: int, most: int) -> DeviceError:
        """More CPU devices than are made."""
        return cls(
            f"{wanted} replicas on CPU devices are too many for one machine; at most {most} are made. More than there "
            "are cores do not run faster."
        )

    @classmethod
    def no_group(cls, given: object) -> DeviceError:
        """Something that is no group of devices."""
        return cls(
            "Programs are compiled for None, the first devices of the best platform, or for a group of devices, such "
            f"as xla.PjrtClusterResolver('cpu').devices; got {shown(given)}."
        )

    @classmethod
    def other_size(cls, given: int, wanted: int) -> DeviceError:
        """A program compiled for another number of replicas."""
        return cls(
            f"The body was traced for {wanted} replicas and cannot be compiled for {given} devices. Trace it with as "
            "many lists of arguments as there are devices: xla.lower(fn, inputs=[[x0], [x1], ...]).compile(devices)."
        )

    @classmethod
    def unknown_platform(cls, platform: object, known: Sequence[str]) -> DeviceError:
        """No such kind of device."""
        return cls(
            f"No such platform: {shown(platform)}. It is one of {', '.join(known)}, or None for the first there is."
        )

    @classmethod
    def none_of_platform(cls, platform: str, present: Sequence[str]) -> DeviceError:
        """jax finds no device of that kind."""
        return cls(
            f"jax finds no {platform.upper()} device; this process has: {', '.join(present)}. For GPUs install "
            '"replica-engine[cuda]", for TPUs "replica-engine[tpu]".'
        )

    @classmethod
    def too_late(cls, wanted: int, kind: str, present: int) -> DeviceError:
        """Logical devices asked for after TensorFlow made its devices."""
        return cls(
            f"Asked for {wanted} logical {kind} devices, but TensorFlow has started with {present}. Logical "
            "devices are made before TensorFlow first runs anything: call "
            f"replica_engine.testing.logical_devices({wanted}) at the top of the program."
        )

    @classmethod
    def none_of_kind(cls, kind: str) -> DeviceError:
        """No physical device of the kind to divide into logical ones."""
        return cls(
            f"This machine has no {kind} device to make logical devices of. Any machine has a CPU: logical_devices(n)."
        )


class ForkedError(ReplicaEngineError, RuntimeError):
    """A run in a process that was forked after TensorFlow had started."""

    @classmethod
    def of_process(cls, child: int, parent: int) -> ForkedError:
        """Which process, and of which it is a fork."""
        return cls(
            f"Process {child} was forked from process {parent}, in which TensorFlow had started. A fork has none of "
            "its parent's threads, so whatever waits for them here would wait for ever, replicas too. Start the "
            "process afresh instead, multiprocessing.get_context('spawn').Process(...), or "
            "fork before the first op of TensorFlow. The parent goes on as before."
        )


class BackendMissingError(ReplicaEngineError, ImportError):
    """jax, which compiled programs run on, is not installed or not of a version that works."""

    @classmethod
    def not_installed(cls) -> BackendMissingError:
        """There is no jax."""
        needs = " (It takes Python 3.11 or newer.)" if sys.version_info < (3, 11) else ""
        return cls(
            "TPUStrategy and replica_engine.xla run programs through jax, which is not installed. Install it with\n"
            f'    pip install "replica-engine[xla]"     # CPU; [cuda] for GPUs, [tpu] for TPUs{needs}'
        )

    @classmethod
    def unsupported(cls, version: str, oldest: str) -> BackendMissingError:
        """A version that is too old."""
        return cls(
            f"jax {version} is installed; replica_engine needs {oldest} or newer. Install it with\n"
            '    pip install --upgrade "replica-engine[xla]"'
        )

    @classmethod
    def name_vanished(cls, version: str, error: BaseException) -> BackendMissingError:
        """A version that lacks a name that is needed."""
        return cls(
            f"jax {version} lacks a name that replica_engine uses ({error}). Install a version that it was checked "
            'with:\n    pip install "jax==0.10.2" "jaxlib==0.10.2"'
        )
