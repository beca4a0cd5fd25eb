"""What a Sonnet module computes on replicas, and on one device with the same weights."""

import numpy as np
import sonnet as snt
import tensorflow as tf
from sonnet.src.conformance import descriptors

from helpers.sonnet_replicators import REPLICAS

STEPS = 3


class Unrolled(snt.Module):
    """A core over a sequence of several steps. XLA makes no gradient of a loop of one step; see docs/clients.md."""

    def __init__(self, core, unroll):
        super().__init__()
        self.core, self.unroll = core, unroll

    def __call__(self, x):  # [batch, time, ...]
        sequence = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        return self.unroll(self.core, sequence, self.core.initial_state(x.shape[0]))


def _unrolled(core, unroll, name):
    return core._replace(
        name=f"{name}({core.name})",
        create=lambda: Unrolled(core.create(), unroll),
        shape=(core.shape[0], STEPS, *(core.shape[2:] if core in descriptors.UNROLLED_RNN_CORES else core.shape[1:])),
    )


MODULES = {
    module.name: module
    for module in (
        *descriptors.BATCH_MODULES,
        *(_unrolled(core, snt.dynamic_unroll, "dynamic_unroll") for core in descriptors.RNN_CORES),
        *(_unrolled(core, snt.static_unroll, "static_unroll") for core in descriptors.RNN_CORES),
        *(_unrolled(core, lambda core, *args: core(*args), "unrolled") for core in descriptors.UNROLLED_RNN_CORES),
    )
}
# Compared otherwise: a random one, and one that normalizes over the batch of all replicas.
RANDOM, WHOLE_BATCH = "Dropout", "CrossReplicaBatchNorm"


def make_batch(module):
    """Inputs for all replicas: as many rows as the module's own test takes, for each of them."""
    shape = (REPLICAS * module.shape[0], *module.shape[1:])
    rng = np.random.default_rng(5)
    if module.dtype.is_integer:
        return rng.integers(0, 10, shape).astype(module.dtype.as_numpy_dtype)
    return rng.normal(size=shape).astype(module.dtype.as_numpy_dtype)


def outputs_and_gradients(module, x):
    """What a replica computes: flat lists of the module's outputs and of its weights' gradients, dense."""
    with tf.GradientTape() as tape:
        outputs = [tensor for tensor in tf.nest.flatten(module(x)) if tensor is not None]
        loss = sum(tf.reduce_sum(tf.sin(tensor)) for tensor in outputs if tensor.dtype.is_floating)
    gradients = tape.gradient(loss, module.trainable_variables) if module.trainable_variables else ()
    return outputs, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]


def on_one_device(descriptor, x, jit_compile=False):
    """For each replica its (outputs, gradients); and the weights that they were computed with."""
    module = snt.allow_empty_variables(descriptor.create())
    shares = [x] if descriptor.name == WHOLE_BATCH else np.split(x, REPLICAS)
    module(tf.constant(shares[0]))
    weights = [new_value(variable, number) for number, variable in enumerate(module.variables)]
    compute = lambda share: outputs_and_gradients(module, share)  # noqa: E731
    if jit_compile:
        compute = tf.function(compute, jit_compile=True)
    results = []
    for share in shares:
        assign(module, weights)
        results.append(tf.nest.map_structure(np.asarray, compute(tf.constant(share))))
    return results, weights


def on_replicas(replicator, descriptor, x, weights):
    """The same of a module whose variables the replicas create, in the first call."""
    with replicator.scope():
        module = snt.allow_empty_variables(descriptor.create())
    shares = replicator.experimental_distribute_values_from_function(
        lambda context: tf.constant(np.split(x, REPLICAS)[context.replica_id_in_sync_group])
    )

    def run(fn):
        # A function each: one that both creates variables and differentiates a loop fails in TensorFlow's graph
        # optimizer, under its own MirroredStrategy too ("AddN must have the same size and shape").
        results = tf.function(lambda: replicator.run(fn, args=(shares,)))()
        return [tf.nest.map_structure(np.asarray, local) for local in replicator.experimental_local_results(results)]

    run(lambda share: module(share) is None)  # creates the variables
    assign(module, weights)
    return run(lambda share: outputs_and_gradients(module, share))


def assign(module, weights):
    for variable, value in zip(module.variables, weights, strict=True):
        variable.assign(value)


def new_value(variable, number):
    """Weights of moderate size; counters stay as they are."""
    if not variable.dtype.is_floating or variable.shape.rank == 0:
        return variable.numpy()
    return np.random.default_rng(number).uniform(0.1, 0.9, variable.shape).astype(variable.dtype.as_numpy_dtype)
