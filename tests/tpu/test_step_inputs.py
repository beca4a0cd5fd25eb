"""The inputs of device loops: what iterators may yield, and what steps get."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import PAIR, Counted, GetNext, floats, numbers


def test_of_a_distributed_data_set_each_replica_gets_its_share(two, noting):
    dataset = floats(12).batch(2, drop_remainder=True)
    batches = iter(two.strategy.experimental_distribute_dataset(dataset))
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    two.strategy.run_steps(step, batches, 4)
    two.strategy.run_steps(step, batches, 2)
    assert noting.inputs == [[0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]]


def test_of_a_data_set_that_is_made_for_each_replica_each_gets_its_own(two, noting):
    batches = iter(two.strategy.distribute_datasets_from_function(lambda context: floats(8)))
    noting.run(batches, 3)
    assert noting.inputs == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


ITERATORS = {
    "a dataset's": lambda: iter(floats(10)),
    "one with get_next": lambda: GetNext(floats(10)),
    "a generator": lambda: (number for number in numbers(10)),
    "a list's of NumPy scalars": lambda: iter(numbers(10)),
    "a list's of Python numbers": lambda: iter([float(number) for number in range(10)]),
    "the program's own": lambda: Counted(10),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_of_any_other_iterator_all_replicas_get_all_and_a_loop_goes_on_where_the_last_one_ended(two, noting, make):
    step = lambda context, x: noting.step(context, tf.reduce_sum(x))  # noqa: E731
    iterator = make()
    assert two.strategy.run_steps(step, iterator, 1).steps == 1
    assert two.strategy.run_steps(step, iterator, 3).steps == 3
    assert noting.inputs == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(tf.errors.OutOfRangeError, match="6 of 8 steps") as raised:
        two.strategy.run_steps(step, iterator, 8)
    assert raised.value.context.steps == 6
    assert two.each(raised.value.context.last_step_outputs["x"]) == [9.0, 9.0]
    assert noting.inputs == [float(number) for number in range(10)]


def test_a_dataset_or_a_list_starts_again_in_each_loop(noting):
    for batches in (floats(4), numbers(4)):
        noting.run(batches, 2)
        noting.run(batches, 2)
    assert noting.inputs == [0.0, 1.0] * 4


@pytest.mark.parametrize(("prefetch", "iterations"), [(5, 3), (2, 1)])
def test_no_more_batches_are_taken_than_there_are_iterations(noting, prefetch, iterations):
    batches = Counted(10)
    noting.run(batches, iterations, prefetch=prefetch)
    assert batches.taken == iterations


def test_values_by_replica_are_each_replicas_own(two, noting):
    noting.run([two.spread(lambda i, n=n: 10.0 * n + tf.cast(i, tf.float32)) for n in range(3)], 3)
    assert noting.inputs == [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


def test_inputs_arrive_to_the_bit(two):
    batch = {
        "bfloat16": tf.constant([1.5, -2.0], tf.bfloat16),
        "float16": tf.constant([1.5, -2.0], tf.float16),
        "float64": tf.constant([1.5, np.pi], tf.float64),
        "bool": tf.constant([True, False]),
        "complex64": tf.constant([1 + 2j, 3], tf.complex64),
        "int64": tf.constant([[1, 2], [3, 1 << 40]], tf.int64),
        "uint8": tf.constant([0, 255], tf.uint8),
        "empty": tf.zeros([0, 3]),
        "strides": np.arange(6.0)[::2],
        "transposed": np.float32([[1, 2], [3, 4]]).T,
        "big-endian float": np.array([1.5, 2.5], ">f4"),
        "big-endian int": np.array([1, 256], ">i4"),
    }

    def step(context, x):
        context.set_last_step_output("x", x)

    outputs = two.strategy.run_steps(step, [batch, batch], 2).last_step_outputs["x"]
    for name, values in batch.items():
        for one in outputs[name].values:
            assert one.dtype == tf.convert_to_tensor(values).dtype, name
            np.testing.assert_array_equal(one.numpy(), np.asarray(values), name)


def test_batches_may_be_tuples_dictionaries_and_nested(two):
    def step(context, x, pair, rest):
        context.set_last_step_output("all", [x, pair[0] * 10.0, pair[1] * 100.0, rest["a"]["b"][0] * 1000.0])
        assert rest["name"] == "static"
        assert rest["nothing"] is None

    batches = []
    for n in range(3):
        own = two.spread(lambda i, n=n: 1.0 * n + tf.cast(i, tf.float32))
        rest = {"a": {"b": [own]}, "name": "static", "nothing": None}
        batches.append((np.float32(n), (tf.constant(n + 1.0), own), rest))
    outputs = two.strategy.run_steps(step, batches, 3).last_step_outputs["all"]
    assert [two.each(each) for each in outputs] == [[2.0, 2.0], [30.0, 30.0], [200.0, 300.0], [2000.0, 3000.0]]


def test_sparse_and_ragged_batches_of_one_shape(two):
    def step(context, sparse, ragged):
        context.set_last_step_output("sums", (sparse.values * 10.0, tf.reduce_sum(ragged.flat_values)))

    batches = [
        (tf.SparseTensor([[0, n]], [n + 1.0], [2, 3]), tf.ragged.constant([[1.0 * n], [2.0, 3.0]])) for n in range(3)
    ]
    sums = two.strategy.run_steps(step, batches, 3).last_step_outputs["sums"]
    assert [two.each(each)[1] for each in sums] == [[30.0], 7.0]


class Array(np.ndarray):
    """A program's own kind of array."""


