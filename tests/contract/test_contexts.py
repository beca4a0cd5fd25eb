"""What `tf.distribute` says about where one is, and what a replica inherits from the caller of `run`."""

import contextvars

import pytest
import tensorflow as tf

import replica_engine


def where():
    """cross-replica?, a replica context?, a strategy?, and the strategy."""
    return (
        tf.distribute.in_cross_replica_context(),
        tf.distribute.get_replica_context() is not None,
        tf.distribute.has_strategy(),
        tf.distribute.get_strategy(),
    )


def same_everywhere(seen):
    assert len(seen) >= 1
    assert all(one == seen[0] for one in seen)
    return seen[0]


def test_outside_everything_there_is_the_default_strategy(strategy):
    cross_replica, in_replica, has, current = where()
    assert (cross_replica, in_replica, has) == (False, True, False)
    assert current is not strategy
    strategy.run(where)
    assert where() == (cross_replica, in_replica, has, current)


def test_a_scope_is_cross_replica_context(strategy):
    with strategy.scope():
        assert where() == (True, False, True, strategy)
    assert where()[:3] == (False, True, False)


def test_scopes_nest_with_their_own_strategy_only(make_strategy):
    one, other = make_strategy(2), make_strategy(2)
    with one.scope():
        with one.scope():
            assert where() == (True, False, True, one)
        with pytest.raises(RuntimeError, match=r"Mixing different tf\.distribute\.Strategy"), other.scope():
            pass
        assert where() == (True, False, True, one)


def test_a_run_is_replica_context(strategy, run):
    seen = []
    run(lambda: seen.append(where()))
    assert same_everywhere(seen) == (False, True, True, strategy)


def test_a_run_under_a_scope_is_replica_context(strategy, run):
    seen = []
    with strategy.scope():
        run(lambda: seen.append(where()))
        assert where() == (True, False, True, strategy)
    assert same_everywhere(seen) == (False, True, True, strategy)


def test_a_merge_function_is_in_cross_replica_context(strategy, run):
    seen, after = [], []

    def fn():
        tf.distribute.get_replica_context().merge_call(lambda strategy: seen.append(where()))
        after.append(where())

    run(fn)
    assert seen == [(True, False, True, strategy)]
    assert same_everywhere(after) == (False, True, True, strategy)


def test_an_update_is_in_cross_replica_context(strategy, n, run):
    seen = []
    with strategy.scope():
        v = tf.Variable(0.0)

    def update(component):
        seen.append(where())
        component.assign_add(1.0)

    def fn():
        def merge_fn(strategy):
            strategy.extended.update(v, update)

        tf.distribute.get_replica_context().merge_call(merge_fn)

    run(fn)
    assert same_everywhere(seen) == (True, False, True, strategy)
    components = strategy.experimental_local_results(v)
    assert [component.numpy() for component in components] == [1.0] * n


def test_a_context_knows_its_strategy_and_how_many_replicas_there_are(strategy, n, run):
    seen = []

    def fn():
        context = tf.distribute.get_replica_context()
        assert isinstance(context, tf.distribute.ReplicaContext)
        seen.append((context.strategy is strategy, context.num_replicas_in_sync))

    run(fn)
    assert same_everywhere(seen) == (True, n)


@pytest.mark.threads("a context of its own")
def test_the_context_is_this_librarys(strategy, run):
    seen = []
    run(lambda: seen.append(isinstance(tf.distribute.get_replica_context(), replica_engine.ReplicaContext)))
    assert same_everywhere(seen) is True


@pytest.mark.threads("a device of its own")
def test_a_context_knows_its_device(strategy, n, run):
    seen = {}

    def fn():
        context = tf.distribute.get_replica_context()
        seen[int(tf.get_static_value(context.replica_id_in_sync_group))] = context.devices[0][0]

    run(fn)
    devices = strategy.extended.worker_devices
    assert seen == {i: devices[i] for i in range(n)}


def test_the_replica_id_is_a_number_that_tensors_can_use(n, run, local):
    def fn():
        i = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.gather([10, 20, 30, 40], i) + i

    assert local(run(fn)) == [10 * (i + 1) + i for i in range(n)]


def test_outside_a_run_the_default_context_merges_at_once(strategy):
    seen = []
    tf.distribute.get_replica_context().merge_call(lambda current: seen.append(current is tf.distribute.get_strategy()))
    assert seen == [True]
    with strategy.scope():
        assert tf.distribute.get_replica_context() is None


@pytest.mark.threads("a context of its own")
def test_two_runs_in_a_row_have_contexts_of_their_own(strategy, n):
    seen = []
    for _ in range(2):
        strategy.run(lambda: seen.append(tf.distribute.get_replica_context()))
    assert len(set(map(id, seen))) == 2 * n


def test_context_variables_are_inherited(n, run, local):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(42)

    def fn():
        before = variable.get()
        variable.set(before + 1)
        return tf.constant([before, variable.get()])

    assert local(run(fn)) == [[42, 43]] * n
    assert variable.get() == 42


def test_variable_creators_are_inherited(strategy, run):
    seen = []

    def creator(next_creator, **kwargs):
        seen.append(kwargs["name"])
        return next_creator(**kwargs)

    made = []

    def fn():
        if not made:
            made.append(tf.Variable(1.0, name="made"))

    with strategy.scope(), tf.variable_creator_scope(creator):
        run(fn)
    assert "made" in seen


def test_soft_placement_and_device_scopes_apply_in_a_replica(strategy, n, local):
    def fn():
        with tf.device("CPU:7"):
            return tf.add(1, 1).device

    assert [name[-5:] for name in local(strategy.run(fn))] == ["CPU:7"] * n
