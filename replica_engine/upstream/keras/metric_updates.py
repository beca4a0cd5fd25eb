"""Whether a metric of the user's own only adds to its variables, so that values of replicas can be added up.

Keras writes all updates as assignments, `assign_add(x)` too, which is `assign(self + x)`. So the kind of the assignment
says nothing. The update is traced once more, in a graph that is thrown away, with a placeholder for the value of each
variable, and the graph shows what the new value is made of: "old value + something that does not depend on old values"
is a sum over samples, as far as a graph can tell. "The larger of the old value and x" is not.

The graph is made on a thread of its own: there is no replica on it, so nothing there waits for other replicas or counts
for them. Checked on Keras 3.10 to 3.16. This module imports Keras, so only code that already has a Keras model should
import it.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from replica_engine.upstream.graphs import function_graphs, graph_walk

SUM, OTHER, UNKNOWN = "sum", "other", "unknown"

_SAME = ("Identity", "Cast", "StopGradient", "PreventGradient", "EnsureShape", "Reshape", "Squeeze", "ExpandDims")
_ADDING = ("Add", "AddV2", "AddN")
_FIRST = ("Sub", "TensorScatterAdd", "TensorScatterSub")  # the old value may be the first input only
_NO_SUMS = ("Max", "Min", "Sqrt")  # what one of these made of a batch is not the sum of what it makes of shards
_COMPARISONS = ("Greater", "GreaterEqual", "Less", "LessEqual")
_OF_LAST = ("Maximum", "Minimum", "Max", "Min", "Mean")  # what one of these made is not a sum over the last batch
_ASSIGNING = ("AssignVariableOp", "ResourceScatter")

T = TypeVar("T")
UpdateCall: TypeAlias = "functools.partial[object]"
"""A call of a metric's `update_state`."""
Locate: TypeAlias = Callable[[], str]

_thread = threading.local()


class Update(NamedTuple):
    """What an update of a metric does to one of its variables.

    Attributes:
        variable: the name of the variable.
        kind: `SUM`; `OTHER` if it is surely not a sum over samples; `UNKNOWN` if the graph does not tell.
        place: what `place` returned where the variable got its new value.
    """

    variable: str
    kind: str
    place: str


def has_own_update(metric: keras.metrics.Metric) -> bool:
    """Whether the metric's `update_state` is not one of Keras, which are known to add, or to be correlations."""
    module = getattr(type(metric).update_state, "__module__", None) or ""
    return module.partition(".")[0] != "keras"


def list_own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model that are of the user's own kind, also those inside others."""
    every = graph_walk.reached(model.metrics, lambda metric: getattr(metric, "metrics", metric._metrics))
    return [metric for metric in every if has_own_update(metric)]


def is_looking() -> bool:
    """Whether this thread only looks at an update, of a metric that contains others."""
    return getattr(_thread, "is_looking", False)


def only_adds(metric: keras.metrics.Metric, update: UpdateCall) -> bool:
    """Whether a call of `update_state` adds to the variables of a metric, if a graph tells; see `list_updates`."""
    return all(each.kind == SUM for each in list_updates(metric, update, lambda: ""))


def adds_over_samples(metric: keras.metrics.Metric, update: UpdateCall) -> bool:
    """Whether what a call of `update_state` adds for a batch is what it adds for two parts of the batch.

    The update is tried on numbers, since its ops do not show it: a sum, divided by the samples and multiplied by them
    again, is a sum. False too if that cannot be tried. Takes the arguments of `list_updates`, as that function does.
    """
    return bool(_looked_at(metric, _adds_in_parts, update))


