"""`tf.function` around a run, inside it, and both: one trace a signature, options kept, AutoGraph at work."""

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index

pytestmark = pytest.mark.replicas(2)

FORMS = ("around", "inside", "both")


@pytest.fixture(params=FORMS)
def compiled(request, strategy):
    """`compiled(fn, **options)`: a step that runs `fn` in one of the forms, with tf.function options on it."""

    def compiled(fn, **options):
        if request.param == "around":
            return tf.function(lambda *args: strategy.run(fn, args=args), **options)
        inner = tf.function(fn, **options)
        if request.param == "inside":
            return lambda *args: strategy.run(inner, args=args)
        return tf.function(lambda *args: strategy.run(inner, args=args), **options)

    return compiled


@pytest.mark.graphs
def test_a_function_is_traced_once_for_a_signature(n, compiled, local, traces):
    calls = []

    def fn(x):
        calls.append(index())
        return x + 1

    step = compiled(fn)
    assert local(step(tf.constant(1))) == [2] * n
    assert calls == ([None] if traces < n else list(range(n)))  # once a replica, or once for all
    for k in range(3):
        assert local(step(tf.constant(k))) == [k + 1] * n
    assert len(calls) == traces
    assert local(step(tf.constant([1.0]))) == [[2.0]] * n
    assert len(calls) == 2 * traces
    step(tf.constant(5))
    assert len(calls) == 2 * traces


@pytest.mark.graphs
def test_traces_count_merge_functions_once(strategy, n, compiled, local):
    merges = []

    def merge_fn(strategy, x):
        merges.append(1)
        return tf.add_n(strategy.experimental_local_results(x))

    step = compiled(lambda x: context().merge_call(merge_fn, args=(x + 0,)))
    for k in range(3):
        assert local(step(tf.constant(k))) == [n * k] * n
    assert merges == [1]


@pytest.mark.graphs
def test_distributed_arguments_do_not_retrace(n, compiled, local, per_replica, traces):
    calls = []

    def fn(x):
        calls.append(1)
        return 2 * x

    step = compiled(fn)
    for k in range(3):
        assert local(step(per_replica(lambda i, k=k: i + k))) == [2 * (i + k) for i in range(n)]
    assert len(calls) == traces


def test_one_function_serves_several_strategies(make_strategy):
    fn = tf.function(lambda x: context().all_reduce("sum", x))
    strategies = [make_strategy(size) for size in (1, 2, 4)]
    for _ in range(2):
        totals = [s.experimental_local_results(s.run(fn, args=(tf.constant(1.0),)))[0] for s in strategies]
        assert [float(total) for total in totals] == [1.0, 2.0, 4.0]


def test_a_function_works_alone_after_a_run(strategy, n, local):
    fn = tf.function(lambda x: x * 3)
    assert local(strategy.run(fn, args=(tf.constant(2),))) == [6] * n
    assert int(fn(tf.constant(2))) == 6
    assert local(strategy.run(fn, args=(tf.constant(3),))) == [9] * n


@pytest.mark.graphs
@pytest.mark.parametrize("kept", ["input_signature", "reduce_retracing"])
def test_options_are_kept(n, compiled, local, traces, kept):
    calls = []

    def fn(x):
        calls.append(1)
        return tf.reduce_sum(x)

    step = compiled(fn, **{kept: [tf.TensorSpec([None], tf.float32)] if kept == "input_signature" else True})
    for size in (1, 2, 3, 4, 5):
        assert local(step(tf.ones([size]))) == [size] * n
    if kept == "reduce_retracing":
        assert len(calls) == 2 * traces  # the second trace takes any length
        return
    assert len(calls) == traces
    with pytest.raises((TypeError, ValueError)):
        step(tf.constant("text"))


@pytest.mark.graphs
def test_without_autograph_a_tensor_is_no_condition(compiled):
    def fn(x):
        if x > 0:
            return x
        return -x

    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        compiled(fn, autograph=False)(tf.constant(1.0))


