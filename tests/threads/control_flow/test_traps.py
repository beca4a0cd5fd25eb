"""What goes wrong with operators that all replicas enter if nobody looks after it."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.on_mirrored import context, index, locally, numbered, run, stepping, total

from replica_engine import MirroredStrategy
from replica_engine.errors import MergeCallGraphError

OPERATORS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")


def operators(step, *args):
    """The names of the operators in a traced step, those inside others included."""
    graph = step.get_concrete_function(*args).graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return sorted(node.op.removeprefix("Stateless") for node in nodes if node.op in OPERATORS)


# TensorFlow's graph optimizer.


@pytest.mark.parametrize("size", [2, 4])
def test_one_tensor_that_all_replicas_reduce_in_a_branch(size):
    """TensorFlow's graph optimizer makes an empty tensor of a sum of identities of one tensor on several devices."""
    strategy = MirroredStrategy(DEVICES[:size])

    def body(x, yes):
        once = tf.cond(tf.reduce_sum(x) > 0.0, lambda: total(x), lambda: x)
        again = tf.cond(yes, lambda: total(x * 1.0) + x, lambda: x)
        return once, again, tf.cond(yes, lambda: total(tf.ones([])) * x, lambda: x)

    step = tf.function(lambda x, yes: strategy.run(body, args=(x, yes)))
    for own in locally(strategy, step(tf.ones([2]), tf.constant(True))):
        assert own == ([size] * 2, [size + 1.0] * 2, [size] * 2)

    reduced = tf.function(lambda x, yes: strategy.reduce("SUM", strategy.run(body, args=(x, yes)), axis=None))
    assert reduced(tf.ones([2]), tf.constant(True))[0].numpy().tolist() == [size * size] * 2


# Users' handlers.


def test_a_bare_except_in_a_branch(mirrored):
    """It does not keep the operator from becoming a sync point."""
    seen = []

    def body(x):
        def branch():
            try:
                return total(x)
            except:  # noqa: E722
                seen.append(index())
                return x

        return tf.cond(x > 0.0, branch, lambda: x)

    assert run(mirrored, body, numbered(mirrored)) == [3.0, 3.0]
    assert seen == [0]  # the attempt


def test_except_exception_sees_nothing(mirrored):
    def body(x):
        def branch():
            try:
                return total(x)
            except Exception as error:
                raise AssertionError from error

        return tf.cond(x > 0.0, branch, lambda: x)

    assert run(mirrored, body, numbered(mirrored)) == [3.0, 3.0]


@pytest.mark.parametrize("form", ["graph", "eager"])
def test_a_bare_except_in_a_nested_function_is_told(mirrored, form):
    @tf.function
    def inner(x):
        try:
            return total(x)
        except:  # noqa: E722
            return x

    with pytest.raises(MergeCallGraphError, match="caught the exception"):
        run(mirrored, lambda x: inner(x), numbered(mirrored), form=form)
    assert run(mirrored, lambda x: total(x), numbered(mirrored), form=form) == [3.0, 3.0]


# Variables.


def test_variables_made_in_an_attempt_have_values(mirrored):
    made = {}

    def body(x):
        @tf.function
        def inner(x):
            if not made:
                made["scale"] = tf.Variable(4.0, trainable=False)
            return total(x) * made["scale"]

        return inner(x)

    assert run(mirrored, body, numbered(mirrored)) == [12.0, 12.0]
    assert made["scale"].numpy() == 4.0
    made.clear()
    assert run(mirrored, body, numbered(mirrored), form="eager") == [12.0, 12.0]


# Decisions.


def test_the_same_line_with_and_without_merges(mirrored):
    def body(x):
        for merges in (True, False, False, True, False):
            x = tf.cond(x > 0.0, lambda x=x, merges=merges: total(x) if merges else x + 1.0, lambda x=x: x)
        return x

    step = stepping(mirrored, body)
    assert locally(mirrored, step(numbered(mirrored))) == [11.0, 11.0]
    assert operators(step, numbered(mirrored)).count("If") == 2 + 3 * 2


