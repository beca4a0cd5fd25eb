"""MultiWorkerMirroredStrategy in real processes: equal numbers, Keras, and what the others get when a worker is lost.

Processes that start TensorFlow are expensive. So a job checks many things, and prints what it found as JSON.
"""

import json
import signal

import pytest
from helpers.jobs import LONGER, is_stopped, job, until
from helpers.workers import (
    HEAD,
    IN_A_LOOP,
    SCOPED_KERAS,
    TAIL,
    UNEVEN_KERAS,
    alone,
    failing,
    files,
    flat,
    outputs,
    read,
)

LOOP = """
before = tf.constant(1.0) + 1  # TensorFlow has started before the strategy
strategy = KIND()
rng = np.random.RandomState(0)
x = rng.rand(64, 8).astype("float32")
y = x.sum(1, keepdims=True)
weight = rng.rand(8, 1).astype("float32")
tf.random.set_seed(me)
with strategy.scope():
    w = tf.Variable(weight + me)  # the chief's counts
    b = tf.Variable(tf.random.normal([]) * 0.0)
    seen = tf.Variable(
        0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
    )
    counted = tf.Variable(0, aggregation=tf.VariableAggregation.SUM, trainable=False)
    of_first = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, trainable=False,
                           aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    text = tf.Variable("another" if me else "chief", trainable=False)
found["text"] = text.numpy().decode()
found["replicas"] = strategy.num_replicas_in_sync
found["hosts"] = getattr(strategy, "num_hosts", None), repr(strategy).partition("(")[2]
found["first"] = w.numpy().tolist()


def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x @ w + b - y) ** 2) / 16
    gradients = context().all_reduce("SUM", tape.gradient(loss, [w, b]))
    w.assign_sub(0.1 * gradients[0])
    b.assign_sub(0.1 * gradients[1])
    seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
    return loss


@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)


batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))
found["losses"] = [float(train(*batch)) for _ in range(2) for batch in batches]
found["eager"] = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in batches]
found["bare"] = strategy.experimental_local_results(
    strategy.run(tf.function(lambda v: context().all_reduce("SUM", v)), args=(tf.ones([3]),))
)[0].numpy().tolist()
ids = strategy.run(lambda: context().all_gather(tf.reshape(context().replica_id_in_sync_group, [1]), axis=0))
found["ids"] = strategy.experimental_local_results(ids)[0].numpy().tolist()
found["seen"] = float(seen)
found["sums"] = [float(value) for value in tf.nest.flatten(strategy.reduce("SUM", strategy.run(
    lambda: {"a": tf.constant(1.0), "b": [tf.constant(2.0)]}), axis=None))]


def of_two_kinds():
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.reshape(context().replica_id_in_sync_group, [1]), (4, 2))
    mixed = context().all_reduce("SUM", {"count": tf.constant(1), "loss": tf.constant(0.5), "rows": rows})
    return {**mixed, "rows": tf.convert_to_tensor(mixed["rows"])}


def of_tables():  # the squares of rows that all replicas have at the same places, and of rows that each has at others
    same = tf.range(3)
    own = same + context().replica_id_in_sync_group
    tables = [tf.IndexedSlices(tf.ones([3, 1]), places, tf.constant([6, 1])) for places in (same, own)]
    reduced = context().all_reduce("SUM", tables)
    return [tf.convert_to_tensor(tf.IndexedSlices(each.values**2, each.indices, (6, 1))) for each in reduced]


for name, fn in (("tables", of_tables), ("tables, traced", tf.function(of_tables))):
    same, own = strategy.run(fn)
    found[name] = [
        tf.reshape(strategy.experimental_local_results(each)[-1], [-1]).numpy().tolist() for each in (same, own)
    ]


large = tf.reshape(tf.cast(tf.range(2_500_000) % 1000, tf.float32), [-1, 5])  # which goes in pieces


def mean_of_large():
    own = large * (1.0 + tf.cast(context().replica_id_in_sync_group, tf.float32))
    return context().all_reduce("MEAN", own)


for name, fn in (("large", mean_of_large), ("large, traced", tf.function(mean_of_large))):
    values = strategy.experimental_local_results(strategy.run(fn))
    found[name] = [bool(np.array_equal(value, large * 2.5)) for value in values][:2]
found["worker"] = strategy.sync_points()[-1].worker


def of_narrow_floats():  # rounded after each addition, the sums would be 2048 and 256
    i = context().replica_id_in_sync_group
    of_first = {"float16": 2048.0, "bfloat16": 256.0}
    values = [tf.cast(tf.where(i == 0, large, 1.0), dtype) for dtype, large in of_first.items()]
    return [context().all_reduce(op, value) for op in ("SUM", "MEAN") for value in values]


for name, fn in (("narrow", of_narrow_floats), ("narrow, traced", tf.function(of_narrow_floats))):
    found[name] = [
        [float(each) for each in strategy.experimental_local_results(value)][:2] for value in strategy.run(fn)
    ]


for name, fn in (("mixed", of_two_kinds), ("traced", tf.function(of_two_kinds))):
    values = strategy.experimental_local_results(strategy.run(fn))[0]
    found[name] = [values[key].numpy().tolist() for key in sorted(values)]


@tf.function
def in_a_branch(flag):
    return strategy.run(
        lambda: tf.cond(flag, lambda: context().all_reduce("SUM", 1.0), lambda: context().all_reduce("MEAN", 3.0))
    )


found["branches"] = [
    float(strategy.experimental_local_results(in_a_branch(tf.constant(flag)))[0]) for flag in (True, False)
]
found["second"] = float(KIND().reduce("SUM", KIND().run(lambda: context().all_reduce("MEAN", 1.0)), axis=None))
found["weights"] = [w.numpy().tolist(), float(b)]
for number in (me, me + 1):  # a Python number, equal on the replicas of one worker
    strategy.run(lambda: counted.assign_add(number))
    strategy.run(tf.function(lambda: counted.assign_add(number)))
found["counted"] = int(counted)
strategy.run(lambda: of_first.assign(tf.cast(context().replica_id_in_sync_group + 1, tf.float32)))
found["of first"] = [float(of_first), float(tf.function(lambda: of_first + 1.0)())]
"""


