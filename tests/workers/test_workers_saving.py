"""Checkpoints and saved models of several workers in one shared folder."""

import concurrent.futures
import os
import threading

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import HEAD, TAIL, alone, failing, files, outputs

from replica_engine.threads.merge_checks import Launches
from replica_engine.workers.saving import Saving

SAVING = """
import keras

folder = os.environ["FOLDER"]
strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
    seen = tf.Variable(
        0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
    )
checkpoint = tf.train.Checkpoint(w=w, seen=seen)
manager = tf.train.CheckpointManager(checkpoint, f"{folder}/managed", max_to_keep=2)
for step in range(3):
    strategy.run(lambda: seen.assign_add(1.0 + tf.cast(context().replica_id_in_sync_group, tf.float32)))
    w.assign(float(step))
    manager.save()
found["checkpoints"] = [os.path.basename(path) for path in manager.checkpoints]
found["latest"] = os.path.basename(tf.train.latest_checkpoint(f"{folder}/managed"))
found["written"] = os.path.relpath(checkpoint.write(f"{folder}/written/here"), folder)
found["saved"] = os.path.relpath(checkpoint.save(f"{folder}/saved/ckpt"), folder)
w.assign(9.0)
strategy.run(lambda: seen.assign(50.0))
checkpoint.restore(tf.train.latest_checkpoint(f"{folder}/managed")).assert_consumed()
found["restored"] = [float(w), float(seen)]
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
data = tf.data.Dataset.from_tensor_slices((np.ones([16, 3], "float32"), np.ones([16, 1], "float32"))).batch(8)
model.fit(data, verbose=0)
model.save(f"{folder}/model.keras")
found["loaded"] = keras.saving.load_model(f"{folder}/model.keras").predict(np.ones([2, 3]), verbose=0).tolist()
found["own"] = model.predict(np.ones([2, 3]), verbose=0).tolist()
tf.train.Checkpoint(model=model).write(f"{folder}/of model")
model.export(f"{folder}/exported", verbose=False)
served = tf.saved_model.load(f"{folder}/exported")
found["served"] = served.serve(tf.ones([2, 3])).numpy().tolist()


class Module(tf.Module):
    def __init__(self):
        self.w, self.seen = w, seen

    @tf.function(input_signature=[tf.TensorSpec([])])
    def __call__(self, x):
        return x * self.w


tf.saved_model.save(Module(), f"{folder}/module".encode())  # TensorFlow takes bytes, too
module = tf.saved_model.load(f"{folder}/module")
found["module"] = float(module(tf.constant(3.0)))
tf.train.Checkpoint(plain=tf.Variable(1.0)).write(f"{folder}/of worker {me}")  # of no strategy: each writes its own
"""

DIFFERENT = """
strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
checkpoint = tf.train.Checkpoint(w=w)
if me == 0:
    checkpoint.write(os.environ["FOLDER"] + "/ckpt")
else:
    strategy.run(lambda: context().all_reduce("SUM", 1.0))
"""

PARTS = """
import keras

folder = os.environ["FOLDER"]
strategy = KIND()
with strategy.scope():
    w = tf.Variable(1.0)
step = lambda: context().all_reduce("SUM", w)
checkpoint = tf.train.Checkpoint(w=w)
options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
for _ in range(3):
    path = checkpoint.save(f"{folder}/asynchronous/ckpt", options)
    for _ in range(10):
        strategy.run(step)
    checkpoint.sync()
    found["is there"] = os.path.exists(path + ".index")
plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
plain.compile("adam", "mse")
model = replica_engine.keras.replicate_model(plain, strategy=strategy)
model.fit(np.ones([8, 3], "float32"), np.ones([8, 1], "float32"), batch_size=4, verbose=0, shuffle=False)
parts = {"model": plain, "layer": plain.layers[0], "optimizer": plain.optimizer, "variable": plain.variables[0].value}
for name, part in parts.items():
    tf.train.Checkpoint(part=part, step=tf.Variable(me)).write(f"{folder}/{name}")
    found[name] = int(tf.train.load_variable(f"{folder}/{name}", "step/.ATTRIBUTES/VARIABLE_VALUE"))
own = f"{folder}/own {me}"
tf.train.Checkpoint(step=tf.Variable(me)).write(own)
found["own"] = os.path.exists(own + ".index")
"""


CHIEF_CANNOT_BEGIN = """
folder = os.environ["FOLDER"]
strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
checkpoint = tf.train.Checkpoint(w=w, state=replica_engine.TrainingState(strategy=strategy))
try:
    checkpoint.write(f"{folder}/a file/ckpt")
except replica_engine.errors.CheckpointError as error:
    found["error"] = str(error).splitlines()[0]
found["there"] = os.path.exists(checkpoint.write(f"{folder}/ckpt") + ".index")
"""


