"""Datasets for replicas on CPU devices: no iterator for each device, and the same batches as TensorFlow's."""

import functools
import threading

import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from tensorflow.core.framework import dataset_options_pb2

from replica_engine.upstream import host_datasets
from replica_engine.upstream.host_datasets import HostDatasets

pytestmark = [pytest.mark.graphs, pytest.mark.replicas(2)]


def numbers(n, batch, **options):
    return tf.data.Dataset.range(n).batch(batch, **options)


def unlike():
    spec = tf.TensorSpec([None], tf.float64)
    return tf.data.Dataset.from_generator(lambda: iter([[0.0] * 3, [1.0] * 5, [2.0]]), output_signature=spec)


KINDS = {
    "partial": lambda: numbers(13, 8),
    "one sample": lambda: numbers(1, 8),
    "empty": lambda: numbers(0, 4),
    "static shapes": lambda: numbers(15, 3, drop_remainder=True),
    "endless": lambda: numbers(8, 8).repeat(),
    "cardinality unknown": lambda: tf.data.Dataset.range(30).filter(lambda x: x % 3 != 0).batch(5),
    "sizes unlike": unlike,
    "strings": lambda: tf.data.Dataset.from_tensor_slices(["a", "bb", "c"]).batch(2),
    "structure": lambda: tf.data.Dataset.range(6).batch(4).map(lambda x: {"x": (x, 2 * x), "y": x[..., tf.newaxis]}),
    "with None": lambda: tf.data.Dataset.range(6).batch(4).map(lambda x: (x, None)),
    "ragged": lambda: tf.data.Dataset.range(7).map(lambda x: tf.ragged.range(tf.stack([x % 3, x % 2]))).batch(4),
    "sparse": lambda: tf.data.Dataset.range(7).map(lambda x: tf.sparse.from_dense(tf.stack([x, 0, 1]))).batch(4),
}


def distributed(strategy, kind, split):
    if split:
        return strategy.experimental_distribute_dataset(KINDS[kind]())
    return strategy.distribute_datasets_from_function(lambda _: KINDS[kind]())


def parts(strategy, leaf):
    """Each replica's tensor as what it consists of, its dtypes and shapes included."""
    tensors = tf.nest.flatten(strategy.experimental_local_results(leaf), expand_composites=True)
    return str([tensor if tensor is None else (tensor.dtype, tensor.shape, tensor.numpy()) for tensor in tensors])


def read(strategy, dataset):
    """What a program can see of a distributed dataset: its specs, and the first batches of each replica."""
    steps = iter(dataset)
    batches = []
    for _ in range(4):
        try:
            batch = next(steps)
        except Exception as error:  # the end, or what TensorFlow cannot do either; the text names an op
            batches.append(type(error))
            break
        batches.append(tf.nest.map_structure(lambda leaf: parts(strategy, leaf), batch))
    return str(dataset.element_spec), str(steps.element_spec), int(dataset.cardinality), batches


@functools.cache
def expected(kind, split):
    reference = tf.distribute.MirroredStrategy(DEVICES[:2])
    return read(reference, distributed(reference, kind, split))


@pytest.mark.parametrize(
    ("kind", "split"),
    [(kind, True) for kind in KINDS] + [(kind, False) for kind in ("partial", "static shapes", "ragged")],
)
def test_batches_and_specs_are_those_of_tensorflow(strategy, kind, split):
    assert read(strategy, distributed(strategy, kind, split)) == expected(kind, split)


def test_loops_in_functions_make_one_iterator(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(13, 8))

    @tf.function
    def epoch(distributed):
        steps = 0
        for _ in distributed:
            steps += 1
        return steps

    ops = {op.type for op in epoch.get_concrete_function(distributed).graph.get_operations()}
    assert "AnonymousIteratorV3" in ops
    assert "AnonymousMultiDeviceIteratorV3" not in ops
    assert int(epoch(distributed)) == 2


def test_passes_over_a_dataset_share_a_trace(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(16, 8))

    @tf.function
    def step(iterator):
        return [tf.reduce_sum(part) for part in strategy.experimental_local_results(next(iterator))]

    for _ in range(2):
        steps = iter(distributed)
        assert [[int(part) for part in step(steps)] for _ in range(2)] == [[6, 22], [38, 54]]
        with pytest.raises(tf.errors.OutOfRangeError):
            step(steps)
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("fetch", [True, False])
def test_each_part_is_on_the_device_of_its_replica(strategy, fetch):
    options = tf.distribute.InputOptions(experimental_fetch_to_device=fetch)
    batch = next(iter(strategy.experimental_distribute_dataset(numbers(8, 4), options)))
    devices = strategy.extended.worker_devices if fetch else [strategy.extended.worker_devices[0]] * 2
    assert [part.device for part in strategy.experimental_local_results(batch)] == list(devices)


@pytest.mark.parametrize(("buffer", "ahead"), [(0, 0), (1, 2), (3, 6)])
def test_elements_are_read_ahead_for_each_replica(strategy, buffer, ahead):
    taken, enough = [], threading.Event()

    def elements():
        for number in range(20):
            taken.append(number)
            if len(taken) >= 2 + ahead:
                enough.set()
            yield [number]

    dataset = tf.data.Dataset.from_generator(elements, output_signature=tf.TensorSpec([1], tf.int32))
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=buffer)
    steps = iter(strategy.distribute_datasets_from_function(lambda _: dataset, options))
    next(steps)
    assert enough.wait(300)
    if not buffer:
        assert taken == [0, 1]


