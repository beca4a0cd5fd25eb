"""What a user is told: which strategy was chosen, what is compiled, how long it takes, which layer is to blame."""

import logging
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import LoweringError
from replica_engine.keras import replicate_model, train_function

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
BATCHES, SHORT = (tf.data.Dataset.from_tensor_slices((X[:count], X[:count, :1])).batch(8) for count in (24, 20))


def small(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    return model


def of_level(caplog, level):
    """What this library has logged; TensorFlow warns of functions that it traces often, by what ran before."""
    own = [record for record in caplog.records if record.name == "replica_engine"]
    return [record.getMessage() for record in own if record.levelname == level]


def test_each_program_is_a_message_with_its_time_and_compiled_once(both, is_tpu, caplog):
    model = replicate_model(small(), strategy=both(2))
    with caplog.at_level("INFO", "replica_engine"):
        model.fit(BATCHES, epochs=2, verbose=0)
        model.fit(BATCHES, verbose=0)
    (message,) = of_level(caplog, "INFO")
    made = "compiled" if is_tpu else "traced"
    assert message.startswith(f"{made} train_step of 'small' for 2 replicas, batches of ")
    assert message.endswith(" s")
    caplog.clear()
    with caplog.at_level("INFO", "replica_engine"):
        model.fit(SHORT, verbose=0)  # its last batch has 4 samples
        model.predict(X, 8, verbose=0)
        model.predict(X[:6], 8, verbose=0)  # padded to 8
    assert len(of_level(caplog, "INFO")) == (2 if is_tpu else 1)


@pytest.mark.on("tpu")
def test_a_program_of_the_cache_folder_is_read_and_not_compiled(both, caplog, tmp_path):
    pytest.importorskip("jax")
    from replica_engine import xla

    model = small()
    xla.set_cache_dir(tmp_path)
    with caplog.at_level("INFO", "replica_engine"):
        for _ in range(2):
            replicate_model(model, strategy=both(2)).train_on_batch(X[:8], X[:8, :1])
    first, second = (text for text in of_level(caplog, "INFO") if "ran it once" in text)
    batch = "train_step of 'small' for 2 replicas, batches of 8 samples, and ran it once"
    assert first.startswith(f"compiled {batch}")
    assert second.startswith(f"read the program for {batch}")


@pytest.mark.on("tpu")  # on threads: test_shared_with_original.py
def test_compile_frozen_layers_and_another_optimizer_are_noticed(both):
    original = small(keras.layers.Dense(3))
    model = replicate_model(original, strategy=both(2))
    model.fit(BATCHES, verbose=0)
    original.layers[0].trainable = False
    before = original.layers[0].get_weights(), original.layers[1].get_weights()
    model.fit(BATCHES, verbose=0)
    assert np.array_equal(before[0][0], original.layers[0].get_weights()[0])
    assert not np.array_equal(before[1][0], original.layers[1].get_weights()[0])
    original.compile(keras.optimizers.SGD(0.0), "mse")
    before = original.get_weights()
    model.fit(BATCHES, verbose=0)
    assert all(np.array_equal(one, other) for one, other in zip(before, original.get_weights(), strict=True))


def test_a_traced_step_that_does_not_come_back_is_warned_of(caplog):
    """The engine sees a step on threads only while it is traced."""
    told = threading.Event()
    slow = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record):
            if "The tf.function `test_step` has not returned" in record.getMessage():
                told.set()

    def wait(x):
        return x if not slow.is_set() or told.wait(60) else np.full_like(x, np.nan)

    class Waits(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32), x.shape)

    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"], warn_after=0.05)
    model = replicate_model(small(Waits()), strategy=strategy)
    model.test_on_batch(X[:8], X[:8, :1])
    logger = logging.getLogger("replica_engine")
    logger.addHandler(handler := Handler())
    try:
        slow.set()
        model.test_on_batch(X[:8], X[:8, :1])
    finally:
        logger.removeHandler(handler)
    assert told.is_set()


def test_a_long_compilation_says_that_it_goes_on(both, is_tpu, caplog, monkeypatch):
    """The layer is traced until somebody has been told that it takes long."""
    told = threading.Event()

    class Slow(keras.layers.Layer):
        def call(self, x):
            if tf.distribute.has_strategy():
                assert told.wait(300)
            return x

    class Told(logging.Handler):
        def emit(self, record):
            told.set()

    model = replicate_model(small(Slow()), strategy=both(2))
    monkeypatch.setattr(train_function, "PROGRESS_EVERY", 0.1)
    logger, handler = logging.getLogger("replica_engine"), Told(logging.WARNING)
    logger.addHandler(handler)
    try:
        with caplog.at_level("WARNING", "replica_engine"):
            model.fit(BATCHES, verbose=0)
    finally:
        logger.removeHandler(handler)
    doing = "compiling" if is_tpu else "tracing"  # threads compile nothing
    assert f"still {doing} train_step of 'small' for 2 replicas" in of_level(caplog, "WARNING")[0]


