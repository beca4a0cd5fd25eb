"""TPUStrategy in real processes: two workers of two replicas equal one process of four, replica by replica.

Processes that start TensorFlow are expensive. So a job checks many things, and prints what it found as JSON.
"""

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import IN_A_LOOP, SCOPED_KERAS, TPU_HEAD, TPU_TAIL, UNEVEN_KERAS, flat, read

NUMBERS = """
import re
import threading

import keras

strategy = replica_engine.TPUStrategy(num_cores=4)
rng = np.random.RandomState(0)
x = rng.rand(96, 8).astype("float32")
y = x.sum(1, keepdims=True)
weight = rng.rand(8, 1).astype("float32")


def local(value):
    return [each.numpy().tolist() for each in strategy.experimental_local_results(value)]


def variables():
    with strategy.scope():
        w = tf.Variable(weight + me)  # the chief's counts
        b = tf.Variable(tf.zeros([]))
        seen = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ,
                           aggregation=tf.VariableAggregation.SUM, trainable=False)
        first = tf.Variable(-1.0, synchronization=tf.VariableSynchronization.ON_READ,
                            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, trainable=False)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.nn.dropout(x, 0.2) @ w + b - y) ** 2) / 16
        gradients = context().all_reduce("SUM", tape.gradient(loss, [w, b]))
        w.assign_sub(0.1 * gradients[0])
        b.assign_sub(0.1 * gradients[1])
        seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        first.assign(tf.cast(context().replica_id_in_sync_group, tf.float32) + 3.0)
        return loss

    return w, b, seen, first, step


def data():
    # Replica i has the i-th four samples of a batch of 16, as in one process.
    def own(of):
        share = 16 // of.num_input_pipelines
        begin = share * of.input_pipeline_id
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
        return batches.map(lambda x, y: (x[begin : begin + share], y[begin : begin + share])).unbatch().batch(4)

    return strategy.distribute_datasets_from_function(own)


other = "made"
try:
    replica_engine.MultiWorkerMirroredStrategy()
except replica_engine.errors.ClusterConfigError as error:
    other = str(error)
together = threading.Barrier(4 // strategy.num_hosts)


def fails():
    together.wait(300)  # each replica is called before one fails
    raise ValueError("no")


try:  # without collectives: it concerns no other worker
    strategy.run(lambda: xla.outside_compilation(fails))
except ValueError as error:
    failed = [re.findall(r"replicas? (\\d.*?)(?: of 4|$)", note) for note in error.__notes__]
facts = xla.get_tpu_system_metadata(xla.PjrtClusterResolver("cpu"))
parts["facts"] = [[strategy.num_replicas_in_sync, strategy.num_hosts, facts.num_cores, facts.num_hosts, other, failed]]
tf.random.set_seed(7)
w, b, seen, first, step = variables()
found["initial"] = w.numpy().tolist()
found["eager"] = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in data()]
train = tf.function(lambda *batch: strategy.reduce("SUM", strategy.run(step, args=batch), axis=None))
found["traced"] = [float(train(*batch)) for batch in data()]
found["weights"] = [w.numpy().tolist(), float(b), float(seen), float(first)]

w, b, seen, first, step = variables()
loop = strategy.run_steps(lambda context, x, y: context.set_last_step_output("loss", step(x, y), "MEAN"),
                          iter(data()), iterations=6)
found["loop"] = [w.numpy().tolist(), float(loop.last_step_outputs["loss"]), loop.steps]

parts["ids"] = local(strategy.run(lambda: context().replica_id_in_sync_group))
parts["random"] = local(strategy.run(lambda: tf.random.uniform([3])))
parts["host calls"] = local(strategy.run(lambda: xla.outside_compilation(lambda: tf.identity(xla.replica_id()))))
parts["printed"] = local(strategy.run(lambda: tf.strings.length(tf.strings.as_string(10 ** xla.replica_id()))))
parts["values"] = local(strategy.experimental_distribute_values_from_function(
    lambda of: tf.constant([of.replica_id_in_sync_group, of.num_replicas_in_sync])))
kept = {"bool": True, "int8": -5, "int64": 2**40 + 1, "float16": -0.0, "float64": -0.0, "complex64": 1 - 2j}
with strategy.scope():
    firsts = [tf.Variable(tf.cast(value, name), synchronization=tf.VariableSynchronization.ON_READ, trainable=False,
                          aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA) for name, value in kept.items()]
found["first bits"] = [list(each.read_value().numpy().tobytes()) for each in firsts]
shares = strategy.experimental_distribute_values_from_function(lambda of: tf.ones([1 + of.replica_id_in_sync_group]))
parts["uneven"] = local(strategy.run(lambda share: tf.reduce_sum(share) + tf.cast(xla.replica_id(), tf.float32),
                                     args=(shares,)))
tied = replica_engine.TPUStrategy(num_cores=4, same_random_numbers=True)
tf.random.set_seed(None)
found["tied"] = len({float(each) for each in tied.experimental_local_results(tied.run(
    lambda: xla.all_gather(tf.random.uniform([1]))))[0]})
if not me:
    found_alone = strategy.run(lambda: tf.constant(1.0))  # without collectives: it concerns no other worker
own = strategy.run(lambda: tf.cast(context().replica_id_in_sync_group, tf.float32))
found["reduced"] = {op: float(strategy.reduce(op, own, axis=None)) for op in ("SUM", "MEAN")}
found["narrow"] = float(strategy.reduce("SUM", strategy.run(lambda: tf.cast(xla.replica_id(), tf.bfloat16)), axis=None))
found["gathered"] = strategy.gather(strategy.run(lambda: tf.fill([2], xla.replica_id())), axis=0).numpy().tolist()
sums = strategy.reduce("SUM", {"a": own, "b": [own]}, axis=None)
found["structure"] = [float(each) for each in tf.nest.flatten(sums)]


def collectives():
    id = tf.cast(xla.replica_id(), tf.float32)
    four = tf.range(4.0) + 10 * id

    def scattered(x):
        with tf.GradientTape() as tape:  # the gradient of a gather is a reduce-scatter
            tape.watch(x)
            total = tf.reduce_sum(xla.all_gather(x) ** 2 * (id + 1))
        return tape.gradient(total, x)

    return {
        "to all": xla.all_to_all(four, 0, 0),
        "permuted": xla.collective_permute(id, [(0, 2), (2, 1), (1, 3), (3, 0)]),
        "of pairs": xla.all_reduce(id, "SUM", [[0, 3], [1, 2]]),
        "largest": xla.all_reduce(id, "MAX"),
        "scattered": scattered(tf.reshape(id, [1])),
        "in a branch": tf.cond(xla.cross_replica_sum(id) > 0, lambda: xla.cross_replica_sum(id * 2), lambda: id),
    }


results = strategy.run(collectives)
for name in results:
    parts[name] = local(results[name])

keras.utils.set_random_seed(1 + me)  # the chief's weights count


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])


fast = replica_engine.keras.replicate_model(dense(), strategy=strategy)
with strategy.scope():
    model = dense()
found["predict"] = model.predict(x[:16], batch_size=16, verbose=0).tolist()
found["fast predict"] = fast.predict(x[:10], batch_size=16, verbose=0).tolist()
"""