def test_operators_without_merges_stay_each_replicas_own(mirrored):
    """Replicas may differ in their number, their kind and which way they go."""

    def body(x):
        if index() == 0:
            x = tf.cond(x > 5.0, lambda: x * 100.0, lambda: x)
            x = tf.while_loop(lambda x: x < 3.0, lambda x: [x + 1.0], [x])[0]
        else:
            x = tf.switch_case(tf.cast(x, tf.int32), [lambda: x, lambda: x, lambda: x + 10.0])
        y = tf.cond(x > 5.0, lambda: x + 1.0, lambda: x - 1.0)
        return tf.cond(total(x) > 0.0, lambda: total(y), lambda: y)

    step = stepping(mirrored, body)
    assert locally(mirrored, step(numbered(mirrored))) == [15.0, 15.0]
    assert operators(step, numbered(mirrored)) == ["Case", "If", "If", "If", "If", "While"]


def test_replicas_may_differ_inside_a_joint_branch(mirrored):
    def body(x):
        def branch():
            y = x
            if index() == 1:
                y = tf.cond(x > 1.5, lambda: x * 10.0, lambda: x)
            return total(y)

        return tf.cond(total(x) > 0.0, branch, lambda: x)

    assert run(mirrored, body, numbered(mirrored)) == [21.0, 21.0]


def test_an_operator_that_is_joint_now_and_then(mirrored):
    merges = [True]

    def body(x):
        x = tf.cond(x > 0.0, lambda: total(x) if merges[0] else x * 10.0, lambda: x)
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + 1.0 if merges[0] else total(x)), (0, x))[1]

    for merging, expected in ((True, [5.0, 5.0]), (True, [5.0, 5.0]), (False, [60.0, 60.0]), (True, [5.0, 5.0])):
        merges[0] = merging
        assert run(mirrored, body, numbered(mirrored)) == expected


def test_what_was_traced_before_does_not_change_a_graph(mirrored):
    """Otherwise the last bits of a training depend on what the process has trained before."""

    def ops(merges):
        def body(x):
            x = tf.cond(x > 0.0, lambda: total(x) if merges else x * 10.0, lambda: x)
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, total(x) if merges else x + 1.0), (0, x))[1]

        step = tf.function(lambda x: mirrored.run(body, args=(x,)))
        graph = step.get_concrete_function(numbered(mirrored)).graph
        return [(op.type, op.name, [each.name for each in op.inputs]) for op in graph.get_operations()]

    before, _, after = ops(False), ops(True), ops(False)
    assert before == after


# Costs: calls of the Python functions.


def test_nesting_costs_one_aborted_pass_for_each_level(mirrored):
    calls = {"outer": [], "inner": [], "loop": [], "else": []}

    def body(x):
        def called(name, value):
            calls[name].append(index())
            return value

        def inner():
            called("inner", x)
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, called("loop", total(x))), (0, x))[1]

        def outer():
            called("outer", x)
            return tf.cond(x > -1.0, inner, lambda: called("else", x))

        return tf.cond(x > 0.0, outer, lambda: called("else", x))

    results = {}
    for attempt in range(2):
        results[attempt] = run(mirrored, body, numbered(mirrored))
        counted = {name: [each.count(index) for index in (0, 1)] for name, each in calls.items()}
        assert counted == {"outer": [2, 1], "inner": [3, 1], "loop": [1, 1], "else": [2, 2]}
        for each in calls.values():
            each.clear()
    assert results[0] == results[1] == [6.0, 6.0]


def test_autographs_trial_of_a_loop_is_not_attempted_again(mirrored):
    calls = []

    def body(x):
        for _ in tf.range(2):
            calls.append(index())
            last = total(x)
            x = last
        return last

    assert run(mirrored, body, numbered(mirrored)) == [6.0, 6.0]
    assert calls.count(0) <= 4
    assert calls.count(1) == 2  # AutoGraph's trial, and the loop


# Gradients.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_gradient_is_counted_once(size):
    strategy = MirroredStrategy(DEVICES[:size])
    with strategy.scope():
        weight = tf.Variable(3.0)

    def body(x, cond):
        with tf.GradientTape() as tape:
            y = x * weight
            z = cond(total(1.0) > 0.0, lambda: total(y) * y, lambda: y)
            loss = cond(total(1.0) > 0.0, lambda: total(z) + z * weight, lambda: z)
        return tape.gradient(loss, weight)

    results = [
        run(strategy, lambda x, each=each: body(x, each), numbered(strategy))
        for each in (tf.cond, lambda condition, yes, no: yes())
    ]
    np.testing.assert_allclose(*results, rtol=1e-6)


