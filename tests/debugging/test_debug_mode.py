"""Debug mode: mistakes that raise nothing by themselves, and programs that only look like them."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import DebugError, ReplicaMismatchError

SHARDS = [[1.0, 2.0], [0.0, 3.0]]  # of which the second one has a 0


@pytest.fixture(params=["threads", "compiled"])
def two(request):
    if request.param == "threads":
        return replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])
    return replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture(params=["eager", "function"])
def look(request, two):
    """`look(fn, shards)`: a run in debug mode, in which replica i has `shards[i]`."""

    def look(fn, *shards, reduce=None):
        args = tuple(per_replica(two, each) for each in shards)

        def step(args):
            result = two.run(fn, args=args)
            return result if reduce is None else two.reduce(reduce, result, axis=None)

        with replica_engine.debug():
            return step(args) if request.param == "eager" else tf.function(step)(args)

    return look


@pytest.fixture
def told(caplog):
    """`told()`: what debug mode has warned of."""
    caplog.set_level(logging.WARNING, "replica_engine")
    return lambda: [each.getMessage() for each in caplog.records if "warnings.html#may_be_meant" in each.getMessage()]


def per_replica(two, values):
    return two.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def context():
    return tf.distribute.get_replica_context()


def variable(two, **options):
    with two.scope():
        return tf.Variable([1.0, 2.0], name="w", **options)


def found(look, *args, **options):
    """What debug mode says of a run: without the pages that it names."""
    with pytest.raises(DebugError) as caught:
        look(*args, **options)
    return str(caught.value)


# What is not finite.


def test_the_first_infinity_has_its_op_its_replica_and_its_line(look):
    def step(x):
        y = tf.math.log(x)
        return tf.reduce_sum(y * 2.0)

    said = found(look, step, SHARDS)
    assert "made by Log at" in said
    assert "in step, on replica 1 of 2 (CPU:1), out of finite numbers" in said


def test_an_infinity_in_the_gradient_alone(look, two):
    w = variable(two, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.where(x > 0, tf.math.log(x), 0.0))
        w.assign_sub(context().all_reduce("MEAN", tape.gradient(y, x)))
        return y

    said = found(look, step, SHARDS)
    assert "made by Reciprocal" in said
    assert "replica 1 of 2" in said


def test_infinities_that_are_masked_and_those_that_were_given(look, two, told):
    w = variable(two, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        kept = x > 0
        safe = tf.where(kept, tf.math.log(tf.where(kept, x, 1.0)), 0.0)
        scores = tf.nn.softmax(tf.where(kept, x, -np.inf))
        masked = tf.where(kept, tf.math.log(x), 0.0)
        w.assign_add(context().all_reduce("SUM", safe + scores))
        return tf.reduce_sum(masked), tf.constant(np.inf)

    look(step, SHARDS)
    assert not told()


# Copies of variables.


def test_copies_that_become_unequal(two, look):
    w = variable(two)
    if two.extended.backend.compiles:

        def step(x):
            w.assign_sub(x)
            return x
    else:

        def step(x):
            def merge(two, x):
                two.extended.update(w, lambda copy, x: copy.assign_sub(x), args=(x,))

            context().merge_call(merge, args=(x,))
            return x

    said = found(look, step, SHARDS)
    assert "copies of the variable 'w' have become unequal in `step`: replica 1 of 2 (CPU:1)" in said
    assert "test_debug_mode.py:" in said


def test_copies_that_an_update_outside_of_runs_made_unequal(two, look):
    w = variable(two)
    two.extended.update(w, lambda copy, x: copy.assign_sub(x), args=(per_replica(two, SHARDS),))
    assert "This step has not written it" in found(look, lambda x: tf.reduce_sum(w * x), SHARDS)


def test_variables_that_stay_equal_or_are_of_each_replica(look, two, told):
    w = variable(two)
    own = variable(two, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    if two.extended.backend.compiles:

        def step(x):
            w.assign_sub(context().all_reduce("MEAN", x))
            own.assign_add(x)
    else:

        def step(x):
            def merge(two, x):
                mean = two.extended.reduce_to("MEAN", x, w)
                two.extended.update(w, lambda copy, x: copy.assign_sub(x), args=(mean,))

            context().merge_call(merge, args=(x,))
            own.assign_add(x)

    look(step, SHARDS)
    assert not told()


# Means, sums and tapes.


def test_a_mean_in_the_step_of_shards_of_unequal_size(look, two):
    step, shards = lambda x: context().all_reduce("MEAN", tf.reduce_mean(x)), [[1.0, 2.0], [3.0, 4.0, 5.0]]
    if two.extended.backend.compiles:  # a compiled step that reduces refuses such shards always
        with pytest.raises(ReplicaMismatchError):
            look(step, shards)
        return
    said = found(look, step, shards)
    assert "shards of 2, 3 samples, and a mean over replicas is taken at" in said
    assert "divided by the 5 samples" in said


def test_a_mean_after_the_step_of_shards_of_unequal_size(look):
    shards = [[1.0, 2.0], [3.0, 4.0, 5.0]]
    assert "shards of 2, 3 samples" in found(look, tf.reduce_mean, shards, reduce="MEAN")
    assert float(look(tf.reduce_sum, shards, reduce="SUM")) == 15.0
    assert float(look(tf.reduce_mean, [[1.0, 2.0], [3.0, 4.0]], reduce="MEAN")) == 2.5


def test_what_is_summed_twice(look, told):
    def step(x):
        gradient = context().all_reduce("SUM", x) * 0.1
        return context().all_reduce("SUM", gradient)

    assert "it comes out 2 times as large" in found(look, step, SHARDS)


def test_a_gradient_that_the_optimizer_sums_again(look, two, told):
    with two.scope():
        w = keras.Variable([1.0, 2.0], name="w")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([w])

    def step(x, twice=True):
        optimizer.apply([context().all_reduce("SUM", x) if twice else x], [w])

    assert "Optimizers of Keras sum the gradients" in found(look, step, SHARDS)
    look(lambda x: step(x, twice=False), SHARDS)
    assert not told()


def test_sums_of_what_is_the_same_on_all_replicas_are_meant(look, told):
    def step(x):
        count = context().all_reduce("SUM", tf.cast(tf.size(x), tf.float32))
        mean = context().all_reduce("SUM", x) / count
        variance = context().all_reduce("SUM", (x - mean) ** 2) / count  # as of a batch normalization over replicas
        return context().all_reduce("SUM", tf.reduce_sum(x * mean)), context().all_reduce("MEAN", count), variance

    look(step, SHARDS)
    assert not told()


def test_a_sum_that_is_divided_by_the_number_of_replicas_before_it_is_summed_again(look, told):
    def step(x):
        gradient, _ = tf.clip_by_global_norm([context().all_reduce("SUM", x)], 1.0)
        return context().all_reduce("SUM", gradient[0] / two_replicas)

    two_replicas = 2
    look(step, SHARDS)
    look(lambda x: context().all_reduce("SUM", context().all_reduce("MEAN", x) * 0.5), SHARDS)
    assert not told()


def test_a_reduction_whose_result_nobody_uses(look, told):
    def step(x):
        context().all_reduce("MEAN", x)
        return x

    look(step, SHARDS)
    (said,) = told()
    assert "in step is not used" in said
    assert 'gradient = context.all_reduce("MEAN", gradient)' in said


def test_a_tape_around_a_run(look, two):
    w = variable(two)

    def step(x):
        return tf.reduce_sum(w * x)

    def train(x):
        with tf.GradientTape() as tape:
            loss = two.run(step, args=(per_replica(two, SHARDS),))
        return tape.gradient(loss, w)

    with replica_engine.debug(), pytest.raises(DebugError, match=r"open around strategy.run of `step` at .*in train"):
        train(SHARDS)


# Batches and random numbers.


def test_a_batch_that_all_replicas_have(look, two, told):
    w = variable(two, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        w.assign_sub(context().all_reduce("MEAN", x))

    look(step, [SHARDS[0]] * 2)
    (said,) = told()
    assert "All 2 replicas of `step`, run at " in said
    assert "in step, have the same batch" in said


def test_a_batch_of_which_each_replica_takes_its_rows(look, two, told):
    w = variable(two, aggregation=tf.VariableAggregation.MEAN)

    def step(x):
        w.assign_sub(context().all_reduce("MEAN", x[context().replica_id_in_sync_group]))

    look(step, [SHARDS] * 2)
    assert not told()


def test_fit_deals_the_batch_out_in_its_step(two, told):
    with two.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with replica_engine.debug():
        model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0)
    assert not told()


def test_a_batch_for_all_replicas_of_a_step_that_writes_nothing(look, told):
    look(tf.reduce_sum, [SHARDS[0]] * 2)
    assert not told()


def dropped(x, seed):
    return tf.where(tf.random.stateless_uniform([32], seed) >= 0.5, tf.reduce_sum(x), 0.0)


def test_random_masks_that_are_the_same(look, told):
    look(lambda x: dropped(x, [1, 2]), SHARDS)
    (said,) = told()
    assert "StatelessRandomUniform" in said
    assert "draws the same numbers on all 2 replicas" in said


def test_random_masks_of_each_replica(look, told):
    look(lambda x: dropped(x, tf.stack([1, context().replica_id_in_sync_group])), SHARDS)
    look(lambda x: tf.nn.dropout(tf.ones([32]) * x[0], 0.5), SHARDS)
    assert not told()


# When it is on.


def test_it_is_off_after_the_block(two):
    def step(x):
        return tf.math.log(x)

    args = (per_replica(two, SHARDS),)
    two.run(step, args=args)
    for _ in range(2):
        with replica_engine.debug(), pytest.raises(DebugError):
            two.run(step, args=args)
        two.run(step, args=args)


def test_numbers_are_the_same(two):
    x = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")

    def trained():
        with two.scope():
            keras.utils.set_random_seed(0)
            model = keras.Sequential(
                [
                    keras.Input([4]),
                    keras.layers.Dense(5, "relu"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
        history = model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=2, verbose=0).history
        return history, [each.numpy().tolist() for each in model.weights]

    plain = trained()
    with replica_engine.debug():
        debugged = trained()
    # Beside more ops, XLA and TensorFlow's optimizer of graphs put others together, which rounds in another order.
    tf.nest.map_structure(lambda *each: np.testing.assert_allclose(*each, rtol=1e-5, atol=1e-5), plain, debugged)


def test_fit_names_the_first_nan(two):
    x = np.ones((16, 4), "float32")
    x[12] = 0.0  # of the second replica
    with two.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Lambda(tf.math.log), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with replica_engine.debug(), pytest.raises(DebugError, match=r"is made by Log at .*on replica 1 of 2"):
        model.fit(x, x[:, :1], batch_size=16, shuffle=False, verbose=0)


# Right programs with tensors that are not there at the end of the step, and odd structures.


def test_reductions_in_branches_loops_and_nested_functions(look, told):
    inner = tf.function(lambda x: context().all_reduce("SUM", x))

    def step(x):
        taken = tf.cond(tf.constant(True), lambda: context().all_reduce("SUM", x), lambda: x)
        _, looped = tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, context().all_reduce("MEAN", y + 1.0)), (tf.constant(0), x)
        )
        return taken, looped, inner(x)

    look(step, SHARDS)
    assert not told()


def test_a_value_that_one_replica_passes_on_to_all(look, told):
    def step(x):
        total = context().all_reduce("SUM", x)
        is_first = tf.cast(tf.equal(context().replica_id_in_sync_group, 0), tf.float32)
        return context().all_reduce("SUM", total * is_first)

    look(step, SHARDS)
    assert not told()


def test_what_the_step_was_given_may_not_be_finite(look, told):
    look(lambda x: tf.where(x > 2.0, x, -np.inf) * x, [[1.0, np.inf], [2.0, 3.0]])
    assert not told()


def test_two_variables_of_one_name(two, look):
    own, shared = variable(two), variable(two, aggregation=tf.VariableAggregation.MEAN)
    two.extended.update(own, lambda copy, x: copy.assign_sub(x), args=(per_replica(two, SHARDS),))

    def step(x):
        shared.assign_add(context().all_reduce("SUM", x))
        return own * x

    assert "copies of the variable 'w' have become unequal" in found(look, step, SHARDS)


def test_structures_with_keys_of_several_types(two):
    with replica_engine.debug():
        result = two.run(lambda d: {"a": d[1], 2: d["b"]}, args=({1: tf.constant(1.0), "b": tf.constant([2.0])},))
    assert float(two.experimental_local_results(result["a"])[0]) == 1.0


def test_values_from_outside_of_a_function(two):
    values = per_replica(two, SHARDS)
    step = tf.function(lambda: two.run(lambda x: context().all_reduce("SUM", x), args=(values,)))
    with replica_engine.debug():
        assert two.experimental_local_results(step())[0].numpy().tolist() == [1.0, 5.0]