def test_two_workers_of_two_replicas_equal_one_of_four(programs):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, LOOP, local=2)
    reference = alone(programs, LOOP, 4)
    here = "4 replicas, on this worker: CPU:0, CPU:1)"
    assert (first.pop("hosts"), second.pop("hosts")) == ([2, here], [2, here])
    assert reference.pop("hosts") == [None, "4 replicas: CPU:0, CPU:1, CPU:2, CPU:3)"]
    assert (first.pop("worker"), second.pop("worker"), reference.pop("worker")) == (0, 1, None)
    assert (first.pop("counted"), second.pop("counted"), reference.pop("counted")) == (16, 16, 8)
    assert first == second
    assert first["ids"] == [0, 1, 2, 3]
    assert (first.pop("text"), reference.pop("text")) == ("chief", "chief")
    assert first["mixed"] == first["traced"] == [4, 2.0, [[1.0, 1.0]] * 4]
    assert first["tables"] == first["tables, traced"] == [[16.0] * 3 + [0.0] * 3, [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]]
    assert first["narrow"] == first["narrow, traced"] == [[2052.0] * 2, [260.0] * 2, [513.0] * 2, [65.0] * 2]
    assert first["branches"] == [4.0, 3.0]
    assert first["of first"] == [1.0, 2.0]
    assert first["large"] == first["large, traced"] == [True, True]
    assert (first["replicas"], first["seen"]) == (4, 192.0)
    assert first.keys() == reference.keys()
    for name, value in reference.items():
        for ours, theirs in zip(flat(first[name]), flat(value), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), name