def outputs(programs, made, program: str, **environment: str) -> list[list[dict]]:
    """Runs a program in all workers of a job; returns what each has found."""
    text = TPU_HEAD + program + TPU_TAIL
    started = made.start_all(programs, text, **environment)
    return [read(each, LONGER) for each in started]


def assert_equal_to_one_process(programs, program: str, close: float = 1e-6, **environment: str) -> list[list[dict]]:
    """Two workers find bitwise the same, and what one process with as many replicas finds."""
    with job(join=LONGER) as made:
        (first, of_first), (second, of_second) = outputs(programs, made, program, **environment)
    expected, of_all = read(programs.start(TPU_HEAD + program + TPU_TAIL, env=environment), LONGER)
    assert first == second
    facts = [each.pop("facts", None) for each in (of_first, of_second, of_all)]
    for name, value in expected.items():
        assert flat(first[name]) == pytest.approx(flat(value), abs=close), name
    for name, value in of_all.items():
        assert flat(of_first[name]) + flat(of_second[name]) == pytest.approx(flat(value), abs=close), name
    return facts


def test_two_workers_of_two_replicas_equal_one_process_of_four(programs):
    facts = assert_equal_to_one_process(programs, NUMBERS)
    assert [each[0][:2] for each in facts] == [[4, 2], [4, 2], [4, 1]]
    assert facts[0][0][3] == facts[1][0][3] == 2
    for worker in range(2):
        assert f"already, as worker {worker}. A process joins its job once" in facts[worker][0][4]
    assert facts[2][0][4] == "made"
    assert [each[0][5] for each in facts] == [[["0"], ["1"]], [["2"], ["3"]], [["0"], ["1, 2, 3"]]]


