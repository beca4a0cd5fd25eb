"""The strategies of examples/: what docs/custom_strategy.md says can be done, done."""

import copy
import importlib.util
import pathlib
import threading

import pytest
import tensorflow as tf

import replica_engine
from replica_engine.strategies import MirroredExtended, ReplicaOptions, ReplicaThreads

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_replicas(strategy, values, fn):
    distributed = strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )
    return strategy.experimental_local_results(strategy.run(fn, args=(distributed,)))


def all_reduce(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


class TestBfloat16AllReduce:
    @pytest.fixture
    def compressed(self):
        return load("bfloat16_all_reduce").CompressedMirroredStrategy(["CPU:0", "CPU:1"])

    def test_floats_lose_what_bfloat16_cannot_carry(self, compressed):
        thirds = on_replicas(compressed, [tf.constant([1 / 3]), tf.constant([1 / 3])], all_reduce)
        assert [t.dtype for t in thirds] == [tf.float32] * 2
        assert [t.numpy()[0] for t in thirds] == [2 * 0.333984375] * 2
        exact = on_replicas(replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]), [tf.constant([1 / 3])] * 2, all_reduce)
        assert exact[0].numpy()[0] == pytest.approx(2 / 3, abs=1e-7)

    def test_integers_and_sparse_values_pass_unchanged(self, compressed):
        ints = on_replicas(compressed, [tf.constant([1_000_001])] * 2, all_reduce)
        assert ints[0].numpy()[0] == 2_000_002
        slices = tf.IndexedSlices(tf.constant([[1 / 3]]), tf.constant([0]), tf.constant([2, 1]))
        reduced = on_replicas(compressed, [slices, slices], all_reduce)
        assert tf.convert_to_tensor(reduced[0]).numpy()[0, 0] == pytest.approx(2 / 3, abs=1e-7)

    def test_trains_a_keras_model(self, compressed):
        import keras

        keras.utils.set_random_seed(1)
        with compressed.scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        inputs = tf.random.stateless_normal([64, 4], [1, 2])
        history = model.fit(inputs, tf.reduce_sum(inputs, 1), batch_size=16, epochs=5, verbose=0)
        assert history.history["loss"][-1] < history.history["loss"][0] / 2

    def test_is_short(self):
        assert len((EXAMPLES / "bfloat16_all_reduce.py").read_text().splitlines()) < 60


def test_multi_worker_strategy_in_two_processes(programs, unused_ports):
    unused = unused_ports(2)
    workers = [programs.start(EXAMPLES / "multi_worker.py", task, *unused) for task in range(2)]
    try:
        outputs = [worker.communicate(timeout=500) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for task, (out, err) in enumerate(outputs):
        assert out == f"worker {task}: the sum over 2 replicas is 3\n", err[-2000:]


def test_multi_worker_strategy_runs_on_replica_threads():
    strategy = load("multi_worker").MultiWorkerOnReplicaThreads()
    names = []
    strategy.run(lambda: names.append(threading.current_thread().name))
    assert names == ["replica 0 of 1 (CPU:0)"]


def test_a_context_class_of_ones_own():
    class Context(replica_engine.ReplicaContext):
        def greeting(self):
            return f"replica {int(self.replica_id_in_sync_group)}"

    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.extended.replica_options = ReplicaOptions(context_class=Context)
    result = strategy.run(lambda: tf.distribute.get_replica_context().greeting())
    assert strategy.experimental_local_results(result) == ("replica 0", "replica 1")


class _OnThreads(ReplicaThreads, tf.distribute.MirroredStrategy(["CPU:0"]).extended.__class__):
    def sync_points(self):
        return [*super().sync_points(), "one of its own"]


def replica_id():
    return int(tf.distribute.get_replica_context().replica_id_in_sync_group)


class _Own(tf.distribute.MirroredStrategy):
    def __init__(self, devices):
        tf.distribute.Strategy.__init__(self, _OnThreads(self, devices))


def test_a_deep_copy_of_a_strategy_that_has_run_runs_too():
    strategy = _Own(replica_engine.logical_devices(2))
    assert strategy.experimental_local_results(strategy.run(replica_id)) == (0, 1)
    copied = copy.deepcopy(strategy)
    assert copied.experimental_local_results(copied.run(replica_id)) == (0, 1)


def test_an_extended_half_may_add_sync_points():
    assert _Own(replica_engine.logical_devices(1)).extended.sync_points() == ["one of its own"]


def test_the_backend_of_an_extended_half_cannot_be_set():
    with pytest.raises(AttributeError, match="Give your own attribute another name"):
        _Own(replica_engine.logical_devices(2)).extended.backend = "nccl"


def test_sync_points_of_what_has_not_run_are_none():
    assert replica_engine.sync_points(tf.distribute.get_strategy()) == []
    assert replica_engine.sync_points(tf.distribute.MirroredStrategy(["CPU:0"])) == []


def test_replicate_model_runs_on_a_strategy_of_one_s_own():
    import keras

    from replica_engine.keras import replicate_model

    class Own(tf.distribute.MirroredStrategy):
        def __init__(self):
            tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices=["CPU:0", "CPU:1"]))

    x = tf.random.stateless_normal([10, 4], [1, 2])
    losses = []
    for strategy in (None, Own(), load("multi_worker").MultiWorkerOnReplicaThreads()):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("adam", "mse")
        trained = model if strategy is None else replicate_model(model, strategy=strategy)
        losses.append(trained.fit(x, x[:, :1], batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
