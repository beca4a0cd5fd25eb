"""Private attributes and hooks of TensorFlow that the library uses.

A vanished private import fails at once. A vanished attribute of this list would fail later and elsewhere, so
`test_rules.py` looks each one up and names those that are gone. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.autograph.impl import api
from tensorflow.python.checkpoint import checkpoint, functional_saver
from tensorflow.python.distribute import distribute_lib, distribute_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended as MultiWorkerMirroredExtended,
)
from tensorflow.python.distribute.cross_device_ops import CollectiveAllReduce
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies
from tensorflow.python.ops import script_ops, summary_ops_v2
from tensorflow.python.util import tf_stack

from replica_engine.upstream import versions


class Private(NamedTuple):
    """One private attribute: the object that has it, its name, and what the library needs it for."""

    owner: Any
    name: str
    why: str


_graph = func_graph.FuncGraph("names")
_variable = tf.Variable(0)
with _graph.as_default():
    _op = tf.constant(0).op


def _called() -> None:
    """A function that an op of a graph calls."""


with tf.Graph().as_default() as _outermost, func_graph.FuncGraph("inner").as_default() as _inner:
    tf.numpy_function(_called, [], [])
_keeps_called = _outermost if versions.minor(tf.__version__) < (2, 22) else _inner
_context = context.context()
_dataset = tf.distribute.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(tf.data.Dataset.range(1))

PRIVATE = (
    Private(AtomicFunction, "_bound_context", "options of the graph optimizer for one function"),
    Private(AutomaticControlDependencies, "run_independently", "marks that no op waits for"),
    Private(_graph, "num_operations", "the ops that a merge function makes"),
    Private(_op, "_get_control_flow_context", "no mark waits for an op of a loop of tf.compat.v1"),
    Private(script_ops.FuncRegistry, "__call__", "which thread runs which Python function of a graph"),
    Private(Function, "_clone", "copying a tf.function with its options"),
    Private(tf.function(lambda: None), "_jit_compile", "leaving functions compiled for GPUs alone"),
    Private(_graph, "_variable_creator_stack", "inheriting variable creators"),
    Private(_graph, "_current_control_dependencies", "inheriting control dependencies at a merge call"),
    Private(_graph, "switch_to_thread_local", "a device stack for each replica thread"),
    Private(_context, "_context_handle", "whether TensorFlow has started; the device policy"),
    Private(_context, "_thread_local_data", "inheriting op callbacks"),
    Private(_context, "_soft_device_placement", "whether ops that XLA cannot compile run on the host"),
    Private(_graph, "_add_function_recursive", "copying ops that call functions"),
    Private(_graph, "_create_op_internal", "copying ops"),
    Private(_graph, "_get_function", "the functions of branches and loops"),
    Private(_op, "_add_control_input", "ops with effects wait for the arguments of a run"),
    Private(_op, "_update_input", "counting with as many places as two equal limits say"),
    Private(_op, "_set_attr", "the number of a gradient"),
    Private(_keeps_called, "_py_funcs_used_in_graph", "letting go of Python functions with the graph that calls them"),
    Private(_called, "ag_dnc_wrapper__", "letting go of Python functions with the graph that calls them"),
    Private(script_ops._py_funcs, "get", "looking up a tf.py_function"),
    Private(
        script_ops.EagerFunc(lambda: None, [], False), "_is_grad_func", "whether a tf.py_function computes a gradient"
    ),
    Private(
        script_ops.EagerFunc(lambda: None, [], False), "_support_graph_mode_gradient", "gradients of a tf.py_function"
    ),
    Private(script_ops.EagerFunc(lambda: None, [], False), "_func", "the Python function of a tf.py_function"),
    Private(_context._thread_local_data, "op_callbacks", "inheriting op callbacks"),
    Private(summary_ops_v2._summary_state, "step", "inheriting summary state"),
    Private(summary_ops_v2._summary_state, "writer", "inheriting summary state"),
    Private(summary_ops_v2._summary_state, "is_recording", "inheriting summary state"),
    Private(summary_ops_v2._summary_state, "is_recording_distribution_strategy", "replica 0 writes for all"),
    Private(distribute_utils.caching_scope_local, "new_cache_scope_count", "inheriting the caching scope"),
    Private(distribute_utils.caching_scope_local, "cache_scope_exited_count", "inheriting the caching scope"),
    Private(tf_stack, "_source_mapper_stacks", "the user's lines for generated code"),
    Private(api._ErrorMetadata, "get_message", "the text that AutoGraph adds to an error"),
    Private(distribute_lib.ReplicaContextBase, "_merge_call", "overridden: a merge call pauses the replica"),
    Private(
        distribute_lib._InReplicaThreadMode(tf.distribute.get_replica_context()),
        "strategy",
        "dropping the reference to a strategy",
    ),
    Private(distribute_lib.StrategyExtendedV1, "_container_strategy", "the strategy of an extended half"),
    Private(distribute_lib.StrategyExtendedV1, "_call_for_each_replica", "overridden: runs the replicas"),
    Private(MirroredExtended, "_get_replica_id_in_sync_group", "replica ids with several processes"),
    Private(MirroredExtended, "_initialize_strategy", "overridden: the default all-reduce"),
    Private(MirroredExtended, "_batch_reduce_to", "overridden: reducing tensors of several dtypes"),
    Private(MirroredExtended, "_get_cross_device_ops", "overridden: one reduction object for all integer dtypes"),
    Private(MirroredExtended, "_experimental_distribute_dataset", "overridden: one iterator on the host"),
    Private(MirroredExtended, "_distribute_datasets_from_function", "overridden: one iterator on the host"),
    Private(_dataset, "_type_spec", "overridden: the iterator as the argument of a tf.function; the worker's dataset"),
    Private(_dataset, "_input_workers", "the devices that a distributed dataset feeds"),
    Private(_dataset, "_options", "how far a distributed dataset reads ahead"),
    Private(_dataset, "_strategy", "making the iterator of a distributed dataset"),
    Private(_dataset, "_cardinality", "making the iterator of a distributed dataset"),
    Private(_dataset, "_enable_get_next_as_optional", "whether batches may be partial"),
    Private(_dataset, "_element_spec", "making the iterator of a distributed dataset"),
    Private(_dataset._type_spec, "_component_specs", "overridden: the iterator as the argument of a tf.function"),
    Private(_dataset._type_spec, "_to_components", "overridden: the same"),
    Private(_dataset._type_spec, "_from_components", "overridden: the same"),
    Private(MirroredExtended, "_initialize_single_worker", "TPUExtended: every replica uses the host device"),
    Private(MirroredExtended, "_reduce_to", "overridden: a collective in a compiled body"),
    Private(MirroredExtended, "_gather_to_implementation", "overridden: a collective in a compiled body"),
    Private(MirroredExtended, "_broadcast_to", "overridden: returns its argument in a compiled body"),
    Private(MirroredExtended, "_local_results", "overridden: an all-gather in a compiled body"),
    Private(MirroredExtended, "_update", "overridden: once for all replicas"),
    Private(MirroredExtended, "_update_non_slot", "overridden: once for all replicas"),
    Private(MirroredExtended, "_create_variable", "overridden: variables on devices"),
    Private(MirroredExtended, "_replica_ctx_all_reduce", "overridden: a collective in a compiled body"),
    Private(MirroredExtended, "_use_merge_call", "overridden: always uses merge calls"),
    Private(_variable, "_handle", "a variable's handle, without the property `handle`"),
    Private(type(_variable), "_read_variable_op", "overridden: reading first updates the value on the host"),
    Private(type(_variable), "_export_to_saved_model_graph", "overridden: the handle that saved functions use"),
    Private(_variable.handle, "_handle_data", "dtype and shape of a captured variable"),
    Private(_graph, "_watched_variables", "the plain variables to which replicas add in a traced step"),
    Private(_graph, "function_captures", "a handle that is looked up at each call"),
    Private(_op, "_clear_attr", "makes a run count as writing to its variables"),
    Private(_op, "_is_stateful", "which ops of initial values run once for all variables"),
    Private(
        _context,
        "get_function_def",
        "the ops of functions that an initial value calls; whether a body was lowered before",
    ),
    Private(AtomicFunction, "call_flat", "computing an initial value"),
    Private(_context, "get_compiler_ir", "the StableHLO of a function"),
    Private(Function(lambda: None, "names"), "_function_cache", "the lines of ops that failed"),
    Private(tf.errors.OpError(None, None, "names", 3), "_message", "replacing the text of an error"),
    Private(Function(lambda: None, "names"), "_autograph", "a tf.function's options"),
    Private(Function(lambda: None, "names"), "_reduce_retracing", "a tf.function's options"),
    Private(Function(lambda: None, "names"), "_run_functions_eagerly", "nested tf.functions with merge calls"),
    Private(Function(lambda: None, "names"), "_function_type", "the arguments of a nested tf.function"),
    Private(Function(lambda: None, "names"), "_default_values", "the arguments of a nested tf.function"),
    Private(Function(lambda: None, "names"), "_is_pure", "the arguments of a nested tf.function"),
    Private(Function(lambda: None, "names"), "_lock", "arguments that do not fit a nested tf.function"),
    Private(Function(lambda: None, "names"), "_name", "copying a tf.function without its input signature"),
    Private(Function(lambda: None, "names"), "_attributes", "copying a tf.function without its input signature"),
    Private(Function(lambda: None, "names"), "_experimental_autograph_options", "the same"),
    Private(Function(lambda: None, "names"), "_created_variables", "a first call that is left"),
    Private(Function(lambda: None, "names"), "_variable_creation_config", "a first call that is left"),
    Private(tf.GradientTape(), "_tape", "a tape that an attempt has asked"),
    Private(tf.GradientTape(), "_recording", "a tape that an attempt has asked"),
    Private(tf.GradientTape(), "_persistent", "a tape that an attempt has asked"),
    Private(_graph, "_scope_exit_callbacks", "leaving a graph that another thread has left"),
    Private(_graph, "capture", "each replica's own aliases of what a branch captures"),
    Private(ops.gradient_registry, "_registry", "the gradients of If, Case and While ops"),
    Private(_context, "abort_collective_ops", "ending collectives when a worker is lost"),
    Private(_context, "configure_coordination_service", "leaving TensorFlow's coordination service out"),
    Private(_graph, "is_control_flow_graph", "where the numbers of collectives are looked up"),
    Private(_graph, "capture_call_time_value", "looking up the numbers of collectives at each call"),
    Private(_graph, "_function_captures", "looking up the numbers of collectives at each call"),
    Private(_graph._function_captures, "by_ref_external", "looking up the numbers of collectives at each call"),
    Private(CollectiveReplicaLauncher, "_next_instance_key", "overridden: says what is launched"),
    Private(CollectiveReplicaLauncher, "_all_gather", "overridden: says what is launched"),
    *(
        Private(MultiWorkerMirroredExtended, name, why)
        for name, why in (
            ("_enable_check_health", "overridden: the job notices who is lost"),
            ("_initialize_local_devices", "overridden: all devices of the worker"),
            ("_get_variable_creator_initial_value", "overridden: compares variables before the chief's value is sent"),
            ("_reduce_to", "overridden: says what is reduced"),
            ("_gather_to_implementation", "overridden: says what is gathered"),
            ("_in_multi_worker_mode", "whether an iterator asks the other workers"),
        )
    ),
    Private(tf.distribute.CrossDeviceOps, "_num_between_graph_workers", "overridden: several workers"),
    Private(tf.distribute.CrossDeviceOps, "_gather", "gathers what a worker has gathered"),
    Private(CollectiveAllReduce, "_gather_implementation", "overridden: gathers inside the worker first"),
    Private(checkpoint, "_execute_callbacks", "callbacks of a checkpoint that is complete"),
    Private(functional_saver.MultiDeviceSaver, "_get_shards_by_task", "the values of a checkpoint"),
    Private(tf.train.Checkpoint(), "_checkpoint_options", "reading without TensorFlow's own thread"),
    Private(tf.train.Checkpoint(), "_async_checkpointer_impl", "what saves asynchronously, and `sync` waits for"),
    Private(functional_saver.MultiDeviceSaver({}), "_registered_savers", "objects that write files of their own"),
    Private(tf.distribute.MirroredStrategy, "_collective_key_base", "separate collective keys for each strategy"),
)
"""Every private attribute that the library uses, and every hook that it overrides."""
