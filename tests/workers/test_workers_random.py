"""Random numbers on several workers: every replica draws what the replica of its id draws in one process."""

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import alone, flat, outputs

RANDOM = """
import keras

tf.random.set_seed(3)
strategy = KIND()
with strategy.scope():
    generator = tf.random.Generator.from_seed(7)
    counted = tf.Variable(0.0)


def of_all(value):
    rows = strategy.run(lambda own: context().all_gather(tf.reshape(own, [1, -1]), axis=0), args=(value,))
    return strategy.experimental_local_results(rows)[0].numpy().tolist()


def draw():
    own = [tf.random.normal([]), tf.random.normal([], seed=5), tf.random.shuffle(tf.range(100.0))[0]]
    context().all_reduce("SUM", own[0])
    own += [tf.random.uniform([]), generator.normal([])]
    own += [tf.cond(own[0] < 100, lambda: tf.random.normal([]), lambda: 0.0)]
    own += [tf.cond(own[0] < 100, lambda: context().all_reduce("SUM", 1.0) + tf.random.normal([]), lambda: 0.0)]
    return tf.stack(own)


traced = tf.function(draw)
found["eager"] = [of_all(strategy.run(draw)) for _ in range(2)]
found["traced"] = [of_all(strategy.run(traced)) for _ in range(2)]
found["after"] = float(tf.random.normal([]))

keras.utils.set_random_seed(1 + me)  # the chief's initial values count, and then all draw alike
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dropout(0.5, seed=2), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
found["initial"] = [each.tolist() for each in model.get_weights()]
rng = np.random.RandomState(0)
x, y = rng.rand(32, 8).astype("float32"), rng.rand(32, 1).astype("float32")
model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0)
found["dropout"] = [each.tolist() for each in model.get_weights()]

keras.utils.set_random_seed(1)
plain = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dropout(0.5, seed=2), keras.layers.Dense(1)]
)
plain.compile("sgd", "mse")
fast = replica_engine.keras.replicate_model(plain, strategy=strategy)
for _ in range(2):
    fast.fit(x, y, batch_size=8, verbose=0, shuffle=False)
found["replicated"] = [each.tolist() for each in plain.get_weights()]
found["seed"] = [each.state.numpy().tolist() for layer in plain.layers if hasattr(layer, "seed_generator")
                 for each in [layer.seed_generator]]
"""


def test_workers_draw_what_one_process_draws(programs):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, RANDOM, local=2)
    reference = alone(programs, RANDOM, 4)
    assert first == second
    for name in ("eager", "traced", "after", "initial", "seed"):
        assert first[name] == reference[name], name
    for name in ("dropout", "replicated"):
        assert flat(first[name]) == pytest.approx(flat(reference[name]), abs=1e-6), name
    for rows in (first["eager"][0], first["traced"][0]):
        normals, seeded = ([row[place] for row in rows] for place in (0, 1))
        assert len(set(normals)) == 4
        assert len(set(seeded)) == 1  # all replicas have asked for the same seed
    assert first["eager"][0] != first["eager"][1]
    assert first["traced"][0] != first["traced"][1]
