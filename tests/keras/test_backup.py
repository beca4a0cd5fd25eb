"""A training with `BackupAndRestore` whose process was killed goes on in another process as if it had never stopped.

The processes are real, and the kill is SIGKILL, at a batch that is drawn from the seed in the test's name.
"""

import json
import random
import signal
import textwrap
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import Stops, dense
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine.errors import BackupError
from replica_engine.keras import BackupAndRestore
from replica_engine.keras.backup.backup_files import BackupFolder

EPOCHS, BATCHES = 3, 5

# Arguments: a folder, the number of the batch at which it kills itself, and then kinds: what trains, and on which data.
# Each kind has a folder of its own in the folder, with the backups and with what the training comes to.
PROGRAM = """
    import contextlib, json, os, random, signal, sys
    from replica_engine import logical_devices

    folder, killed_at, kinds = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    devices = logical_devices(2)

    import keras, numpy as np, tensorflow as tf
    import replica_engine
    from keras import callbacks, layers
    from replica_engine.keras import BackupAndRestore, replicate_model

    class Killed(callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    class Draws(callbacks.Callback):
        "Everything that draws a random number outside of the model; its state is what it drew."
        drawn = ()

        def on_train_batch_end(self, batch, logs=None):
            draws = random.random(), np.random.rand(), tf.random.uniform([]), keras.random.uniform([])
            self.drawn += tuple(map(float, draws)), (float(self.model.noise.uniform([])),)

        def get_state(self):
            return {"drawn": self.drawn}

        def set_state(self, state):
            self.drawn = state["drawn"]

    def make_strategy(kind):
        compiled = kind.startswith("tpu")
        return replica_engine.TPUStrategy(num_cores=2) if compiled else replica_engine.MirroredStrategy(devices)

    def data_of(kind, x, y):
        options = tf.data.Options()
        options.autotune.enabled = False  # iterators that tune themselves take long to delete
        augmented = lambda a, b: (a + tf.random.stateless_normal(tf.shape(a), [1, 2]), b)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(40).batch(8).map(augmented).prefetch(2)
        if kind.endswith("python"):  # a dataset with Python code, whose state TensorFlow cannot save
            keep = lambda a, b: (tf.ensure_shape(tf.numpy_function(np.copy, [a], tf.float32), [None, 4]), b)
            dataset = dataset.map(keep)
        if kind.endswith("repeated"):
            return {"x": dataset.repeat().with_options(options), "steps_per_epoch": 5}
        if kind.endswith("generator"):
            own = np.random.default_rng(7)  # a thread of tf.data is ahead in the generator, and shares no other
            drawn = (own.permutation(40)[:8] for _ in iter(int, 1))  # without end
            return {"x": ((x[rows], y[rows]) for rows in drawn), "steps_per_epoch": 5}
        arrays = {"x": x, "y": y, "batch_size": 8}
        return arrays if kind.endswith("arrays") else {"x": dataset.with_options(options)}

    for kind in kinds:
        os.makedirs(files := f"{folder}/{kind}", exist_ok=True)
        keras.utils.set_random_seed(1)
        data = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
        in_scope = make_strategy(kind).scope() if "scope" in kind else contextlib.nullcontext()
        with in_scope:
            parts = [layers.Dense(6, "relu"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5)]
            model = keras.Sequential([keras.Input((4,)), *parts, layers.Dense(2)])
            adam = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, 20))
            loss_scale = dict(initial_scale=8.0, dynamic_growth_steps=3)
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.05) if "rates" in kind else adam, **loss_scale
            )
            model.compile(optimizer, "mse", metrics=["mae"])
        model.noise = tf.random.Generator.from_seed(3)
        trained = model if "scope" in kind or "alone" in kind else replicate_model(model, strategy=make_strategy(kind))
        given = [
            Killed(),  # comes first: what happens at the batch where it strikes is lost
            BackupAndRestore(f"{files}/backup", save_freq=2, keep=2),
            draws := Draws(),
            stopping := callbacks.EarlyStopping("mae", patience=9, min_delta=1.0, restore_best_weights=True),
            callbacks.CSVLogger(f"{files}/log.csv"),
            best := callbacks.ModelCheckpoint(
                f"{files}/best.weights.h5", "mae", save_best_only=True, save_weights_only=True
            ),
        ]
        if "rates" in kind:
            given.append(callbacks.ReduceLROnPlateau("mae", 0.5, 1, min_delta=9.0))
            given.append(callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9))
        sample = (data[:8, :4], data[:8, 4:])
        history = trained.fit(
            **data_of(kind, data[:, :4], data[:, 4:]), epochs=3, verbose=0, callbacks=given, validation_data=sample
        )
        state = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
        np.savez(f"{files}/found.npz", *state, *stopping.best_weights, drawn=np.concatenate(draws.drawn))
        found = {"history": history.history, "epochs": history.epoch, "best": [stopping.wait, stopping.best, best.best]}
        found["log"] = open(f"{files}/log.csv").read()
        found["left"] = sorted(os.listdir(files))
        with open(f"{files}/found.json", "w") as file:
            json.dump(found, file)
"""