def _adds_in_parts(metric: keras.metrics.Metric, update: UpdateCall) -> bool:
    leaves = tf.nest.flatten((update.args, update.keywords))
    # The placeholders that take their places would not have the mask.
    if any(getattr(each, "_keras_mask", None) is not None for each in leaves):
        return False
    given: list[object] = []

    def update_by_any_batch() -> None:
        given.extend(_with_unknown_length(each) if tf.is_tensor(each) else each for each in leaves)
        args, kwargs = tf.nest.pack_sequence_as((update.args, update.keywords), given)
        update.func(*args, **kwargs)

    traced = _traced(metric, update_by_any_batch, lambda: "")
    if traced is None:
        return False
    graph, own, new, _ = traced
    ops = graph.get_operations()
    inputs = [each for each in given if tf.is_tensor(each)] + own
    captured = [(outside, inside) for outside, inside in graph.captures if not tf.is_symbolic_tensor(outside)]
    # A tensor of another graph has no value to try with, and an assignment would change the user's variable.
    if len(captured) < len(graph.captures) or any(op.type.startswith(_ASSIGNING) for op in ops):
        return False
    inputs += [inside for _, inside in captured]
    state = [np.zeros(each.shape, each.dtype.as_numpy_dtype) for each in own]
    outside = [each for each, _ in captured]
    inner = [op for op in ops if op.type != "Placeholder"]
    random = np.random.default_rng(0)
    parts = [[_numbers_like(each, rows, random) for each in given if tf.is_tensor(each)] for rows in (3, 2)]
    whole = [np.concatenate(both) if both[0].ndim else both[0] for both in zip(*parts, strict=True)]

    def after(part: list[np.ndarray]) -> list[np.ndarray]:
        values = [tf.convert_to_tensor(each) for each in [*part, *state]] + outside
        return [each.numpy() for each in graph_walk.run(graph, inner, inputs, values, new)]

    try:
        one, two, both = map(after, (*parts, whole))
    except (tf.errors.OpError, AttributeError, RuntimeError, TypeError, ValueError):  # it takes other numbers only
        return False
    added = zip(one, two, both, strict=True)
    return all(np.all(np.isfinite(c)) and np.allclose(a + b, c, rtol=1e-3, atol=1e-5) for a, b, c in added)


def _with_unknown_length(tensor: tf.Tensor) -> tf.Tensor:
    rank = tensor.shape.rank
    return tf.compat.v1.placeholder(tensor.dtype, [None, *tensor.shape[1:]] if rank else tensor.shape)


def _numbers_like(tensor: tf.Tensor, rows: int, random: np.random.Generator) -> np.ndarray:
    """Numbers of the dtype of a tensor, for so many samples."""
    shape = [rows, *(each or 2 for each in tensor.shape[1:])] if tensor.shape.rank else []
    numbers = random.uniform(0.1, 0.9, shape) if tensor.dtype.is_floating else random.integers(0, 2, shape)
    return np.asarray(numbers, tensor.dtype.as_numpy_dtype)


def list_updates(metric: keras.metrics.Metric, update: UpdateCall, place: Locate) -> list[Update]:
    """What a call of `update_state` does to the variables of a metric. The call changes no variable.

    The caller holds off Ctrl-C, so that it has the metric as it was when it gets one.

    Args:
        metric: the metric, with all its variables.
        update: the call, with tensors of any graph among its arguments.
        place: returns the user's line that is running.
    """
    return _looked_at(metric, _updates, update, place) or []


def _looked_at(metric: keras.metrics.Metric, look: Callable[..., T], *args: object) -> T | None:
    """What `look(metric, *args)` returns on a thread of its own; None if it fails. The metric is as before then."""
    found: list[T] = []
    context = contextvars.copy_context()
    kept = [(each, dict(vars(each))) for each in graph_walk.reached([metric], lambda each: each._metrics)]

    def looking() -> None:
        _thread.is_looking = True  # the thread ends with this function
        try:
            found.append(context.run(look, metric, *args))
        finally:  # an update may keep tensors; those of the graph that is thrown away must not stay
            for each, attributes in kept:
                vars(each).clear()
                vars(each).update(attributes)

    thread = threading.Thread(target=looking, name="replica_engine: metric")
    thread.start()
    thread.join()
    return found[0] if found else None


def _traced(
    metric: keras.metrics.Metric, update: Callable[[], object], place: Locate
) -> tuple[tf.Graph, list[tf.Tensor], list[tf.Tensor], dict[int, str]] | None:
    """The graph of an update, the values of the metric's variables before and after it, and `_Watching.places`.

    None if the update can only run for real; what it raises there, it raises there.
    """
    graph, variables = tf.__internal__.FuncGraph("metric"), metric.variables
    try:
        with graph.as_default(), function_graphs.inlined():
            old = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in variables]
            with _Watching(list(zip(variables, old, strict=True)), place) as scope:
                update()
            new = [tf.convert_to_tensor(scope.get_current_value(each)) for each in variables]
    except Exception:  # of the user's code, which runs with tensors of a graph here
        return None
    return graph, old, new, scope.places


