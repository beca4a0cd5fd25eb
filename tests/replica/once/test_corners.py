"""Programs in which a copy could be wrong without a word, on three replicas: what Python code sees, and what it keeps.

Each gives what it gives without `trace_once`, or each replica is traced, or it is an error.
"""

import tempfile

import numpy as np
import pytest
import tensorflow as tf
from helpers.once_checks import check, merged, together
from helpers.once_programs import ON_READ, SUM, context, twice
from tensorflow.python.framework.smart_cond import smart_constant_value

from replica_engine import MirroredStrategy
from replica_engine.errors import TraceOnceError

DEVICES = ("CPU:0", "CPU:1", "CPU:2")
COMPONENT = "a component of a distributed variable"
SHAPE = "a static shape that follows from the value"
PLACE = "the device, the handle or the op behind a variable or tensor"
NUMBER = "a Python value of type float"


def own(s, value=lambda index: 1.0 + index):
    """A value of each replica."""
    return s.experimental_distribute_values_from_function(
        lambda context: tf.constant(value(float(context.replica_id_in_sync_group)))
    )


def different(s):
    """A variable of 3, 7 and 11."""
    with s.scope():
        variable = tf.Variable(3.0, synchronization=ON_READ, aggregation=SUM)
    for index, component in enumerate(variable.values):
        component.assign(3.0 + 4.0 * index)
    return variable


def or_minus_one(gradient):
    return tf.constant(-1.0) if gradient is None else gradient


def component_after_its_variable(s):
    v = different(s)
    return twice(s, lambda: v * v.values[0])


def component_as_what_is_assigned(s):
    v = different(s)
    return [twice(s, lambda: v.assign_add(v.values[0])), v.values]


def gradient_of_a_component(s):
    v = different(s)

    def body(x):
        with tf.GradientTape() as tape:
            y = v * v * x
        return or_minus_one(tape.gradient(y, v.values[0]))

    return twice(s, body, own(s))


def component_and_variable_in_a_nested_function(s):
    v = different(s)

    @tf.function
    def nested(x):
        v.assign_add(x)
        return v.values[0].read_value() + v

    return [twice(s, lambda x: nested(x), own(s)), v.values]


def nested_function_in_all_kinds_of_runs(s):
    with s.scope():
        v = tf.Variable(3.0)
    nested = tf.function(lambda x: v * x)
    first = twice(s, lambda x: nested(x), own(s))
    for component in v.values:
        component.assign(5.0)
    eagerly = s.run(lambda x: nested(x), args=(own(s),))
    return [first, eagerly, nested(tf.constant(1.0)), twice(s, lambda x: nested(x) + 1.0, own(s))]


def variables_that_a_tape_watched(s):
    with s.scope():
        v, w = tf.Variable(2.0), tf.Variable(3.0)
    nested = tf.function(lambda x: v * v * x + w)

    def body(x):
        with tf.GradientTape() as tape:
            y = nested(x)
        return tape.gradient(y, tape.watched_variables())

    return twice(s, body, own(s))


def one_argument_twice(s):
    def body(a, b):
        with tf.GradientTape() as tape:
            tape.watch(a)
            y = b * b
        return or_minus_one(tape.gradient(y, a))

    return tf.function(lambda x: s.run(body, args=(x, x)))(own(s))


def merge_that_returns_its_argument(s):
    def body(x):
        y = x * 3.0
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            z, same = context().merge_call(lambda strategy, *args: args, args=(y, x))
            w = z * z * same
        return or_minus_one(tape.gradient(w, y)), or_minus_one(tape.gradient(w, x))

    return twice(s, body, own(s))


def result_of_an_assignment_in_a_merge_function(s):
    v = different(s)

    def body(x):
        result = v.assign_add(x)
        return context().merge_call(lambda strategy: result + 0.0)

    return [twice(s, body, own(s)), v.values]


def operation_in_a_merge_function(s):
    v = tf.Variable(0.0)

    def body(x):
        added = tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=x)

        def merge(strategy):
            with tf.control_dependencies([added]):
                return v.read_value()

        return context().merge_call(merge)

    return [twice(s, body, own(s)), v]


