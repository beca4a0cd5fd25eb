"""The arguments and results of a body, taken apart into tensors and the structure around them.

A program is compiled for the shapes and dtypes of the tensors among the arguments, which become its parameters, and for
the value of everything else: structure, Python numbers, variables. `Arguments` holds both halves, and a key that is
equal for arguments that one program serves. The tensors among the results (`Outputs`) become results of the program.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from replica_engine.errors import HostResultError, InputsError, ReplicaMismatchError, ReplicaValueError, run_errors
from replica_engine.errors.base import brief
from replica_engine.process import interrupts
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import graph_walk
from replica_engine.values import structure
from replica_engine.values.regroup import regroup
from replica_engine.values.structure import Build, ById, as_tensor, build_composite, components, flatten

# Names of a body's arguments, for errors about tensors that come from them.
_PLACE = re.compile(r"(args|kwargs)\[(?:(\d+)|'(\w+)')\](.*)", re.DOTALL)
_thread = threading.local()


@contextlib.contextmanager
def named(
    fn: Callable[..., object], tensors: Sequence[tf.Tensor], places: Sequence[str], skip: int = 0
) -> Iterator[None]:
    """Inside, errors about these tensors name them as arguments of a function.

    Args:
        fn: the function.
        tensors: placeholders for the tensors among its arguments.
        places: the paths of the tensors in the arguments: "args[0]['x']".
        skip: how many arguments come before the first one that `places` counts.
    """
    described = [f"the argument `{_parameter(fn, place, skip)}` of `{_name(fn)}`" for place in places]
    graph = getattr(_thread, "graph", None) if skip else eager.graph()  # with `skip` it is only a part of the body
    with (
        interrupts.set_for_block(_thread, "named", [*_named(), *zip(tensors, described, strict=True)]),
        interrupts.set_for_block(_thread, "graph", graph),
    ):
        yield


def describe_placeholder(placeholder: tf.Tensor) -> str:
    """What messages call a placeholder: "the argument `x` of `step`"."""
    for tensor, described in _named():
        if tensor is placeholder:
            return described
    # A placeholder of a nested tf.function, which knows the name that the user gave it.
    name = placeholder.op.node_def.attr["_user_specified_name"].s.decode() or placeholder.op.name
    return f"the argument `{name}` of `{placeholder.graph.name}`"


def behind(tensor: tf.Tensor, wanted: Callable[[tf.Tensor], bool]) -> list[str]:
    """The arguments, and tensors from outside, that a tensor of a body depends on and that are `wanted`, as text."""
    found: dict[str, None] = {}
    for each in _tensors_behind(tensor):
        if each.op.type == "Placeholder" and wanted(each):
            outside = graph_walk.captured(each)
            found[describe_placeholder(each) if outside is None else _describe_outside(outside)] = None
    return sorted(found)


def comes_from_loop(tensor: tf.Tensor) -> bool:
    """Whether a tensor in a loop depends on a value of unknown shape that the loop changes."""
    return any(
        each.op.type == "Placeholder"
        and not each.shape.is_fully_defined()
        and eager.is_loop_body(each.graph)
        and graph_walk.captured(each) is None
        for each in _tensors_behind(tensor)
    )


def ops_behind(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops of a body that a tensor depends on, including the op that makes it."""
    return (each.op for each in _tensors_behind(tensor) if each.op.type != "Placeholder")