KINDS = [
    ["alone rates dataset", "mirrored rates arrays", "mirrored scope repeated", "mirrored python"],
    ["tpu rates dataset", "tpu scope generator"],
]


@pytest.mark.parametrize("kinds", KINDS if HAS_XLA else KINDS[:1], ids=["threads", "compiled"][: 1 + HAS_XLA])
@pytest.mark.parametrize("seed", [0])
@pytest.mark.full("many processes; the places of a backup are compared without a kill above and below")
def test_kill_9_at_a_random_batch(programs, tmp_path, kinds, seed):
    """Weights, optimizer, history, callbacks, files and random numbers agree bit by bit, and no backup is left."""

    def run(name, *arguments):
        (tmp_path / name).mkdir(exist_ok=True)
        return programs.run(textwrap.dedent(PROGRAM), tmp_path / name, *arguments, timeout=300)

    for kind in kinds:
        killed_at = random.Random(f"{kind} {seed}").randint(4, BATCHES * EPOCHS)
        killed = run("killed", killed_at, kind)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert (tmp_path / "killed" / kind / "backup").exists(), (kind, killed_at)
    for name in ("killed", "undisturbed"):
        done = run(name, 0, *kinds)
        assert done.returncode == 0, done.stderr
    for kind in kinds:
        found, expected = (tmp_path / name / kind for name in ("killed", "undisturbed"))
        assert json.loads((found / "found.json").read_text()) == json.loads((expected / "found.json").read_text()), kind
        with np.load(found / "found.npz") as values, np.load(expected / "found.npz") as others:
            assert values.files == others.files
            different = [name for name in values.files if not np.array_equal(values[name], others[name])]
        assert not different, kind


RESIZED = [
    ("mirrored", 2, 4),
    *(pytest.param("tpu", *sizes, marks=pytest.mark.full("as on threads")) for sizes in ((2, 4), (4, 1))),
]