@pytest.mark.parametrize("kind", [np.ndarray, Array])
def test_one_array_may_be_filled_again_for_each_batch(noting, kind):
    """As loaders do that save memory; what is fetched ahead is a copy."""
    array = np.zeros(4096, np.float32).view(kind)

    def batches():
        for number in range(20):
            array[...] = number
            yield (array,)

    noting.strategy.run_steps(lambda context, x: noting.step(context, tf.reduce_max(x)), batches(), 20, prefetch=8)
    assert noting.inputs == [float(number) for number in range(20)]


def pass_out(context, *values):
    context.set_last_step_output("all", values)


@pytest.mark.parametrize(
    ("batch", "step", "expected"),
    [
        (PAIR, lambda context, x, y: pass_out(context, x, y), [1.0, 2.0]),
        (PAIR, lambda context, *inputs: pass_out(context, *inputs), [1.0, 2.0]),
        (PAIR, lambda context, pair: pass_out(context, *pair), [1.0, 2.0]),
        (PAIR, lambda context, x, y, scale=3.0: pass_out(context, x, y * scale), [1.0, 6.0]),
        ((PAIR,), lambda context, pair: pass_out(context, *pair), [1.0, 2.0]),
        (list(PAIR), lambda context, inputs: pass_out(context, *inputs), [1.0, 2.0]),
        ({"x": PAIR[0], "y": PAIR[1]}, lambda context, inputs: pass_out(context, inputs["x"], inputs["y"]), [1.0, 2.0]),
    ],
    ids=["two", "any", "one", "default", "nested", "list", "dict"],
)
def test_a_tuple_is_several_arguments_or_one_as_the_step_takes_it(two, batch, step, expected):
    found = two.strategy.run_steps(step, [batch], 1).last_step_outputs["all"]
    assert [two.each(each) for each in found] == [[value, value] for value in expected]


def test_in_extended_a_batch_is_one_argument_unless_the_step_takes_more(two):
    kinds = []
    run = two.strategy.extended.experimental_run_steps_on_iterator
    run(lambda context, inputs: kinds.append(type(inputs)), [PAIR], 1)
    run(lambda context, inputs, scale=3.0: kinds.append((type(inputs), scale)), [PAIR], 1)
    run(lambda context, x, y: kinds.append(2), [PAIR], 1)
    run(lambda context, *inputs: kinds.append(len(inputs)), [PAIR], 1)
    assert kinds == [tuple, (tuple, 3.0), 2, 1]
