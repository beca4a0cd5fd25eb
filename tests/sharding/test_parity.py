"""`check_parity` with a distribution: variables in parts against one device of plain TensorFlow."""

import keras
import numpy as np
import pytest
from helpers.divided import model_parallel

import replica_engine
from replica_engine.errors import DistributionError
from replica_engine.testing import check_parity

X = np.random.default_rng(0).normal(size=(40, 8)).astype("f")
Y = np.random.default_rng(1).integers(0, 3, 40)


def test_a_model_in_parts_computes_what_one_device_does():
    """Batch normalization and Dropout included, which differ on several replicas."""
    keras.utils.set_random_seed(0)
    up = keras.layers.Dense(64, activation="relu", name="up")
    norm, drop, out = keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(3)
    model = keras.Sequential([keras.Input([8]), up, norm, drop, out], name="net")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    given = replica_engine.TPUStrategy(num_cores=4, distribution="zero1")
    report = check_parity(model, X, Y, replicas=2, steps=1, strategies=[given], distribution="fsdp")
    assert report.strategies == ("TPUStrategy", "TPUStrategy('fsdp')")
    assert report.ok, report
    wrong = model_parallel({"net/wrong/kernel": (None, "model")}, (2,), ["model"], None)
    with pytest.raises(DistributionError, match="matches none of the"):
        check_parity(model, X, Y, strategies=[], distribution=wrong)
