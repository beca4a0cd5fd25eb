"""What keeps a state: variables, generators of random numbers, modules, tables, strategies of TensorFlow."""

import keras
import pytest
import tensorflow as tf

from helpers.made_before import BOTH, MIRRORED, TPU, made_before, shares
from helpers.made_before.control_flow import ONE, context, total
from helpers.on_mirrored import locally, numbered, run


@made_before(*BOTH)
def methods_of_a_plain_variable():
    variable = tf.Variable(1.0)
    assign, read, numpy = variable.assign, variable.read_value, variable.numpy
    doubled = tf.function(lambda: 2.0 * variable)
    assert doubled() == 2.0

    def use(strategy):
        assign(3.0)
        assert run(strategy, lambda x: x * read(), numbered(strategy)) == [3.0, 6.0]
        strategy.run(lambda: assign(7.0))
        assert numpy() == 7.0
        assert doubled() == 14.0
        assert run(strategy, lambda: doubled() + variable) == [21.0, 21.0]

    return use


@made_before(MIRRORED)
def numbers_drawn_by_names_of_functions():
    from tensorflow.random import normal, set_seed, uniform

    def draw():
        return normal([2]) + uniform([2])

    draw()

    def use(strategy):
        set_seed(7)
        alone = [draw().numpy().tolist() for _ in range(2)]
        set_seed(7)
        first, second = run(strategy, draw, form="eager")
        assert [first, draw().numpy().tolist()] == alone  # the second replica has drawn none of them
        assert second not in alone
        set_seed(None)

    return use


@made_before(*BOTH)
def a_generator_of_random_numbers():
    generator = tf.random.Generator.from_seed(5)
    draw, draw_layer = generator.normal, keras.layers.Dropout(0.5, seed=3)
    draw([2])
    draw_layer(tf.ones([8]), training=True)

    def use(strategy):
        generator.reset_from_seed(5)
        fresh = tf.random.Generator.from_seed(5)
        assert run(strategy, lambda: draw([2])) == run(strategy, lambda: fresh.normal([2]))
        other = keras.layers.Dropout(0.5, seed=3)
        draw_layer.seed_generator.state.assign(other.seed_generator.state)
        found, expected = (
            run(strategy, lambda layer=layer: layer(tf.ones([8]), training=True)) for layer in (draw_layer, other)
        )
        assert found == expected

    return use


@made_before(TPU)
def binomial_numbers_of_a_generator():
    generator = tf.random.Generator.from_seed(5)
    draw = generator.binomial
    draw([2], 8.0, 0.5)

    def use(strategy):
        generator.reset_from_seed(5)
        fresh = tf.random.Generator.from_seed(5)
        found, expected = (run(strategy, lambda each=each: each([9], 8.0, 0.5)) for each in (draw, fresh.binomial))
        assert found == expected

    return use


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.seen = None

    def __call__(self, x):
        self.seen = x
        total(x)
        return self.seen * 1.0


class Layer(keras.layers.Layer):
    def call(self, x):
        self.seen = x
        total(x)
        return self.seen * 1.0


@made_before(MIRRORED)
def what_a_step_keeps_in_an_attribute():
    each = [Module(), Layer()]
    for kept in each:
        assert kept(ONE) == 1.0

    def use(strategy):
        for kept in each:
            for form in ("eager", "graph"):
                assert run(strategy, lambda x, kept=kept: kept(x), numbered(strategy), form=form) == [1.0, 2.0]

    return use


@made_before(*BOTH)
def a_module_that_makes_its_variable_in_a_replica():
    class Lazy(tf.Module):
        weight = None

        def __call__(self, x):
            if self.weight is None:
                self.weight = tf.Variable(2.0, aggregation=tf.VariableAggregation.SUM)
            self.weight.assign_add(x)
            return self.weight.read_value()

    other, module = Lazy(), Lazy()
    assert other(ONE) == 3.0

    def use(strategy):
        module.weight = None
        assert run(strategy, lambda x: module(x), numbered(strategy), form="eager") == [5.0, 5.0]
        assert float(module.weight) == 5.0

    return use


