"""`check_parity` of training steps of one's own, on both strategies."""

import contextlib
import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy
from replica_engine.errors import ParityArgumentError
from replica_engine.keras import CrossReplicaOptimizer
from replica_engine.testing import check_parity

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("float32")
Y = X @ np.float32([[1.0], [2.0], [3.0]])


def all_reduce(how, values):
    return tf.distribute.get_replica_context().all_reduce(how, values)


@pytest.fixture
def linear():
    """`linear(how)`: a step of a linear model, whose gradients are brought together so; and its two variables."""

    def linear(how):
        w, b = tf.Variable(tf.ones([3, 1]), name="w"), tf.Variable([0.5], name="b")

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w + b - y) ** 2)
            gradients = tape.gradient(loss, [w, b])
            if how:
                gradients = all_reduce(how, gradients)
            w.assign_sub(0.1 * gradients[0])
            b.assign_sub(0.1 * gradients[1])
            return loss

        return step, [w, b]

    return linear


def kinds_of(report):
    return {cause.kind for cause in report.causes}


def test_means_over_equal_shares_are_ok_and_nothing_has_changed(linear):
    step, variables = linear("mean")
    report = check_parity(step, (X, Y), variables, replicas=2, steps=3, batch_size=8)
    assert report.ok, str(report)
    assert report.batches == (8, 8, 8)
    assert {(row.kind, row.count) for row in report.compared} == {("result", 3), ("weight", 6)}
    assert "uneven=True" in report.left_out["batches of uneven shares"]
    assert [variable.numpy().tolist() for variable in variables] == [[[1], [1], [1]], [0.5]]
    step(X, Y)  # it uses its own variables again
    assert variables[1].numpy() != 0.5


def test_means_over_unequal_shares_are_not(linear):
    step, variables = linear("mean")
    report = check_parity(tf.function(step), (X[:23], Y[:23]), variables, steps=3, batch_size=8)
    assert report.batches == (8, 8, 7)
    assert {difference.step for difference in report.differences} == {3}
    assert {difference.strategy for difference in report.differences} == {"MirroredStrategy"}
    assert kinds_of(report) == {"unequal shares"}
    assert not any(name.startswith("Mirrored") for name in report.left_out)
    assert check_parity(step, (X[:23], Y[:23]), variables, steps=3, batch_size=8, uneven=False).ok


@pytest.mark.parametrize(("how", "cause"), [("sum", "scaled by replicas"), (None, "not combined")])
def test_gradients_that_are_brought_together_wrongly_are_named(linear, how, cause):
    step, variables = linear(how)
    report = check_parity(step, (X, Y), dict(zip("wb", variables, strict=True)), steps=2, batch_size=8)
    assert {each.name for each in report.differences if each.kind == "weight"} == {"w", "b"}
    assert all(each.kind == "weight" and each.name == "w" for each in report.first.values())
    assert kinds_of(report) == {cause}
    assert {each.name for each in report.causes} == {"w"}
    assert all_reduce.__name__ in str(report)


def test_variables_that_are_made_for_each_strategy_and_weights_of_rows():
    """Random initial values, an optimizer that builds itself, predictions in the order of the batch."""

    def make():
        weights = tf.Variable(tf.random.normal([3, 1]))
        return {"w": weights, "optimizer": CrossReplicaOptimizer(keras.optimizers.Adam(0.1), "sum")}

    def step(made, x, y, weights):
        with tf.GradientTape() as tape:
            outputs = x @ made["w"]
            loss = tf.reduce_sum(tf.reduce_sum((outputs - y) ** 2, axis=1) * weights)
        gradient = tape.gradient(loss, made["w"])
        made["optimizer"].apply([gradient], [made["w"]])
        return {"loss": loss, "gradient": gradient, "outputs": outputs}

    report = check_parity(step, (X, Y), make, steps=3, batch_size=8)
    assert report.ok, str(report)
    assert report.batches == (8, 8, 7)
    assert {row.kind: row.count for row in report.compared}.items() >= {"loss": 3, "gradient": 3, "result": 3}.items()


def test_a_model_and_an_optimizer_that_the_step_closes_over():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), "mean")
    before = model.get_weights()

    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    def step(x, y):
        loss, gradients = gradients_of(x, y)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    report = check_parity(step, (X, Y), model.trainable_variables, steps=2, batch_size=8)
    assert report.ok, str(report)
    assert not optimizer.built
    assert not optimizer.inner_optimizer.built
    assert all(np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))
    step(X, Y)
    assert optimizer.built


@pytest.fixture
def dense():
    """`dense(optimizer)`: a step of a model of one layer, which takes weights of rows; and its model."""

    def dense(optimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])

        def step(x, y, weights):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.reduce_mean((model(x) - y) ** 2, axis=1) * weights)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return step, model

    return dense


def adam():
    return keras.optimizers.Adam(0.1, epsilon=1.0)  # a large epsilon: rounding is not amplified


