"""`check_parity` of training steps of one's own, on both strategies."""

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
        made = [tf.Variable(tf.ones([3, 1]), name="w"), tf.Variable([0.5], name="b")]

        def step(variables, x, y):
            w, b = variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w + b - y) ** 2)
            gradients = tape.gradient(loss, [w, b])
            if how:
                gradients = all_reduce(how, gradients)
            w.assign_sub(0.1 * gradients[0])
            b.assign_sub(0.1 * gradients[1])
            return loss

        return step, made

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
    named = {"w": variables[0], "b": variables[1]}
    report = check_parity(lambda v, x, y: step([v["w"], v["b"]], x, y), (X, Y), named, steps=2, batch_size=8)
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


def adam():
    return keras.optimizers.Adam(0.1, epsilon=1.0)  # a large epsilon: rounding is not amplified


@pytest.fixture
def dense():
    """`dense(optimizer, is_built)`: a step of a model of one layer, which takes weights of rows; and what makes it."""

    def dense(optimizer, is_built=True):
        def make():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
            made = {"model": model, "optimizer": optimizer()}
            if is_built:
                made["optimizer"].build(model.trainable_variables)
            return made

        def step(made, x, y, weights):
            model = made["model"]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.reduce_mean((model(x) - y) ** 2, axis=1) * weights)
            gradients = tape.gradient(loss, model.trainable_variables)
            made["optimizer"].apply(gradients, model.trainable_variables)
            return loss

        return step, make

    return dense


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize(
    "optimizer", [lambda: keras.optimizers.SGD(0.1), lambda: CrossReplicaOptimizer(adam(), "sum")], ids=["sgd", "cross"]
)
def test_a_model_and_an_optimizer_that_are_made_for_each_strategy(dense, optimizer, is_built):
    step, make = dense(optimizer, is_built)
    report = check_parity(step, (X, Y), make, steps=2, batch_size=8)
    assert report.ok, str(report)
    made = make()
    step(made, X, Y, np.full([24], 1 / 24, "float32"))
    names = [*made["model"].variables, *made["optimizer"].variables]
    assert {row.kind: row.count for row in report.compared}["weight"] == 2 * len(names)


@pytest.mark.parametrize("is_built", [True, False])
def test_means_of_gradients_that_have_to_be_summed_are_named(dense, is_built):
    """Of an optimizer that is not built, the first step makes variables that no run has at its start."""
    step, make = dense(lambda: CrossReplicaOptimizer(adam(), "mean"), is_built)
    report = check_parity(step, (X, Y), make, steps=1, batch_size=8, strategies="MirroredStrategy")
    causes = {(cause.kind, cause.name) for cause in report.causes}
    assert ("scaled by replicas", next(name for _, name in causes)) in causes
    assert all('CrossReplicaOptimizer(..., "sum")' in str(cause) for cause in report.causes)


def test_a_first_batch_that_one_strategy_cannot_share_out(linear):
    step, variables = linear("mean")
    report = check_parity(step, (X, Y), variables, steps=1, batch_size=7)
    assert {each.strategy for each in report.differences} == {"MirroredStrategy"}
    assert not any(name.startswith("Mirrored") for name in report.left_out)
    if "TPUStrategy" in report.strategies:
        assert "TPUStrategy, the last 1 of 1 batches" in report.left_out


def test_a_step_that_refuses_the_rows_of_one_replica_alone(linear):
    step, variables = linear("sum")

    def strict(variables, x, y):
        if tf.distribute.get_strategy().num_replicas_in_sync == 1 and x.shape[0] != 8:
            raise ValueError("8 rows")
        return step(variables, x, y)

    report = check_parity(strict, (X, Y), variables, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert not report.ok
    assert "search for known causes failed: ValueError: 8 rows" in "".join(report.notes)


class Counter(tf.Module):
    def __init__(self):
        self.parts = ({"sum": tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="sum")},)

    def __call__(self, batch):
        self.parts[0]["sum"].assign_add(all_reduce("sum", tf.reduce_sum(batch["x"])))


def test_modules_and_dictionaries():
    report = check_parity(lambda count, batch: count(batch), {"x": X}, Counter, steps=2, strategies="MirroredStrategy")
    assert report.first_of("weight").name == "sum"  # a sum over replicas of what each assigns: 2 x for 2 replicas
    assert kinds_of(report) == {"scaled by replicas"}


def test_variables_of_equal_names_keep_their_own_values():
    """Each step starts from the values of one device, which are kept by name."""
    pair = [tf.Variable(1.0), tf.Variable(2.0)]

    def step(variables, x):
        for variable in variables:
            variable.assign_add(all_reduce("mean", tf.reduce_mean(x)))

    report = check_parity(step, X, pair, steps=2, batch_size=8)
    assert report.ok, str(report)
    assert {row.count for row in report.compared} == {4}


def test_objects_that_hold_variables_and_partials():
    def step(factor, made, x):
        return factor * tf.reduce_mean(made["random"].normal([1])) + tf.reduce_mean(x)

    def make():
        return {"random": tf.random.Generator.from_seed(1)}

    report = check_parity(functools.partial(step, 0.0), X, make, steps=1, batch_size=8)
    assert report.ok, str(report)