DATA = """
strategy = replica_engine.TPUStrategy(num_cores=4)
Policies = tf.data.experimental.AutoShardPolicy


def floats(count):
    return tf.data.Dataset.range(count).map(lambda x: tf.cast(x, tf.float32))


def sharded(dataset, policy=Policies.AUTO):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def total(part):
    return context().all_reduce("SUM", tf.reduce_sum(part))


def taken(name, dataset):
    rows = []
    found[name] = []
    for batch in dataset:
        rows.append([part.numpy().ravel().tolist() for part in strategy.experimental_local_results(batch)])
        found[name].append(float(strategy.experimental_local_results(strategy.run(total, args=(batch,)))[0]))
    parts[name] = rows


@tf.function
def next_of(iterator):
    return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(iterator),)), axis=None)


def lines(count_of_files):
    names = [f"{os.environ['FOLDER']}/{index}" for index in range(count_of_files)]
    return tf.data.TextLineDataset(names).map(lambda line: tf.strings.to_number(line)).batch(4, drop_remainder=True)


taken("auto", sharded(floats(16).batch(8)))
taken("data", sharded(floats(16).batch(8), Policies.DATA))
taken("off", sharded(floats(16).batch(8), Policies.OFF))
taken("file", sharded(lines(3), Policies.FILE))
found["traced loop"] = [float(each) for each in in_a_loop(sharded(lines(3), Policies.FILE))]
found["keras"] = keras_on(sharded(pairs(lines(3)), Policies.FILE), [*range(1, 9), *range(11, 19)])
iterator = iter(sharded(lines(3), Policies.FILE))
found["traced step"] = []
try:
    while True:
        found["traced step"].append(float(next_of(iterator)))
except (StopIteration, tf.errors.OutOfRangeError) as ended:
    found["ended"] = type(ended).__name__


def steps(context, part):
    context.set_last_step_output("total", tf.reduce_sum(part), "SUM")


uneven = strategy.distribute_datasets_from_function(lambda of: floats(2 * (7 - 3 * of.input_pipeline_id)).batch(1))
found["loops"] = []
for prefetch in (None, 1):
    try:
        strategy.run_steps(steps, iter(uneven), iterations=20, prefetch=prefetch)
    except tf.errors.OutOfRangeError as error:
        found["loops"].append([error.context.steps, float(error.context.last_step_outputs["total"])])
batches = iter(uneven)  # what a launch does not take stays
found["whole"] = []
for count in (1, 3):
    loop = strategy.run_steps(steps, batches, iterations=count)
    found["whole"].append([loop.steps, float(loop.last_step_outputs["total"])])
empty = strategy.distribute_datasets_from_function(lambda of: floats(2 - 2 * of.input_pipeline_id).batch(1))
try:
    strategy.run_steps(steps, iter(empty), iterations=2)
except tf.errors.OutOfRangeError as error:
    found["empty"] = error.context.steps
"""


def test_datasets_end_on_the_same_step_everywhere(programs, tmp_path):
    for index in range(3):
        (tmp_path / str(index)).write_text("".join(f"{10 * index + line}\n" for line in range(1, 9)))
    with job(join=LONGER) as made:
        (first, of_first), (second, of_second) = outputs(
            programs, made, UNEVEN_KERAS + IN_A_LOOP + DATA, FOLDER=str(tmp_path)
        )
    assert first == second
    steps, *_, loss, of_rows = first["keras"]
    assert (steps, loss) == (8, pytest.approx(of_rows))
    for name, rows in of_first.items():
        assert len(rows) == len(of_second[name]) == len(first[name])
        for ours, theirs, total in zip(rows, of_second[name], first[name], strict=True):
            assert sum(flat(ours)) + sum(flat(theirs)) == total
    seen = {name: sorted(flat([of_first[name], of_second[name]])) for name in of_first}
    assert seen["auto"] == seen["data"] == [float(number) for number in range(16)]
    assert seen["off"] == sorted([float(number) for number in range(16)] * 2)
    # The second worker has one file of two batches: the second file of the first worker is not read.
    assert seen["file"] == [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18]
    assert first["traced loop"] == [sum(seen["file"]), 4]
    assert first["traced step"] == first["file"]
    assert first["ended"] == "OutOfRangeError"
    # 7 and 4 steps of two replicas: in the fourth step they have 6 and 7.
    assert first["loops"] == [[4, 26.0], [4, 26.0]]
    assert (first["whole"], first["empty"]) == ([[1, 2.0], [3, 26.0]], 0)