@pytest.mark.parametrize(
    "make", [lambda: keras.optimizers.SGD(0.1), lambda: CrossReplicaOptimizer(adam(), "sum")], ids=["sgd", "cross"]
)
def test_an_optimizer_that_is_built_and_has_been_used(dense, make):
    optimizer = make()
    step, model = dense(optimizer)
    optimizer.build(model.trainable_variables)
    step(X, Y, np.full([24], 1 / 24, "float32"))
    before = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    report = check_parity(step, (X, Y), [model, optimizer], steps=2, batch_size=8)
    assert report.ok, str(report)
    assert {row.kind: row.count for row in report.compared}["weight"] == 2 * len(before)
    after = [variable.numpy() for variable in [*model.variables, *optimizer.variables]]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    step(X, Y, np.full([24], 1 / 24, "float32"))
    assert int(optimizer.iterations.numpy()) == 2


def test_an_optimizer_that_is_built_for_plain_variables():
    w, optimizer = tf.Variable(tf.ones([3, 1]), name="w"), keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer.build([w])

    def step(x, y, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_mean((x @ w - y) ** 2, axis=1) * weights)
        optimizer.apply([tape.gradient(loss, w)])
        return loss

    report = check_parity(step, (X, Y), {"w": w, "made": [optimizer]}, steps=2, strategies="MirroredStrategy")
    assert report.ok, str(report)
    assert w.numpy().tolist() == [[1], [1], [1]]


@pytest.mark.parametrize("is_built", [True, False])
def test_means_of_gradients_that_have_to_be_summed_are_named(dense, is_built):
    """Of an optimizer that is not built, the first step makes variables that no run has at its start."""
    optimizer = CrossReplicaOptimizer(adam(), "mean")
    step, model = dense(optimizer)
    if is_built:
        optimizer.build(model.trainable_variables)
    report = check_parity(step, (X, Y), [model, optimizer], steps=1, batch_size=8, strategies="MirroredStrategy")
    (cause,) = report.causes
    assert "momentum" in cause.name
    assert cause.kind == "scaled by replicas"
    assert 'CrossReplicaOptimizer(..., "sum")' in str(cause)


def test_a_first_batch_that_one_strategy_cannot_share_out(linear):
    step, variables = linear("mean")
    report = check_parity(step, (X, Y), variables, steps=1, batch_size=7)
    assert {each.strategy for each in report.differences} == {"MirroredStrategy"}
    assert not any(name.startswith("Mirrored") for name in report.left_out)
    if "TPUStrategy" in report.strategies:
        assert "TPUStrategy, the last 1 of 1 batches" in report.left_out


def test_a_step_that_refuses_the_rows_of_one_replica_alone(linear):
    step, variables = linear("sum")

    def strict(x, y):
        if tf.distribute.get_strategy().num_replicas_in_sync == 1 and x.shape[0] != 8:
            raise ValueError("8 rows")
        return step(x, y)

    report = check_parity(strict, (X, Y), variables, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert not report.ok
    assert "search for known causes failed: ValueError: 8 rows" in "".join(report.notes)


class Counter(tf.Module):
    def __init__(self):
        self.parts = ({"sum": tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="sum")},)

    def __call__(self, batch):
        self.parts[0]["sum"].assign_add(all_reduce("sum", tf.reduce_sum(batch["x"])))


def test_modules_dictionaries_and_bound_methods():
    counter = Counter()
    inside = counter.parts[0]
    report = check_parity(functools.partial(counter), {"x": X}, counter, steps=2, strategies="MirroredStrategy")
    assert report.first_of("weight").name == "sum"  # a sum over replicas of what each assigns: 2 x for 2 replicas
    assert kinds_of(report) == {"scaled by replicas"}
    assert counter.parts[0] is inside
    assert float(inside["sum"]) == 0


def test_random_numbers_in_a_step_are_named(linear):
    def noisy(x):
        return all_reduce("mean", tf.reduce_mean(x * tf.random.stateless_normal(tf.shape(x), [1, 2])))

    def drawn(x):
        return tf.reduce_mean(x + tf.random.normal(tf.shape(x)))

    for step, kind in ((noisy, "stateless algorithm"), (drawn, "random numbers")):
        report = check_parity(step, X, steps=1, strategies="MirroredStrategy")
        assert not report.ok
        assert kind in kinds_of(report)


def test_datasets_lists_of_batches_and_sums(linear):
    def total(x):
        return tf.reduce_sum(x)

    batches = tf.data.Dataset.from_tensor_slices(X).batch(8)
    options = {"steps": 2, "strategies": "MirroredStrategy", "reduction": "sum"}
    for inputs in (batches, [(X[:8],), (X[8:15],)]):
        report = check_parity(total, inputs, **options)
        assert report.ok, str(report)
    assert report.batches == (8, 7)
    wrong = check_parity(total, batches, **{**options, "reduction": None})
    assert kinds_of(wrong) == {"scaled by replicas"}


