"""Orbit, the training loops of TensorFlow's Model Garden: its Controller, with its own example of a trainer."""

import numpy as np
import orbit
import pytest
import tensorflow as tf
from helpers.comparing import ONE_DEVICE, assert_close
from orbit.examples.single_task.single_task_evaluator import SingleTaskEvaluator
from orbit.examples.single_task.single_task_trainer import SingleTaskTrainer

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

BATCH, STEPS, SAMPLES = 8, 6, 32
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 3)).astype("float32")
Y = RNG.integers(0, 2, SAMPLES).astype("float32")[:, None]
WEIGHTS = [RNG.normal(size=shape).astype("float32") for shape in ((3, 4), (4,), (4, 1), (1,))]


class CountingTrainer(SingleTaskTrainer):
    """The example's trainer leaves the global step to its user; and Orbit writes metrics, and does not return them."""

    def __init__(self, step, **kwargs):
        super().__init__(**kwargs)
        self.global_step, self.logs = step, []

    def train_step(self, iterator):
        super().train_step(iterator)
        self.global_step.assign_add(1)

    def train_loop_end(self):
        metrics = super().train_loop_end()
        self.logs.append({name: value.numpy() for name, value in metrics.items()})
        return metrics


def make_controller(strategy, root, **trainer_options):
    """A controller, its model and its counter of steps."""
    with strategy.scope():
        inputs = tf.keras.Input((3,), name="x")
        hidden = tf.keras.layers.Dense(4, activation="tanh")(inputs)
        model = tf.keras.Model({"x": inputs}, tf.keras.layers.Dense(1, activation="sigmoid")(hidden))
        model.set_weights(WEIGHTS)
        dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).repeat().batch(BATCH, drop_remainder=True)
        accuracy = [tf.keras.metrics.BinaryAccuracy(name=name) for name in ("accuracy", "eval_accuracy")]
        optimizer = tf.keras.optimizers.SGD(0.1)
        step = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        trainer = CountingTrainer(
            step,
            train_dataset=strategy.experimental_distribute_dataset(dataset),
            label_key="y",
            model=model,
            loss_fn=tf.keras.losses.binary_crossentropy,
            optimizer=optimizer,
            metrics=accuracy[0],
            trainer_options=orbit.StandardTrainerOptions(**trainer_options),
        )
        evaluator = SingleTaskEvaluator(
            strategy.experimental_distribute_dataset(dataset.take(SAMPLES // BATCH)),
            label_key="y",
            model=model,
            metrics=accuracy[1],
        )
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = tf.train.CheckpointManager(
        checkpoint, root / "checkpoints", max_to_keep=2, step_counter=step, checkpoint_interval=STEPS
    )
    controller = orbit.Controller(
        global_step=step,
        trainer=trainer,
        evaluator=evaluator,
        strategy=strategy,
        steps_per_loop=3,
        checkpoint_manager=manager,
        summary_dir=root / "train",
        eval_summary_dir=root / "eval",
    )
    return controller, model, step


def train(strategy, root, **trainer_options):
    controller, model, _ = make_controller(strategy, root, **trainer_options)
    controller.train(steps=STEPS)
    evaluated = {name: value for name, value in controller.evaluate(SAMPLES // BATCH).items() if "second" not in name}
    return controller.trainer.logs, evaluated, model.get_weights()


OPTIONS = {
    "loop-on-host": {"use_tf_while_loop": False},
    "loop-in-graph": {},
    "summaries-of-last-step": {"use_tpu_summary_optimization": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training_and_evaluation_come_to_the_numbers_of_one_device(strategy, options, tmp_path):
    expected = train(ONE_DEVICE(), tmp_path / "alone")
    assert_close(train(strategy, tmp_path / "replicas", **options), expected)


def test_a_second_controller_resumes(strategy, tmp_path):
    *_, weights = train(strategy, tmp_path)
    _, model, step = make_controller(strategy, tmp_path)
    assert step.numpy() == STEPS
    assert_close(model.get_weights(), weights, 0)
