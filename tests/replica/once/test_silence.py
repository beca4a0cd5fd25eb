"""Programs whose results `trace_once` once changed without a word: each is right, is traced each, or is an error."""

import gc
import weakref

import keras
import pytest
import tensorflow as tf
from helpers.once_checks import check, merged, together
from helpers.once_programs import ON_READ, SUM, context, per, twice

from replica_engine import MirroredStrategy
from replica_engine._tf.graphs import source
from replica_engine.errors import TraceOnceError

DEVICES = ("CPU:0", "CPU:1")


def two(s):
    """A variable of 3 on replica 0 and 7 on replica 1."""
    with s.scope():
        variable = tf.Variable(3.0, synchronization=ON_READ, aggregation=SUM)
    variable.values[1].assign(7.0)
    return variable


def assignment_is_an_argument_of_a_merge(s):
    v = two(s)
    return twice(s, lambda x: context().merge_call(together, args=(v.assign_add(x),)), per(s, 1.0, 2.0))


def assignment_to_a_plain_variable_is_an_argument_of_a_merge(s):
    v = tf.Variable(3.0)
    return twice(s, lambda x: context().merge_call(together, args=(v.assign_add(x),)), per(s, 1.0, 2.0))


def assignment_is_what_a_variable_is_updated_with(s):
    v = two(s)
    with s.scope():
        w = tf.Variable(0.0)

    def merge(strategy, a):
        strategy.extended.update(w, lambda component, value: component.assign(value), args=(a,))

    twice(s, lambda x: context().merge_call(merge, args=(v.assign_add(x),)), per(s, 1.0, 2.0))
    return w.values


def assignment_is_returned_and_read_after_another(s):
    v = two(s)

    @tf.function
    def step(x):
        result = s.run(lambda x: v.assign_add(x), args=(x,))
        for each in v.values:
            each.assign(100.0)
        return [tf.identity(each) for each in s.experimental_local_results(result)]

    return step(per(s, 1.0, 2.0))


def assignment_of_a_merge_is_read_after_another(s):
    with s.scope():
        w = tf.Variable(1.0, aggregation=SUM)

    def body(x):
        first = w.assign_add(x)
        w.assign_add(x)
        return first * 1.0

    return twice(s, body, per(s, 1.0, 2.0))


def mask_between_runs(s):
    with s.scope():
        embedding, recurrent = keras.layers.Embedding(4, 2, mask_zero=True), keras.layers.LSTM(2)
        embedding.build((None, 3))
        recurrent.build((None, 3, 2))
        embedding.set_weights([tf.reshape(tf.range(8.0), [4, 2]).numpy()])
        recurrent.set_weights([tf.fill(weight.shape, 0.5).numpy() for weight in recurrent.weights])

    @tf.function
    def step(x):
        return s.run(recurrent, args=(s.run(embedding, args=(x,)),))

    return step(per(s, [[1, 2, 0]], [[3, 0, 0]]))


def attribute_between_runs(s):
    def mark(x):
        y = x * 2.0
        y.tag = 5.0
        return y

    @tf.function
    def step(x):
        return s.run(lambda y: y * getattr(y, "tag", 1.0), args=(s.run(mark, args=(x,)),))

    return step(per(s, 1.0, 2.0))


def attribute_in_a_merge(s):
    def merge(strategy, y):
        total = together(strategy, y)
        for each in strategy.experimental_local_results(y):
            total += getattr(each, "tag", 0.0)
        total.tag = 7.0
        return total

    def body(x):
        y = x * 2.0
        y.tag = x * 3.0
        total = context().merge_call(merge, args=(y,))
        return total + getattr(total, "tag", 0.0)

    return twice(s, body, per(s, 1.0, 2.0))


def component_in_a_function_traced_outside(s):
    v = two(s)
    get = tf.function(lambda: v.values[0].read_value()).get_concrete_function()
    return twice(s, lambda: v - get())


def handle_of_a_component(s):
    v = two(s)
    handle = v.values[0].handle
    return twice(s, lambda: v - tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))


def handle_as_an_argument(s):
    v = two(s)
    read = lambda h: v - tf.raw_ops.ReadVariableOp(resource=h, dtype=tf.float32)  # noqa: E731
    step = tf.function(lambda: s.run(read, args=(v.values[0].handle,)))
    return [step(), step()]


def component_after_a_step_through_the_variable(s):
    v = two(s)
    get = tf.function(lambda: v.values[0].read_value()).get_concrete_function()
    return [twice(s, lambda: v + 0.0), twice(s, lambda: v - get())]


def component_after_a_sync_point(s):
    v = two(s)
    get = tf.function(lambda: v.values[0].read_value()).get_concrete_function()
    return twice(s, lambda x: merged(x) + v - get(), per(s, 1.0, 2.0))


