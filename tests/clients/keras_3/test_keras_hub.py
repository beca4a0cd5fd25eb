"""KerasHub: a text classifier on a small BERT backbone; untrained, since its weights come from the network."""

import keras
import keras_hub
import numpy as np
import pytest
from helpers.comparing import assert_close

from replica_engine.keras import replicate_model

pytestmark = [pytest.mark.replicas(2), pytest.mark.graphs]

LENGTH, SAMPLES = 6, 24
RNG = np.random.default_rng(0)
INPUTS = {
    "token_ids": RNG.integers(0, 20, (SAMPLES, LENGTH)),
    # Of integers: Keras' fit takes no boolean inputs in the scope of any strategy; see docs/clients.md.
    "padding_mask": (np.arange(LENGTH) < RNG.integers(1, LENGTH, (SAMPLES, 1))).astype("int32"),
    "segment_ids": np.zeros((SAMPLES, LENGTH), int),
}
LABELS = RNG.integers(0, 3, SAMPLES)


def classifier():
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=20,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,  # random numbers differ by replica
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def train(model):
    history = model.fit(INPUTS, LABELS, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return history, model.predict(INPUTS, batch_size=8, verbose=0)


@pytest.fixture(scope="module")
def alone():
    return train(classifier())


def test_replicate_model(strategy, alone):
    assert_close(train(replicate_model(classifier(), strategy=strategy)), alone, 1e-3)


def test_a_model_of_the_strategys_scope(strategy, alone):
    with strategy.scope():
        model = classifier()
    assert_close(train(model), alone, 1e-3)