def test_random_numbers_in_a_step_are_named(linear):
    def noisy(x):
        return all_reduce("mean", tf.reduce_mean(x * tf.random.stateless_normal(tf.shape(x), [1, 2])))

    def drawn(x):
        return tf.reduce_mean(x + tf.random.normal(tf.shape(x)))

    for step in (noisy, drawn):
        report = check_parity(step, X, steps=1, strategies="MirroredStrategy")
        assert not report.ok
        assert kinds_of(report) == {"random numbers"}


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


def test_a_variable_that_the_step_changes_and_that_was_not_passed(linear):
    step, (w, b) = linear("mean")
    with pytest.raises(ParityArgumentError, match="changes variables that are not in `variables`: w, b"):
        check_parity(lambda x, y: step([w, b], x, y), (X, Y), strategies="MirroredStrategy")
    with pytest.raises(ParityArgumentError, match="not in `variables`: b"):
        check_parity(lambda given, x, y: step([given, b], x, y), (X, Y), w, strategies="MirroredStrategy")
    assert [w.numpy().tolist(), b.numpy().tolist()] == [[[1], [1], [1]], [0.5]]


def test_a_model_that_the_step_trains_and_that_was_not_passed():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, name="dense")])
    optimizer = keras.optimizers.SGD(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.raises(ParityArgumentError, match=r"kernel.*pass a function that makes them"):
        check_parity(step, (X, Y), strategies="MirroredStrategy")


def test_a_variable_that_the_step_only_reads_may_be_anywhere():
    table = tf.Variable([1.0, 2.0, 3.0])
    report = check_parity(lambda x: tf.reduce_mean(x * table), X, steps=1, batch_size=8)
    assert report.ok, str(report)


def test_a_step_that_cannot_be_traced(linear):
    step, variables = linear("mean")

    def eager(variables, x, y):
        return step(variables, x, y).numpy()

    report = check_parity(eager, (X, Y), variables, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert report.ok, str(report)
    assert "cannot be traced alone" in "".join(report.notes)


def test_a_step_with_an_exception_leaves_its_variables(linear):
    step, variables = linear("mean")

    def failing(variables, x, y):
        step(variables, x, y)
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise KeyError("on replicas")

    with pytest.raises(KeyError, match="on replicas"):
        check_parity(failing, (X, Y), variables, strategies="MirroredStrategy")
    assert variables[1].numpy() == 0.5


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


@pytest.mark.parametrize(
    "wrong", [Y, [Y], "w", {"w": 1.0}, [], (each for each in ()), keras.layers.Dense(1), Counter()]
)
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


def test_a_check_in_the_scope_of_a_strategy_and_of_its_variables(linear):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        step, variables = linear("mean")
        report = check_parity(step, (X, Y), variables, steps=1, batch_size=8, strategies="MirroredStrategy")
        with pytest.raises(ParityArgumentError, match="not in `variables`: w, b\\. "):
            check_parity(lambda x, y: step(variables, x, y), (X, Y), steps=1, strategies="MirroredStrategy")
    assert report.ok, str(report)
    assert isinstance(variables[0], tf.distribute.DistributedValues)


def test_the_log_says_what_runs(caplog):
    caplog.set_level(logging.INFO, "replica_engine")
    check_parity(lambda x: tf.reduce_sum(x), X, steps=2, strategies="MirroredStrategy", reduction="sum")
    texts = [record.getMessage() for record in caplog.records if record.name == "replica_engine"]
    assert texts[:2] == ["check_parity: one device, batch 1 of 2", "check_parity: one device, batch 2 of 2"]
    assert texts[-1] == "check_parity: MirroredStrategy, batch 2 of 2"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: check_parity(keras.layers.Dense(1), X), r"takes a Keras model.* or a function.*; got Dense"),
        (lambda: check_parity(lambda x: x, X, steps=0), "steps must be a positive int; got 0"),
        (lambda: check_parity(lambda x: x, X, rtol=-1e-4), "rtol must be a number, 0 or larger"),
        (lambda: check_parity(lambda x: x, X, strategies="MirroredStrategy", reduction="max"), 'must be "mean", "sum"'),
        (lambda: check_parity(lambda x: x, X, replica=2), r"\(step, inputs, variables\): .*'replica'"),
        (lambda: check_parity(keras.Sequential([keras.Input((3,))])), r"\(model, x, y, sample_weight\): missing"),
        (lambda: check_parity(lambda x: None, X, strategies="MirroredStrategy"), "returned no numbers"),
        (
            lambda: check_parity(lambda x: x, X, replicas=3, strategies=MirroredStrategy(["CPU:0", "CPU:1"])),
            r"has 2 replicas, but replicas=3.*replicas=2",
        ),
    ],
)
def test_arguments_that_cannot_be_checked(call, says):
    with pytest.raises(ParityArgumentError, match=says):
        call()


def test_a_compiled_model_without_targets():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    with pytest.raises(ParityArgumentError, match="'small' is compiled with a loss, and the data has no targets"):
        check_parity(model, X, strategies="MirroredStrategy")