def method_of_a_component_as_a_branch(s):
    v = two(s)
    read = v.values[0].read_value
    return twice(s, lambda x: v - tf.cond(x > 0.0, read, read), per(s, 1.0, 2.0))


def method_of_a_component_as_a_function(s):
    v = two(s)
    read = tf.function(v.values[0].read_value)
    return twice(s, lambda x: v * 0.0 + read(), per(s, 1.0, 2.0))


def variable_traced_outside(s):
    v = two(s)
    get = tf.function(lambda: v.read_value()).get_concrete_function()
    return twice(s, lambda x: v + get() * x, per(s, 1.0, 2.0))


def control_dependency_on_an_op_outside(s):
    v = two(s)

    @tf.function
    def step(x, limit):
        check = tf.debugging.assert_less(limit, 1.0)

        def body(x):
            with tf.control_dependencies([check]):
                v.assign_add(x)

        s.run(body, args=(x,))
        return tf.constant(0.0)

    try:
        step(per(s, 1.0, 2.0), tf.constant(2.0))
    except tf.errors.InvalidArgumentError:
        return v.values
    return "no error"


def reads_in_init_scope(s):
    v = two(s)

    def body(x):
        with tf.init_scope():
            now = float(v.read_value())
        return x + now

    return twice(s, body, per(s, 1.0, 2.0))


def writes_in_init_scope(s):
    v = two(s)

    def body(x):
        with tf.init_scope():
            v.assign_add(10.0)
        return x + v

    return [twice(s, body, per(s, 1.0, 2.0)), v.values]


def seed_in_the_body(s):
    def body(x):
        tf.random.set_seed(7)
        return x + tf.random.uniform([])

    return twice(s, body, per(s, 1.0, 2.0))


def seed_in_a_merge(s):
    def merge(strategy, x):
        tf.random.set_seed(7)
        return x

    def body(x):
        first = tf.random.uniform([])
        return context().merge_call(merge, args=(x,)) + first + tf.random.uniform([])

    tf.random.set_seed(3)
    return twice(s, body, per(s, 1.0, 2.0))


def distributed_value_in_a_closure(s):
    values = per(s, 5.0, 6.0)
    return twice(s, lambda x: x + values._get(), per(s, 1.0, 2.0))


def eager_argument_is_asked_for(s):
    x = per(s, 1.0, 2.0)
    step = tf.function(lambda: s.run(lambda x: x * (float(x.numpy()) if hasattr(x, "numpy") else 10.0), args=(x,)))
    return [step(), step()]


def gradient_of_a_nested_function_with_a_lookup(s):
    with s.scope():
        w = tf.Variable([[1.0], [2.0], [3.0]])
    nested = tf.function(lambda i: tf.reduce_sum(tf.nn.embedding_lookup(w, i) ** 2))

    def body(i):
        with tf.GradientTape() as tape:
            y = nested(i) * tf.while_loop(lambda k, _: k < 2, lambda k, y: (k + 1, y * w[0, 0]), (0, 1.0))[1]
        return merged(tf.convert_to_tensor(tape.gradient(y, w)))

    return twice(s, body, per(s, [0, 1], [1, 2]))


def operation_of_a_merge_is_waited_for(s):
    v = tf.Variable(0.0)

    def merge(strategy, x):
        return tf.group(v.assign_add(together(strategy, x)))

    def body(x):
        with tf.control_dependencies([context().merge_call(merge, args=(x,))]):
            return v * x

    return twice(s, body, per(s, 1.0, 2.0))


def attribute_that_a_merge_function_gives(s):
    def merge(strategy, y):
        for each in strategy.experimental_local_results(y):
            each.tag = 5.0
        return together(strategy, y)

    def body(x):
        y = x * 2.0
        return context().merge_call(merge, args=(y,)) * getattr(y, "tag", 1.0)

    return twice(s, body, per(s, 1.0, 2.0))


def attribute_that_a_run_gives_to_its_argument(s):
    @tf.function
    def step(x):
        s.run(lambda x: setattr(x, "tag", 7.0), args=(x,))
        return s.run(lambda x: x * getattr(x, "tag", 1.0), args=(x,))

    return step(per(s, 1.0, 2.0))


def attribute_of_a_component(s):
    v = two(s)
    for index, component in enumerate(v.values):
        component.tag = float(index + 1)
    return twice(s, lambda x: x * getattr(v, "tag", 50.0), per(s, 1.0, 2.0))


def tensor_of_one_replica_for_all(s):
    def body(x):
        y = x * 2.0
        with tf.GradientTape() as tape:
            tape.watch(y)
            z = context().merge_call(lambda strategy, y: strategy.experimental_local_results(y)[0], args=(y,))
            z = z * z
        gradient = tape.gradient(z, y)
        return tf.constant(-1.0) if gradient is None else gradient

    return twice(s, body, per(s, 1.0, 2.0))


