"""How the inputs of device loops end: with the last batch, an error, or a batch unlike the first."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import SUM, GetNext, floats, numbers, then_fail

from replica_engine import xla
from replica_engine.errors import InputsError, ReplicaEngineError

# Ends.


def test_as_many_batches_as_iterations_and_then_none(noting):
    batches = iter(floats(4))
    assert noting.run(batches, 4).steps == 4
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError, match="0 of 4 steps") as raised:
            noting.run(batches, 4, initial_loop_values={"x": 7.0})
        assert raised.value.context.steps == 0
        assert raised.value.context.last_step_outputs == {"x": 7.0}
    assert noting.inputs == [0.0, 1.0, 2.0, 3.0]


EMPTY = {
    "list": lambda strategy: [],
    "generator": lambda strategy: iter(()),
    "dataset": lambda strategy: floats(0),
    "iterator": lambda strategy: iter(floats(0)),
    "get_next": lambda strategy: GetNext(floats(0)),
    "distributed": lambda strategy: iter(strategy.experimental_distribute_dataset(floats(0).batch(2))),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_no_batch_at_all(two, launched, make):
    before = xla.counts()
    with pytest.raises(tf.errors.OutOfRangeError, match="0 of 3 steps") as raised:
        two.strategy.run_steps(lambda context, x: None, make(two.strategy), 3)
    assert raised.value.context.steps == 0
    assert raised.value.context.last_step_outputs == {}
    assert xla.counts() == before


class Cancelled(BaseException):
    """Like asyncio.CancelledError: not an Exception."""


@pytest.mark.parametrize(
    ("after", "error"),
    [(0, OSError("disk")), (0, Cancelled("enough")), (1, RuntimeError("bug")), (3, Cancelled("enough"))],
    ids=repr,
)
def test_what_an_iterator_raises_is_raised_when_the_steps_before_are_done(noting, after, error):
    error = type(error)(*error.args)
    with pytest.raises(type(error)) as raised:
        noting.run(then_fail(numbers(after), error), 10)
    assert raised.value is error
    assert noting.inputs == [float(number) for number in range(after)]
    assert error.context.steps == after
    if after:
        assert noting.replicas.each(error.context.last_step_outputs["x"]) == [after - 1.0] * 2
    assert any(f"{after} of 10 steps" in note for note in getattr(error, "__notes__", [])) == (after > 0)
    noting.run(numbers(2, start=50), 2)
    assert noting.inputs[after:] == [50.0, 51.0]


def test_an_error_of_a_data_set_has_tensorflows_type(two, noting):
    def check(i):
        with tf.control_dependencies([tf.debugging.assert_less(i, 6.0, message="too large")]):
            return tf.identity(i)

    bad = floats(12).map(check)
    shared = two.strategy.experimental_distribute_dataset(bad.batch(2, drop_remainder=True))
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    for batches, steps in ((bad, 6), (shared, 3)):
        noting.count.assign(0)
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large") as raised:
            two.strategy.run_steps(step, iter(batches), 12)
        assert raised.value.context.steps == noting.count.numpy() == steps


@pytest.mark.parametrize("count", [0, 2])
def test_an_error_that_takes_no_attributes_is_raised_all_the_same(noting, count):
    class Frozen(Exception):
        __slots__ = ()

        def __setattr__(self, name, value):
            raise AttributeError("frozen")

    with pytest.raises(Frozen, match="ice"):
        noting.run(then_fail(numbers(count), Frozen("ice")), 3)
    assert noting.inputs == [0.0, 1.0][:count]


# Batches that do not fit.


def rows(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("batches", "messages"),
    [
        ([rows(4, 2), rows(4, 2), rows(3, 2)], ["(3, 2)", "(4, 2)", "args[0]", "drop_remainder=True"]),
        ([{"x": rows(4), "y": rows(4)}] * 2 + [{"x": rows(4), "y": rows(2)}], ["['y']", "drop_remainder=True"]),
        ([rows(4), rows(4), rows(4).astype(np.float64)], ["dtype"]),
        ([rows(4), rows(4), [rows(4)]], ["structure"]),
        ([{"x": rows(4)}, {"x": rows(4)}, {"y": rows(4)}], ["structure"]),
        ([(rows(4), rows(4))] * 2 + [rows(2, 4)], ["structure"]),
        ([(rows(4), rows(4))] * 2 + [None], ["structure"]),
        ([rows(4), rows(4), (rows(4), rows(4))], ["structure"]),
    ],
    ids=["shape", "in a dict", "dtype", "list", "keys", "rows for a pair", "none for a pair", "pair for one"],
)
def test_a_batch_unlike_the_first_ends_the_run_after_the_steps_before(two, batches, messages):
    ran = two.variable(0, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    with pytest.raises(InputsError) as raised:
        two.strategy.run_steps(lambda context, *inputs: ran.assign_add(1), batches, 3)
    for message in (*messages, "atch 2"):
        assert message in str(raised.value)
    assert raised.value.context.steps == ran.numpy() == 2


def test_the_order_of_a_dictionarys_keys_is_of_no_matter(two):
    batches = [{"a": np.float32(1.0), "b": np.int32(2)}, {"b": np.int32(4), "a": np.float32(3.0)}]

    def step(context, inputs):
        context.set_last_step_output("both", (inputs["a"], inputs["b"]))

    both = two.strategy.run_steps(step, batches, 2).last_step_outputs["both"]
    assert [two.each(each)[0] for each in both] == [3.0, 4]


def test_a_data_set_with_a_partial_last_batch(two, noting):
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    for count in (11, 9):  # of the last batch one replica has less, or nothing
        batches = iter(two.strategy.experimental_distribute_dataset(floats(count).batch(4)))
        with pytest.raises(InputsError, match="drop_remainder=True") as raised:
            two.strategy.run_steps(step, batches, 5)
        assert raised.value.context.steps == 2
    assert noting.inputs == [[1.0, 9.0] * 2, [5.0, 13.0] * 2]


def test_a_first_batch_that_replicas_cannot_share_evenly(two, launched):
    batches = iter(two.strategy.experimental_distribute_dataset(floats(3).batch(4)))
    with pytest.raises(InputsError, match=r"args\[0\] .*\(2,\), \(1,\).*drop_remainder=True"):
        two.strategy.run_steps(lambda context, x: None, batches, 5)
    assert launched() == 0


def test_a_loop_of_batches_of_another_shape_is_another_program(two, launched):
    before = xla.counts()
    total = two.variable(0.0, SUM)
    for length in (4, 3, 4):
        two.strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_sum(x)), [np.ones(length, "f4")] * 2, 2)
    assert total.numpy() == 2 * 2 * 11
    assert (xla.counts() - before).compiles == 2
    assert launched() == 3


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        (tf.constant("a"), "args[0]"),
        ({"x": tf.zeros([]), "text": tf.constant(["a"])}, "args[0]['text']"),
        (np.array("a"), "args[0]"),
    ],
    ids=["tensor", "in a dict", "NumPy"],
)
def test_without_soft_placement_strings_are_refused_with_their_name(replicas, launched, batch, name):
    strategy = replicas(2, soft_placement=False).strategy
    with pytest.raises(ReplicaEngineError, match="string") as raised:
        strategy.run_steps(lambda context, x: None, [batch] * 3, 3)
    assert name in str(raised.value)
    assert launched() == 0