def computed_number_is_returned(s):
    step = tf.function(lambda x: together(s, s.run(lambda x: 1.5 * (1 + len(x.shape)), args=(x,))))
    return step(own(s))


def computed_number_is_returned_after_a_merge(s):
    def body(x):
        merged(x)
        return 1.5 * (1 + len(x.shape))

    return tf.function(lambda x: together(s, s.run(body, args=(x,))))(own(s))


def computed_number_is_merged(s):
    return twice(s, lambda x: context().merge_call(together, args=(1.5 * (1 + len(x.shape)),)), own(s))


def number_of_the_code_is_merged(s):
    return twice(s, lambda x: context().merge_call(together, args=(1.5,)) + x, own(s))


def function_is_merged(s):
    def merge(strategy, function):
        return tf.add_n([each() for each in strategy.experimental_local_results(function)])

    return twice(s, lambda x: context().merge_call(merge, args=(lambda: x * 2.0,)), own(s))


def plain_variable_in_init_scope(s):
    v = tf.Variable(0.0)

    def body(x):
        with tf.init_scope():
            v.assign_add(1.0)
        return x

    return [twice(s, body, own(s)), v]


def operation_in_the_graph_outside(s):
    v = tf.Variable(0.0)

    @tf.function
    def step(x):
        outside = tf.compat.v1.get_default_graph()

        def body(x):
            with outside.as_default():
                v.assign_add(1.0)
            return x

        return s.run(body, args=(x,))

    return step(own(s))


def device_of_a_variable(s):
    with s.scope():
        v = tf.Variable(1.0)
    return twice(s, lambda x: x * (10.0 if v.device.endswith("CPU:0") else 20.0), own(s))


def device_of_a_tensor(s):
    return twice(s, lambda x: x * (10.0 if (x * 2.0).device.endswith("CPU:0") else 20.0), own(s))


def device_of_a_handle(s):
    with s.scope():
        v = tf.Variable(1.0)
    return twice(s, lambda x: x * (10.0 if "CPU:0" in v.handle.device else 20.0), own(s))


def operation_of_the_replica_id(s):
    return twice(s, lambda x: x * context().replica_id_in_sync_group.op.get_attr("value").int_val[0], own(s))


def condition_that_is_known(s):
    def body(x):
        is_first = smart_constant_value(tf.equal(context().replica_id_in_sync_group, 0))
        return x if is_first else x * 100.0

    return twice(s, body, own(s))


def device_of_the_handle_of_a_component(s):
    with s.scope():
        v = tf.Variable(1.0)
    return twice(s, lambda x: x * (10.0 if "CPU:0" in v._get().handle.device else 20.0), own(s))


def tape_outside_that_is_paused_inside(s):
    with s.scope():
        v = tf.Variable(2.0)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:

            def body(x):
                with tape.stop_recording():
                    y = v * x
                return y * 3.0 + v * x * x

            total = together(s, s.run(body, args=(x,)))
        return [or_minus_one(each) for each in tape.gradient(total, list(v.values))]

    return step(own(s))


@tf.RegisterGradient("FiftyTimes")
def fifty_times(op, upstream):
    return upstream * 50.0


def gradient_that_is_overridden_around_the_run(s):
    @tf.function
    def step(x):
        with tf.compat.v1.get_default_graph().gradient_override_map({"Sin": "FiftyTimes"}):
            y = s.run(lambda x: tf.sin(x) * x, args=(x,))
        return tf.gradients(s.experimental_local_results(y), s.experimental_local_results(x))

    return step(own(s))


def gradient_through_all_gather(s):
    with s.scope():
        v = tf.Variable(2.0)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context().all_gather(tf.stack([x * v, x]), axis=0)
            z = tf.reduce_sum(y * y) * x
        return tape.gradient(z, [x, v])

    return twice(s, body, own(s))


def random_numbers_in_a_vectorized_map(s):
    tf.random.set_seed(3)
    return twice(s, lambda x: tf.vectorized_map(lambda i: i * tf.random.normal([]) * x, tf.range(3.0)), own(s))