# Memory.


def _cond(x, weight):
    return tf.cond(weight > 0.0, lambda: total(x * weight), lambda: x)


def _loop(x, weight):
    return tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, total(v * weight)), (0, x))[1]


def _taped(x, weight):
    with tf.GradientTape() as tape:
        y = _loop(x, weight)
    return tape.gradient(y, weight)


def _nested(x, weight):
    return tf.function(lambda x: total(x * weight))(x)


def _failing(x, weight):
    def branch():
        total(x)
        raise KeyError

    return tf.cond(weight > 0.0, branch, lambda: x)


@pytest.mark.parametrize("form", ["graph", "eager"])
@pytest.mark.parametrize("body", [_cond, _loop, _taped, _nested, _failing])
def test_strategies_and_graphs_are_freed(body, form):
    graphs = []

    def used():
        strategy = MirroredStrategy(DEVICES[:2])
        with strategy.scope():
            weight = tf.Variable(2.0)

        def of_replica(x):
            y = body(x, weight) if form == "graph" else tf.function(body)(x, weight)
            graphs.append(weakref.ref(y.graph) if form == "graph" else lambda: None)
            return y

        try:
            run(strategy, of_replica, numbered(strategy), form=form)
        except KeyError:
            assert body is _failing
        return weakref.ref(strategy)

    strategy = used()
    tf.compat.v1.reset_default_graph()
    for _ in range(3):
        gc.collect()
    assert strategy() is None
    assert [graph() for graph in graphs] == [None] * len(graphs)


def test_the_context_is_the_same_inside(mirrored):
    def body(x):
        outer = context()

        def branch():
            assert context() is outer
            return outer.all_reduce("SUM", x) + tf.cast(context().replica_id_in_sync_group, tf.float32)

        return tf.cond(x > 0.0, branch, lambda: x)

    assert run(mirrored, body, numbered(mirrored)) == [3.0, 4.0]


def test_random_numbers_differ_in_a_joint_branch(mirrored):
    first, second = run(
        mirrored,
        lambda x: tf.cond(x > 0.0, lambda: total(x) * 0.0 + tf.random.normal([]), lambda: x),
        numbered(mirrored),
    )
    assert first != second


def test_ops_are_on_the_devices_of_their_replicas(mirrored):
    def body(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, v: (i + 1, tf.sin(v) + total(v)), (0, x))[1]

    graph = stepping(mirrored, body).get_concrete_function(numbered(mirrored)).graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    assert sorted(node.device[-5:] for node in nodes if node.op == "Sin") == ["CPU:0", "CPU:1"]


def test_results_that_are_no_tensors(mirrored):
    """None, IndexedSlices, Python numbers, operations, and no result at all."""

    def body(x):
        def yes():
            return {"nothing": None, "slices": tf.IndexedSlices(total(x[tf.newaxis]), tf.constant([0])), "number": 3}

        def no():
            return {"nothing": None, "slices": tf.IndexedSlices(x[tf.newaxis], tf.constant([0])), "number": 4}

        made = tf.cond(x > 0.0, yes, no)
        assert made["nothing"] is None
        tf.cond(x > 0.0, lambda: tf.group(total(x)), lambda: tf.no_op())
        assert tf.cond(x > 0.0, lambda: (total(x), None)[1], lambda: None) is None
        return made["slices"].values[0] + tf.cast(made["number"], tf.float32)

    assert run(mirrored, body, numbered(mirrored)) == [6.0, 6.0]


def test_a_saved_model(mirrored, tmp_path):
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([2])])
        def step(self, x):
            def body(x):
                return tf.cond(tf.reduce_sum(x) > 0.0, lambda: total(x), lambda: x)

            return mirrored.reduce("SUM", mirrored.run(body, args=(x,)), axis=None)

    module = Module()
    tf.saved_model.save(module, str(tmp_path))
    for each in (module, tf.saved_model.load(str(tmp_path))):
        assert each.step(tf.ones([2])).numpy().tolist() == [4.0, 4.0]
