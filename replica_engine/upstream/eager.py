"""Eager tensors and handles of variables, without the ops that TensorFlow would run.

Calling an op that adds two small tensors takes about ten times as long as NumPy's addition. So arrays become tensors,
and the memory of tensors is read as arrays, without an op. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# TFE_Py_TapeSetPossibleGradientTypes: whether a tape or a forward accumulator watches tensors. TFE_FromDlpackCapsule:
# what `tf.experimental.dlpack.from_dlpack` calls, which takes twice as long.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# context: has the thread's op callbacks.
from tensorflow.python.eager import context as _context

# stop_recording: for code that has no gradient.
from tensorflow.python.eager import record as _record

# get_read_write_resource_inputs: the variables that an op, a function call or a loop may write to. Also the attribute
# that says this for calls.
from tensorflow.python.framework import auto_control_deps_utils as _control_deps

# ControlFlowFuncGraph: the graph of a branch or loop body; it shares the captures of the function around it.
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph as _ControlFlowFuncGraph

# WhileBodyFuncGraph: the graph of the body of a loop.
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph as _WhileBodyFuncGraph

# WhileCondFuncGraph: the graph of a loop condition, which must not write variables.
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileCondFuncGraph as _WhileCondFuncGraph

# ResourceVariable: the class of a plain tf.Variable. default_variable_creator_v2: the last variable creator.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable as ResourceVariable
from tensorflow.python.ops.resource_variable_ops import default_variable_creator_v2 as _default_creator

# enabled: whether a profile is being taken. TensorFlow has no public function for this, and making a Trace costs more.
# A function since TensorFlow 2.21; before, a bool that the profiler sets, so it is looked up in its module each time.
from tensorflow.python.profiler import trace as _trace

# in_save_context: whether a SavedModel is being written.
from tensorflow.python.saved_model import save_context as _save_context

from replica_engine.upstream.distribute import DistributedValues, MirroredVariable
from replica_engine.upstream.thread_state import unobserved

EagerTensor = tf.__internal__.EagerTensor
"""The class of dense tensors in eager mode. This module calls these of its private methods:

- `_numpy_internal`: the memory of a tensor on a CPU, without the copy that `numpy()` makes;
- `_copy_to_device`: an equal tensor on another device;
- `_datatype_enum`: the number of the dtype, which takes less time than the dtype;
- `_shape_tuple`: the shape; the property `shape` makes a new TensorShape each time.
"""

# What TensorFlow writes to tensors itself.
_OWN_ATTRIBUTES = frozenset(("assign", "_cached_value", "_handle_data", "_name", "_parent_trackable", "_unique_id"))
_ALIGNMENT = 64  # bytes; TensorFlow copies an array with a smaller alignment
_LARGE = 16384  # bytes; below, TensorFlow's copy costs less than an aligned one


def tensor(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor on the host from a copy of the array, or from the array itself if no other code has its memory.

    `tf.constant` takes ten times as long, mostly to look for a device.
    """
    return EagerTensor(_copy(array), _host(), None)


def tensor_from_memory(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor on the host that shares the memory of an array, which is aligned, and which nobody writes."""
    return EagerTensor(array, _host(), None)


def tensor_from_capsule(capsule: object) -> tf.Tensor:
    """Makes a tensor on the host that is a view of the memory of a DLPack capsule.

    Raises:
        tf.errors.InvalidArgumentError: TensorFlow does not know the dtype.
    """
    return _pywrap_tfe.TFE_FromDlpackCapsule(capsule, _context.context()._handle)


def is_replaced_interrupt(error: BaseException) -> bool:
    """Whether an error says that Ctrl-C came while TensorFlow made an exception: pybind11 gives up both for its own."""
    return type(error) is RuntimeError and "REPLACED BY KeyboardInterrupt" in str(error)


def is_eager(value: object) -> bool:
    """Whether `value` is a dense eager tensor."""
    return isinstance(value, EagerTensor)


def view_as_array(tensor: tf.Tensor) -> np.ndarray:
    """The memory of an eager tensor on a CPU, which must not be written to; a NumPy scalar for a scalar."""
    return tensor._numpy_internal()


def described(tensor: tf.Tensor) -> tuple[int, tuple[int, ...]]:
    """The dtype of an eager tensor, as a number, and its shape."""
    return tensor._datatype_enum(), tensor._shape_tuple()


def read_shape(tensor: tf.Tensor) -> tuple[int, ...]:
    """The shape of an eager tensor."""
    return tensor._shape_tuple()


def on_devices(array: np.ndarray, devices: Sequence[str]) -> tuple[tf.Tensor, ...]:
    """Makes a tensor on each of these CPU devices from an array, which must not be written to any more."""
    host = EagerTensor(array, devices[0].rpartition(":")[0] + ":0", None)
    return tuple([host._copy_to_device(device) for device in devices])


def soft_placement() -> bool:
    """The last argument of `tf.config.set_soft_device_placement`; True if it was never called.

    `tf.config.get_soft_device_placement` builds a whole configuration first, and returns False inside a graph.
    """
    wanted = _context.context()._soft_device_placement
    return True if wanted is None else bool(wanted)


def is_watched(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether anything on this thread watches these tensors: a gradient tape, or a debugger of ops."""
    return bool(
        _pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))
        or _context.context()._thread_local_data.op_callbacks
    )