def run_that_is_copied_after_one_that_is_not(s):
    @tf.function
    def step(x):
        y = s.run(lambda x: tf.numpy_function(lambda v: v, [x * 2.0], tf.float32), args=(x,))
        with tf.name_scope("replica_1"):
            z = tf.identity(2.0, name="mul")
        return s.run(lambda x, y: x * 2.0 + y * z, args=(x, y))

    return step(own(s))


def slice_of_a_variable(s):
    with s.scope():
        v = tf.Variable([1.0, 2.0])
    return twice(s, lambda x: v[1], own(s))


def static_shape(n):
    shape = tf.zeros([n]).shape
    return 100.0 if shape[0] is None else float(shape[0])


def shape_of_the_replica_id(s):
    return twice(s, lambda x: x * static_shape(context().replica_id_in_sync_group + 1), own(s))


def shape_of_the_replica_id_after_a_merge(s):
    return twice(s, lambda x: merged(x) * static_shape(context().replica_id_in_sync_group + 1), own(s))


def constant_outside_the_run(s):
    @tf.function
    def step(x):
        n = tf.constant(3)

        def body(x, argument):
            merged(x)
            given = context().merge_call(lambda strategy: tf.constant(4))
            known = [static_shape(each) for each in (n, argument, given)]
            return x * tf.constant([*known, float(tf.get_static_value(n))])

        return s.run(body, args=(x, n))

    return step(own(s))


def numpy_function_with_a_state(s):
    def body(x):
        calls = []
        return tf.numpy_function(lambda v: np.float32(v * (calls.append(v) or len(calls))), [x], tf.float32)

    return twice(s, body, own(s))


def numpy_function_in_a_nested_function(s):
    @tf.function
    def nested(x):
        calls = []
        return tf.numpy_function(lambda v: np.float32(v * (calls.append(v) or len(calls))), [x], tf.float32)

    return twice(s, lambda x: nested(x), own(s))


def table_that_is_made_in_a_replica(s):
    def body(x):
        table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
        table.insert(tf.constant([1], tf.int64), [x])
        return table.lookup(tf.constant([1], tf.int64))

    return twice(s, body, own(s))


def table_outside_the_replicas(s):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def body(x):
        before = table.lookup(tf.constant([1], tf.int64))
        table.insert(tf.constant([1], tf.int64), before + x)
        return before

    return twice(s, body, own(s))


def ragged_arguments(s):
    x = s.experimental_distribute_values_from_function(
        lambda context: tf.ragged.constant([[1.0, 2.0], [3.0 + context.replica_id_in_sync_group]])
    )

    def body(x):
        return tf.reduce_sum(x, 1), x.row_lengths(), x.with_values(merged(x.values)).to_tensor(shape=[2, 2])

    return twice(s, body, x)


