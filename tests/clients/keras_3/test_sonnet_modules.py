"""Each of Sonnet's modules on replicas: outputs and gradients against one device."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.comparing import assert_close
from helpers.sonnet_modules import MODULES, RANDOM, WHOLE_BATCH, make_batch, on_one_device, on_replicas
from helpers.sonnet_replicators import REPLICAS, REPLICATORS

# Layers of batch normalization over 72 numbers and fewer: rounding grows from layer to layer. Gradients of the biases
# before them are zero, but for rounding.
DEEP = {"nets.Cifar10ConvNet": (2e-3, 1e-5), "nets.ResNet50": (5e-3, 1e-5)}
# On CPUs its gradient comes from TensorFlow's BlockLSTMV2 and is wrong; finite differences agree with the compiled one.
COMPILED = "unrolled(UnrolledLSTM)"


@pytest.fixture(params=REPLICATORS)
def replicator(request):
    return REPLICATORS[request.param]()


@pytest.mark.parametrize("name", [name for name in MODULES if name not in (RANDOM, WHOLE_BATCH)])
def test_outputs_and_gradients_are_those_of_one_device(replicator, name):
    x = make_batch(MODULES[name])
    compiled = name == COMPILED and isinstance(replicator, tf.distribute.TPUStrategy)
    expected, weights = on_one_device(MODULES[name], x, jit_compile=compiled)
    assert_close(on_replicas(replicator, MODULES[name], x, weights), expected, *DEEP.get(name, (1e-4,)))


def test_cross_replica_batch_norm_normalizes_the_whole_batch(replicator):
    x = make_batch(MODULES[WHOLE_BATCH])
    ((outputs, gradients),), weights = on_one_device(MODULES[WHOLE_BATCH], x)
    shares = on_replicas(replicator, MODULES[WHOLE_BATCH], x, weights)
    assert_close([np.concatenate(parts) for parts in zip(*(share[0] for share in shares), strict=True)], outputs)
    assert_close([sum(parts) for parts in zip(*(share[1] for share in shares), strict=True)], gradients)


def test_dropout_drops_half_and_not_the_same_on_each_replica(replicator):
    x = np.ones((REPLICAS * 8, 20, 20), "float32")
    shares = [outputs[0] for outputs, _ in on_replicas(replicator, MODULES[RANDOM], x, [])]
    for share in shares:
        assert set(np.unique(share)) == {0.0, 2.0}
        assert np.mean(share) == pytest.approx(1, abs=0.15)
    assert not np.array_equal(shares[0], shares[1])
