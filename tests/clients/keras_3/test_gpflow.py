"""GPflow: Gaussian processes trained on replicas, with its transformed parameters, in float64."""

import gpflow
import numpy as np
import pytest
import tensorflow as tf
from helpers.comparing import ONE_DEVICE, assert_close

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

RNG = np.random.default_rng(0)
X = np.sort(RNG.uniform(0, 6, (64, 1)))
Y = np.sin(X) + 0.1 * RNG.normal(size=X.shape)
BATCH, STEPS = 16, 4
EXACT = 1e-8  # float64


def sparse_variational():
    return gpflow.models.SVGP(
        gpflow.kernels.SquaredExponential(), gpflow.likelihoods.Gaussian(0.1), X[::8].copy(), num_data=len(X)
    )


def sparse_regression():
    """Its data is part of it, so every replica has all of it."""
    return gpflow.models.SGPR((X, Y), gpflow.kernels.Matern52() + gpflow.kernels.Linear(), X[::8].copy())


def train(strategy, make):
    """Losses, parameters and predictions after gradient descent, on batches where the model takes them."""
    with strategy.scope():
        model = make()
        optimizer = tf.keras.optimizers.SGD(1e-3)
    batches = isinstance(model, gpflow.models.SVGP)

    def replica_step(batch):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(model.trainable_variables)
            loss = (model.training_loss(batch) if batches else model.training_loss()) / strategy.num_replicas_in_sync
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))  # adds up replicas' gradients
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("sum", strategy.run(replica_step, args=(batch,)), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH, drop_remainder=True).take(STEPS)
    losses = [float(step(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    parameters = [parameter.numpy() for parameter in model.parameters]
    return losses, parameters, [prediction.numpy() for prediction in model.predict_f(X[:3])]


@pytest.mark.parametrize("make", [sparse_variational, sparse_regression])
def test_training_comes_to_the_numbers_of_one_device(strategy, make):
    expected = train(ONE_DEVICE(), make)
    assert expected[0][-1] < expected[0][0]
    assert_close(train(strategy, make), expected, EXACT)


def test_replicas_share_out_a_prediction(strategy):
    with strategy.scope():
        model = gpflow.models.GPR((X, Y), gpflow.kernels.SquaredExponential(), noise_variance=0.1)
    points = np.linspace(0, 6, 10)[:, None]
    shares = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(np.split(points, 2)[context.replica_id_in_sync_group])
    )
    results = strategy.experimental_local_results(strategy.run(tf.function(model.predict_f), args=(shares,)))
    ours = [np.concatenate([np.asarray(result[part]) for result in results]) for part in range(2)]
    assert_close(ours, [value.numpy() for value in model.predict_f(points)], EXACT)
