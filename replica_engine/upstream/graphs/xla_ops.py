"""TensorFlow's support for programs that XLA compiles, and ops for which it has none.

The support is cross-replica ops, tracing for XLA, and StableHLO; checked on TensorFlow 2.19 to 2.22. The ops are the
row of each value of a ragged tensor, and updates of some rows of a table; checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# XlaAllReduce and XlaReplicaId lower on every platform, also on CPU, where CrossReplicaSum has no kernel in the wheel.
# XlaCustomCallV2 marks operations that TensorFlow does not lower. XlaDynamicUpdateSlice writes in place. XlaCallModule
# runs a program of another library.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops as _ops

# get_compiler_ir: the function behind tf.function's experimental_get_compiler_ir, which does not accept function
# graphs.
from tensorflow.python.eager import context as _context

# from_func_graph: registers a function graph under a name for get_compiler_ir.
from tensorflow.python.eager.polymorphic_function import atomic_function as _atomic_function

# func_graph_from_py_func: traces a Python function as tf.function does, but without a cache and without its two traces.
from tensorflow.python.framework import func_graph as _func_graph

# XLAControlFlowContext: tells TensorFlow's loops and branches that XLA compiles them.
from tensorflow.python.ops.control_flow_ops import XLAControlFlowContext as _XLAControlFlowContext

from replica_engine.upstream.graphs import function_graphs, graph_walk
from replica_engine.upstream.graphs.function_graphs import kept_on
from replica_engine.upstream.hook import FIRST_COMPILED, Hook

# The row of each value of a ragged tensor in a body for XLA.
#
# TensorFlow finds the row of each value by a mask of rows and of places in the longest row. XLA would have to know the
# longest row when it compiles: `jit_compile=True` compiles a program for each value of the splits. The number of values
# is known whatever the splits are. So here the rows are found from it, and one program serves all splits.

_VALUES = "_replica_engine_values_of_splits"


def note_values(ragged: tf.RaggedTensor) -> None:
    """Notes which values the splits of a new ragged tensor divide, for `rows_of_values`."""
    splits = ragged.row_splits
    if tf.is_symbolic_tensor(splits):
        kept_on(splits.graph, _VALUES, dict)[splits.name] = ragged.values


def rows_of_values(lengths: Any) -> tf.Tensor | None:
    """The row of each value, if the lengths are those of the rows of a ragged tensor; None if that is not known."""
    splits = _splits(lengths) if tf.is_symbolic_tensor(lengths) else None
    values = None if splits is None else _values(splits)
    if splits is None or values is None:
        return None
    count = values.nrows(splits.dtype) if isinstance(values, tf.RaggedTensor) else tf.shape(values, splits.dtype)[0]
    # One place more than there are values: empty rows at the end begin there.
    begins = tf.tensor_scatter_nd_add(0 * tf.range(count + 1), splits[1:-1, tf.newaxis], tf.ones_like(splits[1:-1]))
    rows = tf.slice(tf.cumsum(begins), [0], [count])
    rows.set_shape([values.shape[0]])
    return rows


def _values(splits: tf.Tensor) -> Any | None:
    """The values that splits divide; the graph of a branch or a loop may have captured the splits."""
    outside: Any = splits
    while tf.is_symbolic_tensor(outside):
        if (found := getattr(outside.graph, _VALUES, {}).get(outside.name)) is not None:
            return found
        if outside.op.type != "Placeholder":
            return None
        outside = graph_walk.captured(outside)
    return None


def _splits(lengths: tf.Tensor) -> tf.Tensor | None:
    """The splits whose differences are the lengths."""
    while lengths.op.type in ("Identity", "Cast"):
        lengths = lengths.op.inputs[0]
    ends = list(lengths.op.inputs) if lengths.op.type == "Sub" else []
    if not ends or any(each.op.type != "StridedSlice" for each in ends):
        return None
    (splits, first, *_), (other, _, last, *_) = (each.op.inputs for each in ends)
    is_whole = splits is other and tf.get_static_value(first) == [1] and tf.get_static_value(last) == [-1]
    return splits if is_whole else None


# Updates of some rows of a table, for which XLA has no kernel.
#
# The optimizers of `tf.compat.v1.train`, and those of Keras 2 in part, have an op that updates a table and its slots at
# some rows. XLA has the op that updates all rows. So in a body all rows are updated, and the others are put back.

_SPARSE, _DENSE = "ResourceSparseApply", "ResourceApply"

MAKE_OP = Hook(
    "tensorflow.python.framework.op_def_library",
    "_apply_op_helper",
    why="in compiled bodies, optimizers of `tf.compat.v1.train` and Keras 2 update rows of tables, and "
    "`Generator.binomial` draws",
    since=FIRST_COMPILED,
)


def update_all(original: Callable[..., Any], kind: str, name: str | None = None, **given: Any) -> Any:
    """Makes an op, or in a body what stands for an update of some rows; the answer has the op as its third value."""
    of_all = getattr(tf.raw_ops, kind.replace(_SPARSE, _DENSE), None) if kind.startswith(_SPARSE) else None
    if of_all is None or not function_graphs.in_body():
        return original(kind, name=name, **given)
    rows, indices = tf.convert_to_tensor(given.pop("grad")), tf.convert_to_tensor(given.pop("indices"))
    shape = tf.raw_ops.VariableShape(input=given["var"], out_type=indices.dtype)
    places = indices[:, tf.newaxis]
    gradient = "delta" if "delta" in inspect.signature(of_all).parameters else "grad"
    given[gradient] = tf.scatter_nd(places, rows, shape)
    chosen = tf.scatter_nd(places, tf.ones_like(indices, tf.int32), shape[:1]) > 0
    chosen = tf.reshape(chosen, [-1, *[1] * (rows.shape.rank - 1)])
    handles = [each for each in given.values() if isinstance(each, tf.Tensor) and each.dtype == tf.resource]
    before = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=rows.dtype) for handle in handles]
    with tf.control_dependencies([*before, of_all(**given)]):
        updates = [_put_back(handle, chosen, old) for handle, old in zip(handles, before, strict=True)]
    return None, True, tf.group(*updates), []


def _put_back(handle: tf.Tensor, chosen: tf.Tensor, before: tf.Tensor) -> tf.Operation:
    """Restores the rows of a variable that were not to be updated."""
    after = tf.raw_ops.ReadVariableOp(resource=handle, dtype=before.dtype)
    return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.where(chosen, after, before))


# Cross-replica ops, tracing for XLA, StableHLO.

_HOST = "/job:localhost/replica:0/task:0/device:CPU:0"


class _BodyContext(_XLAControlFlowContext):
    def RequiresUniqueFunctionRetracing(self) -> bool:
        # A tf.function that a body calls is traced for that body: there its variables are read from the devices,
        # and its collectives have that body's number of replicas.
        return True


# All contexts are kept: a tf.function keeps its traces by the id of the context, so an id must never be reused.
_contexts: list[_BodyContext] = []


@contextlib.contextmanager
def xla_context() -> Iterator[None]:
    """Inside the block, loops and branches are made for XLA, and tf.functions are traced again."""
    context = _BodyContext()
    _contexts.append(context)
    context.Enter()
    try:
        yield
    finally:
        context.Exit()


replica_id = _ops.xla_replica_id
"""The id of the replica that runs this op."""


def takes_all_reduce(dtype: tf.DType) -> bool:
    """Whether `all_reduce` supports a dtype."""
    return dtype in (tf.float16, tf.bfloat16, tf.float32, tf.int32, tf.uint32)


def all_reduce(x: tf.Tensor, groups: Sequence[Sequence[int]], op: str) -> tf.Tensor:
    """Reduces `x` over the replicas of each group; `op` is "Add", "Min" or "Max"."""
    return _ops.xla_all_reduce(x, group_assignment=groups, reduce_op=op, mode="CrossReplica")


def marker(
    name: str,
    operands: list[tf.Tensor],
    parameters: str,
    dtypes: list[tf.DType],
    shapes: list[Any],
    has_effect: bool = False,
) -> list[tf.Tensor]:
    """A custom call that stands for another operation, or for work on the host.

    One that has an effect runs each time, even if its results are not used.
    """
    return list(
        _ops.xla_custom_call_v2(
            operands=operands,
            call_target_name=name,
            backend_config=parameters,
            has_side_effect=has_effect,
            result_dtypes=dtypes,
            result_shapes=shapes,
        )
    )


def same_shape_marker(x: tf.Tensor, parameters: str) -> tf.Tensor:
    """A custom call to `Sharding` whose result has the shape of its operand, which need not be known.

    The program has the parameters as a list of code points: the op takes numbers, and passes them on as they are.
    """
    return _ops.xla_sharding(x, sharding="", unspecified_dims=list(parameters.encode()))


def marker_name(op: tf.Operation) -> str:
    """The name of the operation that a marker op stands for; "" for any other op."""
    return op.get_attr("call_target_name").decode() if op.type == "XlaCustomCallV2" else ""


def marker_parameters(op: tf.Operation) -> str:
    """The parameters that a marker op was made with."""
    return op.get_attr("backend_config").decode()


def call_module(
    module: bytes, program: Any, operands: list[tf.Tensor], dtypes: list[tf.DType], shapes: list[Any]
) -> list[tf.Tensor]:
    """Runs a program that JAX has exported (`jax.export`), of which `module` is the serialized form."""
    return list(
        _ops.xla_call_module(
            [operands[index] for index in program.module_kept_var_idx],
            version=9,  # TensorFlow before 2.20 has no other; the next differs in shardings only, which are not in it
            module=module,
            Sout=shapes,
            Tout=dtypes,
            platforms=list(map(str.upper, program.platforms)),
            disabled_checks=list(map(str, program.disabled_safety_checks)),
        )
    )


update_slice = _ops.xla_dynamic_update_slice
"""A tensor in which a part is replaced. Takes the tensor, the new part, and the indices at which the part begins."""


def trace(name: str, fn: Callable[..., Any], specs: Sequence[tf.TensorSpec]) -> Any:
    """Traces `fn` with one placeholder for each spec; `fn` returns a list of tensors. Returns the function graph."""
    return _func_graph.func_graph_from_py_func(name, fn, tuple(specs), {})


def leave_collections(graph: Any, variables: Sequence[Any]) -> None:
    """Takes variables out of the collections of a function graph.

    `tf.distribute` puts each distributed variable that it creates in a graph there. Function graphs share these lists
    with the default graph of the thread, which lives as long as the thread.
    """
    created = set(map(id, variables))
    for key in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES):
        collection = graph.get_collection_ref(key)
        collection[:] = [each for each in collection if id(each) not in created]


def register(name: str, graph: Any) -> Any:
    """Registers the ops that a function graph's results and effects need as a function under a new name.

    The name stays registered as long as the return value lives. XLA would compile all other ops, or fail to.
    """
    aside, wanted = function_graphs.set_aside(graph), needed(graph, graph.inputs)
    operations = [op for op in graph.get_operations() if op.name in wanted]
    effects = [op for op in graph.control_outputs if op.name not in aside]
    part = graph_walk.GraphPart(graph, operations, graph.inputs, graph.outputs, effects)
    return _atomic_function.from_func_graph(name, part, {})


def needed(graph: Any, also: Sequence[tf.Tensor] = ()) -> dict[str, tf.Operation]:
    """By name, the ops that a function graph's results and effects need, and those that the tensors in `also` need."""
    aside = function_graphs.set_aside(graph)

    def before(op: tf.Operation) -> list[tf.Operation]:
        return [] if op.name in aside else [*op.control_inputs, *(tensor.op for tensor in op.inputs)]

    ends = [*graph.control_outputs, *(tensor.op for tensor in (*graph.outputs, *also))]
    return {op.name: op for op in graph_walk.reached(ends, before, lambda op: op.name) if op.name not in aside}


