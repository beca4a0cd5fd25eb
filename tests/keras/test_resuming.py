"""Keras' callbacks that save, in two processes after each other, do for replicas what they do alone.

`test_backup.py` has the library's own `BackupAndRestore`, and processes that are killed.
"""

import textwrap

import numpy as np
import pytest
from helpers.versions import HAS_XLA

# What each program of this module begins with. Its first argument is a folder.
SETUP = """
    import os, sys
    from replica_engine import logical_devices

    folder = sys.argv[1]
    devices = logical_devices(2)

    import keras, numpy as np, tensorflow as tf
    import replica_engine
    from replica_engine.keras import replicate_model

    random = np.random.default_rng(0)
    x = random.normal(size=(24, 4)).astype("float32")
    y = random.normal(size=(24, 2)).astype("float32")

    def make_strategy(kind):
        return replica_engine.TPUStrategy(num_cores=2) if kind == "tpu" else replica_engine.MirroredStrategy(devices)

    def read_state(model):
        return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]

    def batches_of(count):
        # Of arrays Keras would make a pipeline for each fit, which takes longer than to train; and iterators that tune
        # themselves take long to delete.
        options = tf.data.Options()
        options.autotune.enabled = False
        return tf.data.Dataset.from_tensor_slices((x[:count], y[:count])).batch(8).with_options(options)
"""

# Further arguments: "first" or "second" process, and then "kind/case": a kind of strategy and callbacks. What a model
# with these comes to is written down by names that begin so, and by "alone/case" what it comes to on one device.
CALLBACKS = (
    SETUP
    + """
    from keras import callbacks, optimizers

    process, names = sys.argv[2], sys.argv[3:]

    def sgd(**options):
        return optimizers.SGD(0.05, momentum=0.9, **options)

    def at(hook, do):
        "Does it at the first call of the hook in this process."
        class At(callbacks.Callback):
            done = False

            def now(self, *_, **__):
                if not self.done:
                    self.done = True
                    do(self.model)

        setattr(At, hook, At.now)
        return At()

    def remake(model):
        "Plain Keras goes on with the functions that it has; replicated models do not need this."
        model.make_train_function(force=True)
        model.make_test_function(force=True)

    def compile(model):
        model.compile(optimizers.SGD(0.1, momentum=0.9), "mae", metrics=["mse"], run_eagerly=True)
        remake(model)

    def replace(model):
        model.optimizer = optimizers.Adagrad(0.1)
        remake(model)

    def build(model):
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    class Whole(callbacks.Callback):
        "Saves the whole model, and takes weights and optimizer from a file that is there."
        def __init__(self, path):
            super().__init__()
            self.path = path

        def on_train_begin(self, logs=None):
            if os.path.exists(self.path):
                loaded, state = keras.models.load_model(self.path), {}
                self.model.set_weights(loaded.get_weights())
                loaded.optimizer.save_own_variables(state)
                build(self.model)
                self.model.optimizer.load_own_variables(state)

        def on_epoch_end(self, epoch, logs=None):
            self.model.save(self.path)

    def load(path):
        def now(model):
            if process == "second":
                build(model)
                model.load_weights(path)
        return at("on_train_begin", now)

    def spoil(model):
        model.set_weights([weight * np.nan for weight in model.get_weights()])

    def cases(folder):
        backup = lambda **options: callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False, **options)
        weights = f"{folder}/last.weights.h5"
        checkpoint = callbacks.ModelCheckpoint(weights, save_weights_only=True)
        best = callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="val_loss", save_best_only=True)
        stopping = callbacks.EarlyStopping("loss", 100.0, 1, restore_best_weights=True)
        swap = callbacks.SwapEMAWeights(swap_on_epoch=True)
        schedule = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        plateau = callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=100.0)
        board = callbacks.TensorBoard(f"{folder}/board", update_freq="batch")
        return {
            "backup": lambda: (optimizers.Adam(0.05), [backup()]),
            "backup by batches": lambda: (sgd(), [backup(save_freq=2, double_checkpoint=True)]),
            "checkpoint": lambda: (sgd(), [checkpoint, best, load(weights)]),
            "whole": lambda: (sgd(gradient_accumulation_steps=2, clipnorm=0.5), [Whole(f"{folder}/whole.keras")]),
            "early stopping": lambda: (sgd(), [backup(), stopping]),
            "rates": lambda: (sgd(), [schedule, plateau, backup()]),
            "averages": lambda: (sgd(use_ema=True, ema_momentum=0.5), [swap, backup()]),
            "nan": lambda: (sgd(), [backup(), at("on_epoch_end", spoil), callbacks.TerminateOnNaN()]),
            "logs": lambda: (sgd(), [board, callbacks.CSVLogger(f"{folder}/table.csv", append=True), backup()]),
            "compile": lambda: (sgd(), [at("on_train_begin", compile), backup()]),
            "replace": lambda: (sgd(), [backup(), at("on_train_batch_end", replace)]),
            "scaled": lambda: (optimizers.LossScaleOptimizer(sgd()), [backup()]),
        }

    kinds = dict.fromkeys(name.split("/")[0] for name in names)
    cases_of = dict.fromkeys(name.split("/")[1] for name in names)
    strategies = {kind: make_strategy(kind) for kind in kinds}
    batches, validation = batches_of(16), batches_of(8)
    found = {}
    for name in [*(f"alone/{case}" for case in cases_of), *names]:
        kind, case = name.split("/")
        files = f"{folder}/{kind} {case}"
        os.makedirs(files, exist_ok=True)
        optimizer, given = cases(files)[case]()
        keras.utils.set_random_seed(1)
        original = model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
        if kind != "alone":
            model = replicate_model(model, strategy=strategies[kind])
        epochs = 2 if process == "first" else 3
        history = model.fit(batches, epochs=epochs, validation_data=validation, verbose=0, callbacks=given).history
        found.update({f"{name}/{key}": value for key, value in history.items()})
        found.update({f"{name}/state {index}": value for index, value in enumerate(read_state(original))})
    np.savez(f"{folder}/found.npz", **found)
"""
)

