"""Random numbers: the same seed gives the same run, and each replica draws its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy

DRAWS = {
    "normal": lambda: tf.random.normal([50]),
    "uniform": lambda: tf.random.uniform([50]),
    "uniform integers": lambda: tf.random.uniform([50], 0, 1000, tf.int32),
    "uniform 64-bit integers": lambda: tf.random.uniform([50], 0, 1 << 40, tf.int64),
    "truncated normal": lambda: tf.random.truncated_normal([50]),
    "shuffle": lambda: tf.random.shuffle(tf.range(50)),
    "categorical": lambda: tf.random.categorical(tf.zeros([5, 20]), 10),
    "dropout": lambda: tf.nn.dropout(tf.ones([50]), 0.5),
    "seeded": lambda: tf.random.normal([50], seed=7),
    "gamma": lambda: tf.random.gamma([50], 2.0),
    "poisson": lambda: tf.random.poisson([50], 20.0),
    "double": lambda: tf.random.normal([50], dtype=tf.float64),
}


def every_kind():
    """All of them in one step."""
    return {name: draw() for name, draw in DRAWS.items()}


@pytest.fixture
def drawn(two):
    """`drawn(fn, replicas=two, times=1)`: for each run and replica what `fn` drew."""

    drawn = lambda fn, replicas=two, times=1: [replicas.each(replicas.strategy.run(fn)) for _ in range(times)]  # noqa: E731
    return drawn


@pytest.fixture(scope="module")
def runs(replicas):
    """Two steps that draw every kind, of the seeds 1, 1, 1 and 2; the third of a strategy of its own."""
    found, one = [], replicas(2)
    for some, seed in ((one, 1), (one, 1), (replicas(2), 1), (one, 2)):
        tf.random.set_seed(seed)
        found.append([some.each(some.strategy.run(every_kind)) for _ in range(2)])
    return found


def test_the_same_seed_gives_the_same_run(runs):
    """Also to another strategy."""
    assert runs[0] == runs[1] == runs[2]
    for name in DRAWS:
        assert runs[0][0][0][name] != runs[3][0][0][name], name


def test_the_same_seed_gives_replica_0_the_same_numbers_whatever_the_number_of_replicas(replicas, drawn):
    tf.random.set_seed(1)
    (alone,) = drawn(DRAWS["normal"], replicas(1))[0]
    tf.random.set_seed(1)
    assert drawn(DRAWS["normal"], replicas(4))[0][0] == alone


def test_replicas_draw_different_numbers_that_differ_from_step_to_step(runs):
    for name in DRAWS:
        assert len({str(one[name]) for run in runs[0] for one in run}) == 4, name


def test_replicas_draw_the_same_numbers_if_asked_to(replicas, drawn):
    """On the devices, and by the host."""
    names = ("normal", "shuffle", "dropout", "gamma")
    tf.random.set_seed(1)
    some = replicas(2, same_random_numbers=True)
    runs = drawn(lambda: {name: DRAWS[name]() for name in names}, some, times=2)
    for name in names:
        (first, second), (third, fourth) = [[one[name] for one in run] for run in runs]
        assert first == second, name
        assert third == fourth, name
        assert first != third, name


def test_what_the_host_draws_has_its_distribution_and_its_gradient(two):
    @two.strategy.run
    def run():
        rate = tf.constant([2.0, 8.0])
        with tf.GradientTape() as tape:
            tape.watch(rate)
            drawn = tf.random.gamma([4000], rate, beta=2.0)
        return drawn, tape.gradient(drawn, rate) / 4000, tf.random.poisson([4000], rate)

    for gamma, slope, poisson in zip(*map(two.strategy.experimental_local_results, run), strict=True):
        np.testing.assert_allclose(np.mean(gamma, 0), [1.0, 4.0], rtol=0.1)
        np.testing.assert_allclose(np.var(gamma, 0), [0.5, 2.0], rtol=0.2)
        np.testing.assert_allclose(slope, [0.5, 0.5], rtol=0.1)  # of the mean, alpha / beta
        np.testing.assert_allclose(np.mean(poisson, 0), [2.0, 8.0], rtol=0.1)
        np.testing.assert_allclose(np.var(poisson, 0), [2.0, 8.0], rtol=0.2)


def test_without_a_seed_runs_differ(replicas, drawn):
    tf.random.set_seed(None)
    assert drawn(DRAWS["normal"], replicas(2)) != drawn(DRAWS["normal"], replicas(2))


def test_two_draws_in_one_step_differ(drawn):
    tf.random.set_seed(1)
    fn = lambda: (tf.random.normal([5]), tf.random.normal([5]), tf.random.normal([5], seed=1))  # noqa: E731
    for first, second, third in drawn(fn)[0]:
        assert first != second
        assert first != third


def test_a_host_function_draws_as_eager_runs_do(two, drawn):
    """Its steps go on in the same stream, and the seed sets that back."""
    fn = DRAWS["normal"]
    step = tf.function(lambda: two.strategy.run(fn))
    runs = []
    for _ in range(2):
        tf.random.set_seed(5)
        runs.append([two.each(step()) for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({str(run) for run in runs[0]}) == 3
    assert runs[0][0][0] != runs[0][0][1]


def test_draws_in_loops_and_branches_differ_each_time(drawn):
    def fn():
        found = tf.TensorArray(tf.float32, 5)
        for i in tf.range(5):
            value = tf.random.normal([]) if i < 3 else tf.random.uniform([]) + 10.0
            found = found.write(i, value)
        return found.stack()

    tf.random.set_seed(1)
    runs = drawn(fn, times=2)
    flat = np.array(runs)
    assert flat.shape == (2, 2, 5)
    assert len(np.unique(flat)) == flat.size
    assert (flat[..., 3:] >= 10.0).all()
    tf.random.set_seed(1)
    assert drawn(fn, times=2) == runs


def test_draws_in_nested_functions_differ_each_call(drawn):
    inner = tf.function(lambda: tf.random.normal([]))
    tf.random.set_seed(1)
    flat = np.array(drawn(lambda: tf.stack([inner(), inner(), inner()]), times=2))
    assert len(np.unique(flat)) == flat.size == 12


def test_stateless_draws_are_equal_on_all_replicas(drawn):
    """They are those of eager code too."""
    expected = tf.random.stateless_normal([5], [1, 2]).numpy()
    for kind in ({}, {"alg": "philox"}):
        for run in drawn(lambda kind=kind: tf.random.stateless_normal([5], [1, 2], **kind), times=2):
            np.testing.assert_allclose(run, [expected] * 2, rtol=1e-6)


# Distributions. The seed is fixed, so what passes once passes always; the bounds are five standard errors.

COUNT = 40_000


DISTRIBUTIONS = {
    "normal": (lambda: tf.random.normal([COUNT // 4]), 0.0, 1.0),
    "normal 5 2": (lambda: tf.random.normal([COUNT // 4], 5.0, 2.0), 5.0, 4.0),
    "uniform": (lambda: tf.random.uniform([COUNT // 4]), 0.5, 1 / 12),
    "uniform -3 7": (lambda: tf.random.uniform([COUNT // 4], -3.0, 7.0), 2.0, 100 / 12),
    "integers": (lambda: tf.random.uniform([COUNT // 4], 0, 1000, tf.int32), 499.5, (1000**2 - 1) / 12),
    "truncated": (lambda: tf.random.truncated_normal([COUNT // 4]), 0.0, 0.7737),
    "dropout": (lambda: tf.nn.dropout(tf.ones([COUNT // 4]), 0.25), 1.0, 1 / 3),
}
"""What draws a quarter of them, the mean and the variance."""


@pytest.fixture(scope="module")
def samples(replicas):
    """Of each, what two replicas drew in two steps."""
    tf.random.set_seed(11)
    some = replicas(2)
    steps = [
        some.each(some.strategy.run(lambda: {name: draw() for name, (draw, *_) in DISTRIBUTIONS.items()}))
        for _ in range(2)
    ]
    return {name: np.array([one[name] for step in steps for one in step]).reshape(-1) for name in DISTRIBUTIONS}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_numbers_are_distributed_as_they_should(samples, name):
    found, (_, mean, variance) = samples[name], DISTRIBUTIONS[name]
    assert abs(found.mean() - mean) < 5 * np.sqrt(variance / COUNT)
    assert abs(found.var() - variance) < 5 * variance * np.sqrt(2 / COUNT) + 1e-3 * variance


def test_the_streams_of_replicas_and_steps_are_not_correlated(drawn):
    tf.random.set_seed(11)
    streams = np.array(drawn(lambda: tf.random.normal([10_000]), times=2)).reshape(4, -1)
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(10_000)


def test_numbers_keep_to_their_ranges(drawn):
    tf.random.set_seed(1)

    def fn():
        return (
            tf.random.uniform([10_000], 3.0, 4.0),
            tf.random.uniform([10_000], -2, 3, tf.int32),
            tf.random.truncated_normal([10_000]),
        )

    for uniform, integers, truncated in drawn(fn)[0]:
        assert 3.0 <= min(uniform) < 3.01
        assert 3.99 < max(uniform) < 4.0
        assert set(integers) == {-2, -1, 0, 1, 2}
        assert max(map(abs, truncated)) <= 2.0


def test_a_shuffle_is_a_permutation_of_rows(drawn):
    every = [tf.reshape(tf.range(np.prod(shape)), shape) for shape in ([20], [20, 3], [1], [0])]
    tf.random.set_seed(1)
    for found in drawn(lambda: [tf.random.shuffle(values) for values in every])[0]:
        assert [sorted(one) for one in found] == [values.numpy().tolist() for values in every]


def test_every_place_is_as_likely_for_every_element(drawn):
    tf.random.set_seed(1)
    counts = np.zeros([4, 4])

    def fn():
        found = tf.TensorArray(tf.int32, 50)
        for i in tf.range(50):
            found = found.write(i, tf.random.shuffle(tf.range(4)))
        return found.stack()

    for run in drawn(fn, times=10):
        for permutation in np.concatenate(run).tolist():
            counts[range(4), permutation] += 1
    assert counts.sum() == 4000
    assert np.abs(counts - 250).max() < 5 * np.sqrt(1000 * 0.25 * 0.75)


def test_categories_come_as_often_as_their_logits_say(drawn):
    probabilities = np.array([0.1, 0.2, 0.0, 0.7])
    with np.errstate(divide="ignore"):
        logits = np.log(probabilities)[None].astype("float32")
    tf.random.set_seed(1)
    found = np.array(drawn(lambda: tf.random.categorical(logits, 10_000))[0]).reshape(-1)
    frequencies = np.bincount(found, minlength=4) / found.size
    assert frequencies[2] == 0.0
    np.testing.assert_allclose(frequencies, probabilities, atol=5 * np.sqrt(0.25 / found.size))


def test_dropout_drops_the_gradient_where_it_drops_the_value(drawn):
    def fn():
        x = tf.ones([100])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.dropout(x, 0.5)
        return y, tape.gradient(y, x)

    for values, gradient in drawn(fn)[0]:
        assert values == gradient
        assert set(values) == {0.0, 2.0}


def test_variables_made_in_a_step_of_random_numbers_start_equal(two):
    class Lazy:
        weight = None

        def __call__(self):
            if self.weight is None:
                self.weight = tf.Variable(lambda: tf.random.normal([4]))
            return self.weight * 1.0

    first, second = two.each(two.strategy.run(Lazy()))
    assert first == second
    assert len(set(first)) == 4


# Generators and Keras.


def test_a_generator_made_in_scope_goes_on_from_step_to_step(two, drawn):
    with two.strategy.scope():
        generator = tf.random.Generator.from_seed(1)
    (first, second), (third, fourth) = drawn(lambda: generator.normal([5]), times=2)
    assert len({str(each) for each in (first, second, third, fourth)}) == 4

    with two.strategy.scope():
        again = tf.random.Generator.from_seed(1)
    assert drawn(lambda: again.normal([5])) == [[first, second]]


def test_layers_of_keras_draw_as_their_seeds_say(replicas, drawn):
    runs = []
    for same in (False, False, True):
        some = replicas(2, same_random_numbers=same)
        with some.strategy.scope():
            layers = [keras.layers.Dropout(0.5, seed=1), keras.layers.GaussianNoise(1.0, seed=1)]
        fn = lambda layers=layers: [layer(tf.ones([4, 5, 30]), training=True) for layer in layers]  # noqa: E731
        runs.append(drawn(fn, some, times=2))
    assert runs[0] == runs[1]
    for index in range(2):
        assert len({str(one[index]) for run in runs[0] for one in run}) == 4  # replicas differ, and steps do
        (first, second), (third, fourth) = [[one[index] for one in run] for run in runs[2]]
        assert first == second
        assert third == fourth
        assert first != third


def test_a_seed_generator_of_keras_goes_on_after_a_look(two, drawn):
    """A look at its state, or a write to another variable, does not put it back."""
    with two.strategy.scope():
        seed = keras.random.SeedGenerator(5)
    fn = lambda: keras.random.uniform([5], seed=seed)  # noqa: E731
    plain = drawn(fn, times=4)
    seed.state.assign([5, 0])
    looked = []
    for _ in range(4):
        looked += drawn(fn)
        seed.state.numpy()
    assert looked == plain
    assert len({str(one) for run in plain for one in run}) == 8


def test_the_default_seed_of_keras_gives_the_same_run(replicas, drawn):
    runs = []
    for _ in range(2):
        keras.utils.set_random_seed(9)
        some = replicas(2)
        with some.strategy.scope():
            layer = keras.layers.Dropout(0.5)
        runs.append(drawn(lambda layer=layer: layer(tf.ones([40]), training=True), some, times=2))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


STATELESS = {
    "uniform": lambda **kind: tf.random.stateless_uniform([5], [1, 2], **kind),
    "normal": lambda **kind: tf.random.stateless_normal([5], [1, 2], **kind),
    "truncated normal": lambda **kind: tf.random.stateless_truncated_normal([5], [1, 2], **kind),
    "integers": lambda **kind: tf.random.stateless_uniform([5], [1, 2], 0, 1000, tf.int32, **kind),
    "shuffle": lambda **kind: tf.random.experimental.stateless_shuffle(tf.range(5), [1, 2], **kind),
}


@pytest.mark.parametrize("kind", [{}, {"alg": "philox"}], ids=str)
def test_stateless_ops_draw_the_same_everywhere(two, kind):
    body = lambda: {name: draw(**kind) for name, draw in STATELESS.items()}  # noqa: E731
    expected = body()
    for found in two.each(two.strategy.run(body)):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-6, err_msg=name)


FLOATS = [(tf.float16, [9]), (tf.bfloat16, []), (tf.float32, [3, 335]), (tf.float64, [7, 5])]


def of_all_floats(uniform, normal, truncated_normal):
    """What three functions of a shape and a dtype draw; uniform numbers are compared bit for bit."""
    return {
        (name, dtype.name): tf.cast(draw(shape, dtype=dtype), tf.float64)
        for name, draw in (("uniform", uniform), ("normal", normal), ("truncated", truncated_normal))
        for dtype, shape in FLOATS
    }


def check_all_floats(found, expected):
    for key, value in expected.items():
        error = np.abs(np.asarray(found[key]) - value.numpy()).max()
        assert error <= (0.0 if key[0] == "uniform" else 2e-6), (key, error)


def stateless(seed):
    """Every dtype, of a seed."""
    return of_all_floats(
        lambda shape, dtype: tf.random.stateless_uniform(shape, seed, dtype=dtype),
        lambda shape, dtype: tf.random.stateless_normal(shape, seed, dtype=dtype),
        lambda shape, dtype: tf.random.stateless_truncated_normal(shape, seed, dtype=dtype),
    )


def in_a_loop(seed):
    draw = lambda i, _: (i + 1, tf.random.stateless_normal([1003], seed + tf.cast(i, tf.int64)))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, draw, [0, tf.zeros([1003])])[1]


def in_a_branch(seed):
    draw = lambda: tf.random.stateless_truncated_normal([1003], seed)  # noqa: E731
    return tf.cond(seed[0] > 0, draw, lambda: tf.zeros([1003]))


OTHER_FORMS = ("a variable", "of the replica", "in a branch", "in a loop")
OTHER_WAY = pytest.mark.full("the seed comes another way into the same code")


@pytest.mark.parametrize("form", ["an argument", *(pytest.param(form, marks=OTHER_WAY) for form in OTHER_FORMS)])
def test_seeds_that_are_known_only_at_the_run_draw_tensorflows_numbers(two, form):
    """A seed that is a constant proves little: TensorFlow computes what follows from it before XLA sees it."""
    state = two.variable(tf.constant([3, 1 << 40], tf.int64))
    own = lambda: tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int64)  # noqa: E731
    draw = {
        "an argument": stateless,
        "a variable": lambda _: stateless(state),
        "of the replica": lambda seed: stateless(seed + own()),
        "in a branch": in_a_branch,
        "in a loop": in_a_loop,
    }[form]
    seed = tf.constant([3, 1 << 40], tf.int64)
    for replica, found in enumerate(two.each(two.strategy.run(lambda seed: draw(seed), args=(seed,)))):
        if form == "in a loop":
            np.testing.assert_allclose(found, tf.random.stateless_normal([1003], seed + 2), rtol=0, atol=2e-6)
        elif form == "in a branch":
            np.testing.assert_allclose(found, tf.random.stateless_truncated_normal([1003], seed), rtol=0, atol=2e-6)
        else:
            check_all_floats(found, stateless(seed + (replica if form == "of the replica" else 0)))


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 5.0), (-0.05, 0.05), (10.0, 10.7)])
def test_uniform_numbers_of_a_range_differ_in_their_last_bit_at_most(two, low, high):
    draw = lambda seed: tf.random.stateless_uniform([2000], seed, low, high)  # noqa: E731
    seed = tf.constant([5, 6])
    last_bit = np.spacing(np.float32(max(abs(low), high)))
    for found in two.each(two.strategy.run(draw, args=(seed,))):
        np.testing.assert_allclose(found, draw(seed), rtol=0, atol=last_bit)


def test_a_generator_draws_the_numbers_of_replica_threads(two):
    def drawn(strategy):
        with strategy.scope():
            generator = tf.random.Generator.from_seed(7)
        body = lambda: of_all_floats(generator.uniform, generator.normal, generator.truncated_normal)  # noqa: E731
        runs = [strategy.run(body) for _ in range(2)]  # the second one from where the first one stopped
        return [[tf.nest.map_structure(lambda each, i=i: each.values[i], run) for run in runs] for i in range(2)]

    on_threads = drawn(MirroredStrategy(["CPU:0", "CPU:1"]))
    for found, expected in zip(drawn(two.strategy), on_threads, strict=True):
        for one, other in zip(found, expected, strict=True):
            check_all_floats(one, other)


def test_dropout_drops_tensorflows_elements(two):
    drop = lambda seed: tf.nn.experimental.stateless_dropout(tf.ones([500]), 0.3, seed)  # noqa: E731
    seed = tf.constant([8, 9])
    assert two.each(two.strategy.run(drop, args=(seed,))) == [drop(seed).numpy().tolist()] * 2


def test_layers_of_keras_drop_the_same_as_on_one_device(replicas):
    def dropped(some):
        keras.utils.set_random_seed(4)
        with some.strategy.scope():
            layer = keras.layers.Dropout(0.5)
        return [some.each(some.strategy.run(lambda: layer(tf.ones([100]), training=True)))[0] for _ in range(3)]

    keras.utils.set_random_seed(4)
    layer = keras.layers.Dropout(0.5)
    expected = [layer(tf.ones([100]), training=True).numpy().tolist() for _ in range(3)]
    assert dropped(replicas(1)) == expected


@pytest.mark.parametrize(
    ("counts", "probs", "dtype"), [(6.0, 0.5, tf.int32), ([3.0, 9.0], 0.25, tf.float32), (5, [0.0, 1.0], tf.int64)]
)
def test_a_generator_draws_binomial_numbers_by_the_host(two, counts, probs, dtype):
    """From a seed that the generator draws on the devices, so each replica and each call gets others."""
    with two.strategy.scope():
        generator = tf.random.Generator.from_seed(3)
    shape = [400, 2]

    def draw():
        drawn = [generator.binomial(shape, tf.cast(counts, tf.float32), probs, dtype) for _ in range(2)]
        return tf.stack([tf.cast(each, tf.float32) for each in drawn])

    found = np.concatenate(two.each(two.strategy.run(draw)))  # two replicas, two draws each
    mean = np.broadcast_to(np.multiply(counts, probs), [2])
    np.testing.assert_allclose(found.mean(1), np.stack([mean] * 4), atol=0.5)
    assert found.min() >= 0
    assert (found <= counts).all()
    if np.min(probs) > 0:
        assert len({each.tobytes() for each in found}) == 4
