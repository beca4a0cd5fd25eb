"""A step changes neither the arrays that a dataset took from Python nor, without a batch, any variable."""

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = [pytest.mark.graphs, pytest.mark.replicas(4)]

ROWS, COLUMNS = 64, 16


def aligned(value):
    """An array that TensorFlow takes without a copy: its memory begins at a multiple of 64 bytes."""
    size = ROWS * COLUMNS * 4
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + size].view(np.float32).reshape(ROWS, COLUMNS)
    array[:] = value
    return array


def generated(arrays):
    spec = tf.TensorSpec([None, COLUMNS], tf.float32)
    return tf.data.Dataset.from_generator(lambda: iter(arrays), output_signature=spec)


def mapped(arrays):
    def array(index):
        return tf.ensure_shape(tf.numpy_function(lambda i: arrays[i], [index], tf.float32), [None, COLUMNS])

    return tf.data.Dataset.range(len(arrays)).map(array)


def in_dictionaries(arrays):
    return generated(arrays).map(lambda x: {"x": (x,)}).prefetch(2)


def of_the_worker(arrays):
    return generated(arrays)


def distributed(strategy, source, arrays):
    if source is of_the_worker:
        return strategy.distribute_datasets_from_function(lambda context: source(arrays))
    return strategy.experimental_distribute_dataset(source(arrays))


@pytest.mark.parametrize("source", [generated, mapped, in_dictionaries, of_the_worker])
def test_arrays_that_python_gives_to_a_dataset_stay_as_they_are(strategy, source):
    arrays = [aligned(1.0) for _ in range(8)]

    def in_replica(batch):
        (x,) = tf.nest.flatten(batch)
        return tf.reduce_sum(tf.exp(-x[: ROWS // 4]))  # the last op that needs the part may write where it lies

    @tf.function
    def step(batches):
        return strategy.reduce("SUM", strategy.run(in_replica, args=(next(batches),)), axis=None)

    sums = []
    for _ in range(2):
        batches = iter(distributed(strategy, source, arrays))
        sums += [float(step(batches)) for _ in range(8 // (4 if source is of_the_worker else 1))]

    np.testing.assert_array_equal(arrays, np.ones([8, ROWS, COLUMNS]))
    np.testing.assert_allclose(sums, ROWS * COLUMNS / np.e, rtol=1e-5)


@pytest.mark.replicas(2)
def test_fit_leaves_the_arrays_of_a_sequence_as_they_are(strategy):
    inputs, targets = [[aligned(value) for _ in range(4)] for value in (1.0, 2.0)]

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return inputs[index], targets[index]

    with strategy.scope():
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Activation("exponential")])
        model.add(keras.layers.Dense(COLUMNS))
        model.compile("sgd", "huber", metrics=["mae"])
    model.fit(Sequence(), epochs=2, verbose=0)

    np.testing.assert_array_equal(inputs, np.full([4, ROWS, COLUMNS], 1.0))
    np.testing.assert_array_equal(targets, np.full([4, ROWS, COLUMNS], 2.0))


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_that_finds_no_batch_changes_no_variable(strategy, nested):
    with strategy.scope():
        steps = tf.Variable(0)
        weight = tf.Variable(1.0)
        own = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)

    def in_replica(x):
        steps.assign_add(1)
        weight.assign(weight * 0.5)  # as decay of weights does it
        own.assign_add(1)
        return tf.reduce_sum(x)

    def on_replicas(batch):
        return strategy.reduce("SUM", strategy.run(in_replica, args=(batch,)), axis=None)

    inner = tf.function(on_replicas) if nested else on_replicas
    step = tf.function(lambda batches: inner(next(batches)))
    dataset = strategy.experimental_distribute_dataset(generated([np.ones([8, COLUMNS], "float32")]))
    for epoch in range(1, 4):
        batches = iter(dataset)
        step(batches)
        with pytest.raises(tf.errors.OutOfRangeError):
            step(batches)
        components = [int(each) for each in strategy.experimental_local_results(steps)]
        assert components == [epoch] * 4
        assert [float(each) for each in strategy.experimental_local_results(weight)] == [0.5**epoch] * 4
        assert int(own.read_value()) == 4 * epoch


@pytest.mark.replicas(2)
def test_fit_of_a_dataset_of_unknown_length_counts_its_batches_and_no_more(strategy):
    data = [(np.full([8, 3], index, "float32"), np.ones([8, 1], "float32")) for index in range(3)]
    specs = tuple(tf.TensorSpec([None, size], tf.float32) for size in (3, 1))

    def trained(dataset):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
        model.fit(dataset, epochs=2, verbose=0)
        return model

    of_generator = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=specs)
    model = trained(of_generator)
    of_known_length = trained(of_generator.apply(tf.data.experimental.assert_cardinality(3)))

    assert int(model.optimizer.iterations.numpy()) == 6
    for weight, same in zip(model.get_weights(), of_known_length.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)