@made_before(TPU)
def rows_of_a_ragged_tensor():
    from tensorflow import ragged, reduce_sum, repeat

    rows, table = ragged.constant([[1.0, 2.0], [3.0], []]), tf.constant([[1.0], [2.0], [3.0]])

    @tf.function
    def step(x):
        return reduce_sum(x, axis=1), repeat(table, x.row_lengths(), axis=0)

    def plain(result):
        return [each.numpy().tolist() for each in result]

    expected = plain(step(rows))

    def use(strategy):
        @tf.function(input_signature=[tf.RaggedTensorSpec([None, None])])
        def of_argument(x):
            return strategy.run(step, args=(x,))

        for result in (strategy.run(lambda: step(rows)), of_argument(rows)):
            assert [locally(strategy, each) for each in result] == [[each] * 2 for each in expected]

    return use


@made_before(TPU)
def an_optimizer_of_tensorflow_1_that_updates_rows():
    optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)

    def trained(words, found):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(words, found) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, words), words)])

    def table():
        return tf.Variable(tf.reshape(tf.range(6.0), [3, 2]))

    tf.function(trained)(table(), tf.constant([0, 1, 1]))

    def use(strategy):
        with strategy.scope():
            words = table()
        strategy.run(trained, args=(words, shares(strategy, [[0, 1], [1, 0]])))
        both = table()
        tf.function(trained)(both, tf.constant([0, 1, 1, 0]))
        assert tf.reduce_max(tf.abs(words.read_value() - both)) < 1e-5

    return use


@made_before(*BOTH)
def tables_and_words():
    from tensorflow.strings import length, to_number

    words = tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0])
    table = tf.lookup.StaticHashTable(words, -1.0)
    layer = keras.layers.TextVectorization(vocabulary=["a", "b"])

    @tf.function
    def step(text):
        return table.lookup(text) + to_number(tf.strings.as_string(length(text)))

    assert step(tf.constant("b")) == 3.0
    assert layer(tf.constant(["b a"])).numpy().tolist() == [[3, 2]]

    def use(strategy):
        each = shares(strategy, ["a", "b"])
        assert run(strategy, lambda text: step(text), each) == [2.0, 3.0]
        found = strategy.run(lambda text: layer(text[tf.newaxis]), args=(each,))
        assert locally(strategy, found) == [[[2]], [[3]]]

    return use


@made_before(*BOTH)
def a_check_that_fails_in_a_replica():
    from tensorflow.debugging import assert_positive

    @tf.function
    def checked(x):
        assert_positive(x, message="must be positive")
        return tf.math.log(x)

    assert checked(ONE) == 0.0

    def use(strategy):
        assert run(strategy, lambda x: checked(x), ONE) == [0.0, 0.0]
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
            strategy.run(lambda x: checked(x), args=(-ONE,))

    return use


@made_before(*BOTH)
def a_strategy_of_tensorflow_and_its_values():
    theirs = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with theirs.scope():
        variable = tf.Variable(1.5)

    def number():
        return tf.cast(context().replica_id_in_sync_group, tf.float32)

    result = theirs.run(number)

    def use(strategy):
        import replica_engine

        assert float(variable) == 1.5
        with pytest.raises(replica_engine.errors.ReplicaValueError, match="experimental_local_results"):
            result[0]
        yes = tf.constant(True)

        def step():
            return tf.cond(yes, lambda: total(number() + variable), lambda: 0.0)

        found = tf.function(lambda: replica_engine.call_for_each_replica(theirs, step))()
        assert locally(theirs, found) == [4.0, 4.0]
        assert locally(theirs, theirs.run(number)) == [0.0, 1.0]

    return use


@made_before(MIRRORED)
def a_graph_and_a_session_of_tensorflow_1():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        plain = x * 2.0
    session = tf.compat.v1.Session(graph=graph)
    assert session.run(plain, {x: 3.0}) == 6.0

    def use(strategy):
        with graph.as_default():
            result = strategy.reduce("SUM", strategy.run(lambda x: x * 2.0, args=(x,)), axis=None)
        assert session.run([plain, result], {x: 3.0}) == [6.0, 12.0]

    return use