def second_derivative_across_a_merge(s):
    with s.scope():
        w = tf.Variable(2.0)

    def body(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                y = w * w * w * x * merged(x * w)
            gradient = inner.gradient(y, w)
        return gradient, merged(tape.gradient(gradient, w))

    return twice(s, body, own(s))


def run_in_a_merge_function(s):
    with s.scope():
        w = tf.Variable(2.0)

    def merge(strategy, x):
        return strategy.run(lambda x: x * w + merged(x), args=(x,))

    return twice(s, lambda x: context().merge_call(merge, args=(x * 3.0,)) + x, own(s))


def variables_that_are_made_in_a_nested_function(s):
    made = {}

    @tf.function
    def nested(x):
        if not made:
            made["v"] = tf.Variable([1.0, 2.0])
        return made["v"] * x

    with s.scope():
        return [twice(s, lambda x: nested(x), own(s)), made["v"].values]


def saved_function_that_replicas_have_traced(s):
    module = tf.Module()
    with s.scope():
        module.weight = tf.Variable(2.0)
    module.call = tf.function(lambda x: module.weight * x)
    results = twice(s, lambda x: module.call(x), own(s))
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        return results, tf.saved_model.load(folder).weight


def collection_of_the_graph(s):
    @tf.function
    def step(x):
        s.run(lambda x: tf.compat.v1.add_to_collection("mine", x * 2.0), args=(x,))
        return tf.add_n([*tf.compat.v1.get_collection("mine"), tf.constant(0.0)])

    return step(own(s))


def static_check_of_the_replica_id(s):
    def body(x):
        tf.debugging.assert_less(context().replica_id_in_sync_group, 100)
        return x

    return twice(s, body, own(s))


def dataset_in_the_replicas(s):
    outside = tf.data.Dataset.range(4)

    def body(x):
        total = x
        for element in outside:
            total = total * 2.0 + tf.cast(element, tf.float32)
        return total + merged(total)

    return twice(s, body, own(s))


PROGRAMS = {
    saved_function_that_replicas_have_traced: "",
    collection_of_the_graph: "a collection of the graph",
    static_check_of_the_replica_id: "a value of the replica where the graph depends on it",
    dataset_in_the_replicas: "",
    random_numbers_in_a_vectorized_map: "a random op without a seed of its own in tf.vectorized_map",
    run_that_is_copied_after_one_that_is_not: "tf.numpy_function",
    slice_of_a_variable: "",
    device_of_a_handle: PLACE,
    device_of_the_handle_of_a_component: PLACE,
    operation_of_the_replica_id: PLACE,
    condition_that_is_known: "a value of the replica where the graph depends on it",
    tape_outside_that_is_paused_inside: "a tape or an accumulator that was made outside the run",
    gradient_that_is_overridden_around_the_run: "",
    gradient_through_all_gather: "",
    component_after_its_variable: COMPONENT,
    component_as_what_is_assigned: COMPONENT,
    gradient_of_a_component: COMPONENT,
    component_and_variable_in_a_nested_function: COMPONENT,
    nested_function_in_all_kinds_of_runs: "",
    variables_that_a_tape_watched: "",
    one_argument_twice: "",
    merge_that_returns_its_argument: "",
    result_of_an_assignment_in_a_merge_function: TraceOnceError,
    operation_in_a_merge_function: TraceOnceError,
    computed_number_is_returned: NUMBER,
    computed_number_is_returned_after_a_merge: TraceOnceError,
    computed_number_is_merged: NUMBER,
    number_of_the_code_is_merged: "",
    function_is_merged: "a Python value of type function",
    plain_variable_in_init_scope: "tf.init_scope",
    operation_in_the_graph_outside: TraceOnceError,
    device_of_a_variable: PLACE,
    device_of_a_tensor: PLACE,
    shape_of_the_replica_id: SHAPE,
    shape_of_the_replica_id_after_a_merge: TraceOnceError,
    constant_outside_the_run: "",
    numpy_function_with_a_state: "tf.numpy_function",
    numpy_function_in_a_nested_function: "tf.numpy_function",
    table_that_is_made_in_a_replica: "an operation with a state of its own, MutableHashTableV2",
    table_outside_the_replicas: "",
    ragged_arguments: "",
    second_derivative_across_a_merge: "",
    run_in_a_merge_function: "",
    variables_that_are_made_in_a_nested_function: "",
}


def test_a_tape_outside_through_a_branch_whose_outputs_differ():
    strategy = MirroredStrategy(DEVICES, trace_once=True)
    with strategy.scope():
        w, v = tf.Variable(2.0), tf.Variable([1.0, 2.0])
    nested = tf.function(lambda x: tf.reduce_sum(v * x) * w)

    @tf.function
    def step(x):
        body = lambda x: tf.cond(x > 1.5, lambda: nested(x), lambda: w) * merged(x * w)  # noqa: E731
        return strategy.reduce("SUM", strategy.run(body, args=(x,)), axis=None)

    x = own(strategy)
    with pytest.raises(TraceOnceError, match=r"differentiates a tf.cond inside"), tf.GradientTape():
        step(x)  # TensorFlow makes the gradient with the call


@pytest.mark.parametrize("trace_once", [True, "checked"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_corner(program, trace_once, caplog):
    check(program, DEVICES, trace_once, PROGRAMS[program], caplog)
