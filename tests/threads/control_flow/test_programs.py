"""Programs that people write with merge calls in control flow: two replicas train as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.on_mirrored import FORMS, shares, stepping, total

from replica_engine import MirroredStrategy

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
LABELS = (ROWS @ np.array([[1.0], [-2.0], [0.5]]) + 0.3).astype(np.float32)
STEPS = 4


def dense(units, seed):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed))


def model_of(seed=1):
    return keras.Sequential([keras.Input((3,)), dense(4, seed), dense(1, seed + 1)])


def of_batch(error):
    """The loss of a share of a batch, of which a sum over replicas makes the loss of the batch."""
    return tf.reduce_sum(error**2) / len(ROWS)


class OneDevice:
    total = staticmethod(lambda x: x)


class OnReplicas:
    total = staticmethod(total)


@pytest.fixture
def check():
    """`check(Program)`: weights after some steps of `Program(where)` are those of one device.

    A program makes its model in `__init__`; `step(x, y)` is what each replica runs; `where.total` sums over replicas.
    """

    def check(program, form="graph", steps=STEPS):
        strategy = MirroredStrategy(DEVICES[:2])
        with strategy.scope():
            replicated = program(OnReplicas)
        alone = program(OneDevice)
        run = stepping(strategy, replicated.step, form)
        for step in range(steps):
            x, y = ROWS * (step + 1), LABELS * (step + 1)
            run(shares(strategy, x), shares(strategy, y))
            alone.step(tf.constant(x), tf.constant(y))
        for got, wanted in zip(replicated.variables, alone.variables, strict=True):
            np.testing.assert_allclose(got.numpy(), wanted.numpy(), 1e-4, 1e-5)

    return check


class Program:
    def __init__(self, where):
        self.where = where
        self.model = model_of()
        self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.optimizer.build(self.weights)

    @property
    def weights(self):
        return self.model.trainable_variables

    @property
    def variables(self):
        return [weight.value for weight in self.weights]

    def gradients(self, x, y):
        with tf.GradientTape() as tape:
            loss = of_batch(self.model(x, training=True) - y)
        return loss, tape.gradient(loss, self.weights)

    def apply(self, gradients):
        self.optimizer.apply(gradients, self.weights)


class Accumulating(Program):
    """Applies every second time, in a condition on a counter that all replicas have."""

    def __init__(self, where):
        super().__init__(where)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.count = tf.Variable(0, trainable=False, aggregation=first)
        self.sums = [
            tf.Variable(
                tf.zeros(weight.shape),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for weight in self.weights
        ]

    def step(self, x, y):
        _, gradients = self.gradients(x, y)
        for held, gradient in zip(self.sums, gradients, strict=True):
            held.assign_add(gradient)
        self.count.assign_add(1)
        if self.count % 2 == 0:
            self.apply([held + 0.0 for held in self.sums])
            for held in self.sums:
                held.assign(tf.zeros_like(held))


class AccumulatingInALoop(Program):
    """Micro-batches in a loop without merge calls, and one merge at its end; all in a nested function."""

    @tf.function
    def step(self, x, y):
        held = [tf.zeros(weight.shape) for weight in self.weights]
        for i in tf.range(2):
            half = tf.shape(x)[0] // 2
            _, gradients = self.gradients(x[i * half : (i + 1) * half], y[i * half : (i + 1) * half])
            held = [a + b for a, b in zip(held, gradients, strict=True)]
        self.apply(held)


class ScalingTheLoss(Program):
    """Dynamic loss scaling: skips the update where gradients are not finite."""

    def __init__(self, where):
        super().__init__(where)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.scale = tf.Variable(3.0e38, trainable=False, aggregation=first)

    @property
    def variables(self):
        return [*super().variables, self.scale]

    def step(self, x, y):
        with tf.GradientTape() as tape:
            loss = of_batch(self.model(x, training=True) - y) * self.scale
        gradients = [self.where.total(each) for each in tape.gradient(loss, self.weights)]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in gradients])

        def update():
            replicas = self.where.total(1.0)
            self.apply([each / self.scale / replicas for each in gradients])
            self.scale.assign(self.scale * 2.0)
            return True

        def skip():
            self.scale.assign(self.scale / 1e10)
            return False

        tf.cond(finite, update, skip)


class Clipping(Program):
    """Clips by the norm of the batch's gradient, in a condition on it."""

    def step(self, x, y):
        _, gradients = self.gradients(x, y)
        square = tf.add_n([tf.reduce_sum(self.where.total(each) ** 2) for each in gradients])
        if square > 1.0:
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(self.where.total(each) ** 2) for each in gradients]))
            gradients = [each / norm for each in gradients]
            self.apply(gradients)
        else:
            self.apply(gradients)


class Critic(Program):
    """A critic loop with a gradient penalty, and then a step of the generator."""

    def __init__(self, where):
        super().__init__(where)
        self.critic = model_of(5)
        self.of_critic = keras.optimizers.SGD(0.01)
        self.of_critic.build(self.critic.trainable_variables)

    @property
    def variables(self):
        return [*super().variables, *(weight.value for weight in self.critic.trainable_variables)]

    def step(self, x, y):
        for _ in tf.range(2):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    value = tf.tanh(self.critic(x))
                slopes = inner.gradient(value, x)
                loss = of_batch(value - y) + of_batch(slopes)
            weights = self.critic.trainable_variables
            self.of_critic.apply(outer.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = of_batch(self.critic(x * self.model(x)))
        self.apply(tape.gradient(loss, self.weights))


class TrainingInALoop(Program):
    """Several steps of a nested train step in one call, and the loss of the last one, undefined before the loop."""

    def __init__(self, where):
        super().__init__(where)
        self.last = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

    @property
    def variables(self):
        return [*super().variables, self.last]

    @tf.function
    def train(self, x, y):
        loss, gradients = self.gradients(x, y)
        self.apply(gradients)
        return loss

    def step(self, x, y):
        for _ in tf.range(3):
            loss = self.train(x, y)
        self.last.assign(loss)


class StoppingEarly(Program):
    """Trains until the loss of the whole batch is small."""

    def step(self, x, y):
        steps = 0
        loss = tf.constant(1e9)
        while loss > 0.05 and steps < 6:
            own, gradients = self.gradients(x, y)
            loss = self.where.total(own)
            if loss < 1.0:
                self.apply(gradients)
                continue
            self.apply([each / loss for each in gradients])
            steps += 1


@pytest.mark.parametrize(
    "program", [Accumulating, AccumulatingInALoop, ScalingTheLoss, Clipping, Critic, TrainingInALoop, StoppingEarly]
)
def test_as_on_one_device(check, program):
    check(program)


@pytest.mark.parametrize("program", [AccumulatingInALoop, TrainingInALoop])
def test_in_an_eager_run(check, program):
    assert "eager" in FORMS
    check(program, "eager", steps=2)