KERAS = """
import logging
import keras

before = keras.ops.ones([2]) + 1  # TensorFlow has started before the strategy
strategy = KIND()
folder = os.environ["FOLDER"]
said = []


class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


tf.get_logger().addHandler(Kept())
keras.utils.set_random_seed(1 + me)
rng = np.random.RandomState(0)
x = rng.rand(64, 8).astype("float32")
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.set_weights([rng.rand(*each.shape).astype("float32") for each in model.get_weights()])
    model.compile("adam", "mse", metrics=["mae"])
callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.weights.h5", save_weights_only=True)]
if strategy.extended.should_save_summary:
    callbacks += [keras.callbacks.CSVLogger(f"{folder}/log.csv"), keras.callbacks.TensorBoard(f"{folder}/board")]
found["fit"] = model.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=callbacks).history
found["evaluate"] = model.evaluate(data, verbose=0, return_dict=True)
found["predict"] = model.predict(x[:10], verbose=0).tolist()
model.save(f"{folder}/model.keras")
found["weights"] = [each.tolist() for each in model.get_weights()]
with strategy.scope():
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
found["two steps"] = model.fit(data, epochs=1, verbose=0).history
found["unpacked"] = [each for each in said if "batch_reduce" in each]
"""


@pytest.mark.full("test_replicate_model has more, and the numbers of a scope are those of the test above")
def test_keras(programs, folders):
    shared, theirs = folders
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, KERAS, FOLDER=str(shared))
    reference = alone(programs, KERAS, 2, FOLDER=str(theirs))
    assert first == second
    assert first["unpacked"] == []
    assert flat(first) == pytest.approx(flat(reference), abs=1e-5)
    assert files(shared) == files(theirs)


REPLICATED = """
import keras

strategy = KIND()
keras.utils.set_random_seed(1)
rng = np.random.RandomState(0)
x = rng.rand(70, 8).astype("float32")  # batches of 16, and one of 6
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
fast = replica_engine.keras.replicate_model(model, strategy=strategy)
found["fit"] = fast.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False).history
found["of three"] = fast.evaluate(x[:3], y[:3], verbose=0, return_dict=True)
found["predict"] = fast.predict(x[:10], verbose=0).tolist()
checkpoint = keras.callbacks.ModelCheckpoint(os.environ["FOLDER"] + "/{epoch}.keras")
fast.fit(x, y, batch_size=16, verbose=0, shuffle=False, callbacks=[checkpoint])
model.save(os.environ["FOLDER"] + f"/saved by {me}.keras")
found["weights"] = [each.tolist() for each in model.get_weights()]
(*logs, found["refused"], log), *others = in_a_scope(x, y)
found["scope"] = [logs, log, others]
"""


def test_replicate_model(programs, folders):
    shared, theirs = folders
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, SCOPED_KERAS + REPLICATED, local=2, FOLDER=str(shared))
    reference = alone(programs, SCOPED_KERAS + REPLICATED, 4, FOLDER=str(theirs))
    assert first == second
    assert first.pop("refused") == reference.pop("refused")
    assert flat(first) == pytest.approx(flat(reference), rel=1e-6, abs=1e-6)
    assert files(theirs) == ["1.keras", "saved by 0.keras"]
    assert files(shared) == [*files(theirs), "saved by 1.keras"]  # whose path is its own


RESUMED = """
import keras

strategy = KIND()
rng = np.random.RandomState(0)
x = rng.rand(64, 8).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16)


class Dies(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if os.environ["DIES"] == str(me) and self.model.optimizer.iterations == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(folder):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    backup = replica_engine.keras.BackupAndRestore(folder, delete_checkpoint=False)
    dies = Dies()
    model.fit(data, epochs=3, verbose=0, callbacks=[backup, dies])
    return [dies.seen, *(each.tolist() for each in model.get_weights())]


for name in os.environ["FOLDERS"].split(","):
    found[os.path.basename(name)] = trained(name)
"""