KINDS = ["mirrored", "tpu"] if HAS_XLA else ["mirrored"]


@pytest.fixture
def run(programs, tmp_path):
    """`run(program, folder, *arguments)`: how the program ended, and what it wrote into the folder, by name."""

    def run(program, name, *arguments):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        done = programs.run(textwrap.dedent(program), folder, *arguments, timeout=300)
        if done.returncode:
            return done, None
        with np.load(folder / "found.npz") as found:
            return done, dict(found)

    return run


CASES = [
    "backup",
    "backup by batches",
    "checkpoint",
    "whole",
    "early stopping",
    "rates",
    "averages",
    "nan",
    "logs",
    "compile",
    "replace",
    "scaled",
]


COMPILED_CASES = ["backup", "whole", "averages", "compile", "replace"]
"""Of those what differs in code where steps are compiled: each takes a while to compile."""


@pytest.mark.full("two processes for each callback")
def test_callbacks_do_in_each_process_what_they_do_alone(run):
    """With plain Keras in the first process and in the second, which starts with an optimizer that is not built."""
    compared = [(kind, case) for kind in KINDS for case in (CASES if kind == "mirrored" else COMPILED_CASES)]
    for process, epochs in (("first", 2), ("second", 3)):
        done, found = run(CALLBACKS, "callbacks", process, *(f"{kind}/{case}" for kind, case in compared))
        assert done.returncode == 0, done.stderr
        for kind, case in compared:
            alone, replicated = (
                {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}
                for start in (f"alone/{case}/", f"{kind}/{case}/")
            )
            assert "state 0" in alone
            assert len(alone.get("loss", alone.get("val_loss"))) <= epochs
            assert replicated.keys() == alone.keys(), (process, kind, case)
            different = [key for key in alone if not same(replicated[key], alone[key], case)]
            assert not different, (process, kind, case)


def same(found, expected, case):
    if found.shape != expected.shape or found.dtype.kind != expected.dtype.kind:
        return False
    if case == "nan":
        return np.array_equal(np.isnan(found), np.isnan(expected))
    return np.isfinite(found).all() and np.allclose(found, expected, rtol=1e-3, atol=1e-4)