def _tensors_behind(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor and all tensors of the body that it depends on. Captures of functions in the body are followed."""

    def behind(each: tf.Tensor) -> list[tf.Tensor]:
        if each.op.type != "Placeholder":
            return list(each.op.inputs)
        return [outside] if tf.is_symbolic_tensor(outside := _outside(each)) else []

    found = graph_walk.reached([tensor] if tf.is_symbolic_tensor(tensor) else [], behind)
    return (each for each in found if each.op.type != "Placeholder" or _outside(each) is None)


def _outside(placeholder: tf.Tensor) -> tf.Tensor | None:
    """What a placeholder in a function of the body stands for; None for an input of the body, or of a function."""
    is_input = placeholder.graph is getattr(_thread, "graph", None)
    return None if is_input else graph_walk.captured(placeholder)


def _describe_outside(tensor: tf.Tensor) -> str:
    if tensor.op.type == "Placeholder" and graph_walk.captured(tensor) is None:
        return describe_placeholder(tensor)
    return f"the tensor `{tensor.name}` of `{tensor.graph.name}`"


def _named() -> list[tuple[tf.Tensor, str]]:
    return getattr(_thread, "named", None) or []  # None once a block has ended, see `interrupts.set_for_block`


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")


def _parameter(fn: Callable[..., object], place: str, skip: int) -> str:
    """ "x['ids']" for "args[0]['ids']", where the function's first parameter is x."""
    match = _PLACE.match(place)
    if match is None:
        return place
    _, index, name, rest = match.groups()
    if name is not None:
        return name + rest
    try:
        bound = inspect.signature(fn).bind_partial(*range(int(index) + skip + 1))
    except (TypeError, ValueError):  # the function is not a Python function, or takes fewer arguments
        return place
    name, value = bound.arguments.popitem()  # the last one; the parameter *rows has all values that it takes
    return f"{name}[{len(value) - 1}]{rest}" if isinstance(value, tuple) else name + rest


Shapes = tuple[tf.TensorShape, ...]
"""Shapes of slots; dimensions may be unknown."""


class Slot:
    """A tensor among the arguments: one value for all replicas, or one for each.

    Attributes:
        name: its path in the arguments, for errors: "args[0]['x']".
        values: a single tensor, or one for each replica; eager or of a graph.
        dtype: the dtype of all values.
        shape: the most specific shape that fits all values; static in eager mode if all values have the same shape.
        is_sparse: whether it is a component of a sparse tensor.
        is_shared: whether all replicas get the same tensor. A number counts as a value of each replica.
    """

    __slots__ = ("dtype", "is_shared", "is_sparse", "name", "shape", "values")

    def __init__(self, name: str, values: list[tf.Tensor]):
        self.name = name
        self.values = values
        self.dtype: tf.DType = values[0].dtype
        self.shape: tf.TensorShape = values[0].shape
        self.is_sparse = False
        self.is_shared = all(value is values[0] for value in values)
        for replica, value in enumerate(values[1:], start=1):
            if value.dtype != self.dtype:
                raise ReplicaMismatchError(
                    f"{name} has dtype {self.dtype.name} on replica 0 and {value.dtype.name} on replica {replica}. "
                    "Cast one of them."
                )
            if value.shape != self.shape:
                self.shape = self.shape.most_specific_compatible_shape(value.shape)


class Arguments:
    """The arguments of one call, taken apart.

    Args:
        args: positional arguments; a `PerReplica` has one value for each replica.
        kwargs: keyword arguments; a `PerReplica` has one value for each replica.
        size: the number of replicas.
        numbers: whether Python numbers are treated as tensors.

    Attributes:
        size: the number of replicas.
        slots: the tensors, in order.
        constants: what is not a tensor, as pairs of path and value.
        key: hashable; equal for arguments that differ only in the values and shapes of tensors.
        rebuild: builds the arguments with other tensors in the slots.
        summary_writer: the resource of the caller's summary writer, if the body should use each caller's own writer.
        summary_step: the slot with the caller's step for summaries; None if the body must find the step itself.

    Raises:
        InputsError: an argument is an iterator or a dataset.
        ReplicaMismatchError: replicas have tensors of different dtypes, or different structures.
        ReplicaValueError: an array cannot become a tensor, a distributed value is for another number of replicas, or
            a structure contains itself.
    """

    def __init__(self, args: Sequence[object], kwargs: Mapping[str, object], size: int, numbers: bool = False):
        self.size = size
        self._numbers = numbers
        self.slots: list[Slot] = []
        self.constants: list[tuple[str, object]] = []
        self.summary_writer: tf.Tensor | None = None
        self.summary_step: int | None = None
        build_args, key_args = self._open(tuple(args), "args")
        build_kwargs, key_kwargs = self._open(dict(kwargs), "kwargs")
        # A list inside `tuple`, since a generator takes longer, and each call makes a key.
        self.key: Hashable = (key_args, key_kwargs, tuple([slot.dtype for slot in self.slots]))
        self.rebuild: Build = lambda tensors: (build_args(tensors), build_kwargs(tensors))

    @classmethod
    def from_inputs(cls, inputs: object, size: int | None = None, numbers: bool = False) -> Arguments:
        """Takes one list of arguments for each replica; None for no arguments.

        Args:
            inputs: the lists.
            size: the number of replicas; None takes the number of lists.
            numbers: whether Python numbers that are equal on all replicas become tensors too.

        Raises:
            InputsError: `inputs` is not a list with one list of arguments for each replica.
            StructureMismatchError: two replicas differ in structure.
            ReplicaMismatchError: two replicas differ in the shape or dtype of a tensor.
        """
        if inputs is None:
            inputs = [[]] * (size or 1)
        if not isinstance(inputs, (list, tuple)) or not inputs:
            raise InputsError(
                f"`inputs` must be a list with one argument list for each replica; got {brief(inputs)}. For two "
                "replicas of f(x, y): inputs=[[x0, y0], [x1, y1]]."
            )
        for each in inputs:
            if not isinstance(each, (list, tuple)):
                raise InputsError(
                    "`inputs` must hold a list of arguments for each replica; for one replica it holds "
                    f"{brief(each)}. For two replicas of f(x): inputs=[[x0], [x1]]."
                )
        if size is not None and size != len(inputs):
            raise InputsError(
                f"`inputs` has argument lists for {len(inputs)} replicas, but num_replicas is {size}. Pass one "
                "list for each replica, or leave num_replicas out."
            )
        grouped = regroup([tuple(each) for each in inputs], what="The inputs of the replicas", name="inputs")
        arguments = cls(grouped, {}, len(inputs), numbers)
        for slot in arguments.slots:
            first = slot.values[0].shape
            for replica, value in enumerate(slot.values[1:], start=1):
                if not value.shape.is_compatible_with(first):
                    raise ReplicaMismatchError.shapes(slot.name, replica, str(first), str(value.shape))
        return arguments

    def numpy(self) -> list[list[np.ndarray]]:
        """The values of the slots, which must be eager: views, where NumPy can make one."""
        return [[view(tensor) for tensor in slot.values] for slot in self.slots]

    @property
    def shapes(self) -> Shapes:
        """The shapes of the slots."""
        return tuple(slot.shape for slot in self.slots)

    def _open(self, value: Any, name: str) -> tuple[Build, object]:
        """A function that builds `value` from other tensors, and the part of the key for `value`."""
        if type(value) in structure.PLAIN and not value:  # the fast path: most calls have one
            return (lambda _: type(value)()), type(value)
        if type(value) is tuple and structure.LEAVES.issuperset(map(type, value)):  # most arguments are tensors
            leaves, (spec, key, paths) = list(value), structure.tuple_of_leaves(name, len(value))
        else:
            leaves, spec = structure.flatten(value, name, "the arguments")
            key, paths = spec.key, spec.paths
        opened = [self._open_leaf(leaf, path) for leaf, path in zip(leaves, paths, strict=True)]
        builds, keys = zip(*opened, strict=True) if opened else ((), ())
        return spec.builder(builds), (key, keys)

    def _open_leaf(self, value: object, name: str) -> tuple[Build, object]:
        if type(value) is eager.EagerTensor:
            return self._add(name, [value]), "tensor"
        if isinstance(value, tf.Variable):  # before distributed values: a distributed variable is both
            return (lambda _: value), ById(value)
        if isinstance(value, distribute.DistributedValues):
            return self._open_distributed(value, name)
        number = self._numbers and isinstance(value, (int, float, complex)) and not isinstance(value, bool)
        if number or _is_array(value):
            build = self._add(name, [as_tensor(value, name)])
            # Arrays and numbers count as each replica's own: to add up a constant is allowed.
            self.slots[-1].is_shared = isinstance(value, tf.Tensor)
            return build, "tensor"
        if isinstance(value, tf.__internal__.CompositeTensor):
            return self._open_composite(name, [value])
        self.constants.append((name, value))
        return (lambda _: value), structure.constant_key(value)

    def _open_distributed(self, value: distribute.DistributedValues, name: str) -> tuple[Build, object]:
        parts = value.values
        if len(parts) != self.size:
            raise ReplicaValueError.other_size(name, len(parts), self.size)
        if _TENSORS.issuperset(map(type, parts)):
            return self._add(name, list(parts)), "tensor"
        if any(isinstance(part, tf.Variable) for part in parts):  # before composites: variables are composites too
            raise ReplicaMismatchError(
                f"{name} is another variable on each replica, but one program runs on all replicas. Pass values, "
                "`v.read_value()`; or make one variable under a strategy's scope, with ON_READ synchronization if "
                "each replica needs its own value."
            )
        if any(isinstance(part, distribute.DistributedValues) for part in parts):
            raise ReplicaValueError(
                f"{name} is a distributed value whose components are distributed values. Give each replica a "
                "tensor, or a structure of tensors."
            )
        if any(isinstance(part, tf.__internal__.CompositeTensor) for part in parts):
            return self._open_composite(name, parts)
        if all(part is parts[0] for part in parts) and not _is_array(parts[0]):
            return self._open(parts[0], name)
        if not all(_is_array(part) or isinstance(part, (bool, int, float, complex)) for part in parts):
            raise ReplicaMismatchError.not_tensors(name, next(part for part in parts if not _is_array(part)))
        return self._add(name, [as_tensor(part, name) for part in parts]), "tensor"

    def _open_composite(self, name: str, parts: Sequence[object]) -> tuple[Build, object]:
        first = parts[0]
        if isinstance(first, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            raise InputsError(
                f"{name} is a {type(first).__name__}, and a compiled body takes the values of a batch: "
                "strategy.run(step, args=(next(iterator),)). For many steps in one launch, "
                "strategy.run_steps(step, iterator, iterations=100) takes the iterator itself."
            )
        if isinstance(first, tf.distribute.DistributedDataset):
            raise InputsError.distributed(name, type(first).__name__.lstrip("_"))
        if isinstance(first, tf.data.Dataset):
            raise InputsError(
                f"{name} is a {type(first).__name__.lstrip('_')}, and a compiled body takes the values of a batch. "
                f"Distribute it, and run one batch at a time:\n{run_errors.LOOP}"
            )
        columns = [structure.components(part, name) for part in parts]
        if len({len(column) for column in columns}) > 1:
            raise ReplicaMismatchError.not_tensors(name, first)
        specs = list(dict.fromkeys(map(tf.type_spec_from_value, parts)))
        is_sparse = isinstance(first, tf.SparseTensor)
        builders: list[Build] = []
        for index, values in enumerate(zip(*columns, strict=True)):
            if is_sparse and index == 2 and len(specs) == 1 and specs[0].shape.is_fully_defined():
                builders.append(lambda _: tf.constant(specs[0].shape.as_list(), tf.int64))  # XLA needs fixed shapes
                continue
            inner = f"{name} (component {index})"
            builders.append(self._add(inner, [as_tensor(value, inner) for value in values]))
            self.slots[-1].is_sparse = is_sparse
        common = specs[0].most_specific_common_supertype(specs[1:])  # for ragged tensors with different numbers of rows
        if common is None:
            raise ReplicaMismatchError.not_tensors(name, first)
        return structure.build_composite(common, builders), tuple(specs)

    def _add(self, name: str, values: list[tf.Tensor]) -> Build:
        self.slots.append(Slot(name, values))
        return itemgetter(len(self.slots) - 1)


def difference(given: Sequence[Slot], names: Sequence[str], specs: Sequence[tf.TensorSpec]) -> str:
    """Describes the first tensor that differs or is missing. `names` and `specs` describe the wanted tensors."""
    # One pass for each kind of difference: a missing tensor says more than a dtype, and a dtype more than a shape.
    wanted = dict(zip(names, specs, strict=True))
    there = {slot.name for slot in given}
    for name in names:
        if name not in there:
            return f"the structure differs, {name} is missing"
    for slot in given:
        if slot.name not in wanted:
            return f"the structure differs, {slot.name} is unexpected"
    for slot in given:
        if slot.dtype != wanted[slot.name].dtype:
            return f"{slot.name} has dtype {slot.dtype.name} instead of {wanted[slot.name].dtype.name}"
    for slot in given:
        if slot.shape != wanted[slot.name].shape:
            return f"{slot.name} has shape {slot.shape} instead of {wanted[slot.name].shape}"
    return "the structure differs: it has containers of other types, or other values that are not tensors"


_NUMPYS_OWN = frozenset(tf.as_dtype(np.dtype(kind)) for kind in "?bBhHiIqQefdFD")


def view(tensor: tf.Tensor) -> np.ndarray:
    """The value of an eager tensor: a view of it, where NumPy can make one."""
    if tensor.dtype in _NUMPYS_OWN:
        return np.asarray(tensor)
    return np.asarray(tensor.numpy(), object) if tensor.dtype == tf.string else tensor.numpy()


def is_viewed(tensor: tf.Tensor) -> bool:
    """Whether `view` makes a view of an eager tensor."""
    return tensor.dtype in _NUMPYS_OWN


_TENSORS = frozenset((eager.EagerTensor,))


def _is_array(value: object) -> bool:
    return isinstance(value, (tf.Tensor, np.ndarray, np.generic))


_RESULT = "A result of the replicas"  # for messages


class Outputs:
    """The results of a body, taken apart.

    None, Python values and distributed variables belong to the structure and come out unchanged.

    Args:
        value: the value that the body returned.
        numbers: whether Python numbers and strings come out as tensors, one for all replicas.

    Attributes:
        tensors: the tensors, in the graph of the body.
        rebuild: builds the value that the body returned, with other tensors.
        is_plain: whether anything may stand in the places of the tensors, such as the values of all replicas.

    Raises:
        ReplicaValueError: an array in the value cannot become a tensor, or the structure contains itself.
        HostResultError: the value has results of a host function in it that are not known.
    """

    def __init__(self, value: object, numbers: bool = False):
        self._numbers = numbers
        self.is_plain = True
        self.tensors: list[tf.Tensor] = []
        leaves, spec = flatten(value, what="the results")
        self.rebuild = spec.builder(list(map(self._open, leaves)))

    def _open(self, value: object) -> Build:
        check_known(value)
        if isinstance(value, (distribute.DistributedVariable, tf.Operation)):
            returned = None if isinstance(value, tf.Operation) else value
            return lambda _: returned
        if isinstance(value, tf.Variable):
            # A component of a distributed variable: the user gets that variable.
            container = distribute.value_container(value)
            if container is not value and not isinstance(value, distribute.UnreadVariable):
                return lambda _: container
        if isinstance(value, (tf.Tensor, tf.Variable, np.ndarray, np.generic)):
            return self._add(as_tensor(value, _RESULT))
        if isinstance(value, tf.__internal__.CompositeTensor):
            self.is_plain = False
            return build_composite(value, [self._add(as_tensor(part, _RESULT)) for part in components(value, _RESULT)])
        if self._numbers and isinstance(value, (bool, int, float, complex, str, bytes)):
            # Outside of the body: one tensor for all replicas, and no result of the program.
            with tf.init_scope():
                value = as_tensor(value, _RESULT)
        return lambda _: value

    def _add(self, tensor: tf.Tensor) -> Build:
        self.tensors.append(tf.identity(tensor))
        return itemgetter(len(self.tensors) - 1)


_USES = """
tf_tensor array bool int float complex index round format bytes iter next len contains getitem setitem delitem call
enter exit neg pos abs invert eq ne lt le gt ge setattr
"""
_OPERATORS = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"


class UnknownResults:
    """Results that are not known: any use of them, also of an attribute, raises an error. Printing them does not.

    They stand in a body for the results of a host function that are not known before the run. A host function that
    cannot be traced, and whose results are not declared, is never called to find its results out: it may take items
    from a queue, or write a file. A body that does not use its results needs no declaration.

    Args:
        error: makes the error.
    """

    __slots__ = ("_error",)
    __hash__ = object.__hash__

    _error: Callable[[], HostResultError]

    def __init__(self, error: Callable[[], HostResultError]):
        # Its own `__setattr__` is one of the uses that raise.
        object.__setattr__(self, "_error", error)

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error()

    def __repr__(self) -> str:
        return "<unknown results of a host function; declare them with xla.returns>"


def _used(self: UnknownResults, *args: object, **kwargs: object) -> NoReturn:
    raise self._error()


for _method in (*_USES.split(), *(kind + name for name in _OPERATORS.split() for kind in ("", "r", "i"))):
    setattr(UnknownResults, f"__{_method}__", _used)


def check_known(value: object) -> None:
    """Checks a value that leaves the body, or that a host function gets.

    Raises:
        HostResultError: it stands for unknown results.
    """
    if isinstance(value, UnknownResults):
        raise value._error()