def stablehlo(function: Any, specs: Sequence[tf.TensorSpec], handles: Sequence[tf.Tensor]) -> str:
    """Returns the StableHLO program of a registered function.

    Args:
        function: the return value of `register`. Its inputs are first tensors, then variables.
        specs: the static shapes of the tensors.
        handles: the handles of the variables.

    Raises:
        ValueError: XLA cannot compile the function.
    """
    return (
        _context.context()
        .get_compiler_ir(
            device_name=_HOST,
            platform_name=None,
            function_name=function.name.decode(),
            flat_args=list(specs),
            captured_inputs=list(handles),
            stage="stablehlo",
        )
        .decode()
    )


def digest(function: Any) -> str:
    """A hash of a registered function and of all functions that it calls. It does not depend on the function's name."""
    first, found = function.name.decode(), hashlib.sha256()
    for definition in graph_walk.definitions([first]):
        for node in definition.node_def:
            for attribute in function_graphs.OF_PYTHON:
                node.attr.pop(attribute, None)
        if definition.signature.name == first:
            definition.signature.name = ""
        found.update(definition.SerializeToString(deterministic=True))
    return found.hexdigest()


eager_context = _context.context
"""The context in which eager ops run."""


def variable_dtype_and_shape(handle: tf.Tensor) -> tuple[tf.DType, tf.TensorShape] | None:
    """The dtype and shape of a variable, as its handle knows them; None for a resource that is not a variable."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    first = data.shape_and_type[0]
    return tf.dtypes.as_dtype(first.dtype), tf.TensorShape(first.shape)


def variable_name(handle: tf.Tensor) -> str:
    """The name of the variable behind an eager handle, as far as the handle knows it."""
    found = re.search(r'name="([^"]*)"', str(handle))
    return found.group(1).rpartition("/")[0] or found.group(1) if found else "?"


def is_host_only(dtype: tf.DType) -> bool:
    """Whether devices cannot hold values of this dtype. Quantized numbers lose their dtype in NumPy and XLA."""
    return dtype in (tf.string, tf.variant, tf.resource) or dtype.is_quantized