def _copy(array: np.ndarray) -> np.ndarray:
    if array.flags.owndata and not array.flags.writeable:  # such as the arrays that jaxlib passes to host calls
        return array
    if array.nbytes < _LARGE:
        return array.copy()
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    copied = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copied[...] = array
    return copied


@functools.cache
def _host() -> str:
    """The full name of the host's CPU device."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(0).device


def attributes(tensor: tf.Tensor) -> dict[str, object]:
    """The attributes that Python code has given to a tensor, such as the mask of a Keras layer."""
    return {name: value for name, value in vars(tensor).items() if name not in _OWN_ATTRIBUTES}


# Handles of variables, and variables in host graphs.

_EMPTY = np.empty(0, np.uint8)


def raw_handle(variable: tf.Variable) -> tf.Tensor:
    """The handle itself, without the property `handle`."""
    return variable._handle


def parts(value: object) -> tuple[Any, ...]:
    """A variable or a tensor itself, and its components if it is distributed; of a Keras variable, those of its value.

    The components are those that replicas read. The property `values` makes copies if the replicas' values differ.
    """
    value = value if isinstance(value, tf.Variable) else getattr(value, "value", value)
    return value, *getattr(value, "_values", ())


def is_mirrored(variable: object) -> bool:
    """Whether a variable has several components, which have one value."""
    return isinstance(variable, MirroredVariable) and len(variable._values) > 1


def differ_by_replica(arguments: object) -> bool:
    """Whether a distributed value in a structure differs between two replicas; in eager mode."""
    several = (leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, DistributedValues))
    unequal = (leaf for leaf in several if not getattr(leaf, "_is_mirrored", bool)())  # values of `run` do not have it
    return any(len(set(map(_bytes, leaf._values))) > 1 for leaf in unequal)


def _bytes(value: object) -> tuple[object, ...]:
    arrays = map(np.asarray, tf.nest.flatten(value, expand_composites=True))
    # The bytes of an array of strings are their addresses.
    return tuple(tuple(each.flat) if each.dtype == object else each.tobytes() for each in arrays)


def make_equal(variable: MirroredVariable, source: int) -> None:
    """Copies one component of a mirrored variable to the others that have other values, in eager mode."""
    value = variable._values[source].read_value()
    wanted = _bytes(value)
    for component in variable._values:
        if _bytes(component.read_value()) != wanted:
            component.assign(value)


def find_container(handle: tf.Tensor) -> tf.Variable | None:
    """The distributed variable that a handle's variable is a component of; None if TensorFlow has noted none."""
    container = getattr(handle, "_distributed_container", None)
    return None if container is None else container()


def read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Reads the value behind a handle in eager mode, whatever it is: no check of numbers sees it."""
    with tf.init_scope(), tf.device("CPU:0"), unobserved():
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def write(handle: tf.Tensor, value: object) -> None:
    """Writes a value behind a handle in eager mode."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def tensor_on(array: np.ndarray) -> tf.Tensor:
    """Makes a tensor that uses an array's memory; no code may write to the array from now on.

    `tf.constant` always copies the array, because other code might write to it. Here only an unaligned array is copied.
    After the tensor is gone, TensorFlow releases the array at the next conversion of a NumPy array, on a Python thread.
    TensorFlow must have started.
    """
    return tf.__internal__.EagerTensor(array, None, None)


def release_arrays() -> None:
    """Releases the arrays of `tensor_on` whose tensors are gone: TensorFlow does so when it converts any array."""
    tf.__internal__.EagerTensor(_EMPTY, None, None)


def is_initialized(handle: tf.Tensor) -> bool:
    """Whether a variable's handle has a value; asks in eager mode."""
    with tf.init_scope(), tf.device("CPU:0"):
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


graph = tf.compat.v1.get_default_graph
"""The graph that new ops are added to."""


def function_graph(inner: tf.Graph) -> tf.Graph | None:
    """The graph of the function around a graph, outside branches and loops; None in a tf.compat.v1 graph."""
    while isinstance(inner, _ControlFlowFuncGraph):
        inner = inner.outer_graph
    return inner if isinstance(inner, tf.__internal__.FuncGraph) else None