@pytest.mark.graphs
def test_autograph_converts_conditions_and_loops(n, compiled, local, per_replica):
    def fn(x):
        total = tf.constant(0)
        for k in tf.range(x):
            if k % 2 == 0:
                total += k
        while total > 100:
            total -= 100
        return total

    expected = [sum(range(0, 10 * (i + 1), 2)) for i in range(n)]
    expected = [total - 100 * ((total - 1) // 100) if total > 100 else total for total in expected]
    assert local(compiled(fn)(per_replica(lambda i: 10 * (i + 1)))) == expected


def sign(x):
    if x > 0:
        return 1
    return -1


@pytest.mark.graphs
def test_autograph_converts_what_the_function_calls(n, compiled, local, per_replica):
    result = compiled(lambda x: sign(x) * 10)(per_replica(lambda i: i - 1))
    assert local(result) == [-10 if i < 2 else 10 for i in range(n)]


@pytest.mark.graphs
def test_do_not_convert_is_respected(compiled):
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        compiled(tf.autograph.experimental.do_not_convert(sign))(tf.constant(1))


@pytest.mark.threads("Python code of each replica")
def test_autograph_leaves_an_eager_run_alone(strategy):
    """Else `if` on a tensor would not see Python values."""
    seen = []

    def fn(x):
        if x > 0:
            seen.append("positive")

    strategy.run(fn, args=(tf.constant(1),))
    assert seen == ["positive"] * strategy.num_replicas_in_sync


@pytest.mark.graphs
def test_a_merge_function_is_not_run_in_python_after_tracing(strategy, local):
    """All replicas' ops are in one graph: the side effects of Python happen once, the values are computed each time."""
    v = tf.Variable(0.0)
    python = []

    def merge_fn(strategy):
        python.append(1)
        return v.assign_add(1.0)

    step = tf.function(lambda: strategy.run(lambda: context().merge_call(merge_fn) + 0.0))
    for k in (1, 2, 3):
        assert local(step()) == [float(k)] * strategy.num_replicas_in_sync
    assert python == [1]


def test_a_function_inside_a_replica_runs_on_its_own(n, run, local, per_replica):
    calls = []

    @tf.function
    def double(x):
        calls.append(1)
        return 2 * x

    assert local(run(lambda x: double(x) + 1, args=(per_replica(lambda i: i),))) == [2 * i + 1 for i in range(n)]
    assert 1 <= len(calls) <= n  # TensorFlow traces again for another device


def graph_of(strategy, fn, scope=None):
    @tf.function
    def step():
        if scope is None:
            return strategy.run(fn)
        with tf.name_scope(scope):
            return strategy.run(fn)

    return step.get_concrete_function().graph


def names(graph, suffix):
    return {op.name for op in graph.get_operations() if op.name.split("/")[-1] == suffix}


@pytest.mark.threads("ops of each replica")
def test_each_replica_has_a_name_scope(strategy, n):
    graph = graph_of(strategy, lambda: tf.constant(1.0, name="mine"))
    assert names(graph, "mine") == {"mine", *(f"replica_{i}/mine" for i in range(1, n))}


@pytest.mark.threads("ops in the graph")
def test_name_scopes_continue_the_callers(strategy, n):
    """A merge function is in that of the first replica."""

    def fn():
        with tf.name_scope("inner"):
            context().merge_call(lambda strategy: tf.constant(1.0, name="merged"))
            return tf.constant(1.0, name="mine")

    graph = graph_of(strategy, fn, scope="outer")
    assert names(graph, "mine") == {"outer/inner/mine", *(f"outer/replica_{i}/inner/mine" for i in range(1, n))}
    assert names(graph, "merged") == {"outer/inner/merged"}


@pytest.mark.threads("ops of each replica")
def test_replicas_run_in_one_graph_on_their_devices(strategy):
    graph = graph_of(strategy, lambda: tf.random.uniform([], name="mine"))
    devices = {op.device for op in graph.get_operations() if op.type == "RandomUniform"}
    assert devices == set(strategy.extended.worker_devices)


@pytest.mark.graphs
def test_side_effects_in_replicas_happen_in_a_function(strategy, n):
    """A run whose result nobody uses still assigns."""
    with strategy.scope():
        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def step():
        strategy.run(lambda: v.assign_add(tf.constant(1.0)))
        strategy.run(lambda: v.assign(v * 2.0))

    step()
    assert float(v.numpy()) == 2.0 * n * n  # 1 a replica makes n; each assigns 2 n, summed


@pytest.mark.graphs
@pytest.mark.threads("ops in the graph")
def test_a_merge_function_depends_on_the_control_inputs_of_every_replica(strategy):
    def fn():
        with tf.control_dependencies([tf.constant(1.0, name="before")]):
            return context().merge_call(lambda strategy: tf.constant(1.0, name="merged"))

    graph = graph_of(strategy, fn)
    inputs = {op.name for op in graph.get_operation_by_name("merged").control_inputs}
    assert {f"replica_{i}/before" for i in range(1, strategy.num_replicas_in_sync)} | {"before"} <= inputs


@pytest.mark.graphs
def test_runs_in_a_loop_inside_a_function(strategy, n):
    @tf.function
    def steps(k):
        total = tf.constant(0)
        for _ in tf.range(k):
            total += strategy.reduce("SUM", strategy.run(lambda: context().replica_id_in_sync_group + 1), axis=None)
        return total

    assert int(steps(tf.constant(5))) == 5 * n * (n + 1) // 2


def test_a_method_of_a_class_keeps_its_object(strategy, n, local):
    class Model:
        def __init__(self, factor):
            self.factor = factor

        @tf.function
        def step(self, x):
            return x * self.factor

    first, second = Model(2), Model(3)
    assert local(strategy.run(first.step, args=(tf.constant(1),))) == [2] * n
    assert local(strategy.run(second.step, args=(tf.constant(1),))) == [3] * n