@pytest.mark.parametrize(("kind", "before", "after"), RESIZED if HAS_XLA else RESIZED[:1])
def test_another_number_of_replicas_goes_on_in_the_middle_of_an_epoch(tmp_path, kind, before, after):
    """Its iterators have other parts of the batches, and its replicas have other shares of the metrics."""

    def train(size, folder, *given):
        devices = replica_engine.logical_devices(4)[:size]
        compiled = kind == "tpu"
        strategy = replica_engine.TPUStrategy(num_cores=size) if compiled else replica_engine.MirroredStrategy(devices)
        keras.utils.set_random_seed(1)
        data = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices((data[:, :4], data[:, 4:])).shuffle(48).batch(8)
        with strategy.scope():
            model = dense(4, 2, "adam", "mse", metrics=["mae"])
        backup = BackupAndRestore(tmp_path / folder, save_freq=2)
        history = model.fit(dataset, epochs=3, verbose=0, callbacks=[*given, backup]).history
        return [*model.get_weights(), *(np.array(values) for values in history.values())]

    with pytest.raises(InterruptedError):
        train(before, "stopped", Stops(6 + 5))
    for found, expected in zip(train(after, "stopped"), train(before, "undisturbed"), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_repeated_dataset_goes_on_in_its_order(tmp_path):
    """TensorFlow's state of its iterator lacks the next order of `shuffle` when all elements have left that."""

    def train(folder, *given):
        keras.utils.set_random_seed(1)
        data = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
        dataset = tf.data.Dataset.from_tensor_slices((data[:, :4], data[:, 4:])).shuffle(40).batch(8).prefetch(2)
        model = dense(4, 2, "adam", "mse", run_eagerly=True)  # which saves the time to trace it
        backup = BackupAndRestore(tmp_path / folder, save_freq=2, asynchronous=False)
        fitted = model.fit(dataset.repeat(), steps_per_epoch=5, epochs=3, verbose=0, callbacks=[*given, backup])
        return [*model.get_weights(), np.array(fitted.history["loss"])]

    undisturbed = train("undisturbed")
    for at in (3, 5, 9):
        with pytest.raises(InterruptedError):
            train(f"stopped at {at}", Stops(at))
        for found, expected in zip(train(f"stopped at {at}"), undisturbed, strict=True):
            np.testing.assert_array_equal(found, expected)


# Arguments: a folder, "first" or "second" process, and strategies. The first process trains twice, undisturbed and
# until a signal comes; the second goes on.
LOOP = """
    import os, random, signal, sys
    from replica_engine import logical_devices

    folder, process, kinds = sys.argv[1], sys.argv[2], sys.argv[3:]
    devices = logical_devices(2)

    import keras, numpy as np, tensorflow as tf
    import replica_engine

    data = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")

    def train(kind, name, stopped_at):
        is_compiled = kind == "tpu"
        strategy = replica_engine.TPUStrategy(num_cores=2) if is_compiled else replica_engine.MirroredStrategy(devices)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            parts = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
            model = keras.Sequential([keras.Input((4,)), *parts])
            optimizer = keras.optimizers.Adam(0.05)
            optimizer.build(model.trainable_variables)
            generator = tf.random.Generator.from_seed(4)

        @tf.function
        def step(x, y):
            def on_replica(x, y):
                x += tf.random.normal(tf.shape(x)) if is_compiled else 0.0  # of the strategy's own random numbers
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 8
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return loss

            return strategy.reduce("SUM", strategy.run(on_replica, args=(x, y)), axis=None)

        dataset = tf.data.Dataset.from_tensor_slices((data[:, :4], data[:, 4:])).shuffle(40).batch(8)
        batches = strategy.experimental_distribute_dataset(dataset)
        state = replica_engine.TrainingState(model, strategy)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, generator=generator, state=state)
        manager = tf.train.CheckpointManager(checkpoint, f"{folder}/{kind} {name}", max_to_keep=1)
        checkpoint.restore(manager.latest_checkpoint)
        rows = state.values.setdefault("rows", [])
        while state.epoch < 3:
            for x, y in state.batches(batches):
                draws = random.random(), np.random.rand(), tf.random.uniform([]), generator.uniform([])
                rows.append([float(step(x, y)), *map(float, draws)])
                if len(rows) == stopped_at and process == "first":
                    os.kill(os.getpid(), signal.SIGTERM)
                if state.stops():
                    manager.save()
                    state.exit()
        return [variable.numpy() for variable in [*model.variables, *optimizer.variables]] + [np.array(rows)]

    for kind in kinds:
        try:
            if process == "first":
                np.savez(f"{folder}/{kind}.npz", *train(kind, "undisturbed", None))
            found = train(kind, "stopped", 7)
        except SystemExit as stop:
            print("status", stop.code)
            continue
        with np.load(f"{folder}/{kind}.npz") as expected:
            pairs = zip(expected.files, found, strict=True)
            print("different", [name for name, value in pairs if not np.array_equal(expected[name], value)])
"""


@pytest.mark.full("four processes")
def test_a_loop_of_its_own_goes_on_after_a_signal(programs, tmp_path):
    kinds = ["mirrored", "tpu"] if HAS_XLA else ["mirrored"]
    for process, expected in (("first", "\nstatus 143\n"), ("second", "different []")):
        done = programs.run(textwrap.dedent(LOOP), tmp_path, process, *kinds, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(expected) == len(kinds), done.stdout


def trained(folder, *callbacks, model=None, **kwargs):
    """Fits a model with a backup in a folder; returns the model and its history."""
    model = dense(4, 1, "sgd", "mse") if model is None else model
    x, y = np.ones((8, 4), "f"), np.ones((8, 1), "f")
    backup = [] if folder is None else [BackupAndRestore(folder)]
    return model, model.fit(x, y, verbose=0, callbacks=[*callbacks, *backup], **kwargs)


def test_an_exception_leaves_nothing_to_the_next_fit(tmp_path):
    """The next one begins with its own epoch, and signals are the program's."""

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("fails")

    before, (model, _) = signal.getsignal(signal.SIGTERM), trained(None, epochs=1)
    for _ in range(2):  # the second one goes on with a backup
        with pytest.raises(RuntimeError, match="fails"):
            trained(tmp_path, Fails(), model=model, epochs=4)
        assert signal.getsignal(signal.SIGTERM) is before
    assert trained(None, model=model, epochs=2)[1].epoch == [0, 1]


def test_what_callbacks_put_into_logs(tmp_path, caplog):
    class Logs(keras.callbacks.Callback):
        value, count, directory = tf.constant(0.5), 0, "of the user"

        def on_epoch_end(self, epoch, logs=None):
            self.count += 1
            logs["value"] = self.value

    logs = Logs()
    assert trained(tmp_path, logs, epochs=2)[1].history["value"] == [0.5, 0.5]
    assert "the state of the callback Logs" in caplog.text
    logs.value = object()
    with pytest.raises(BackupError, match=r"cannot save .*'value'.*: object"):
        trained(tmp_path, logs, epochs=1)


INLINE = """
    import gc, os, signal, sys, weakref
    import keras, numpy as np
    from replica_engine.keras import BackupAndRestore

    class Signalled(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                for _ in range(int(sys.argv[2])):
                    signal.raise_signal(signal.SIGTERM)

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((40, 4), "f"), np.ones((40, 1), "f")
    signalled = [Signalled()] if sys.argv[2:] else []
    model.fit(x, y, batch_size=8, callbacks=[*signalled, BackupAndRestore(sys.argv[1], asynchronous=False)])
    freed = weakref.ref(model)
    del model
    keras.utils.clear_session()
    gc.collect()
    assert freed() is None
"""


def test_the_first_fit_of_a_process_does_not_keep_its_model(programs, tmp_path):
    done = programs.run(textwrap.dedent(INLINE), tmp_path / "backup", timeout=500)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.full("less than twice")), 2])  # as Slurm does
