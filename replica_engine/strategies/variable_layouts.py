"""How variables and batches are divided over the devices of a replica, and the table of it.

`read` takes the argument: `TPUStrategy(distribution=...)`. Keras' objects are the vocabulary:
`keras.distribution.ModelParallel` names axes of a mesh for variables by their paths. Two rules need no names. "fsdp"
divides each variable, and "zero1" the variables that an optimizer keeps for each weight, along the largest dimension
that divides evenly, or else along a long one; small ones stay whole. "zero1" and "fsdp" are the stages of ZeRO
(Rajbhandari et al., 2020, arXiv:1910.02054) in which optimizer states, and weights as well, are divided; XLA chooses
when to gather them.

`Layouts` is the table: how each variable of a strategy is divided, and its bytes.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.diagnostics.misuse import warn_once
from replica_engine.errors import DeviceError, DistributionError
from replica_engine.errors.base import positive_int, shown, warning
from replica_engine.pjrt.stablehlo.partition_local import REPLICAS, WHOLE, Axes, ReplicaMesh, names
from replica_engine.upstream.keras import keras_variables
from replica_engine.watch import timeline
from replica_engine.xla.constraints import constrain
from replica_engine.xla.state.device_value import DeviceValue


class LayoutRow(NamedTuple):
    """One variable.

    Attributes:
        path: its path if it is Keras', otherwise its name.
        shape: its shape; None if it is not known.
        dtype: its dtype.
        axes: for each dimension the name of an axis of the mesh, several names, or None.
        bytes: its bytes on each device.
        whole: its bytes in all.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str
    axes: Axes
    bytes: int
    whole: int