def copied_tensor_of_one_replica_for_all(s):
    def merge(strategy, x):
        return tf.identity(strategy.experimental_local_results(x)[0])

    return twice(s, lambda x: context().merge_call(merge, args=(x,)) + x, per(s, 1.0, 2.0))


def tensors_of_all_replicas_in_a_list(s):
    @tf.function
    def step(x):
        box = []

        def body(x):
            box.append(x * 2.0)
            return context().merge_call(lambda strategy: tf.add_n(box))

        return s.run(body, args=(x,))

    return step(per(s, 1.0, 2.0))


def function_that_is_kept(s):
    v, kept = two(s), {}
    function = tf.function(lambda x: x * v)

    def body(x):
        if not kept:
            kept[0] = function.get_concrete_function(tf.TensorSpec([]))
        return kept[0](x)

    return twice(s, body, per(s, 1.0, 2.0))


PROGRAMS = {
    attribute_that_a_merge_function_gives: TraceOnceError,
    attribute_that_a_run_gives_to_its_argument: "",
    attribute_of_a_component: "a Python attribute of a component",
    tensor_of_one_replica_for_all: TraceOnceError,
    copied_tensor_of_one_replica_for_all: "",
    tensors_of_all_replicas_in_a_list: TraceOnceError,
    function_that_is_kept: "get_concrete_function",
    assignment_is_an_argument_of_a_merge: "",
    assignment_to_a_plain_variable_is_an_argument_of_a_merge: "",
    assignment_is_what_a_variable_is_updated_with: "",
    assignment_is_returned_and_read_after_another: "",
    assignment_of_a_merge_is_read_after_another: "",
    mask_between_runs: "",
    attribute_between_runs: "",
    attribute_in_a_merge: "",
    component_in_a_function_traced_outside: "by itself",
    handle_of_a_component: "by itself",
    handle_as_an_argument: "by itself",
    component_after_a_step_through_the_variable: "by itself",
    component_after_a_sync_point: TraceOnceError,
    method_of_a_component_as_a_branch: "by itself",
    method_of_a_component_as_a_function: "by itself",
    variable_traced_outside: "by itself",
    control_dependency_on_an_op_outside: "a control dependency on an operation outside the run",
    reads_in_init_scope: "tf.init_scope",
    writes_in_init_scope: "tf.init_scope",
    seed_in_the_body: "tf.random.set_seed",
    seed_in_a_merge: TraceOnceError,
    distributed_value_in_a_closure: "a distributed value",
    eager_argument_is_asked_for: "the arguments: eager tensors that differ by replica",
    gradient_of_a_nested_function_with_a_lookup: "",
    operation_of_a_merge_is_waited_for: "",
}


@pytest.mark.parametrize("trace_once", [True, "checked"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_nothing_is_silent(program, trace_once, caplog):
    check(program, DEVICES, trace_once, PROGRAMS[program], caplog)


def test_a_variable_of_a_graph_is_freed_with_the_graph():
    """Also in programs that do not use the option, once a strategy of the process does."""
    MirroredStrategy(DEVICES, trace_once=True)
    with tf.Graph().as_default(), MirroredStrategy(DEVICES).scope():
        variable = weakref.ref(tf.compat.v1.get_variable("weight", [], use_resource=True))
    gc.collect()
    assert variable() is None


def test_a_graph_of_many_runs_looks_at_a_capture_once():
    outer, runs = source.FuncGraph("outer"), [source.FuncGraph("run") for _ in range(1500)]
    seen = []
    for run in runs:
        source.on_capture(outer, run, lambda tensor, run=run: seen.append(run) or tf.constant(1.0))
    with runs[7].as_default():
        inside = tf.constant(2.0)
    with outer.as_default():
        assert (inside + 1.0).graph is outer
    assert seen == [runs[7]]


@pytest.mark.parametrize("trace_once", [False, True, "checked"])
def test_a_plain_variable_that_each_replica_adds_to_is_warned_of(trace_once, caplog):
    strategy = MirroredStrategy(DEVICES, trace_once=trace_once)
    plain = tf.Variable(0.0, name="seen")
    with strategy.scope():
        own = tf.Variable(0.0, name="own", synchronization=ON_READ, aggregation=SUM)
    made = []

    def step(x):
        if not made:
            made.append(tf.Variable(0.0, name="made_inside", synchronization=ON_READ, aggregation=SUM))
        own.assign_add(x)
        made[0].assign_add(x)
        if adds:
            plain.assign_add(x)
        return x

    for adds in (False, True):
        tf.function(lambda x: strategy.run(step, (x,)))(tf.constant(1.0))
        assert ("'seen' is written by more than one replica" in caplog.text) == adds, caplog.text
        assert "'own'" not in caplog.text
        assert "'made_inside'" not in caplog.text
        assert "is traced by itself" not in caplog.text
    assert plain.numpy() == 2.0