@pytest.mark.full("four processes; a restart is tested for both strategies, and what a shared backup is where it saves")
def test_started_again_after_a_kill(programs, tmp_path):
    """The second start goes on from the shared backup, to the very weights of a run that nothing disturbed."""
    backup = str(tmp_path / "backup")
    with job(join=LONGER) as made:
        text = HEAD + RESUMED + TAIL
        dying, other = (
            programs.start(text, env=made.environment(worker, LOCAL="1", FOLDERS=backup, DIES="1")) for worker in (1, 0)
        )
        assert "WorkerLostError: worker 1 (" in failing(other)
        dying.communicate(LONGER)
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, RESUMED, FOLDERS=f"{backup},{tmp_path / 'undisturbed'}", DIES="")
    assert first == second
    (batches, *weights), (all_batches, *undisturbed) = first["backup"], first["undisturbed"]
    assert (batches, all_batches) == (8, 12)
    assert weights == undisturbed


DATA = """
strategy = KIND()
Options = tf.data.experimental.AutoShardPolicy
folder = os.environ["FOLDER"]


def taken(dataset):
    rows = []
    for batch in dataset:
        local = [part.numpy().ravel().tolist() for part in strategy.experimental_local_results(batch)]
        total = strategy.reduce("SUM", strategy.run(lambda part: tf.reduce_sum(part), args=(batch,)), axis=None)
        rows.append([local, float(total)])
    return rows


def sharded(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


numbers = tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float32)).batch(4)
files = tf.data.TextLineDataset([f"{folder}/{index}" for index in range(3)]).map(
    lambda line: tf.strings.to_number(line)).batch(2)
found["auto"] = taken(strategy.experimental_distribute_dataset(numbers))
found["data"] = taken(sharded(numbers, Options.DATA))
found["off"] = taken(sharded(numbers, Options.OFF))
found["file"] = taken(sharded(files, Options.FILE))
found["traced loop"] = [float(each) for each in in_a_loop(sharded(files, Options.FILE))]
found["keras"] = keras_on(sharded(pairs(files), Options.FILE), [1, 2, 3, 11, 12, 13, 21, 22, 23])
found["function"] = taken(strategy.distribute_datasets_from_function(
    lambda context: tf.data.Dataset.range(context.input_pipeline_id, 5 + context.input_pipeline_id).map(
        lambda x: tf.cast(x, tf.float32)).batch(context.get_per_replica_batch_size(4))))
"""


def test_datasets(programs, tmp_path):
    for index in range(3):
        (tmp_path / str(index)).write_text("".join(f"{10 * index + line}\n" for line in range(1, 4)))
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, UNEVEN_KERAS + IN_A_LOOP + DATA, FOLDER=str(tmp_path))
    assert first.pop("traced loop") == second.pop("traced loop") == [108, 6]
    steps, *_, loss, of_all_rows = keras = first.pop("keras")
    assert keras == second.pop("keras")
    assert (steps, loss) == (12, pytest.approx(of_all_rows))
    for name, rows in first.items():
        theirs = second[name]
        assert [total for _, total in rows] == [total for _, total in theirs], name  # also: as many steps
        for (ours, total), (others, _) in zip(rows, theirs, strict=True):
            assert sum(flat(ours)) + sum(flat(others)) == total, name
    seen = {name: sorted(flat([row[0] for row in [*first[name], *second[name]]])) for name in first}
    assert seen["auto"] == seen["data"] == [float(number) for number in range(10)]
    assert seen["off"] == sorted([float(number) for number in range(10)] * 2)
    assert seen["file"] == [1, 2, 3, 11, 12, 13, 21, 22, 23]
    assert len(first["file"]) == 6  # two files of the first worker: the second one has no rows in the last steps
    assert seen["function"] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]


