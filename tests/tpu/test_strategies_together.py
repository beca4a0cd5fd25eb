"""Several strategies in one process, on several threads, and beside MirroredStrategy."""

import gc
import textwrap
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers import memory
from helpers.loop_steps import SUM, at_once

from replica_engine import MirroredStrategy, TPUStrategy, logical_devices, xla


class Counting:
    """A strategy with a variable that each step adds 1 + 2 + ... + N to."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.total = replicas.variable(0.0, SUM)
        self.gain = replicas.size * (replicas.size + 1) / 2

    def body(self, x):
        self.total.assign_add(x)
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def step(self):
        """One step; each replica has the sum."""
        x = self.replicas.spread(lambda i: i + 1.0)
        assert self.replicas.each(self.replicas.strategy.run(self.body, args=(x,))) == [self.gain] * self.replicas.size

    def steps(self, count):
        """That many steps, one after the other."""
        for _ in range(count):
            self.step()

    def value(self):
        """The variable's."""
        return float(self.total.numpy())


@pytest.fixture
def counting(replicas):
    return lambda size: Counting(replicas(size))


def test_strategies_of_different_sizes_take_turns(counting):
    all_of_them = [counting(size) for size in (1, 2, 3, 5, 16)]  # 16: more than most machines have cores
    for _ in range(3):
        for each in all_of_them:
            each.step()
    assert [each.value() for each in all_of_them] == [3 * each.gain for each in all_of_them]


def test_two_strategies_of_one_size_do_not_mix(counting):
    first, second = counting(2), counting(2)
    first.steps(3)
    second.steps(5)
    first.total.assign(100.0)
    second.steps(1)
    assert (first.value(), second.value()) == (100.0, 18.0)
    first.steps(1)
    assert (first.value(), second.value()) == (103.0, 18.0)


def test_the_variable_of_one_strategy_in_a_run_of_another(counting):
    two, four = counting(2), counting(4)
    two.steps(1)

    assert four.replicas.each(four.replicas.strategy.run(lambda: two.total * 2.0)) == [6.0] * 4
    assert [float(each) for each in xla.replicate(lambda: two.total * 3.0, num_replicas=3)] == [9.0] * 3
    four.steps(1)
    assert (two.value(), four.value()) == (3.0, 10.0)


def test_different_strategies_run_on_threads_at_once(counting):
    all_of_them = [counting(size) for size in (1, 2, 4, 16)]
    at_once(*(lambda each=each: each.steps(30) for each in all_of_them))
    assert [each.value() for each in all_of_them] == [30 * each.gain for each in all_of_them]


@pytest.mark.parametrize("form", ["eager", "function"])
def test_one_strategy_runs_on_four_threads_at_once(counting, form):
    """No step gets lost, and who reads meanwhile sees the counter grow."""
    one = counting(2)
    step = one.step
    if form == "function":
        x = one.replicas.spread(lambda i: i + 1.0)
        step = tf.function(lambda: one.replicas.strategy.run(one.body, args=(x,)))

    def steps():
        seen = []
        for _ in range(25):
            step()
            seen.append(one.value())
        return seen

    before = xla.counts()
    for seen in at_once(*[steps] * 4):
        assert seen == sorted(seen)
        assert all(value % one.gain == 0.0 for value in seen)
    assert one.value() == 100 * one.gain
    assert (xla.counts() - before).launches == 100


def test_a_host_write_is_not_lost_while_another_thread_runs_steps(counting):
    """It comes before or after each step, and never half."""
    one = counting(2)
    one.step()

    def write():
        for _ in range(50):
            one.total.assign_add(1000.0)

    at_once(lambda: one.steps(50), write)
    assert one.value() == 51 * one.gain + 50 * 1000.0


def test_first_steps_on_threads_trace_once(counting):
    one = counting(2)
    before = xla.counts()
    at_once(*[one.step] * 4)
    assert (xla.counts() - before).compiles <= 1
    assert one.value() == 4 * one.gain


