"""Batches of datasets that are taken many at a time: the same ones, in the same order, up to the end or the error."""

import itertools
import types

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import floats

from replica_engine.upstream import data_pulls
from replica_engine.upstream.data_pulls import MANY, Pulls
from replica_engine.upstream.host_datasets import find_pulls


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """However few came before, and however slowly."""
    monkeypatch.setattr(data_pulls, "_PATIENCE", 0)
    monkeypatch.setattr(data_pulls, "_QUICK", 1e9)


@pytest.fixture
def calls(monkeypatch):
    """How elements were taken, as the numbers of elements."""
    made = []

    def noting(name, original):
        def noted(self):
            columns = original(self)
            made.append((name, len(columns[0]) if columns else 0))
            return columns

        return noted

    for name in ("_many", "_one_by_one"):
        monkeypatch.setattr(Pulls, name, noting(name, getattr(Pulls, name)))
    return made


def of(dataset):
    pulls = Pulls.from_iterator(iter(dataset))
    assert pulls is not None
    return pulls


def taken(pulls, most=1000):
    """All elements of one component, and what ended them."""
    values = []
    while True:
        try:
            (column,) = pulls.take(most)
        except tf.errors.OpError as error:
            return values, type(error)
        values += [float(value) for value in column]


@pytest.mark.parametrize("count", [0, 1, MANY - 1, MANY, MANY + 3, 3 * MANY])
def test_all_elements_come_in_order_up_to_the_end(count, calls):
    assert taken(of(floats(count))) == ([float(number) for number in range(count)], tf.errors.OutOfRangeError)
    assert ("_many", MANY) in calls or count < MANY


def test_what_came_before_an_error_comes_first_and_an_iterator_goes_on_after_it():
    bad = floats(2 * MANY).map(lambda i: tf.debugging.check_numerics(tf.where(i == MANY + 2.0, np.nan, i), "bad"))
    pulls = of(bad)
    assert taken(pulls) == ([float(number) for number in range(MANY + 2)], tf.errors.InvalidArgumentError)
    rest = [float(number) for number in range(MANY + 3, 2 * MANY)]
    assert taken(pulls) == (rest, tf.errors.OutOfRangeError)


def test_no_more_are_taken_than_asked_for(calls):
    iterator = iter(floats(100))
    pulls = Pulls.from_iterator(iterator)
    for most in (MANY, MANY - 1, MANY + 1):
        pulls.take(most)
    assert calls == [("_many", MANY), ("_one_by_one", 1), ("_many", MANY)]
    assert float(next(iterator)) == 2 * MANY + 1


