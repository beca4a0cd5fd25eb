"""TF-Agents: its Learner trains a DQN agent on replicas, in a loop inside its own tf.function, and resumes."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.comparing import ONE_DEVICE, assert_close
from tf_agents.agents.dqn import dqn_agent
from tf_agents.networks import q_network
from tf_agents.specs import tensor_spec
from tf_agents.train import learner
from tf_agents.train.utils import train_utils
from tf_agents.trajectories import time_step, trajectory

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

OBSERVATION = tensor_spec.TensorSpec([4], tf.float32, "observation")
ACTION = tensor_spec.BoundedTensorSpec([], tf.int32, 0, 1, "action")
BATCH, BATCHES = 8, 6
RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=shape).astype("float32") for shape in ((4, 8), (8,), (8, 2), (2,))]


def experience():
    """Transitions of two steps, drawn once, so that all learners see the same."""
    shape = (BATCH * BATCHES, 2)
    return trajectory.Trajectory(
        step_type=np.ones(shape, np.int32),
        observation=RNG.normal(size=(*shape, 4)).astype("float32"),
        action=RNG.integers(0, 2, shape).astype(np.int32),
        policy_info=(),
        next_step_type=np.ones(shape, np.int32),
        reward=RNG.normal(size=shape).astype("float32"),
        discount=np.ones(shape, np.float32),
    )


EXPERIENCE = experience()


def make_learner(strategy, root, summary_interval=0):
    """A learner, its agent's network and its counter of steps."""
    with strategy.scope():
        step = train_utils.create_train_step()
        network = q_network.QNetwork(OBSERVATION, ACTION, fc_layer_params=(8,))
        agent = dqn_agent.DqnAgent(
            time_step.time_step_spec(OBSERVATION),
            ACTION,
            q_network=network,
            optimizer=tf.keras.optimizers.legacy.Adam(0.01),
            train_step_counter=step,
            target_update_period=2,
            summarize_grads_and_vars=bool(summary_interval),
        )
        for variable, value in zip(network.variables, WEIGHTS, strict=True):
            variable.assign(value)

    def dataset():  # each replica takes a batch of its own from it
        samples = EXPERIENCE, np.zeros(BATCH * BATCHES, np.int32)
        share = BATCH // strategy.num_replicas_in_sync
        return tf.data.Dataset.from_tensor_slices(samples).batch(share, drop_remainder=True)

    made = learner.Learner(
        str(root), step, agent, dataset, strategy=strategy, checkpoint_interval=3, summary_interval=summary_interval
    )
    return made, network, step


def train(strategy, root, summary_interval=0):
    made, network, step = make_learner(strategy, root, summary_interval)
    losses = [made.run(iterations).loss.numpy() for iterations in (1, 2)]
    return losses, [variable.numpy() for variable in network.variables], step.numpy()


def test_the_learner_comes_to_the_numbers_of_one_device(strategy, tmp_path):
    assert_close(train(strategy, tmp_path / "replicas"), train(ONE_DEVICE(), tmp_path / "alone"))


def test_the_learner_resumes_from_its_checkpoint(strategy, tmp_path):
    _, weights, step = train(strategy, tmp_path)
    _, network, resumed = make_learner(strategy, tmp_path)
    assert resumed.numpy() == step == 3
    assert_close([variable.numpy() for variable in network.variables], weights, 0)


def losses_written(root):
    """Tags and steps of the losses among the summaries that a learner wrote."""
    events = (
        event
        for path in sorted(root.glob("train/events.*"))
        for event in tf.compat.v1.train.summary_iterator(str(path))
    )
    return {
        (value.tag, event.step) for event in events for value in event.summary.value if value.tag.startswith("Losses/")
    }


def test_summaries_are_written_from_inside_the_agent(strategy, tmp_path):
    results = train(strategy, tmp_path / "replicas", summary_interval=2)
    assert_close(results, train(ONE_DEVICE(), tmp_path / "alone", summary_interval=2))
    written = losses_written(tmp_path / "replicas")
    assert {step for _, step in written} == {0, 2}
    assert written == losses_written(tmp_path / "alone")