def test_cluster_of_tf_config(programs, unused_ports):
    """The coordinator is a child of worker 0 then, and TensorFlow has the addresses of the cluster."""
    ports = unused_ports(3)
    workers = [f"127.0.0.1:{port}" for port in ports[:2]]
    started = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {
            "TF_CONFIG": json.dumps(config),
            "REPLICA_ENGINE_TOKEN": "a secret of the job",
            "REPLICA_ENGINE_COORDINATOR": f"127.0.0.1:{ports[2]}",
            "LOCAL": "1",
        }
        started.append(programs.start(HEAD + SMALL + TAIL, env=environment))
    expected = {"sum": 2.0, "server": workers, "task": "worker"}
    expected["other strategy"] = "ClusterConfigError"
    expected["errors of v1"] = ["MultiWorkerMirroredStrategy of several work"] * 2
    assert [read(each) for each in started] == [{**expected, "id": 0}, {**expected, "id": 1}]


FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raised": "raise ValueError('the body')",
    "left": "sys.exit(0)",
    "left past Python": "os._exit(0)",
}
STATUSES = {"killed": -signal.SIGKILL, "raised": 1, "left": 0, "left past Python": 0}
WORDS = {
    "killed": "has closed its connection without a word",
    "stopped": "has not been heard of for 8 s",
    "raised": "has raised ValueError: the body",
    "left": "has come to the end of its program or to sys.exit",
    "left past Python": "has closed its connection without a word",
}

STEPS = """
strategy = KIND()


def sums():
    return context().all_reduce("SUM", 1.0)


train = tf.function(lambda: strategy.run(sums)) if int(os.environ["VICTIM"]) else lambda: strategy.run(sums)
try:
    while True:
        for _ in range(20):
            train()
        if me == int(os.environ["VICTIM"]):
            {fault}
except replica_engine.errors.WorkerLostError as error:
    found.update(worker=error.worker, pid=error.pid, step=error.step, point=error.sync_point, text=str(error))
    print(json.dumps(found), flush=True)
    raise
"""


@pytest.mark.parametrize(  # a victim of 0 in a loop of eager steps, and of 1 in one of traced steps
    ("fault", "victim"),
    [
        *(("killed", 0), ("stopped", 1)),
        *(
            pytest.param(*case, marks=pytest.mark.full("differs in how it ends, which the job tells the same way"))
            for case in (("raised", 0), ("left", 1), ("left past Python", 0))
        ),
    ],
)
def test_the_others_are_told_who_is_lost(programs, fault, victim):
    with job(join=LONGER) as made:
        text = HEAD + STEPS.replace("{fault}", FAULTS[fault])
        lost, other = (
            programs.start(text, env=made.environment(worker, LOCAL="1", VICTIM=str(victim)))
            for worker in (victim, 1 - victim)
        )
        try:
            if fault == "stopped":
                until(lambda: is_stopped(lost.pid), LONGER)
                made.limit(heartbeat=8.0)
            out, err = other.communicate(LONGER)
        finally:
            lost.kill() if fault == "stopped" else lost.communicate(LONGER)
            other.kill()
    assert out, err[-4000:]
    found = json.loads(out)
    assert (found["worker"], found["pid"], other.returncode) == (victim, lost.pid, 1), err[-4000:]
    assert lost.returncode == STATUSES.get(fault, -signal.SIGKILL)
    assert f"worker {victim} of 2" in found["text"]
    assert WORDS[fault] in found["text"]
    if fault == "stopped":  # not before the limit, by the clock of the coordinator
        assert made.coordinator.failure.arguments[0].silent >= 8.0
    assert found["point"].startswith("all_reduce at ")
    assert found["point"].endswith("in sums")
    assert 1 <= found["step"] <= 20
    assert "WorkerLostError" in err


def told_by_the_other(programs, text, local):
    """What the worker that is left has found, after it was told who is lost."""
    with job(join=LONGER) as made:
        other, lost = made.start_all(programs, text, LOCAL=local)
        try:
            out, err = other.communicate(LONGER)
        finally:
            lost.communicate(LONGER)
            other.kill()
    found = json.loads(out)
    assert f"pid {lost.pid}) has closed its connection without a word" in found["lost"], err[-4000:]
    assert other.returncode == 0, err[-4000:]
    return found