def used_in(graph: tf.Graph) -> list[tf.Variable]:
    """The plain variables, and the components of distributed ones, that a graph has used while it was traced so far."""
    return [each for each in getattr(graph, "_watched_variables", ()) if isinstance(each, ResourceVariable)]


def is_captured(handle: tf.Tensor) -> bool:
    """Whether the current graph, or a graph around it, has captured an eager handle."""
    return any(outside is handle for each in function_graphs(graph()) for outside in each.external_captures)


def graphs() -> list[tf.Graph]:
    """The current graph, and the graphs around it."""
    inner, found = tf.compat.v1.get_default_graph(), []
    while inner is not None:
        found.append(inner)
        inner = getattr(inner, "outer_graph", None)
    return found


def function_graphs(inner: tf.Graph) -> Iterator[tf.Graph]:
    """A graph and the graphs around it, as far as they are those of functions: branches and loops are functions too."""
    while isinstance(inner, tf.__internal__.FuncGraph):
        yield inner
        inner = inner.outer_graph


def is_in_loop_condition(inner: tf.Graph) -> bool:
    """Whether a graph is the condition of a loop, or inside one."""
    return any(isinstance(each, _WhileCondFuncGraph) for each in function_graphs(inner))


def is_loop_body(inner: tf.Graph) -> bool:
    """Whether a graph is the body of a loop. Its placeholders are the values that the loop changes, and captures."""
    return isinstance(inner, _WhileBodyFuncGraph)


def outermost_graph(inner: tf.Graph) -> tf.Graph:
    """The graph of the outermost function around a graph."""
    return [inner, *function_graphs(inner)][-1]


def capture_at_call(graph: tf.Graph, raw: tf.Tensor, at_call: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Captures a handle in a function graph; each call of the function uses the result of `at_call()` as the handle.

    At each call, a function asks the callables among its captures for their values. FuncGraph has a method for such
    captures, but functions that use it cannot be saved.
    """
    placeholder = graph.capture(raw)
    captures = graph.function_captures
    captures.add_or_replace(
        key=id(raw), external=at_call, internal=placeholder, tracetype=captures.capture_types[id(raw)]
    )
    return placeholder


def is_of_dataset(graph: tf.Graph) -> bool:
    """Whether a function graph belongs to a dataset function, as in `Dataset.map`."""
    return graph.name.startswith("Dataset_") or graph.name.startswith("Dataset.")


is_saving = _save_context.in_save_context
"""Whether a function is being traced for a SavedModel."""


def may_write(handle: tf.Tensor, besides: set[str]) -> bool:
    """Whether an op of a finished graph may write to the variable of this handle; `besides` names ops to ignore."""
    return any(
        handle in _control_deps.get_read_write_resource_inputs(op)[1]
        for op in handle.consumers()
        if op.name not in besides
    )


def mark_as_writing(op: tf.Operation) -> None:
    """Makes a function call count as writing to all variables that are passed to it."""
    op._clear_attr(_control_deps.READ_ONLY_RESOURCE_INPUTS_ATTR)


no_tape = _record.stop_recording
"""Stops all gradient tapes from recording inside the block."""


def create(next_creator: Callable[..., tf.Variable], kwargs: dict[str, object]) -> tf.Variable:
    """Makes a plain variable; if a function is being traced, the variable outlives that function.

    Its initial value must not be a tensor of that function (see `xla.state.host_variable`).
    """
    if not tf.inside_function():
        return next_creator(**kwargs)
    with tf.init_scope():
        # Not next_creator: the creator of a tf.function makes variables that have no value yet.
        return _default_creator(None, **kwargs)


def plain_copy(variable: tf.Variable, memo: dict[int, object]) -> tf.Variable:
    """A copy of a plain variable."""
    return ResourceVariable.__deepcopy__(variable, memo)


def plain_like(variable: tf.Variable) -> tf.Variable:
    """A plain variable with the value and the options of a distributed one, in any strategy's scope."""
    with tf.init_scope():
        return _default_creator(
            None,
            initial_value=variable.read_value(),
            trainable=variable.trainable,
            name=variable.name.split(":")[0],
            dtype=variable.dtype,
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
        )


def take_identity(variable: tf.Variable, of: tf.Variable) -> None:
    """Makes Keras' optimizers treat `variable` as the variable `of`, which it replaces."""
    variable._unique_id = of._unique_id


is_profiling = _trace.enabled if callable(_trace.enabled) else lambda: _trace.enabled
"""Whether TensorFlow's profiler runs."""
