"""Errors about devices, and about versions of TensorFlow and Keras that do not serve.

jax, which provides the devices of compiled programs, counts as both. Versions that were never tested get a warning.
"""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, shown, warning

__all__ = ["BackendMissingError", "DeviceError", "DistributionError", "ForkedError", "TensorFlowVersionError"]


class DeviceError(ReplicaEngineError, ValueError, AssertionError):
    """Devices do not exist, do not fit together, or cannot do what was asked.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError for such devices.

    Raised when a strategy is made, when logical devices are made, when a body is compiled for a group of devices, and
    when a value is put on devices that have no room for it.
    Ask for devices that this process has: the message lists them, and says how to make CPU devices or how to install
    another platform.
    """

    @classmethod
    def unreadable(cls, device: object) -> DeviceError:
        """An entry does not name a device."""
        return cls(
            f'Not a device: {shown(device)}. `devices` is a list of names such as "CPU:0" or "/device:GPU:1", or of '
            'tf.config.LogicalDevice objects. Example: ["CPU:0", "CPU:1"].'
        )

    @classmethod
    def bad_count(cls, count: object, what: str = "The number of devices") -> DeviceError:
        """The number of devices is not a positive int; `what` may name the argument."""
        return cls(f"{what} must be a positive int; got {shown(count)}.")

    @classmethod
    def too_many(cls, wanted: int, most: int) -> DeviceError:
        """More CPU devices were requested than the library makes."""
        return cls(
            f"{wanted} replicas on CPU devices are too many for one machine; at most {most} are made. More replicas "
            "than cores do not run faster."
        )


class ForkedError(ReplicaEngineError, RuntimeError):
    """A run in a process that was forked after TensorFlow had started.

    A forked process has no threads but its own, so replicas would wait for ever. Start workers with the `spawn` method,
    or fork before the first op of TensorFlow.
    """


def warn_one_replica(strategy: str) -> str:
    """The warning that a strategy was made without devices where TensorFlow has one CPU device."""
    return warning(
        "warn_one_replica",
        f"{strategy}() has one replica: this process has no GPU, and TensorFlow makes one device of all cores of the "
        "CPU. For two replicas on this CPU, call replica_engine.logical_devices(2) before TensorFlow starts. For one "
        f'replica without this warning, name the device: {strategy}(["CPU:0"]).',
    )


class DistributionError(ReplicaEngineError, ValueError):
    """`distribution=` of a strategy, or a layout in it, does not fit the devices or the variables.

    Raised when the strategy is made, when a variable is made that a layout does not fit, and before the first program
    is traced if a layout has matched no variable.
    """

    @classmethod
    def too_many_axes(cls, what: str, shape: Sequence[int], axes: Sequence[object]) -> DistributionError:
        """A layout has more axes than its variable or value, `what`, has dimensions."""
        return cls(
            f"The layout {tuple(axes)} has {len(axes)} axes, but {what} has the shape {tuple(shape)}. "
            "Give a layout one entry for each dimension: the name of an axis, or None."
        )

    @classmethod
    def no_such_axis(cls, what: str, name: object, known: Sequence[str]) -> DistributionError:
        """A layout names an axis that the mesh lacks."""
        return cls(
            f"The layout of {what} names the axis {name!r}, but the axes of the mesh are {', '.join(map(repr, known))}."
        )


class BackendMissingError(ReplicaEngineError, ImportError):
    """Compiled programs run through jax, and jax is missing, or jax or TensorFlow has a version that does not work.

    Raised by the first use of TPUStrategy or `replica_engine.xla`, never by MirroredStrategy. Run the `pip install` of
    the message.
    """

    @classmethod
    def no_compiler(cls, chips: str, package: str) -> BackendMissingError:
        """The compiler for chips that are not there is not installed."""
        return cls(
            f"Programs for {chips} that are not there are compiled by the package {package}, which is not installed. "
            'Install it with\n    pip install "replica-engine[aot]"'
        )


class TensorFlowVersionError(ReplicaEngineError, ImportError):
    """TensorFlow or Keras is missing, or its version does not serve.

    replica_engine does not install TensorFlow by itself, since `tensorflow` and `tensorflow-cpu` both serve.

    Raised by the first use of the library, or by its import where TensorFlow is imported already. Run the `pip install`
    of the message.
    """

    @classmethod
    def not_installed(cls) -> TensorFlowVersionError:
        """TensorFlow is not installed."""
        return cls(
            "replica_engine runs functions of TensorFlow, which is not installed, or not completely. Install one of\n"
            '    pip install "replica-engine[tensorflow]"\n'
            '    pip install "replica-engine[tensorflow-cpu]"     # without support for GPUs'
        )


def untested_version(package: str, version: str, oldest: str, newest: str) -> str:
    """The warning that an installed package is newer than those that the library was tested with."""
    return warning(
        "untested_version",
        f"{package} {version} is newer than what replica_engine was tested with, {oldest} to {newest}. Private names "
        f"may be missing or behave in another way. The newest tested version: "
        f'pip install "{package.lower()}=={newest}.*"',
    )
