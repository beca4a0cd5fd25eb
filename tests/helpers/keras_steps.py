"""Parts of models for the tests of Keras' steps."""

import keras
import tensorflow as tf


def dense(units, seed, **options):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


class OwnStep(keras.Model):
    """Has a training step with collectives, a metric and a counter of its own, and is built in its first batch."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1, 1)
        self.tracker = keras.metrics.Mean("own")
        self.batches = self.add_weight(
            name="batches", initializer="zeros", trainable=False, aggregation="only_first_replica"
        )

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        context = tf.distribute.get_replica_context()
        variables = self.layer.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.05 * context.all_reduce("MEAN", gradient))
        self.batches.assign_add(tf.ones([]))
        self.tracker.update_state(loss)
        return {"own": self.tracker.result(), "last": {"loss": loss, "number": 3}}

    @property
    def metrics(self):
        return [self.tracker]