def test_threads_that_share_an_iterator_get_whole_rounds(strategy):
    steps = iter(strategy.distribute_datasets_from_function(lambda _: numbers(400, 1)))
    rounds = []

    def take():
        rounds.extend([int(part[0]) for part in strategy.experimental_local_results(batch)] for batch in steps)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rounds) == [[number, number + 1] for number in range(0, 400, 2)]


@pytest.mark.threads("the function is called on each replica")
def test_a_replica_cannot_take_the_batches_of_all(strategy):
    steps = iter(strategy.experimental_distribute_dataset(numbers(13, 8)))
    with pytest.raises(ValueError, match="take it outside"):
        strategy.run(lambda: next(steps))


def test_the_scope_of_another_strategy_is_refused(strategy):
    steps = iter(strategy.experimental_distribute_dataset(numbers(13, 8)))
    with tf.distribute.OneDeviceStrategy(DEVICES[0]).scope(), pytest.raises(RuntimeError, match="different"):
        next(steps)
    with strategy.scope():
        assert sum(len(part) for part in strategy.experimental_local_results(next(steps))) == 8


def test_a_pass_ends_where_ops_run_later(strategy):
    tf.config.experimental.set_synchronous_execution(False)
    try:
        batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(12).batch(4, drop_remainder=True))
        assert len(list(batches)) == 3
    finally:
        tf.config.experimental.set_synchronous_execution(True)


def test_an_error_of_the_dataset_is_raised(strategy):
    dataset = tf.data.Dataset.range(8).map(lambda x: tf.ensure_shape(tf.range(x), [3])[0]).skip(4).batch(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        next(iter(strategy.experimental_distribute_dataset(dataset)))


def test_datasets_for_other_devices_stay_as_they_are():
    class Extended(tf.distribute.StrategyExtended):
        _num_replicas_in_sync = 1

        def _experimental_distribute_dataset(self, dataset, options):
            return dataset

    class ForHost(HostDatasets, Extended):
        pass

    strategy = tf.distribute.OneDeviceStrategy(DEVICES[0])
    made = strategy.experimental_distribute_dataset(numbers(8, 4))
    hook = ForHost(strategy)._experimental_distribute_dataset
    assert type(hook(made, None)) is not type(made)
    made._input_workers = type(made._input_workers)([(DEVICES[0], ("GPU:0", "GPU:1"))])
    assert hook(made, None) is made


def test_all_eager_iterators_read_one_dataset(strategy, monkeypatch):
    """Keras makes two iterators an epoch. Making the dataset took most of the time between two epochs."""
    made = []
    dataset = strategy.experimental_distribute_dataset(numbers(8, 4))
    original = tf.data.Dataset.prefetch
    monkeypatch.setattr(tf.data.Dataset, "prefetch", lambda *args: made.append(1) or original(*args))

    def total():
        return sum(int(tf.reduce_sum(part)) for each in dataset for part in strategy.experimental_local_results(each))

    assert [total() for _ in range(3)] == [28] * 3
    assert len(made) == 1


def test_a_dataset_is_read_in_a_function_and_after_it(strategy):
    dataset = strategy.experimental_distribute_dataset(numbers(8, 4))
    first = tf.function(lambda: strategy.experimental_local_results(next(iter(dataset))))
    expected = [[0, 1], [2, 3]]
    assert [part.numpy().tolist() for part in first()] == expected
    assert [part.numpy().tolist() for part in strategy.experimental_local_results(next(iter(dataset)))] == expected
    assert [part.numpy().tolist() for part in first()] == expected


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("kinds", "ours"), [("CC", True), ("GG", False), ("GC", False)])
def test_datasets_for_gpus_keep_tensorflows_iterators_which_copy_ahead(monkeypatch, kinds, ours, split):
    """A stand-in for two GPUs: the devices that TensorFlow's dataset feeds have their names."""
    dataset = distributed(tf.distribute.MirroredStrategy(DEVICES[:2]), "partial", split)
    devices = [f"/job:localhost/replica:0/task:0/device:{kind}PU:{index}" for index, kind in enumerate(kinds)]
    monkeypatch.setattr(dataset._input_workers, "compute_devices_for_worker", lambda worker: devices)
    assert (host_datasets._on_host(dataset) is not dataset) == ours


@pytest.mark.parametrize("many", [False, True], ids=["a loop", "a function's argument"])
def test_nobody_waits_for_the_end_of_an_iterator(strategy, many):
    """It waits for TensorFlow's thread that tunes the dataset, for up to a minute; here for a generator's end."""
    returned, ended, waited = threading.Event(), threading.Event(), []

    def batches():
        try:
            while True:
                yield [0.0, 1.0]
        finally:
            waited.append(returned.wait(300))
            ended.set()

    dataset = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([2], tf.float64))
    steps = iter(strategy.experimental_distribute_dataset(dataset))
    if many:
        tf.function(lambda given: next(given))(steps)
    else:
        next(steps)
    del steps
    returned.set()
    assert ended.wait(300), "the iterator is kept"
    assert waited == [True], "the iterator ended before `del` returned"


def test_a_loop_in_a_function_does_not_tune_its_dataset(strategy):
    """At its end the graph would wait for TensorFlow's thread that tunes, for up to a minute."""
    dataset = strategy.experimental_distribute_dataset(numbers(8, 4))

    @tf.function
    def batches(dataset):
        found = tf.constant(0)
        for _ in dataset:
            found += 1
        return found

    assert int(batches(dataset)) == 2
    made = batches.get_concrete_function(dataset).graph.get_operations()
    *_, last = (each.get_attr("serialized_options") for each in made if each.type == "OptionsDataset")
    settings = dataset_options_pb2.Options.FromString(last).autotune_options
    assert settings.WhichOneof("optional_enabled") == "enabled"
    assert not settings.enabled