IN_A_LOOP_THAT_FAILS = """
strategy = KIND()
train = tf.function(lambda: strategy.run(lambda: context().all_reduce("SUM", 1.0)))
returned, waited = threading.Event(), []


def endless():
    try:
        while True:
            yield [0.0, 1.0]
    finally:  # the end of the iterator waits for this, and for TensorFlow's thread that tunes the dataset
        waited.append(returned.wait(60))


data = tf.data.Dataset.from_generator(endless, output_signature=tf.TensorSpec([2]))
try:
    for index, _ in enumerate(strategy.distribute_datasets_from_function(lambda _: data)):
        if (index, me) == (3, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        train()
except replica_engine.errors.WorkerLostError as error:
    returned.set()
    found.update(lost=str(error), waited=waited)
"""


def test_the_end_of_an_iterator_delays_no_news(programs):
    """TensorFlow may wait for up to a minute at the end of an iterator, and the launcher does not wait so long."""
    assert told_by_the_other(programs, HEAD + IN_A_LOOP_THAT_FAILS + TAIL, "2")["waited"] == []


MAKING = """
strategy = KIND()
try:
    tf.function(tf.gather)(tf.zeros([2]), 5)
except tf.errors.InvalidArgumentError as error:  # nothing of this library is in it
    found["plain"] = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
try:
    with strategy.scope():
        for number in range(1000):
            if number == 20 and me == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            tf.Variable(tf.zeros([4]))
except replica_engine.errors.WorkerLostError as error:
    found["lost"] = str(error)
"""


def test_one_that_is_lost_while_the_others_make_variables_is_named(programs):
    found = told_by_the_other(programs, "import traceback\n" + HEAD + MAKING + TAIL, "1")
    assert [path for path in found["plain"] if "replica_engine" in path] == []


LATE = """
import logging


class Interrupts(logging.Handler):  # Ctrl-C, as soon as the warning comes that the first launch waits
    def emit(self, record):
        if "for the other workers to come to `all_reduce SUM" in record.getMessage():
            logging.getLogger("replica_engine").removeHandler(self)
            os.kill(os.getpid(), signal.SIGINT)


logging.getLogger("replica_engine").addHandler(Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
waits = KIND(warn_after=0.5)
if me == 1:
    threading.Event().wait()
try:
    waits.run(lambda: context().all_reduce("SUM", 1.0))
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
KIND(timeout=5.0).run(lambda: context().all_reduce("SUM", 1.0))
"""


def test_the_first_launch_waits_until_ctrl_c_or_the_timeout(programs):
    """Worker 1 has joined, and does not come to the all-reduce.

    The wait for the worker and the merge function around it have the same limit, and either may find it first.
    """
    with job(join=LONGER) as made:
        process, other = made.start_all(programs, HEAD + LATE, LOCAL="1")
        try:
            error = failing(process)
        finally:
            other.kill()
    missing = "WorkersMissingError: worker 1 did not come to the compilation of `all_reduce SUM, float32[]` at"
    assert missing in error or "ReplicaTimeoutError: The merge function all_reduce at" in error
    assert "5 s (timeout=)" in error
    assert "interrupted\n" in error


SMALL = """
strategy = KIND()
found["sum"] = float(strategy.run(lambda: context().all_reduce("SUM", 1.0)))
found["server"] = strategy.cluster_resolver.cluster_spec().as_dict()["worker"]
found["task"], found["id"] = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
try:
    replica_engine.TPUStrategy()
except replica_engine.errors.ReplicaEngineError as error:
    found["other strategy"] = type(error).__name__
found["errors of v1"] = []
for make in (lambda: strategy.run(lambda: context().all_reduce("SUM", 1.0)), lambda: tf.Variable(1.0)):
    try:
        with tf.Graph().as_default(), strategy.scope():
            make()
    except replica_engine.errors.GraphModeError as error:
        found["errors of v1"].append(str(error)[:43])
"""
