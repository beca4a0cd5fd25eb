"""A training whose process was killed goes on in another process as if it had never stopped.

The processes are real, and the kill is SIGKILL, at a batch that is drawn from the seed in the test's name.
"""

import functools
import random
import signal
import sys
import textwrap

import numpy as np
import pytest

EPOCHS, BATCHES = 4, 3

# What each program of this module begins with: a folder, and the kind of strategy.
SETUP = """
    import os, signal, sys
    from replica_engine.testing import logical_devices

    folder, kind = sys.argv[1:3]
    devices = logical_devices(2)

    import keras, numpy as np
    import replica_engine
    from replica_engine.keras import replicate_model

    random = np.random.default_rng(0)
    x = random.normal(size=(24, 4)).astype("float32")
    y = random.normal(size=(24, 2)).astype("float32")

    if kind == "tpu":
        strategy = replica_engine.TPUStrategy(num_cores=2)
    else:
        strategy = replica_engine.MirroredStrategy(devices)

    def state_of(model):
        return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
"""

# Further arguments: at which batch it kills itself, if it is not 0, and after how many epochs it ends.
TRAINING = (
    SETUP
    + """
    killed_at, epochs = map(int, sys.argv[3:5])
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])

    class Killed(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    # Killed comes first: what happens at the batch where it strikes is lost.
    resuming = [Killed(), keras.callbacks.BackupAndRestore(f"{folder}/backup")]
    fit = replicate_model(model, strategy=strategy).fit
    history = fit(x, y, 8, epochs, shuffle=False, verbose=0, callbacks=resuming).history
    state = {f"state {index}": value for index, value in enumerate(state_of(model))}
    np.savez(f"{folder}/found.npz", backup=os.path.exists(f"{folder}/backup"), **history, **state)
"""
)

# A further argument: "first" or "second" process. Each case is a model with callbacks, alone and replicated.
CALLBACKS = (
    SETUP
    + """
    from keras import callbacks, optimizers

    process = sys.argv[3]
    names = sys.argv[4:]

    def adam(**options):
        return optimizers.Adam(0.05, **options)

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
        board = callbacks.TensorBoard(f"{folder}/board", update_freq="batch")
        return {
            "backup": (adam(), [backup()]),
            "backup by batches": (adam(), [backup(save_freq=2, double_checkpoint=True)]),
            "checkpoint": (adam(), [checkpoint, best, load(weights)]),
            "whole": (adam(gradient_accumulation_steps=2, clipnorm=0.5), [Whole(f"{folder}/whole.keras")]),
            "early stopping": (adam(), [backup(), stopping]),
            "rates": (adam(), [schedule, callbacks.ReduceLROnPlateau("loss", 0.5, 1, min_delta=100.0), backup()]),
            "averages": (adam(use_ema=True, ema_momentum=0.5), [swap, backup()]),
            "nan": (adam(), [backup(), at("on_epoch_end", spoil), callbacks.TerminateOnNaN()]),
            "logs": (adam(), [board, callbacks.CSVLogger(f"{folder}/table.csv", append=True), backup()]),
            "compile": (adam(), [at("on_train_begin", compile), backup()]),
            "replace": (adam(), [backup(), at("on_train_batch_end", replace)]),
            "scaled": (optimizers.LossScaleOptimizer(adam()), [backup()]),
        }

    found = {}
    for name in names:
        for which in ["alone", "replicated"] if kind == "mirrored" else ["replicated"]:
            files = f"{folder}/{kind} {which} {name}"
            os.makedirs(files, exist_ok=True)
            optimizer, given = cases(files)[name]
            keras.utils.set_random_seed(1)
            original = model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
            if which == "replicated":
                model = replicate_model(model, strategy=strategy)
            data = {"validation_data": (x[:8], y[:8]), "shuffle": False, "verbose": 0}
            epochs = 2 if process == "first" else 3
            history = model.fit(x[:16], y[:16], 8, epochs, callbacks=given, **data).history
            found.update({f"{which}/{name}/{key}": value for key, value in history.items()})
            state = enumerate(state_of(original))
            found.update({f"{which}/{name}/state {index}": value for index, value in state})
    np.savez(f"{folder}/{kind} {process}.npz", **found)
"""
)