@pytest.mark.parametrize(("seconds", "names"), [(1e-3, {"_many"}), (1e-1, {"_one_by_one"})], ids=["quick", "slow"])
def test_elements_are_taken_together_once_enough_of_them_came_quickly(seconds, names, calls, monkeypatch):
    clock = itertools.count(100.0, seconds)  # of two readings for each call
    monkeypatch.setattr(data_pulls, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(data_pulls, "_PATIENCE", 8)
    monkeypatch.setattr(data_pulls, "_QUICK", 2e-3)
    assert len(taken(of(floats(8 + 2 * MANY)))[0]) == 8 + 2 * MANY
    assert {name for name, count in calls[:8]} == {"_one_by_one"}
    assert {name for name, count in calls[8:] if count} == names


def test_components_keep_their_dtypes_and_shapes():
    kinds = (tf.bfloat16, tf.float64, tf.bool, tf.complex64, tf.uint8, tf.int64)
    dataset = tf.data.Dataset.range(MANY).map(lambda i: tuple(tf.cast([[i], [i + 1]], kind) for kind in kinds))
    for column, kind in zip(of(dataset).take(MANY), kinds, strict=True):
        for number, array in enumerate(column):
            np.testing.assert_array_equal(array, tf.cast([[number], [number + 1]], kind).numpy())
            assert array.dtype == kind.as_numpy_dtype


def generator():
    spec = tf.TensorSpec([], tf.float32)
    return tf.data.Dataset.from_generator(lambda: iter(range(50)), output_signature=spec)


PYTHON = {
    "a generator": generator,
    "a py_function": lambda: floats(50).map(lambda i: tf.ensure_shape(tf.py_function(float, [i], tf.float32), [])),
    "a generator inside": lambda: tf.data.Dataset.range(1).flat_map(lambda _: generator()),
    "a dataset from outside": lambda: (lambda outer: tf.data.Dataset.range(1).flat_map(lambda _: outer))(generator()),
    "a part that is not known": lambda: tf.data.Dataset.zip(generator(), floats(50)).map(lambda x, _: x),
}


@pytest.mark.parametrize("make", PYTHON.values(), ids=PYTHON)
def test_python_is_never_waited_for_with_elements_in_hand(make, calls):
    """It may wait for what a step does with an element that came before."""
    assert len(taken(of(make()))[0]) == 50
    assert {name for name, _ in calls} == {"_one_by_one"}


def test_elements_of_other_kinds_are_left_to_the_iterator():
    for dataset in (floats(4).batch(3), tf.data.Dataset.from_tensors("text"), floats(4).map(lambda i: (i, None))):
        assert Pulls.from_iterator(iter(dataset)) is None


def test_an_iterator_that_gives_something_else_is_asked_itself(two):
    partial = two.strategy.experimental_distribute_dataset(floats(8).batch(4))
    assert find_pulls(iter(partial)) is None
    assert find_pulls(iter(two.strategy.experimental_distribute_dataset(floats(8).batch(4, drop_remainder=True))))
    assert find_pulls(iter([1.0])) is None


def test_iterators_share_queues_one_after_the_other(monkeypatch):
    """TensorFlow keeps something of each queue for good."""
    made = []
    original = tf.queue.FIFOQueue
    monkeypatch.setattr(tf.queue, "FIFOQueue", lambda *args: made.append(args) or original(*args))
    for count in (3 * MANY, 3 * MANY + 1, 3 * MANY):
        assert taken(of(floats(count).map(lambda x: x + 0.5)))[0] == [number + 0.5 for number in range(count)]
    assert len(made) <= 1


def test_an_iterator_that_a_function_returned(two, calls):
    """It does not say of what its dataset is made, so its elements are taken one by one."""
    iterator = tf.function(lambda each: each)(iter(floats(3 * MANY)))
    taken_by = two.strategy.run_steps(
        lambda context, x: context.set_last_step_output("x", x, "MEAN"), iterator, 3 * MANY
    )
    assert float(taken_by.last_step_outputs["x"]) == 3 * MANY - 1
    assert {name for name, _ in calls} == {"_one_by_one"}


@pytest.mark.parametrize("distributed", [True, False])
def test_steps_get_the_same_batches(two, calls, distributed):
    dataset = floats(400).map(lambda i: {"b": i, "a": (-i, tf.cast(i, tf.int32))})
    dataset = dataset.batch(2, drop_remainder=True) if distributed else dataset
    batches = iter(two.strategy.experimental_distribute_dataset(dataset) if distributed else dataset)
    total = two.variable(tf.zeros([3], tf.float64), tf.VariableAggregation.SUM, on_read=True)
    weight = two.variable(1, tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def step(context, x):
        parts = tf.stack([tf.cast(tf.reduce_sum(part), tf.float64) for part in (x["b"], x["a"][0], x["a"][1])])
        total.assign_add(parts * tf.cast(weight, tf.float64))  # the place of a batch counts
        weight.assign_add(1)
        context.set_last_step_output("b", x["b"])

    outputs = two.strategy.run_steps(step, batches, 60).last_step_outputs["b"]
    last = two.strategy.run_steps(step, batches, 40).last_step_outputs["b"]
    assert ("_many", MANY) in calls
    of_step = [[2 * step, 2 * step + 1] if distributed else [step] for step in range(100)]
    assert np.ravel(two.each(outputs)).tolist() == (of_step[59] if distributed else of_step[59] * 2)
    assert np.ravel(two.each(last)).tolist() == (of_step[99] if distributed else of_step[99] * 2)
    expected = sum(number * (place + 1) for place, row in enumerate(of_step) for number in row)
    expected *= 1 if distributed else 2
    assert total.numpy().tolist() == [expected, -expected, expected]
    assert float(tf.nest.flatten(two.each(next(batches)["b"] if distributed else [next(batches)["b"]]))[0]) == (
        200.0 if distributed else 100.0
    )