def test_a_step_of_new_shapes_and_a_trace_that_reads_do_not_wait_for_each_other(programs):
    """One thread compiles in a host function, the other reads a variable of the last step while it traces.

    In a process of its own, which can be ended if they do.
    """
    source = textwrap.dedent("""
        import threading

        import tensorflow as tf
        from replica_engine import TPUStrategy

        strategy = TPUStrategy(num_cores=2)
        with strategy.scope():
            variable = tf.Variable(0.0)
        tracing, stepping = threading.Event(), threading.Event()

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def step(x):
            tf.py_function(lambda: stepping.set(), [], [])
            return strategy.run(lambda x: tf.reduce_sum(x) + variable, args=(x,))

        @tf.autograph.experimental.do_not_convert
        def reads_while_it_is_traced():
            tracing.set()
            stepping.wait(60)
            with tf.init_scope():
                return variable.numpy() * 1.0

        def add():
            variable.assign_add(1.0)

        step.get_concrete_function()
        strategy.run(add)  # now the host has to fetch the value
        other = threading.Thread(target=lambda: strategy.run(reads_while_it_is_traced), daemon=True)
        other.start()
        tracing.wait(60)
        print(strategy.experimental_local_results(step(tf.ones([7])))[1].numpy())
        other.join()
    """)
    done = programs.run(source)
    assert done.stdout == "8.0\n", done.stderr


def program(strategy):
    """A training loop with its own optimizer, counters of all kinds and collectives: what it computes."""
    x = np.random.default_rng(0).normal(size=(5, 8, 3)).astype("float32")
    y = np.random.default_rng(1).normal(size=(5, 8, 1)).astype("float32")
    with strategy.scope():
        weight = tf.Variable([[0.1], [-0.2], [0.3]])
        velocity = tf.Variable(tf.zeros([3, 1]), trainable=False)
        seen = tf.Variable(0, aggregation=SUM)
        losses = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM, trainable=False)

    def fn(batch):
        features, labels = batch
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(features @ weight) - labels) ** 2)
        gradient = context.all_reduce("MEAN", tape.gradient(loss, weight))
        velocity.assign(0.9 * velocity + gradient)
        weight.assign_sub(0.1 * velocity)
        seen.assign_add(tf.shape(features)[0])
        losses.assign_add(loss)
        return loss, context.all_gather(features[:1], axis=0)

    dataset = tf.data.Dataset.from_tensor_slices((x.reshape(-1, 3), y.reshape(-1, 1))).batch(8)
    found = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        for result in strategy.run(fn, args=(batch,)):
            found += [one.numpy().ravel() for one in strategy.experimental_local_results(result)]
    return [*np.concatenate(found), *weight.numpy().ravel(), float(losses.numpy()), int(seen.numpy())]


@pytest.mark.parametrize("size", [1, 4])
def test_the_same_program_gives_the_same_numbers_under_both_strategies(size):
    mirrored, tpu = MirroredStrategy(logical_devices(size)), TPUStrategy(num_cores=size)
    found = program(tpu)
    # XLA fuses and sums in another order: a few units in the last place (6e-8) a step, for 5 steps.
    np.testing.assert_allclose(found, program(mirrored), rtol=1e-5, atol=1e-6)
    assert found[-1] == 40


def test_both_kinds_of_strategy_take_turns_in_one_process(counting):
    tpu, mirrored = counting(2), MirroredStrategy(logical_devices(2))
    with mirrored.scope():
        other = tf.Variable(0.0, aggregation=SUM)
    for step in range(1, 6):
        tpu.step()
        mirrored.run(
            lambda x: other.assign_add(x),
            args=(mirrored.experimental_distribute_values_from_function(lambda _: tf.constant(tpu.value())),),
        )
        assert tpu.value() == 3.0 * step
    assert other.numpy() == 2 * (3.0 + 6.0 + 9.0 + 12.0 + 15.0)


@pytest.mark.parametrize("form", ["never", "eager", "function", "host function", "random"])
def test_a_dropped_strategy_is_freed(form):
    """With its variables, its programs and the functions they were made of."""

    class Owner:
        def __init__(self):
            self.strategy = TPUStrategy(num_cores=2)
            with self.strategy.scope():
                self.variable = tf.Variable(tf.zeros([10]))
            self.step = tf.function(lambda: self.strategy.run(self.body))
            self.read = tf.function(lambda: self.variable * 2.0)

        def body(self):
            noise = tf.random.normal([10]) if form == "random" else 1.0
            self.variable.assign_add(self.variable + noise)

    owner = Owner()
    if form in ("eager", "random"):
        owner.strategy.run(owner.body)
    elif form == "function":
        owner.step()
    elif form == "host function":
        owner.step()
        owner.read()
    owner.variable.numpy()
    gone = [weakref.ref(owner), weakref.ref(owner.strategy), weakref.ref(owner.variable)]
    del owner
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_memory_stays_flat_over_many_runs(programs):
    """A step that kept an array of a megabyte, of arguments, results or variables, would keep 300 MB."""
    assert programs.value(memory.grown_by_compiled_runs) < 100 * 2**20


def test_making_and_dropping_strategies_keeps_memory_flat(programs):
    assert programs.value(memory.grown_by_compiled_strategies) < 50 * 2**20  # kept, they would be 90 MB of variables