KINDS = ["mirrored", "tpu"] if sys.version_info >= (3, 11) else ["mirrored"]  # which jax needs


class Trainings:
    """Runs the program above.

    Args:
        programs: what starts processes.
        folder: for its files.
    """

    def __init__(self, programs, folder):
        self._programs = programs
        self._folder = folder
        self._whole = {}

    def run(self, name, kind, killed_at=0, epochs=EPOCHS):
        """One process; returns what it wrote, or None if it was killed."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        done = self._programs.run(textwrap.dedent(TRAINING), folder, kind, killed_at, epochs)
        if killed_at:
            assert done.returncode == -signal.SIGKILL, done.stderr
            return None
        assert done.returncode == 0, done.stderr
        with np.load(folder / "found.npz") as found:
            return dict(found)

    def whole(self, kind):
        """What a training comes to that nobody disturbs."""
        if kind not in self._whole:
            self._whole[kind] = self.run(f"undisturbed {kind}", kind)
        return self._whole[kind]


@pytest.fixture(scope="module")
def trainings(programs, tmp_path_factory):
    return Trainings(programs, tmp_path_factory.mktemp("trainings"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0])
def test_kill_9_at_a_random_batch(trainings, kind, seed):
    """After the first epoch, so that there is a backup. Weights, statistics, optimizer and history agree bit by bit."""
    killed_at = random.Random(f"{kind} {seed}").randint(BATCHES + 1, BATCHES * EPOCHS)
    epochs = (killed_at - 1) // BATCHES  # which the backup has
    name = f"killed {kind} {seed}"
    trainings.run(name, kind, killed_at)
    found, expected = trainings.run(name, kind), trainings.whole(kind)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert np.array_equal(found[key], value[epochs:] if key in ("loss", "mae") else value), (key, killed_at)
    assert not found["backup"]


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


@pytest.fixture(scope="module")
def processes(programs, tmp_path_factory):
    """`processes(kind, process)`: what the callbacks of all cases came to in the first process, or in the second."""
    folder = tmp_path_factory.mktemp("callbacks")

    @functools.cache
    def run(kind, process):
        if process == "second":
            run(kind, "first")
        cases = CASES if kind == "mirrored" else COMPILED_CASES
        return programs.run(textwrap.dedent(CALLBACKS), folder, kind, process, *cases)

    @functools.cache
    def processes(kind, process):
        done = run(kind, process)
        assert done.returncode == 0, done.stderr
        with np.load(folder / f"{kind} {process}.npz") as found:
            return dict(found)

    return processes


@pytest.mark.parametrize("process", ["first", "second"])
@pytest.mark.parametrize(
    ("kind", "case"),
    [("mirrored", case) for case in CASES] + [("tpu", case) for case in COMPILED_CASES if "tpu" in KINDS],
)
def test_a_callback_does_in_each_process_what_it_does_alone(processes, alike, kind, case, process):
    """With plain Keras in the first process and in the second, which starts with an optimizer that is not built."""
    alone = {key: value for key, value in processes("mirrored", process).items() if key.startswith(f"alone/{case}/")}
    assert any("state" in key for key in alone)
    found = processes(kind, process)
    for key, expected in alone.items():
        value = found[key.replace("alone/", "replicated/", 1)]
        if case == "nan":
            assert np.array_equal(np.isnan(value), np.isnan(expected)), key
        else:
            alike(value, expected, rtol=1e-3, atol=1e-4)
    epochs = len(alone.get(f"alone/{case}/loss", alone.get(f"alone/{case}/val_loss")))
    assert epochs <= (3 if process == "second" else 2)