OWN_PATHS = """
import keras

folder = os.environ["FOLDER"]
strategy = KIND()
task = strategy.cluster_resolver.task_id


def own(name):  # as tutorials of TensorFlow have it: the chief's path, or a temporary one beside it
    directory = os.path.join(folder, f"workertemp_{task}") if task else folder
    tf.io.gfile.makedirs(directory)
    return os.path.join(directory, name)


with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = keras.optimizers.SGD(0.125)
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    seen = tf.Variable(0.0, synchronization=on_read, aggregation=total, trainable=False)
data = strategy.distribute_datasets_from_function(
    lambda context: tf.data.Dataset.range(8).map(lambda i: tf.cast(i, tf.float32)[tf.newaxis]).shard(
        context.num_input_pipelines, context.input_pipeline_id
    ).batch(2)
)


@tf.function
def train_step(iterator):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_sum(model(x, training=True) * 0.125, 1), global_batch_size=4)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        seen.assign_add(tf.reduce_sum(x))
        return loss

    return strategy.reduce("SUM", strategy.run(step, args=(next(iterator),)), axis=None)


epoch = tf.Variable(tf.constant(0, tf.int64))
checkpoint = tf.train.Checkpoint(model=model, epoch=epoch, seen=seen)
directory = own("ckpt")
manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=1)
found["left"] = []
while epoch.numpy() < 3:
    iterator = iter(data)
    found["loss"] = float(train_step(iterator) + train_step(iterator))
    manager.save()
    found["left"].append(sorted(os.listdir(directory)))
    if task:
        tf.io.gfile.rmtree(directory)
    epoch.assign_add(1)
trained = model.get_weights()[0].item()
model.set_weights([each * 0 for each in model.get_weights()])
latest = tf.train.latest_checkpoint(f"{folder}/ckpt")
checkpoint.restore(latest).assert_existing_objects_matched()
found["restored"] = [os.path.basename(latest), model.get_weights()[0].item() == trained, int(epoch), float(seen)]


class Ending(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            found["backup"] = sorted(os.listdir(own("backup")))


model.save(own("model.keras"))
model.save_weights(own("model.weights.h5"))
tf.train.Checkpoint(model=model).write(own("alone"))
model.export(own("exported"), verbose=False)
model.compile("sgd", "mse")
backup = keras.callbacks.BackupAndRestore(own("backup"))
model.fit(tf.ones([4, 1]), tf.ones([4, 1]), batch_size=4, epochs=2, verbose=0, callbacks=[backup, Ending()])
"""


def test_a_worker_writes_to_a_path_that_is_not_the_chiefs(programs, tmp_path):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, OWN_PATHS, FOLDER=str(tmp_path))
    assert first == second
    assert first["left"] == [
        ["checkpoint", f"ckpt-{number}.data-00000-of-00001", f"ckpt-{number}.index"] for number in (1, 2, 3)
    ]
    assert first["restored"] == ["ckpt-3", True, 2, 84.0]
    assert first["backup"] == ["latest.weights.h5", "training_metadata.json"]
    shared, theirs = files(tmp_path), files(tmp_path / "workertemp_1")
    assert {"alone.index", "exported/saved_model.pb", "model.keras", "model.weights.h5"} < set(theirs)
    assert {f"workertemp_1/{name}" for name in theirs} < set(shared)
    assert "backup" not in shared + theirs  # deleted at the end of the training
    assert set(theirs) == {name for name in shared if not name.startswith(("ckpt", "workertemp_1"))}


def test_a_worker_knows_the_chiefs_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {}

    class Member:
        size = 2

        def __init__(self, worker):
            self.worker, self.put, self.get = worker, values.__setitem__, lambda key: list(values.values())[-1]
            self.drop = lambda key: None

    chief, other = (Saving(Member(worker), lambda name, limited: None) for worker in range(2))

    def writes(chiefs, own):
        with chief.saving("a model", chiefs) as first, other.saving("a model", own) as inner:
            assert (first, inner) == (True, True)  # inside another saving, the path is chosen already
        with other.saving("a model", own) as second:
            return second

    assert not writes("model.keras", "model.keras")
    assert not writes(str(tmp_path / "model.keras"), tmp_path / "model.keras")
    assert not writes("model.keras", os.fsencode(tmp_path / "model.keras"))
    assert writes("model.keras", "workertemp_1/model.keras")

    def is_together(chiefs, own):
        """Paths of a training that has changed its folder, as they were given."""
        values.clear()
        with chief.taking_turns("a checkpoint", tmp_path / "a" / chiefs, chiefs):
            pass
        with other.taking_turns("a checkpoint", tmp_path / "b" / own, by_all=False, given=own) as turn:
            return not turn.writes

    assert is_together("backups/variables", "backups/variables")
    assert not is_together("backups/variables", "backups of worker 1/variables")
    assert not writes("gs://bucket/model", "gs://bucket/model")
    assert writes("gs://bucket/model", "gs://bucket/own")