def test_a_signal_to_the_first_fit_whose_callback_is_made_in_its_arguments(times, programs, tmp_path):
    done = programs.run(textwrap.dedent(INLINE), tmp_path / "backup", times, timeout=500)
    assert done.returncode == 143, done.stderr
    assert "after 0 epochs and 3 batches" in done.stdout
    assert BackupFolder(tmp_path / "backup", 2).last() is not None


def test_a_signal_ends_the_fit_once_the_backup_is_on_the_disk(tmp_path, monkeypatch):
    """It is written on another thread, which goes on here only when the fit waits for it."""

    class Signalled(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            signal.raise_signal(signal.SIGTERM)

    waits, finish, sync = threading.Event(), BackupFolder.finish, tf.train.Checkpoint.sync
    monkeypatch.setattr(BackupFolder, "finish", lambda *given: waits.wait() and finish(*given))
    monkeypatch.setattr(tf.train.Checkpoint, "sync", lambda checkpoint: (waits.set(), sync(checkpoint)))
    try:
        with pytest.raises(SystemExit):
            trained(tmp_path, Signalled(), batch_size=4)
        assert BackupFolder(tmp_path, 2).last() is not None
    finally:
        waits.set()


def test_a_worker_that_finishes_late_leaves_what_the_others_have(tmp_path):
    chief, other = BackupFolder(tmp_path / "backup", 2), BackupFolder(tmp_path / "backup", 2)
    first = chief.begin(1, 0)
    chief.finish(first)
    second = chief.begin(2, 0)
    other.finish(first)
    assert second.exists()
    chief.finish(second)
    assert chief.last().name.startswith("backup-000002")
    chief.clear()
    other.finish(second)
    assert chief.last() is None


def test_what_is_not_named_as_a_backup_stays(tmp_path):
    for name in ("backup-of-monday.half", "backup-000001.half", "backup-old"):
        (tmp_path / name).mkdir()
    folder = BackupFolder(tmp_path, 1)
    folder.begin(0, 1)
    folder.finish(folder.begin(1, 0))
    folder.clear()
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "backup-000001.half",
        "backup-of-monday.half",
        "backup-old",
    ]


def test_a_loop_that_never_asks_is_ended_by_the_first_signal():
    before = signal.getsignal(signal.SIGUSR1)
    try:
        state = replica_engine.TrainingState(signals=[signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) == before
        assert not state.stops()
        signal.raise_signal(signal.SIGUSR1)
        assert state.stops()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_comes_again_later_is_the_programs(monkeypatch):
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        state = replica_engine.TrainingState(signals=[signal.SIGUSR1])
        assert not state.stops()
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert state.stops()
        assert not came
        later = time.monotonic() + 11
        monkeypatch.setattr(time, "monotonic", lambda: later)
        signal.raise_signal(signal.SIGUSR1)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_asynchronous_checkpoint_has_the_state_of_when_it_was_asked_for(tmp_path, monkeypatch):
    """TensorFlow's own asks for it later, on a thread."""
    asked, serialize = [], replica_engine.TrainingState.serialize
    monkeypatch.setattr(
        replica_engine.TrainingState,
        "serialize",
        lambda self: (asked.append(threading.current_thread()), serialize(self))[1],
    )
    state, count = replica_engine.TrainingState(), tf.Variable(1)
    checkpoint = tf.train.Checkpoint(state=state, count=count)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    state.values["steps"] = 1
    path = checkpoint.save(str(tmp_path / "it"), options)
    state.values["steps"] = 2
    count.assign(2)
    checkpoint.sync()
    checkpoint.restore(path)
    assert (state.values, int(count)) == ({"steps": 1}, 1)
    assert asked == [threading.current_thread()]


def test_a_second_ctrl_c_is_not_held_back():
    state = replica_engine.TrainingState(signals=[signal.SIGINT])
    assert not state.stops()
    signal.raise_signal(signal.SIGINT)
    assert state.stops()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