def _updates(metric: keras.metrics.Metric, update: UpdateCall, place: Locate) -> list[Update]:
    variables: list[keras.Variable] = metric.variables
    traced = _traced(metric, update, place)
    if traced is None:
        return [Update(each.name, UNKNOWN, "") for each in variables]
    graph, old, new, places = traced
    is_hidden = any(op.type.startswith(_ASSIGNING) for op in graph.get_operations())
    outside = {id(inner): outer for outer, inner in graph.captures}
    dependent = {*graph_walk.reached([each.op for each in old], _users)}

    def depends(tensor: tf.Tensor) -> bool:
        return tensor.op in dependent

    found = []
    for variable, value, own in zip(variables, new, old, strict=True):
        is_known = not is_hidden and variable.aggregation == "sum"
        kind = _kind(value, own, depends, outside) if is_known else UNKNOWN
        found.append(Update(variable.name, kind, places.get(id(variable), "")))
    if is_hidden and not found:  # its only variables are plain ones, which Keras does not list
        found.append(Update("", UNKNOWN, ""))
    return found


def _users(op: tf.Operation) -> list[tf.Operation]:
    return [user for output in op.outputs for user in output.consumers()]


class _Watching(keras.StatelessScope):
    """A scope in which assignments of Keras variables change nothing, and are noted.

    Attributes:
        places: the user's line of the last assignment, by the id of the variable.
    """

    def __init__(self, state_mapping: list[tuple[keras.Variable, tf.Tensor]], place: Locate):
        super().__init__(state_mapping=state_mapping, initialize_variables=False)
        self.places: dict[int, str] = {}
        self._place = place

    def add_update(self, update: tuple[keras.Variable, object]) -> None:
        self.places[id(update[0])] = self._place()
        super().add_update(update)


def _kind(
    new: tf.Tensor, own: tf.Tensor, depends: Callable[[tf.Tensor], bool], outside: Mapping[int, tf.Tensor]
) -> str:
    """Whether a new value is the old one and something more, by what depends on old values; see `Update.kind`."""
    while new is not own:
        op, inputs = new.op, list(new.op.inputs)
        if not depends(new):
            return _kind_of_last(new, outside)
        if op.type in _SAME:
            new = inputs[0]
        elif op.type in _ADDING and sum(map(depends, inputs)) == 1:
            if any(_original(each).op.type in _NO_SUMS for each in inputs if not depends(each)):
                return UNKNOWN
            new = next(filter(depends, inputs))
        elif op.type in _FIRST and not any(map(depends, inputs[1:])):
            new = inputs[0]
        elif op.type in ("Select", "SelectV2") and not depends(inputs[0]):
            return SUM if all(_kind(each, own, depends, outside) == SUM for each in inputs[1:]) else UNKNOWN
        else:
            return OTHER if _is_choice(op, depends) else UNKNOWN
    return SUM


def _is_choice(op: tf.Operation, depends: Callable[[tf.Tensor], bool]) -> bool:
    """Whether an op takes the old value or a value of the batch, whichever is larger or smaller.

    Not if it compares with a constant: a sum that ends at a limit is a sum below that.
    """
    compared = list(op.inputs)
    if op.type in ("Select", "SelectV2", "If", "StatelessIf"):
        condition = _original(op.inputs[0]).op
        if condition.type not in _COMPARISONS:
            return False
        compared = list(condition.inputs)
    elif op.type in ("Max", "Min"):
        if op.inputs[0].op.type not in ("Pack", "ConcatV2"):
            return False
        compared = list(op.inputs[0].op.inputs)
    elif op.type not in ("Maximum", "Minimum"):
        return False
    of_batch = [each for each in compared if not depends(each) and _original(each).op.type != "Const"]
    return bool(of_batch) and any(map(depends, compared))


def _original(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _SAME:
        tensor = tensor.op.inputs[0]
    return tensor


def _kind_of_last(new: tf.Tensor, outside: Mapping[int, tf.Tensor]) -> str:
    """Of a value that does not depend on the old one: it may be a sum over the samples of the last batch."""
    new = _original(new)
    while id(new) in outside:
        if not tf.is_symbolic_tensor(outside[id(new)]):
            return UNKNOWN
        new = _original(outside[id(new)])
    return OTHER if new.op.type in _OF_LAST else UNKNOWN
