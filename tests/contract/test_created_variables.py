"""Variables that a body creates when it first runs, of values that it computes."""

import pytest
import tensorflow as tf

pytestmark = pytest.mark.replicas(2)  # one that creates variables, and one that is given them

SEED = 3
MADE = tf.random.Generator.from_seed(SEED)

RANDOM = {
    "normal": lambda: tf.random.normal([3]),
    "initializer": lambda: tf.random_normal_initializer()([3]),
    "computed": lambda: 2.0 * tf.random.uniform([3]) - 1.0,
    "generator": lambda: MADE.normal([3]),
    # Made in the test: TensorFlow keeps what a function was first traced with, the test's strategy, as long as that.
    "function": lambda: tf.function(lambda: tf.random.normal([3]))(),
    "callable": lambda: lambda: tf.random.normal([3]),
    "list": lambda: [tf.random.normal([]), tf.random.normal([]), 1.0],
}


class Module(tf.Module):
    """Makes its variables on the first call, as Sonnet's modules and those of TensorFlow's guide do."""

    def __init__(self, *make):
        super().__init__()
        self.make = make
        self.made = None

    def __call__(self, x):
        if self.made is None:
            self.made = [tf.Variable(make()) for make in self.make]
        return [made * x for made in self.made]


@pytest.fixture
def components(strategy):
    return lambda v: [component.numpy().tolist() for component in strategy.experimental_local_results(v)]


def test_random_initial_values_are_equal_on_all_replicas(strategy, n, run, local, components):
    module = Module(*RANDOM.values())
    results = zip(*local(run(module, [tf.constant(1.0)])), strict=True)
    first = [components(made)[0] for made in module.made]
    for kind, made, result, value in zip(RANDOM, module.made, results, first, strict=True):
        assert len(set(value)) == 3, kind
        assert components(made) == list(result) == [value] * n, kind
        assert made.distribute_strategy is strategy
    assert local(run(module, [tf.constant(1.0)])) == [first] * n


@pytest.mark.graphs  # released all at once, replicas draw eager numbers in any order
def test_a_seed_makes_them_repeatable(run):
    values = []
    for _ in range(2):
        tf.random.set_seed(SEED)
        module = Module(RANDOM["normal"], RANDOM["normal"])
        run(module, [tf.constant(1.0)])
        values.append([made.numpy().tolist() for made in module.made])
    assert values[0] == values[1]
    assert values[0][0] != values[0][1]


@pytest.mark.graphs
def test_an_operations_seed_gives_the_numbers_of_one_device(run):
    def draw():
        return tf.random.normal([3], seed=5)

    tf.random.set_seed(SEED)
    expected = draw().numpy().tolist()
    tf.random.set_seed(SEED)
    module = Module(draw)
    run(module, [tf.constant(1.0)])
    assert module.made[0].numpy().tolist() == expected


def test_two_variables_of_one_random_tensor_are_equal(run):
    class Twins(Module):
        def __call__(self, x):
            if self.made is None:
                value = tf.random.normal([3])
                self.made = [tf.Variable(value), tf.Variable(value * 2.0)]
            return self.made[0] * x

    module = Twins()
    run(module, [tf.constant(1.0)])
    first, second = (made.numpy().tolist() for made in module.made)
    assert second == [2.0 * each for each in first]


def test_an_initial_value_may_be_that_of_another_variable(strategy, run):
    with strategy.scope():
        other = tf.Variable([1.0, 2.0])
    plain = tf.Variable([5.0])
    strategy.run(lambda: other.assign_add([1.0, 1.0]))  # so that the newest value is on the devices
    module = Module(lambda: other * 2.0, other.read_value, lambda: other, lambda: plain + other[0])
    run(module, [tf.constant(1.0)])
    assert [made.numpy().tolist() for made in module.made] == [[4.0, 6.0], [2.0, 3.0], [2.0, 3.0], [7.0]]
    strategy.run(lambda: module.made[1].assign_add([1.0, 1.0]))
    assert other.numpy().tolist() == [2.0, 3.0]


def test_of_replicas_that_compute_different_ones_the_first_ones_counts(run, components):
    module = Module(lambda: tf.distribute.get_replica_context().replica_id_in_sync_group + tf.constant([7]))
    run(module, [tf.constant(1)])
    assert components(module.made[0]) == [[7]] * len(components(module.made[0]))


def test_a_layer_in_a_function_of_its_own(run, local):
    class Linear(tf.Module):
        weight = None

        @tf.function
        def __call__(self, x):
            if self.weight is None:
                self.weight = tf.Variable(tf.random.normal([x.shape[-1], 2]))
            return x @ self.weight

    layer = Linear()
    results = local(run(layer, [tf.eye(3)]))
    assert results == [layer.weight.numpy().tolist()] * len(results)