KERAS = """
import keras

strategy = replica_engine.TPUStrategy(num_cores=4)
folder = os.environ["FOLDER"]
keras.utils.set_random_seed(1 + me)  # the chief's weights count
rng = np.random.RandomState(0)
x = rng.rand(64, 8).astype("float32")
y = x.sum(1, keepdims=True)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16, drop_remainder=True)


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])


with strategy.scope():
    model = dense()
    model.compile("adam", "mse", metrics=["mae"])
makedirs = os.makedirs


def made_by_another_worker(path, *args, **kwargs):  # what a worker meets that has found no folder and is slower
    if strategy.num_hosts > 1 and os.path.abspath(path).startswith(folder):
        makedirs(path, exist_ok=True)
    return makedirs(path, *args, **kwargs)


os.makedirs = made_by_another_worker
callbacks = [keras.callbacks.ModelCheckpoint(f"{folder}/made/{{epoch}}.weights.h5", save_weights_only=True)]
found["fit"] = model.fit(data, epochs=2, verbose=0, validation_data=data, callbacks=callbacks).history
found["evaluate"] = model.evaluate(data, verbose=0, return_dict=True)
model.save(f"{folder}/model.keras")
manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), f"{folder}/managed", max_to_keep=1)
found["saved"] = [os.path.basename(manager.save()) for _ in range(2)]
found["weights"] = [each.tolist() for each in model.get_weights()]
found["predict"] = model.predict(x[:16], batch_size=16, verbose=0).tolist()
with strategy.scope():
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=2)
found["two steps"] = model.fit(data, epochs=1, verbose=0).history
(*logs, found["refused"], log), *others = in_a_scope(x, y)
found["scope"] = [logs, log, others]

keras.utils.set_random_seed(1)
model = dense()
model.compile("adam", "mse", metrics=["mae"])
fast = replica_engine.keras.replicate_model(model, strategy=strategy)
found["fast"] = fast.fit(x[:54], y[:54], batch_size=16, epochs=2, verbose=0, shuffle=False).history
found["fast evaluate"] = fast.evaluate(x[:3], y[:3], verbose=0, return_dict=True)
found["fast predict"] = fast.predict(x[:10], verbose=0).tolist()
fast.save(f"{folder}/fast.keras")
found["fast weights"] = [each.tolist() for each in model.get_weights()]
"""


@pytest.mark.full("four processes; the numbers are those of the first test, the step that of tests/tpu")
def test_keras(programs, tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "one").mkdir()
    with job(join=LONGER) as made:
        (first, _), (second, _) = outputs(programs, made, SCOPED_KERAS + KERAS, FOLDER=str(tmp_path / "job"))
    program = TPU_HEAD + SCOPED_KERAS + KERAS + TPU_TAIL
    alone, _ = read(programs.start(program, env={"FOLDER": str(tmp_path / "one")}), LONGER)
    assert first == second
    assert first.pop("refused") == alone.pop("refused")
    assert first.pop("saved") == alone.pop("saved") == ["ckpt-1", "ckpt-2"]
    for name, value in alone.items():
        assert flat(first[name]) == pytest.approx(flat(value), rel=1e-6, abs=2e-6), name
    written = {
        folder: sorted(str(path.relative_to(tmp_path / folder)) for path in (tmp_path / folder).rglob("*"))
        for folder in ("job", "one")
    }
    assert written["job"] == written["one"]


def test_what_a_resolver_says_itself(programs, unused_port):
    """Without a launcher: the coordinator is a child of worker 0, and the environment has only the token.

    Worker 0 knows its machine by another address than worker 1; all that it starts must listen at that of worker 1.
    """
    program = """
resolver = xla.PjrtClusterResolver("cpu", os.environ["ADDRESS"], 2, int(os.environ["INDEX"]))
from replica_engine.compat.contrib import TPUStrategy
strategy = TPUStrategy(resolver, num_cores=2)
found["truth"] = [strategy.num_hosts, strategy.num_towers, strategy.num_towers_per_host]
found["sum"] = float(strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None))
from replica_engine.pjrt import job_devices as workers
found["service"] = workers._joined[0].member.get(workers._SERVICE)["address"].rpartition(":")[0]
parts["chief"] = [strategy.should_init, strategy.should_checkpoint, strategy.should_save_summary]
"""
    listening = {"REPLICA_ENGINE_TOKEN": "a secret of the job", "REPLICA_ENGINE_LISTEN": f"0.0.0.0:{unused_port}"}
    started = [
        programs.start(
            TPU_HEAD + program + TPU_TAIL, env={"ADDRESS": f"{host}:{unused_port}", "INDEX": str(index), **listening}
        )
        for index, host in enumerate(("localhost", "127.0.0.2"))
    ]
    for worker, process in enumerate(started):
        found, parts = read(process, LONGER)
        assert found == {"truth": [2, 2, 1], "sum": 4.0, "service": "127.0.0.2"}
        assert parts["chief"] == [worker == 0] * 3