def test_the_chief_writes_and_all_restore(programs, folders):
    shared, theirs = folders
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, SAVING, FOLDER=str(shared))
    reference = alone(programs, SAVING, 2, FOLDER=str(theirs))
    assert first == second
    assert first["restored"] == [2.0, 9.0]
    assert first["checkpoints"] == ["ckpt-2", "ckpt-3"]
    assert (first["latest"], first["module"]) == ("ckpt-3", 6.0)
    assert first["loaded"] == first["own"] == first["served"]
    assert first == reference
    assert [each for each in files(shared) if not each.startswith("of worker 1")] == files(theirs)


def test_the_chief_writes_parts_of_replicated_models_and_asynchronous_checkpoints(programs, tmp_path):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, PARTS, FOLDER=str(tmp_path))
    chiefs = dict.fromkeys(("model", "layer", "optimizer", "variable"), 0)
    assert first == second == {"is there": True, **chiefs, "own": True}
    assert [name for name in files(tmp_path / "asynchronous") if name.endswith(".index")] == [
        f"ckpt-{number}.index" for number in (1, 2, 3)
    ]


def test_what_the_chief_cannot_begin_is_the_error_of_all(programs, tmp_path):
    """The others waited for its part of the training's state, which it does not give then."""
    (tmp_path / "a file").touch()
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, CHIEF_CANNOT_BEGIN, FOLDER=str(tmp_path))
    assert first == second
    assert "a file/ckpt" in first["error"]
    assert first["there"]


def test_workers_compare_what_they_have_heard_for_as_long_as_they_train(monkeypatch):
    """About once a second: the job kept the values of each time, and has no room after some minutes."""
    monkeypatch.setattr("replica_engine.workers.job._MOST_VALUES", 5)
    with job() as made, concurrent.futures.ThreadPoolExecutor(2) as pool:

        def exchanged(worker):
            saving = Saving(made.join(worker), lambda name, limited: None)
            return [saving.exchange("signals", each * (1 - 2 * worker)) for each in range(9)]

        for found in pool.map(exchanged, range(2)):
            assert found == [[each, -each] for each in range(9)]


class Chief:
    """The connection of worker 0, whose values nobody reads."""

    worker, size = 0, 2

    def put(self, key, value):
        pass

    def drop(self, key):
        pass


def test_each_thread_meets_for_what_it_saves():
    met = []
    saving = Saving(Chief(), lambda name, limited: met.append((name, limited)))

    def save(what):
        with saving.saving(what, "here"), saving.saving("its weights", "there"):
            pass

    with saving.saving("a model", "here"):
        thread = threading.Thread(target=save, args=("a checkpoint",))
        thread.start()
        thread.join()
    begin, end = "the saving of {}", "the end of saving {}"
    assert [name for name, _ in met] == [
        begin.format("a model"),
        *(each.format("a checkpoint") for each in (begin, end)),
        end.format("a model"),
    ]


def test_the_timeout_does_not_bound_how_long_the_chief_writes():
    timeouts = {}

    class Member(Chief):
        def progress(self, step, name):
            pass

        def meet(self, name, timeout, warn_after):
            timeouts[name] = timeout, warn_after

        def exchange(self, name, value):
            return [value, value]

    member = Member()
    saving = Saving(member, Launches(member, timeout=4.0, warn_after=1.0).meet)
    with saving.saving("a model", "here"):
        saving.exchange("the state of a training", 1)
    assert timeouts == {
        **dict.fromkeys(("the saving of a model", "the state of a training"), (4.0, 1.0)),
        "the end of saving a model": (None, 1.0),
    }


RAISES_WHILE_WRITING = """
from replica_engine.workers import saving

strategy = KIND()
with strategy.scope():
    w = tf.Variable(2.0)
checkpoint = tf.train.Checkpoint(w=w)
if me:  # so the chief waits for it
    saving.SaveTurn.tell = lambda turn, name, value: None
checkpoint.save(os.environ["FOLDER"] + "/ckpt", tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))
if me:
    raise ValueError("my mistake")
checkpoint.sync()
"""


def test_an_exception_while_a_checkpoint_is_written_is_printed_last_and_the_others_lose_the_worker(programs, tmp_path):
    with job(join=LONGER) as made:
        chief, other = made.start_all(programs, HEAD + RAISES_WHILE_WRITING + TAIL, LOCAL="1", FOLDER=str(tmp_path))
        its, chiefs = failing(other), failing(chief)
    assert its.rstrip().splitlines()[-1] == "ValueError: my mistake"
    assert "WorkerLostError: worker 1 (" in chiefs
    assert f"The checkpoint '{tmp_path}/ckpt-1', which was saved asynchronously" in chiefs
    assert "CheckpointError" not in chiefs
    assert files(tmp_path) == []


@pytest.mark.full("a save is a launch that not all come to, which test_launcher.py has")
def test_a_checkpoint_of_the_chief_alone_is_found(programs, tmp_path):
    with job(join=LONGER) as made:
        started = made.start_all(programs, HEAD + DIFFERENT + TAIL, LOCAL="1", FOLDER=str(tmp_path))
        for process in started:
            _, err = process.communicate(LONGER)
            assert process.returncode == 1
            assert "ProgramDisagreementError: After" in err
            assert "wait at the saving of a checkpoint" in err
    assert files(tmp_path) == []
