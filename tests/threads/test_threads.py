"""Replica threads as users meet them: several strategies, several user threads, nested runs, many runs."""

import concurrent.futures
import textwrap
import threading

import keras
import pytest
import tensorflow as tf
from helpers import memory

import replica_engine
from replica_engine.testing import no_leaked_threads


def mirrored(n, **options):
    return replica_engine.MirroredStrategy([f"CPU:{i}" for i in range(n)], **options)


def all_reduce_id(value=1.0):
    context = tf.distribute.get_replica_context()
    replica_id = tf.cast(context.replica_id_in_sync_group, tf.float32)
    return context.all_reduce("SUM", value * (replica_id + 1.0))


def first(strategy, value):
    return float(strategy.experimental_local_results(value)[0])


def threads_of_replicas():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("replica ")]


def test_go_when_the_strategy_goes():
    with no_leaked_threads():
        strategy = mirrored(3)
        with strategy.scope():
            module = tf.Module()
            module.variable = tf.Variable(1.0)
        strategy.run(tf.function(lambda: module.variable + all_reduce_id()))  # noqa: F821
        assert len(threads_of_replicas()) >= 3
        del strategy, module


def test_go_when_keras_made_a_seed_generator_on_them():
    with no_leaked_threads():
        strategy = mirrored(2)
        strategy.run(lambda: keras.random.normal([2]))
        del strategy