def test_a_variable_that_the_step_does_not_reach_is_refused(linear):
    step, _ = linear("mean")
    with pytest.raises(ParityArgumentError, match="does not reach other"):
        check_parity(step, (X, Y), [tf.Variable(1.0, name="other")], strategies="MirroredStrategy")


def test_a_step_with_an_exception_has_its_variables_back(linear):
    step, variables = linear("mean")

    def failing(x, y):
        step(x, y)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise KeyError("on replicas")

    with pytest.raises(KeyError, match="on replicas"):
        check_parity(failing, (X, Y), variables, strategies="MirroredStrategy")
    step(X, Y)
    assert variables[1].numpy() != 0.5


def test_only_an_argument_named_weights_gets_the_weights_of_rows(linear):
    step, variables = linear("mean")
    with pytest.raises(ParityArgumentError, match=r"missing a required argument: 'y'.*named `weights`"):
        check_parity(step, (X,), variables, strategies="MirroredStrategy")
    with pytest.raises(ParityArgumentError, match="missing a required argument: 'sample_weight'"):
        check_parity(lambda x, sample_weight: x, (X,), strategies="MirroredStrategy")

    def optional(x, y, weights=None):
        return {"count": all_reduce("sum", tf.reduce_sum(weights))}

    assert check_parity(optional, (X, Y), steps=1, batch_size=7, strategies="MirroredStrategy").ok
    own = {"steps": 1, "strategies": "MirroredStrategy", "reduction": "sum"}
    report = check_parity(lambda x, weights: tf.reduce_sum(x * weights), (X, np.ones_like(X)), **own)
    assert report.ok, str(report)


@pytest.mark.parametrize("wrong", [Y, [Y], "w", {"w": 1.0}, (each for each in ())])
def test_variables_that_are_none_are_refused(linear, wrong):
    step, _ = linear("mean")
    with pytest.raises(ParityArgumentError, match="variables must be"):
        check_parity(step, X, wrong, strategies="MirroredStrategy")


def test_an_iterator_of_batches():
    batches = ((X[start : start + 8],) for start in (0, 8))
    report = check_parity(lambda x: tf.reduce_sum(x), batches, steps=3, strategies="MirroredStrategy", reduction="sum")
    assert report.ok, str(report)
    assert report.batches == (8, 8, 8)
    with pytest.raises(ParityArgumentError, match="no rows"):
        check_parity(lambda x: x, iter([]), strategies="MirroredStrategy")


def dropped(strategy, x, body):
    strategy.run(body, args=(x,))


def unreduced(strategy, x, body):
    return strategy.run(body, args=(x,))


def reduced(strategy, x, body):
    return strategy.reduce("MEAN", strategy.run(body, args=(x,)), axis=None)


def doubled(strategy, x, body):
    return strategy.run(body, args=(x,)) * 2


def traced(strategy, x, body):
    return tf.function(lambda x: strategy.run(body, args=(x,)))(x)


def caught(strategy, x, body):
    with contextlib.suppress(Exception):
        return strategy.run(body, args=(x,))


def on_replicas_only(strategy, x, body):
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return body(x)
    return strategy.run(body, args=(x,))


@pytest.mark.parametrize("how", [dropped, unreduced, reduced, doubled, caught])
def test_a_step_that_calls_run(how):
    _is_refused(how, "MirroredStrategy")


@pytest.mark.parametrize("how", [traced, on_replicas_only])
def test_a_step_that_calls_run_on_replicas_of_either_kind(how, kind):
    _is_refused(how, kind)


def _is_refused(how, kind):
    strategy, w = MirroredStrategy(["CPU:0", "CPU:1"]), tf.Variable(1.0, name="w")

    def step(x):
        return how(strategy, x, lambda x: w * tf.reduce_sum(x))

    with pytest.raises(ParityArgumentError, match="step calls the run method of a strategy"):
        check_parity(step, X, [w], steps=1, strategies=kind)
    strategy.run(lambda: w.assign_add(1.0, read_value=False))


def test_a_check_in_the_scope_of_a_strategy_and_of_its_variables(linear):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        step, variables = linear("mean")
        report = check_parity(step, (X, Y), variables, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert report.ok, str(report)
    assert isinstance(variables[0], tf.distribute.DistributedValues)
    assert not check_parity(linear("sum")[0], (X, Y), steps=2, batch_size=8, strategies="MirroredStrategy").ok


def test_the_log_says_what_runs(caplog):
    caplog.set_level(logging.INFO, "replica_engine")
    check_parity(lambda x: tf.reduce_sum(x), X, steps=2, strategies="MirroredStrategy", reduction="sum")
    texts = [record.getMessage() for record in caplog.records if record.name == "replica_engine"]
    assert texts[:2] == ["check_parity: one device, batch 1 of 2", "check_parity: one device, batch 2 of 2"]
    assert texts[2] == "check_parity: one device, rows in another order (1 of 3), batch 1 of 2"
    assert texts[-1] == "check_parity: MirroredStrategy, batch 2 of 2"