class Layouts(NamedTuple):
    """The variables of a strategy, in the order in which they were made. A table when printed.

    Attributes:
        mesh: the name and the size of each axis of the mesh; empty if a replica has one device.
        rows: the variables.
    """

    mesh: tuple[tuple[str, int], ...]
    rows: tuple[LayoutRow, ...]

    def __str__(self) -> str:
        lines = [_HEAD, *self._cells()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in text), self._foot()])

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return timeline.table(self._foot(), _HEAD, self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        return [(row.path, str(row.shape), row.dtype, str(row.axes), _bytes(row.bytes, row.whole)) for row in self.rows]

    def _foot(self) -> str:
        mesh = " x ".join(f"{name!r}={size}" for name, size in self.mesh) or "one device"
        sizes = _bytes(sum(row.bytes for row in self.rows), sum(row.whole for row in self.rows))
        return f"mesh: {mesh}; a device has {sizes} bytes"


class VariableTable:
    """The variables of one strategy, which it does not keep alive.

    Args:
        mesh: the name and the size of each axis of the devices of a replica; empty if a replica has one device.
    """

    def __init__(self, mesh: tuple[tuple[str, int], ...]):
        self._mesh = mesh
        self._paths: weakref.WeakKeyDictionary[DeviceValue, str] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def note(self, value: DeviceValue, path: str) -> None:
        """Notes the value of a new variable, and its path."""
        with self._lock:
            self._paths[value] = path

    def find_path(self, value: DeviceValue) -> str:
        """The path that a value was noted with."""
        with self._lock:
            return self._paths[value]

    @property
    def bytes(self) -> int:
        """The bytes of all variables on each device."""
        with self._lock:
            return sum(value.bytes for value in self._paths)

    def layouts(self) -> Layouts:
        """How the variables are divided."""
        with self._lock:
            rows = [_row(path, value) for value, path in self._paths.items()]
        return Layouts(self._mesh, tuple(rows))


_HEAD = ("variable", "shape", "dtype", "axes", "bytes on a device")


def _row(path: str, value: DeviceValue) -> LayoutRow:
    shape = value.shape
    axes = value.axes if shape is None else (*value.axes, *[None] * (len(shape) - len(value.axes)))
    whole = 0 if shape is None or not value.bytes else value.dtype.size * math.prod(shape)
    return LayoutRow(path, shape, value.dtype.name, axes, value.bytes, whole)


def _bytes(part: int, whole: int) -> str:
    return f"{part:,}" if part == whole else f"{part:,} of {whole:,}"


BATCH = "batch"
"""The axis of "fsdp" and "zero1", and of `keras.distribution.DataParallel` without a mesh."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")  # of an axis: it stands in the text of programs
_SMALLEST = 1024  # bytes of a variable that is worth dividing
_LONG = 32  # rows of a part, if a dimension does not divide evenly
_CORE = "core_"  # the axes of logical devices, when no distribution names any


class Made(NamedTuple):
    """A variable that is about to be made.

    Attributes:
        path: its path, as in Keras' LayoutMap: "dense/kernel". The name of a variable that is not Keras'.
        shape: its shape.
        itemsize: bytes of an element.
        layout: the `keras.distribution.TensorLayout` that it was made with, or None.
        reference: for a variable that an optimizer keeps for a weight, the axes of the weight; otherwise None.
        is_weight: whether it is a trainable weight of a Keras model.
        is_state: whether it is another variable of Keras, such as a factor that Adafactor keeps for a weight.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    layout: Any
    reference: Axes | None
    is_weight: bool
    is_state: bool


class Distribution:
    """How one strategy divides variables.

    Args:
        name: what a user calls it.
        mesh: the devices of a replica.
        cores: the number of all devices.
        rule: returns the axes of a variable that was made without a layout.
        given: the `keras.distribution.Distribution` that it was made of, if there is one. If that has a LayoutMap, it
            goes before the rule.
    """

    def __init__(self, name: str, mesh: ReplicaMesh, cores: int, rule: Callable[[Made], Axes], given: object = None):
        if cores < mesh.size:
            raise DistributionError(
                f"A replica needs {mesh.size} devices, but num_cores={cores}. num_cores counts the devices of all "
                f"replicas: leave it out for one replica, or write a multiple of {mesh.size}."
            )
        if cores % mesh.size:
            raise DistributionError(
                f"{cores} devices cannot be shared out among replicas of {mesh.size}: num_cores must be a multiple of "
                "cores_per_replica."
            )
        self.name = name
        self.mesh = mesh
        self.cores = cores
        self.given = given
        self._rule = rule
        self._layout_map = keras_variables.find_layout_map(given)
        self._paths: dict[str, None] = {}
        self._outputs: dict[str, None] = {}
        self._matched: set[int] = set()
        self._has_weights = False
        self._unchecked = self._layout_map is not None

    def described(self, axes: Axes) -> str:
        """How a variable with these axes is divided, in words in which workers compare it."""
        outputs = "".join(
            f", {key!r}={layout.axes}"
            for key, layout in (self._layout_map or {}).items()
            if key.endswith(keras_variables.OUTPUT)
        )
        how, mesh = f"divided as {axes}" if axes else "whole", _described(self.mesh)
        return f"{how} on each replica ({self.name}, mesh {mesh}, batch along {self.mesh.batch!r}{outputs})"

    def choose_axes(self, made: Made) -> Axes:
        """The axes of a variable.

        Raises:
            DistributionError: its layout has more axes than the variable has dimensions, an axis twice, or an axis that
                is not one of the mesh; or several layouts of the LayoutMap match.
        """
        if made.reference is None:  # otherwise it lies like its weight
            self._paths[made.path] = None
        self._has_weights |= made.is_weight
        layout = made.layout
        if layout is None and self._layout_map is not None and made.reference is None:
            layout = self._find_layout(made.path)
        axes = self._rule(made) if layout is None else layout.axes
        # A layout that divides nothing must equal WHOLE, which has no entries.
        while axes and axes[-1] is None:
            axes = axes[:-1]
        if len(axes) > len(made.shape) and made.is_state and made.layout is None:
            axes = WHOLE  # a factor that an optimizer keeps for a weight, whose path matches that of the weight
        if len(axes) > len(made.shape):
            raise DistributionError.too_many_axes(f"the variable {made.path!r}", made.shape, axes)
        known = [name for name, _ in self.mesh.axes]
        taken: set[str] = set()
        for name in (name for entry in axes for name in names(entry)):
            if name not in known:
                raise DistributionError.no_such_axis(f"the variable {made.path!r}", name, known)
            if name in taken:
                raise DistributionError(
                    f"The layout {tuple(axes)} of the variable {made.path!r} names the axis {name!r} twice, but a mesh "
                    "divides a variable along each axis once."
                )
            taken.add(name)
        return axes

    def _find_layout(self, path: str) -> Any:
        assert self._layout_map is not None
        try:
            layout = self._layout_map[path]
        except ValueError as error:
            raise DistributionError(f"Several layouts of the LayoutMap match {path!r}. {error}") from None
        # By identity: the map tells the layout, and not the key that it found.
        self._matched.add(id(layout))
        return layout

    @contextlib.contextmanager
    def while_traced(self, strategy: tf.distribute.Strategy) -> Iterator[None]:
        """Inside, a body is traced: the outputs of layers are divided as the LayoutMap says, and layouts are checked.

        A key for the outputs of a layer is the path of the layer, and "/output". If there are several outputs, it is
        for all of them.

        Raises:
            DistributionError: a layout has matched no variable. Only now: the body may have built the model.
        """
        outputs: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._layout_map is not None:
            outputs = keras_variables.outputs_divided(self.given, self._layout_of_output, _constrained)
        with keras_variables.in_parts(), outputs:
            yield
        self.check_layouts(built=False)
        for key, layout in (self._layout_map or {}).items():
            if self._outputs and key.endswith(keras_variables.OUTPUT) and id(layout) not in self._matched:
                text = (
                    f"The layout {key!r} of the LayoutMap matches the output of none of the {len(self._outputs)} "
                    f"layers that the first step has called. Near: {_near(key, self._outputs)}. A key is "
                    'the path of a layer and "/output", or a regular expression for all of it.'
                )
                warn_once(strategy, ("output", key), warning("unmatched_outputs", text))

    def _layout_of_output(self, path: str) -> Any:
        self._outputs[path] = None
        return self._find_layout(path)

    def check_layouts(self, built: bool = True) -> None:
        """Checks that each layout of the LayoutMap has matched a variable, the first time that a model has some.

        Args:
            built: whether the model is known to have all its variables. Otherwise there is no check before it has a
                trainable weight: a program that runs first may be of something else.

        Raises:
            DistributionError: a layout has matched none.
        """
        if not self._unchecked or not (built or self._has_weights):
            return
        if keras_variables.being_made().variable is not None:
            return  # the program makes its initial value, and others are still to come
        for key, layout in (self._layout_map or {}).items():
            if id(layout) not in self._matched and not key.endswith(keras_variables.OUTPUT):
                raise DistributionError(
                    f"The layout {key!r} of the LayoutMap matches none of the {len(self._paths)} variables that were "
                    f"made under the scope. Near: {_near(key, self._paths)}. A key is the path of a variable "
                    "(variable.path), or a regular expression for all of it, such as '.*kernel'. If it is for another "
                    "model, make that model before the first step."
                )
        self._unchecked = False


def _near(key: str, paths: Iterable[str]) -> str:
    """The paths that a key may have meant, in words; if none is like it, the first ones."""
    known = list(paths)
    near = difflib.get_close_matches(key.strip(".*^$"), known, n=3, cutoff=0.3) or known[:3]
    return ", ".join(map(repr, near)) or "none"


def _constrained(path: str, value: tf.Tensor, layout: Any) -> tf.Tensor:
    rank = len(value.shape)
    if len(layout.axes) > rank:
        raise DistributionError(
            f"The layout {layout.axes} for {path!r} has {len(layout.axes)} axes, but a value there has the shape "
            f"{tuple(value.shape)}. Give a layout one entry for each dimension: the name of an axis, or None."
        )
    return constrain(value, layout.axes)


def read(
    distribution: Any, cores: int | None, cores_per_replica: int | None, every: Callable[[], int]
) -> Distribution | None:
    """The distribution that a strategy was asked for; None if each replica has one device.

    Args:
        distribution: "fsdp", "zero1", a `keras.distribution.Distribution` or None.
        cores: the number of all devices. None is one replica if `distribution` has a mesh, and otherwise all there are.
        cores_per_replica: the devices of each replica. None is all with a distribution, and 1 without.
        every: returns how many devices there are.

    Raises:
        DistributionError: `distribution` is none of these; or its mesh has another number of devices than a replica.
        DeviceError: `cores` is no positive int.
    """
    if cores_per_replica is not None and positive_int(cores_per_replica) is None:
        raise DistributionError(f"cores_per_replica must be a positive int or None; got {shown(cores_per_replica)}.")
    if cores is not None and positive_int(cores) is None:
        raise DeviceError.bad_count(cores, "num_cores, the number of devices,")
    if distribution is None:
        if cores_per_replica in (None, 1):
            return None
        assert cores_per_replica is not None
        mesh = ReplicaMesh(_factors(cores_per_replica), None)
        return Distribution(f"cores_per_replica={cores_per_replica}", mesh, cores or every(), lambda made: WHOLE)
    importlib.import_module("keras")  # before its first variable is made
    keras_variables.watch_variables()
    if isinstance(distribution, str) and distribution in _RULES:
        cores = cores or every()
        size = cores_per_replica or cores
        mesh = ReplicaMesh(((BATCH, size),), BATCH)
        return Distribution(repr(distribution), mesh, cores, lambda made: _RULES[distribution](made, size))
    if not keras_variables.is_distribution(distribution):
        raise DistributionError(
            f"`distribution` must be one of {', '.join(map(repr, sorted(_RULES)))}, a "
            f"keras.distribution.DataParallel or ModelParallel, or None; got {shown(distribution)}."
            f"{_advice(distribution)}"
        )
    device_mesh = distribution.device_mesh
    axes = tuple(zip(device_mesh.axis_names, map(int, device_mesh.shape), strict=True))
    for name in device_mesh.axis_names:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == REPLICAS:
            raise DistributionError(
                f"An axis of the mesh has the name {shown(name)}. Use letters, digits and underscores, with no digit "
                f"first, and not {REPLICAS!r}, which is the axis of the replicas."
            )
    if distribution.batch_dim_name not in device_mesh.axis_names:
        raise DistributionError(
            f"batch_dim_name={shown(distribution.batch_dim_name)}, but the axes of the mesh are "
            f"{', '.join(map(repr, device_mesh.axis_names))}. It is the axis over which the batch of a replica is "
            "divided."
        )
    for key in keras_variables.find_layout_map(distribution) or ():
        try:
            re.compile(key)
        except re.error as error:
            raise DistributionError(
                f"The key {key!r} of the LayoutMap is no regular expression: {error}. Keras compares the paths of "
                "variables with it as with one; re.escape makes one of a plain path."
            ) from None
    mesh = ReplicaMesh(axes, distribution.batch_dim_name)
    if (cores_per_replica or mesh.size) != mesh.size:
        raise DistributionError(
            f"cores_per_replica={cores_per_replica}, but the mesh of `distribution` has {_described(mesh)}. Leave "
            "cores_per_replica out."
        )
    name = type(distribution).__name__
    # A variable that an optimizer keeps for a weight lies like the weight.
    return Distribution(name, mesh, cores or mesh.size, lambda made: made.reference or WHOLE, distribution)


def _described(mesh: ReplicaMesh) -> str:
    return " x ".join(f"{name!r}={size}" for name, size in mesh.axes)


def _advice(given: object) -> str:
    """What to write instead of something that is nearly a distribution."""
    if isinstance(given, str) and (like := given.lower().replace("-", "")) in _RULES:
        return f" Did you mean {like!r}?"
    advice = {
        "LayoutMap": " Write keras.distribution.ModelParallel(layout_map=..., batch_dim_name=...).",
        "DeviceMesh": " Write keras.distribution.DataParallel(device_mesh=...).",
    }
    return advice.get(type(given).__name__, "")


def assigned(assignment: object, cores: int | None, cores_per_replica: int | None) -> tuple[int, int]:
    """The number of all devices, and of those of each replica, that a device assignment of TensorFlow says.

    Raises:
        DistributionError: it is none, or the numbers are given in another way too.
    """
    each, replicas = (
        positive_int(getattr(assignment, name, None)) for name in ("num_cores_per_replica", "num_replicas")
    )
    if each is None or replicas is None:
        raise DistributionError(
            "`experimental_device_assignment` must be a tf.tpu.experimental.DeviceAssignment, with "
            f"num_cores_per_replica and num_replicas; got {shown(assignment)}."
        )
    if cores not in (None, each * replicas) or cores_per_replica not in (None, each):
        raise DistributionError(
            f"`experimental_device_assignment` is for {replicas} replicas of {each} devices, but num_cores={cores} and "
            f"cores_per_replica={cores_per_replica} were passed too. Leave them out."
        )
    return each * replicas, each


def divided(shape: Sequence[int], itemsize: int, parts: int) -> Axes:
    """The axes of a variable along its largest dimension that divides evenly; whole if it is small.

    If none divides evenly, along its largest dimension, if that is long: what is stored behind it is little then.
    """
    if math.prod(shape) * itemsize < _SMALLEST:
        return WHOLE
    largest_first = sorted(range(len(shape)), key=lambda axis: -shape[axis])
    even = [axis for axis in largest_first if shape[axis] % parts == 0]
    long = [axis for axis in largest_first if shape[axis] >= _LONG * parts]
    return next(((*[None] * axis, BATCH) for axis in [*even, *long]), WHOLE)


_RULES: dict[str, Callable[[Made, int], Axes]] = {
    "fsdp": lambda made, parts: divided(made.shape, made.itemsize, parts),
    "zero1": lambda made, parts: WHOLE if made.reference is None else divided(made.shape, made.itemsize, parts),
}


def _factors(count: int) -> tuple[tuple[str, int], ...]:
    """A mesh with an axis for each prime factor: a tensor can be divided in every way that its devices allow."""
    factors, factor = [], 2
    while count > 1:
        while count % factor == 0:
            factors.append(factor)
            count //= factor
        factor += 1
    return tuple((f"{_CORE}{index}", size) for index, size in enumerate(factors))