@pytest.mark.parametrize("form", ["eager", "tf.function"])
def test_several_strategies_at_once(form):
    def work(n):
        strategy = mirrored(n)
        run = tf.function(all_reduce_id) if form == "tf.function" else all_reduce_id
        return [first(strategy, strategy.run(run)) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for n, sums in zip((1, 2, 3, 4), pool.map(work, (1, 2, 3, 4)), strict=True):
            assert sums == [n * (n + 1) / 2] * 20


def test_four_user_threads_on_one_strategy():
    strategy = mirrored(2)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def work(value):
        sums = [first(strategy, strategy.run(all_reduce_id, args=(float(value),))) for _ in range(30)]
        strategy.run(lambda: total.assign_add(tf.ones([])))
        return sums

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for value, sums in enumerate(pool.map(work, range(4))):
            assert sums == [3.0 * value] * 30
    assert float(total.numpy()) == 8.0


def test_collectives_of_two_strategies_do_not_meet():
    """What tf.distribute fails at: "joining a group with size 2, but that group has size 4"."""
    for n in (2, 4, 2):
        strategy = mirrored(n)
        collectives = strategy.extended._collective_ops  # what GPUs would use; here by hand, on CPUs
        value = strategy.experimental_distribute_values_from_function(lambda _: tf.constant([1.0, 2.0]))

        @tf.function
        def reduce(value, strategy=strategy, collectives=collectives):
            with strategy.scope():
                return collectives.reduce("SUM", value, value)

        reduced = strategy.experimental_local_results(reduce(value))
        assert reduced[0].numpy().tolist() == [n * 1.0, n * 2.0]


def test_two_thousand_runs_neither_grow_threads_nor_memory(programs):
    grown, threads = programs.value(memory.grown_by_merge_calls)
    assert threads <= 0
    assert grown < 8 * 2**20, "bytes; 2,000 leaked runs of 4 KiB each would show"


class TestConcurrent:
    @pytest.mark.parametrize("quick", [0, 1])
    def test_variables_are_made_by_replica_0_whichever_is_quicker(self, quick):
        strategy = mirrored(2, concurrent=True)
        other_may_go = threading.Event()

        def fn():
            replica_id = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            if replica_id != quick:
                assert other_may_go.wait(300)
            else:
                other_may_go.set()
            return [tf.Variable(float(replica_id), name="a"), tf.Variable(10.0 + replica_id, name="b")]

        variables = strategy.run(fn)
        assert [v.numpy() for v in variables] == [0.0, 10.0]

    def test_a_variable_made_once_under_a_check_is_not_taken_for_another(self):
        """Replica 1 finds the first variable there and asks for the second only: same name, other line."""
        strategy = mirrored(2, concurrent=True)
        made_first, cache = threading.Event(), {}

        def fn():
            replica_id = int(tf.distribute.get_replica_context().replica_id_in_sync_group)
            if replica_id == 1:
                assert made_first.wait(300)
            if "first" not in cache:
                cache["first"] = tf.Variable(1.0)
                made_first.set()
            second = tf.Variable(2.0)
            return second

        assert strategy.run(fn).numpy() == 2.0

    @pytest.mark.parametrize("n", [2, 4])
    def test_layers_built_lazily_in_a_loop_keep_a_variable_each(self, n):
        class Layer:
            def __init__(self, value):
                self.value, self.variable = value, None

            def __call__(self):
                if self.variable is None:
                    self.variable = tf.Variable(self.value)
                return self.variable.value()

        for _ in range(20):
            strategy, layers = mirrored(n, concurrent=True), [Layer(float(k)) for k in range(6)]
            result = strategy.run(lambda layers=layers: [layer() for layer in layers])
            for k, value in enumerate(result):
                assert [float(v) for v in strategy.experimental_local_results(value)] == [k] * n
            assert len({id(layer.variable) for layer in layers}) == 6

    def test_a_variable_may_be_made_under_a_lock(self):
        strategy, lock, made = mirrored(2, concurrent=True, timeout=300), threading.Lock(), {}

        def fn():
            with lock:
                if "v" not in made:
                    made["v"] = tf.Variable(3.0)
            return made["v"].value()

        assert first(strategy, strategy.run(fn)) == 3.0

    def test_only_functions_that_create_variables_get_a_head_start(self, monkeypatch):
        strategy, order = mirrored(2, concurrent=True), []
        barrier = threading.Barrier(2, timeout=300)

        def fn():
            barrier.wait()
            order.append(threading.current_thread().name[:9])

        strategy.run(fn)  # waits for the end of the head start
        monkeypatch.setattr("replica_engine.engine.run.HEAD_START", 1000.0)  # in which the barrier would break
        for _ in range(4):
            strategy.run(fn)
        assert sorted(order) == ["replica 0"] * 5 + ["replica 1"] * 5


def test_nothing_waits_for_replicas_at_exit(programs):
    """A stuck replica, parked ones, and a run on its way, which does not go on by itself: the interpreter ends."""
    code = """
        import atexit, threading
        atexit.register(lambda: threading.Event().wait(0.5))  # after what is registered later
        import tensorflow as tf, replica_engine
        from replica_engine import logical_devices

        parked = replica_engine.MirroredStrategy(logical_devices(2))
        parked.run(lambda: None)
        strategy = replica_engine.MirroredStrategy(logical_devices(2), timeout=0.2)
        try:
            strategy.run(threading.Event().wait)
        except TimeoutError:
            print("timed out")

        other, inside = replica_engine.MirroredStrategy(logical_devices(2)), threading.Event()

        def merge_fn(strategy):
            inside.set()
            threading.Event().wait()

        def fn():
            print("got", tf.distribute.get_replica_context().merge_call(merge_fn), flush=True)

        threading.Thread(target=other.run, args=(fn,), daemon=True).start()
        inside.wait()
        print("main ends", flush=True)
    """
    result = programs.run(textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "timed out\nmain ends\n"


class TestWorksForOtherStrategies:
    def test_tensorflows_own_mirrored_strategy(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
        names = []

        def fn(x):
            names.append(threading.current_thread().name)
            context = tf.distribute.get_replica_context()
            assert isinstance(context, replica_engine.ReplicaContext)
            return context.all_reduce("SUM", x)

        assert first(strategy, replica_engine.call_for_each_replica(strategy, fn, args=(tf.constant(2.0),))) == 4.0
        assert names == ["replica 0 of 2 (CPU:0)", "replica 1 of 2 (CPU:1)"]

    def test_one_device_strategy(self):
        strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        total = replica_engine.call_for_each_replica(strategy, all_reduce_id, args=(2.0,))
        assert float(total) == 2.0
        assert replica_engine.call_for_each_replica(strategy, lambda x, y: x + y, args=(1,), kwargs={"y": 2}) == 3
