"""Programs in the style of TensorFlow 1: a graph, get_variable, a session."""

import pytest
import tensorflow as tf

pytestmark = [pytest.mark.threads("a graph of TensorFlow 1"), pytest.mark.graphs]

v1 = tf.compat.v1


@pytest.fixture
def graph(strategy):
    with tf.Graph().as_default() as graph:
        yield graph


def session():
    return v1.Session(config=v1.ConfigProto(device_count={"CPU": 8}))


def results(strategy, value):
    return list(strategy.experimental_local_results([value]))


@pytest.mark.usefixtures("graph")
def test_a_run_builds_ops_for_every_replica(strategy, n):
    value = strategy.run(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group * 10)
    with session() as sess:
        found = [sess.run(one[0]) for one in results(strategy, value)]
    assert found == [10 * i for i in range(n)]


@pytest.mark.usefixtures("graph")
def test_get_variable_in_a_run_is_shared(strategy, n):
    def fn():
        v = v1.get_variable("v", initializer=3.0, aggregation=tf.VariableAggregation.SUM)
        i = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return v * (i + 1.0)

    with strategy.scope():
        value = strategy.run(fn)
        initializer = v1.global_variables_initializer()
    assert [v.name for v in v1.global_variables()] == ["v:0"]
    with session() as sess:
        sess.run(initializer)
        found = [sess.run(one[0]) for one in results(strategy, value)]
    assert found == [3.0 * (i + 1) for i in range(n)]


@pytest.mark.usefixtures("graph")
def test_get_variable_takes_the_variable_scope_of_the_caller(strategy):
    with strategy.scope(), v1.variable_scope("outer"):
        strategy.run(lambda: v1.get_variable("v", initializer=1.0) + 0.0)
    assert [v.name for v in v1.global_variables()] == ["outer/v:0"]


@pytest.mark.usefixtures("graph")
def test_reuse_finds_the_variable_again(strategy):
    def fn():
        return v1.get_variable("v", initializer=1.0)

    with strategy.scope(), v1.variable_scope("s", reuse=v1.AUTO_REUSE):
        first = strategy.run(fn)
        assert strategy.run(fn) is first
        assert v1.get_variable("v") is first
    assert len(v1.global_variables()) == 1


@pytest.mark.usefixtures("graph")
def test_a_second_variable_of_the_name_is_refused_without_reuse(strategy):
    with strategy.scope():
        strategy.run(lambda: v1.get_variable("v", initializer=1.0))
        with pytest.raises(ValueError, match="already exists"):
            strategy.run(lambda: v1.get_variable("v", initializer=1.0))


@pytest.mark.usefixtures("graph")
def test_merge_calls_and_reductions_build_ops(strategy, n):
    def fn():
        context = tf.distribute.get_replica_context()
        x = tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0
        return context.all_reduce("sum", x), x

    everywhere, own = strategy.run(fn)
    total = strategy.reduce("SUM", own, axis=None)
    with session() as sess:
        assert [sess.run(one[0]) for one in results(strategy, everywhere)] == [n * (n + 1) / 2] * n
        assert sess.run(total) == n * (n + 1) / 2


@pytest.mark.usefixtures("graph")
def test_a_train_op_trains(strategy, n):
    """The gradient of (w - replica id)^2, summed over replicas, goes to every component."""
    with strategy.scope():
        w = v1.get_variable("w", initializer=0.0, aggregation=tf.VariableAggregation.SUM)

    def fn():
        target = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32) + 1.0
        (gradient,) = tf.gradients((w - target) ** 2, [w])
        return w.assign_sub(0.125 * gradient, read_value=False)

    with strategy.scope():
        train = strategy.experimental_local_results(strategy.run(fn))
        initializer = v1.global_variables_initializer()
    with session() as sess:
        sess.run(initializer)
        sess.run(train)
        found = sess.run([component.read_value() for component in strategy.experimental_local_results(w)])
    assert found == [0.125 * 2 * sum(range(1, n + 1))] * n


@pytest.mark.usefixtures("graph")
def test_placeholders_feed_every_replica(strategy, n):
    x = v1.placeholder(tf.float32, [])
    value = strategy.run(
        lambda x: x * tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group + 1, tf.float32), args=(x,)
    )
    with session() as sess:
        found = [sess.run(one[0], {x: 2.0}) for one in results(strategy, value)]
    assert found == [2.0 * (i + 1) for i in range(n)]


def test_names_and_devices_in_the_graph(strategy, graph):
    strategy.run(lambda: tf.constant(1.0, name="mine"))
    mine = {op.name: op.device for op in graph.get_operations() if op.name.endswith("mine")}
    devices = strategy.extended.worker_devices
    assert mine == {("mine" if i == 0 else f"replica_{i}/mine"): devices[i] for i in range(len(devices))}


def test_a_merge_function_depends_on_what_every_replica_waits_for(strategy, n, graph):
    def fn():
        with tf.control_dependencies([tf.no_op(name="before")]):
            tf.distribute.get_replica_context().merge_call(lambda strategy: tf.no_op(name="merged") and None)

    strategy.run(fn)
    inputs = {op.name for op in graph.get_operation_by_name("merged").control_inputs}
    assert inputs == {"before", *(f"replica_{i}/before" for i in range(1, n))}


def test_control_dependencies_of_a_replica_stay_its_own(strategy, n, graph):
    def fn():
        with tf.control_dependencies([tf.no_op(name="before")]):
            tf.no_op(name="after")

    strategy.run(fn)
    for i in range(n):
        scope = "" if i == 0 else f"replica_{i}/"
        inputs = {op.name for op in graph.get_operation_by_name(f"{scope}after").control_inputs}
        assert inputs == {f"{scope}before"}
