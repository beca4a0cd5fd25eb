"""Mistakes of which the library warns inside a `tf.function` as it does in eager mode, and programs close to them."""

import gc
import logging
import weakref

import keras
import pytest
import tensorflow as tf

WHOLE, TAPE = "gives the whole batch", "A gradient tape is around strategy.run"


@pytest.fixture
def warnings():
    """The first lines of the warnings that the library has logged since this was asked last."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("replica_engine")
    logger.addHandler(handler)

    def taken():
        taken, seen[:] = list(seen), []
        return taken

    yield taken
    logger.removeHandler(handler)
    assert seen == [], "the test has not looked at these"


def plain(rows=8):
    return tf.data.Dataset.from_tensor_slices(tf.ones([2 * rows])).batch(rows)


def total(*values):
    return tf.add_n([tf.reduce_sum(value) for value in values])


@pytest.fixture
def train(strategy):
    return tf.function(lambda batch: strategy.run(total, args=(batch,)))


def test_a_batch_of_a_plain_dataset_is_told_of_once(strategy, train, warnings):
    for index, batch in enumerate(plain()):
        train(batch)
        found = warnings()
        if index == 0:  # the call that traces
            (text,) = found
            assert f"{WHOLE} of 8 to each of {strategy.num_replicas_in_sync} replicas" in text
            assert "test_alarms_in_functions.py" in text
        else:
            assert found == []


def test_a_function_that_was_traced_with_something_else_first(train, warnings):
    train(tf.ones([8]))
    assert warnings() == []
    train(next(iter(plain())))
    (text,) = warnings()
    assert WHOLE in text


def test_a_batch_of_parts(strategy, warnings):
    @tf.function
    def train(batch):
        strategy.run(total, args=batch)

    for batch in tf.data.Dataset.zip((plain(), plain())):
        train(batch)
    assert len(warnings()) == 1


def test_a_batch_that_is_a_dict(strategy, warnings):
    @tf.function
    def train(batch):
        strategy.run(lambda batch: tf.reduce_sum(batch["x"]), args=(batch,))

    for batch in plain().map(lambda x: {"x": x}):
        train(batch)
    assert len(warnings()) == 1


def test_a_function_in_a_function(train, warnings):
    @tf.function
    def outer(number, batch):
        return number, train(batch)

    outer(tf.ones([4]), tf.ones([8]))
    assert warnings() == []
    for batch in plain():
        outer(tf.ones([4]), batch)
    assert len(warnings()) == 1


def test_a_function_that_takes_the_batch_of_the_function_around_it(strategy, warnings):
    @tf.function
    def outer(batch):
        @tf.function
        def inner():
            return strategy.run(total, args=(batch,))

        return inner()

    for batch in plain():
        outer(batch)
    assert len(warnings()) == 1


def test_a_branch(strategy, warnings):
    @tf.function
    def train(batch, wanted):
        if wanted:
            strategy.run(total, args=(batch,))

    for batch in plain():
        train(batch, tf.constant(True))
    assert len(warnings()) == 1


def test_a_loop_over_a_dataset_in_the_function(strategy, warnings):
    @tf.function
    def epoch(dataset):
        for batch in dataset:
            strategy.run(total, args=(batch,))

    epoch(plain())
    (text,) = warnings()
    assert WHOLE in text


def test_a_function_in_a_loop_over_a_dataset_in_a_function(train, warnings):
    @tf.function
    def epoch(dataset):
        count = 0
        for batch in dataset:
            train(batch)
            count += 1
        return count

    epoch(plain())
    assert len(warnings()) == 1


def test_a_batch_of_a_closure(strategy, warnings):
    batch = next(iter(plain()))
    tf.function(lambda: strategy.run(total, args=(batch,)))()
    assert len(warnings()) == 1


def test_an_eager_tape_around_the_function(strategy, train, warnings):
    batch = next(iter(plain()))
    with tf.GradientTape() as tape:
        tape.watch(batch)
        train(batch)
    assert len(warnings()) == 1


def test_a_concrete_function(train, warnings):
    concrete = train.get_concrete_function(tf.TensorSpec([None]))
    for batch in plain():
        concrete(batch)
    assert len(warnings()) == 1


def test_what_does_not_go_whole_to_the_replicas(strategy, train, warnings, per_replica):
    batches = plain()
    for batch in strategy.experimental_distribute_dataset(batches):
        train(batch)

    whole = next(iter(batches))
    train(tf.ones([8]))
    train(whole + 1.0)
    train(strategy.experimental_distribute_values_from_function(lambda context: whole))
    train(next(iter(plain(1))))  # fewer rows than replicas
    train(next(iter(tf.data.Dataset.range(1))))

    @tf.function
    def with_weights(batch, weights):
        strategy.run(total, args=(batch, weights))

    with_weights(per_replica(lambda index: [1.0]), whole)

    @tf.function
    def with_nested(batch, weights):
        strategy.run(lambda x, more: total(x, more["of"]["batch"]), args=(weights, {"of": {"batch": batch}}))

    with_nested(per_replica(lambda index: [1.0]), whole)

    @tf.function
    def of_computed(batch):
        strategy.run(total, args=(tf.ones([8]) * tf.reduce_mean(batch),))

    of_computed(whole)


@pytest.mark.replicas(2)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_batch_that_keras_gives_whole_to_all_replicas(strategy, warnings, run_eagerly):
    """`train_on_batch` trains as on one device: each replica's gradient counts half."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    for x in plain().map(lambda x: x[:, tf.newaxis]):
        model.train_on_batch(x, x)


