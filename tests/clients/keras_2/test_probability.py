"""TensorFlow Probability: distributions, bijectors, layers and chains inside a replica's step."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from helpers.comparing import ONE_DEVICE, assert_close

tfd, tfb = tfp.distributions, tfp.bijectors
pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

BATCH, STEPS = 8, 4
SAMPLES = np.random.default_rng(0).normal(1.0, 2.0, (STEPS * BATCH, 2)).astype("float32")


def normal():
    """A normal distribution whose scale is trained through a bijector."""
    scale = tfp.util.TransformedVariable([1.0, 0.5], tfb.Softplus())
    return tfd.MultivariateNormalDiag(loc=tf.Variable([0.0, 0.5]), scale_diag=scale)


def mixture():
    return tfd.MixtureSameFamily(
        tfd.Categorical(logits=tf.Variable([0.3, -0.2, 0.0])),
        tfd.MultivariateNormalDiag(loc=tf.Variable([[0.0, 1.0], [1.0, 0.0], [2.0, 2.0]]), scale_diag=tf.ones([3, 2])),
    )


def flow():
    """Layers of an invertible network."""
    shift_and_scale = [
        tfb.Chain([tfb.Shift(tf.Variable([0.1 * i, 0.2])), tfb.Scale(tf.Variable([1.5, 0.7])), tfb.SinhArcsinh(0.1)])
        for i in range(2)
    ]
    return tfd.TransformedDistribution(tfd.MultivariateNormalDiag(tf.zeros([2])), tfb.Chain(shift_and_scale))


def train(strategy, make):
    """Losses and parameters of maximum likelihood by gradient descent."""
    with strategy.scope():
        distribution = make()
    weights = distribution.trainable_variables

    def replica_step(samples):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(-distribution.log_prob(samples), global_batch_size=BATCH)
        gradients = tape.gradient(loss, weights)
        loss, gradients = tf.distribute.get_replica_context().all_reduce("sum", (loss, gradients))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.05 * gradient)
        return loss

    step = tf.function(lambda batch: strategy.run(replica_step, args=(batch,)))
    dataset = tf.data.Dataset.from_tensor_slices(SAMPLES).batch(BATCH, drop_remainder=True)
    batches = strategy.experimental_distribute_dataset(dataset)
    losses = [strategy.experimental_local_results(step(batch))[0].numpy() for batch in batches]
    return losses, [weight.numpy() for weight in weights]


@pytest.mark.parametrize("make", [normal, mixture, flow])
def test_maximum_likelihood_comes_to_the_numbers_of_one_device(strategy, make):
    expected = train(ONE_DEVICE(), make)
    assert expected[0][-1] != expected[0][0]
    assert_close(train(strategy, make), expected)


def test_a_chain_on_each_replica_finds_the_distribution(strategy):
    """Hamiltonian Monte Carlo, from a seed of the replica's own: a loop of the library's, with gradients inside."""
    target = tfd.Normal(3.0, 0.5)

    def sample():
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
        kernel = tfp.mcmc.HamiltonianMonteCarlo(target.log_prob, step_size=0.4, num_leapfrog_steps=3)
        return tfp.mcmc.sample_chain(
            300,
            current_state=tf.constant(3.0),
            kernel=kernel,
            num_burnin_steps=20,
            trace_fn=None,
            seed=tf.stack([replica, 7]),
        )

    chains = [chain.numpy() for chain in strategy.experimental_local_results(strategy.run(tf.function(sample)))]
    for chain in chains:
        assert chain.shape == (300,)
        assert np.mean(chain) == pytest.approx(3.0, abs=0.25)
        assert np.std(chain) == pytest.approx(0.5, abs=0.2)
    assert not np.array_equal(chains[0], chains[1])


def test_a_model_that_predicts_a_distribution(strategy):
    """TFP's layers in a Keras 2 model, trained by fit on a likelihood."""

    def fitted(strategy):
        with strategy.scope():
            model = tf.keras.Sequential(
                [
                    tf.keras.layers.Dense(2, input_shape=(1,)),
                    tfp.layers.DistributionLambda(lambda t: tfd.Normal(t[..., :1], 1e-3 + tf.nn.softplus(t[..., 1:]))),
                ]
            )
            model.set_weights([np.array([[0.5, 0.1]], "float32"), np.array([0.1, 0.2], "float32")])
            model.compile(tf.keras.optimizers.SGD(0.05), lambda y, distribution: -distribution.log_prob(y))
        model.fit(SAMPLES[:, :1], SAMPLES[:, 1:], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    assert_close(fitted(strategy), fitted(ONE_DEVICE()))
