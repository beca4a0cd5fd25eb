"""TensorFlow Recommenders: models whose embeddings have sparse gradients, trained by Keras 2's fit."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
from helpers.comparing import ONE_DEVICE, assert_close

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

USERS, FILMS, BATCH, SAMPLES, WIDTH = 7, 11, 8, 48, 4
RNG = np.random.default_rng(0)
DATA = {
    "user": RNG.integers(0, USERS, SAMPLES),
    "film": RNG.integers(0, FILMS, SAMPLES),
    "rating": RNG.normal(size=(SAMPLES, 1)).astype("float32"),
}
NAMES = [f"user {number}" for number in range(USERS)]
START = [RNG.normal(size=shape).astype("float32") for shape in ((USERS, WIDTH), (FILMS, WIDTH), (2 * WIDTH, 1), (1,))]


class Towers(tfrs.Model):
    def __init__(self):
        super().__init__()
        self.users = tf.keras.layers.Embedding(USERS, WIDTH)
        self.films = tf.keras.layers.Embedding(FILMS, WIDTH)


class Ranking(Towers):
    """Predicts a rating: a mean over samples, so shares of a batch add up to it."""

    def __init__(self):
        super().__init__()
        self.rating = tf.keras.layers.Dense(1)
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(reduction="none"),
            metrics=[tf.keras.metrics.RootMeanSquaredError(name="rmse")],
        )

    def call(self, features):
        return self.rating(tf.concat([self.users(features["user"]), self.films(features["film"])], 1))

    def compute_loss(self, features, training=False):
        loss = self.task(labels=features["rating"], predictions=self(features))
        return tf.nn.compute_average_loss(loss, global_batch_size=BATCH)


class NamedRanking(Ranking):
    """The same of users by name: a lookup of strings inside the model, as in the tutorials of this library."""

    def __init__(self):
        super().__init__()
        lookup = tf.keras.layers.StringLookup(vocabulary=NAMES, num_oov_indices=0)
        self.users = tf.keras.Sequential([lookup, self.users])


class Retrieval(Towers):
    """Tells a film from the others of the batch: from those of a replica's share. One device does `shares` in turn."""

    def __init__(self, shares):
        super().__init__()
        self.shares = shares
        self.task = tfrs.tasks.Retrieval()

    def call(self, features):
        return self.users(features["user"]), self.films(features["film"])

    def compute_loss(self, features, training=False):
        parts = zip(*(tf.split(embedding, self.shares) for embedding in self(features)), strict=True)
        return sum(self.task(users, films, compute_metrics=False) for users, films in parts)


def train(strategy, make, drop_remainder, data=DATA):
    """Metrics, and weights by shape; of the losses that Keras 2 reports, see docs/clients.md."""
    with strategy.scope():
        model = make()
        model.compile(optimizer=tf.keras.optimizers.Adagrad(0.1))
        model({name: values[:2] for name, values in data.items()})
    start = {value.shape: value for value in START}
    for variable in model.weights:
        variable.assign(start[tuple(variable.shape)])
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH, drop_remainder=drop_remainder)
    metrics = model.fit(dataset, epochs=2, verbose=0).history.get("rmse", [])
    evaluated = model.evaluate(dataset, verbose=0, return_dict=True).get("rmse", 0.0)
    return metrics, evaluated, {str(variable.shape): variable.numpy() for variable in model.weights}


@pytest.mark.parametrize("drop_remainder", [True, False], ids=["static-batch", "any-batch"])
class TestSparseGradients:
    def test_ranking(self, strategy, drop_remainder):
        expected = train(ONE_DEVICE(), Ranking, drop_remainder)
        assert_close(train(strategy, Ranking, drop_remainder), expected)

    def test_retrieval_from_the_films_of_a_replicas_share(self, strategy, drop_remainder):
        expected = train(ONE_DEVICE(), lambda: Retrieval(2), drop_remainder)
        assert_close(train(strategy, lambda: Retrieval(1), drop_remainder), expected)


def test_users_are_looked_up_by_name_inside_the_model(strategy):
    data = DATA | {"user": np.array(NAMES)[DATA["user"]]}
    assert_close(train(strategy, NamedRanking, True, data), train(ONE_DEVICE(), Ranking, True))


def test_factorized_top_k_of_candidates(strategy):
    """The index is an ordinary layer: queries of replicas find what one device finds."""
    films = tf.constant(START[1])
    queries = tf.constant(START[0][:4])
    with strategy.scope():
        index = tfrs.layers.factorized_top_k.BruteForce(k=3)
        index.index(films)
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: queries[2 * context.replica_id_in_sync_group :][:2]
    )
    results = strategy.experimental_local_results(strategy.run(tf.function(lambda share: index(share)), args=(shares,)))
    scores, found = (np.concatenate([np.asarray(result[part]) for result in results]) for part in (0, 1))
    expected, indices = tf.math.top_k(queries @ tf.transpose(films), k=3)
    assert_close(scores, expected.numpy())
    np.testing.assert_array_equal(found, indices)