def test_a_layer_that_xla_cannot_compile_is_named_and_runs_on_threads(both, is_tpu):
    class Drawn(keras.layers.Layer):
        def call(self, x):
            return x + tf.cast(next(iter(tf.data.Dataset.range(3))), tf.float32)

    model = replicate_model(small(Drawn(name="drawn")), strategy=both(2))
    if not is_tpu:
        assert model.predict(X, verbose=0).shape == (24, 1)
        return
    with pytest.raises(LoweringError, match=r"RangeDataset at .*test_messages\.py:\d+ in call") as raised:
        model.predict(X, verbose=0)
    more, note = raised.value.__notes__
    assert more.startswith("more: errors/LoweringError.html in the site")
    assert "in the layer 'drawn' (Drawn) of the model 'small'" in note
    assert "replicate_model(model, strategy=replica_engine.MirroredStrategy())" in note


class TestTheDefault:
    @pytest.fixture
    def reason(self, caplog):
        def reason(model, replicas=2):
            caplog.clear()
            with caplog.at_level("INFO", "replica_engine"):
                made = replicate_model(model, replicas)
            assert made.strategy.num_replicas_in_sync == replicas
            return type(made.strategy), of_level(caplog, "INFO")[0]

        return reason

    def test_is_xla_for_recurrent_layers(self, reason):
        kind, message = reason(small(keras.layers.Reshape((4, 1)), keras.layers.LSTM(2, name="memory")))
        assert kind is replica_engine.TPUStrategy
        assert message == (
            "replicate_model: 'small' on TPUStrategy(2 replicas: CPU:0, CPU:1): XLA is fast at layers such as 'memory'"
        )

    def test_is_printed_where_nobody_said_how_many(self, capsys):
        made = replicate_model(small())
        assert f"replicate_model: 'small' on {made.strategy!r}: XLA wins nothing on CPU" in capsys.readouterr().out
        replicate_model(small(), replicas=2)
        assert capsys.readouterr().out == ""

    def test_is_threads_for_matrix_products(self, reason):
        kind, message = reason(small())
        assert kind is replica_engine.MirroredStrategy
        assert "XLA wins nothing on CPU" in message

    def test_is_xla_where_tensorflow_has_too_few_devices(self, reason):
        kind, message = reason(small(), replicas=9)
        assert kind is replica_engine.TPUStrategy
        assert "it makes its own CPU devices" in message

    def test_is_threads_for_convolutions(self, reason):
        reshape, flatten = keras.layers.Reshape((4, 1)), keras.layers.Flatten()
        kind, message = reason(small(reshape, keras.layers.Conv1D(2, 2, name="edges"), flatten))
        assert kind is replica_engine.MirroredStrategy
        assert "XLA is slow at convolutions on CPU, such as 'edges'" in message

    def test_is_threads_for_what_xla_cannot_compile(self, reason):
        words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")
        model = keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Embedding(4, 2)])
        kind, message = reason(model)
        assert kind is replica_engine.MirroredStrategy
        assert "XLA cannot compile the layer 'words'" in message

    def test_takes_all_devices(self):
        everything = len(tf.config.list_logical_devices("CPU"))
        assert replicate_model(small()).strategy.num_replicas_in_sync == everything


class Printing(keras.Model):
    """A model whose step has an op that runs on the host, of which the library tells by the name of the step."""

    def train_step(self, data):
        tf.print("a step of", tf.shape(data[0])[0], output_stream="file:///dev/null")
        return super().train_step(data)


@pytest.mark.parametrize("rows", [8, 9], ids=["even", "uneven"])
def test_a_compiled_step_is_called_as_the_method_of_the_model(rows, caplog):
    inputs = keras.Input((4,))
    model = Printing(inputs, keras.layers.Dense(1)(inputs), name="printing")
    model.compile("sgd", "mse")
    replicated = replicate_model(model, strategy=replica_engine.TPUStrategy(num_cores=2))
    with caplog.at_level("INFO", "replica_engine"):
        replicated.train_on_batch(X[:rows], X[:rows, :1])
    (message,) = [text for text in of_level(caplog, "INFO") if "XLA cannot compile all of" in text]
    assert message.startswith("XLA cannot compile all of `train_step`.")