def test_what_a_loop_over_a_dataset_changes_or_leaves(strategy, warnings):
    """Not the elements of the dataset, but values of the loop, and what the code around it has."""

    @tf.function
    def epoch(dataset, weights):
        state = tf.zeros([8])
        for batch in dataset:
            state += tf.reduce_sum(batch)
            strategy.run(total, args=(state, weights))

    epoch(plain(), tf.ones([8]))


def test_the_function_goes_with_the_strategy_and_the_model(make_strategy, warnings):
    """What calls look at holds neither the strategy nor the function."""

    def trained():
        strategy = make_strategy(2)
        train = tf.function(lambda batch: strategy.run(total, args=(batch,)))
        train(next(iter(plain())))
        return weakref.ref(strategy), weakref.ref(train)

    strategies, functions = trained()
    assert len(warnings()) == 1
    gc.collect()
    assert functions() is None
    assert strategies() is None


@pytest.fixture
def weight(strategy):
    with strategy.scope():
        return tf.Variable(3.0)


@pytest.mark.graphs
def test_a_tape_around_run_in_the_function(strategy, weight, warnings):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = strategy.reduce("SUM", strategy.run(lambda: weight * weight), axis=None)
        return tape.gradient(loss, weight)

    assert step() is None
    (text,) = warnings()
    assert TAPE in text
    assert "test_alarms_in_functions.py" in text
    step()


@pytest.mark.graphs
def test_a_tape_that_watches_an_argument_in_the_function(strategy, warnings):
    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            parts = strategy.experimental_local_results(strategy.run(tf.square, args=(x,)))
        return tape.gradient(parts[0], x)

    assert step(tf.constant(2.0)) is None
    (text,) = warnings()
    assert TAPE in text


@pytest.mark.graphs
def test_a_tape_in_a_loop_around_run_in_the_function(strategy, weight, warnings):
    @tf.function
    def steps():
        for _ in tf.range(2):
            with tf.GradientTape() as tape:
                loss = strategy.reduce("SUM", strategy.run(lambda: weight * weight), axis=None)
            assert tape.gradient(loss, weight) is None

    steps()
    (text,) = warnings()
    assert TAPE in text


@pytest.mark.graphs
def test_tapes_for_something_else_in_the_function(strategy, weight, warnings):
    outside = tf.Variable(2.0)
    with strategy.scope():
        frozen = tf.Variable(3.0, trainable=False)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            strategy.run(lambda: weight * weight)  # not used
            stopped = tf.stop_gradient(strategy.reduce("SUM", strategy.run(lambda: weight * weight), axis=None))
            known = strategy.experimental_local_results(strategy.run(lambda: frozen * 1.0))[0]
            passed_on = strategy.experimental_local_results(strategy.run(lambda x: x, args=(x,)))[0]
            loss = outside * outside + stopped + known * outside + passed_on
            tape.watch(known)
            of_result = known * known
        return tape.gradient(loss, outside), tape.gradient(of_result, known)

    assert [float(each) for each in step(tf.constant(1.0))] == [7.0, 6.0]


@pytest.mark.graphs
def test_a_tape_in_the_replicas_of_the_function(strategy, weight, warnings):
    def body():
        with tf.GradientTape() as tape:
            loss = weight * weight
        return tape.gradient(loss, weight)

    results = strategy.experimental_local_results(tf.function(lambda: strategy.run(body))())
    assert {float(each) for each in results} == {6.0}


@pytest.mark.graphs
def test_forward_mode_around_run_in_the_function(strategy, weight, warnings):
    @tf.function
    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones([])) as accumulator:
            strategy.run(lambda x: x * weight, args=(x,))
            y = x * x
        return accumulator.jvp(y)

    assert float(step(tf.constant(3.0))) == 6.0


@pytest.mark.threads("a compiled run has no gradient outside of it")
@pytest.mark.graphs
def test_gradients_of_the_whole_graph_are_right(strategy, weight, warnings):
    """A tape around a function with a run, and `tf.gradients`, see all ops of a graph."""

    @tf.function
    def loss(x):
        return strategy.reduce("SUM", strategy.run(lambda x: x * weight, args=(x,)), axis=None)

    x, expected = tf.constant(2.0), 3.0 * strategy.num_replicas_in_sync
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loss(x)
    assert float(tape.gradient(y, x)) == expected

    @tf.function
    def outer(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loss(x)
        return tape.gradient(y, x), tf.gradients(loss(x), x)[0]

    assert [float(each) for each in outer(x)] == [expected, expected]
