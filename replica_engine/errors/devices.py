"""Devices that cannot be used, and the jax backend that provides them."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, byte_size, shown, warning


class DeviceError(ReplicaEngineError, ValueError, AssertionError):
    """Devices do not exist, do not fit together, or cannot do what was asked.

    It is an AssertionError as well, because `tf.distribute` raises AssertionError for such devices.

    Raised when a strategy is made, when logical devices are made, when a body is compiled for a group of devices, and
    when a value is put on devices that have no room for it.
    Ask for devices that this process has: the message lists them, and says how to make CPU devices or how to install
    another platform.
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
    def bad_count(cls, count: object) -> DeviceError:
        """The number of devices is not a positive int."""
        return cls(f"The number of devices must be a positive int; got {shown(count)}.")

    @classmethod
    def no_logical_device(cls, method: str, given: object, count: int) -> DeviceError:
        """A replica has no device of this number."""
        return cls(f"{method} was called with logical_device_id={shown(given)}, but {_devices_of_replica(count)}")

    @classmethod
    def no_split(cls, given: object, shape: object, count: int) -> DeviceError:
        """A tensor cannot be split so."""
        return cls(
            f"experimental_split_to_logical_devices was called with partition_dimensions={shown(given)} for a tensor "
            f"of shape {shape}. Give one number for each dimension, which divides its size, with the product {count}: "
            f"{_devices_of_replica(count)}"
        )

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


def _devices_of_replica(count: int) -> str:
    having = "one device, number 0" if count == 1 else f"{count} devices, numbers 0 to {count - 1}"
    return f"each replica has {having}. TPUStrategy(cores_per_replica=...) says how many."


class DistributionError(ReplicaEngineError, ValueError):
    """`distribution=` of a strategy, or a layout in it, does not fit the devices or the variables.

    Raised when the strategy is made, when a variable is made that a layout does not fit, and before the first program
    is traced if a layout has matched no variable.
    """

    @classmethod
    def other_size(cls, cores: int, axes: Sequence[tuple[str, int]]) -> DistributionError:
        """`cores_per_replica` is not the size of the mesh."""
        return cls(
            f"cores_per_replica={cores}, but the mesh of `distribution` has {_mesh(axes)}. Leave cores_per_replica out."
        )

    @classmethod
    def not_shared_out(cls, cores: int, cores_per_replica: int) -> DistributionError:
        """The devices cannot be shared out among replicas."""
        if cores < cores_per_replica:
            return cls(
                f"A replica needs {cores_per_replica} devices, but num_cores={cores}. num_cores counts the devices of "
                f"all replicas: leave it out for one replica, or write a multiple of {cores_per_replica}."
            )
        return cls(
            f"{cores} devices cannot be shared out among replicas of {cores_per_replica}: num_cores must be a multiple "
            "of cores_per_replica."
        )

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

    @classmethod
    def too_large(cls, path: str, shape: Sequence[int], part: int, device: int, whole: bool) -> DistributionError:
        """A device cannot have its part of a variable."""
        sizes = f"{byte_size(part)} on each device, which has {byte_size(device)}"
        if whole:
            return cls(
                f"The variable {path!r} of shape {tuple(shape)} takes {sizes}. Divide it: TPUStrategy(distribution="
                '"fsdp"), or a layout in the LayoutMap of a ModelParallel that names an axis for one of its dimensions.'
            )
        return cls(
            f"The variable {path!r} of shape {tuple(shape)} takes {sizes}, though it is divided. Take more devices, or "
            "divide it along another axis too."
        )

    @classmethod
    def set_for_all(cls, strategy: str, takes: bool) -> DistributionError:
        """`keras.distribution.set_distribution` is in effect, and the strategy does not have that distribution."""
        how = f"{strategy}(distribution=...)"
        if not takes:
            how = f"replica_engine.TPUStrategy(distribution=...), since {strategy} has whole variables on each replica"
        return cls(
            "keras.distribution.set_distribution(...), or a scope() of a distribution, is in effect. The strategies of "
            f"replica_engine do not read it: pass the distribution to the strategy, {how}. If it is meant for another "
            "model, end it first: keras.distribution.set_distribution(None)."
        )


def _mesh(axes: Sequence[tuple[str, int]]) -> str:
    return " x ".join(f"{name!r}={size}" for name, size in axes)


class BackendMissingError(ReplicaEngineError, ImportError):
    """Compiled programs run through jax, and jax is missing, or jax or TensorFlow has a version that does not work.

    Raised by the first use of TPUStrategy or `replica_engine.xla`, never by MirroredStrategy. Run the `pip install` of
    the message.
    """

    @classmethod
    def not_installed(cls) -> BackendMissingError:
        """jax is not installed."""
        return cls(
            "TPUStrategy and replica_engine.xla run programs through jax, which is not installed. Install it with\n"
            '    pip install "replica-engine[xla]"     # CPU; [cuda] for GPUs, [tpu] for TPUs'
        )

    @classmethod
    def no_compiler(cls, chips: str, package: str) -> BackendMissingError:
        """The compiler for chips that are not there is not installed."""
        return cls(
            f"Programs for {chips} that are not there are compiled by the package {package}, which is not installed. "
            'Install it with\n    pip install "replica-engine[aot]"'
        )
