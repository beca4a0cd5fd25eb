"""The host does not wait for devices with a queue: in which order it brings batches, launches programs and reads.

CPU devices stand in for them. Their programs run at once, and a stand-in for each result says that its program has not
ended until somebody waits for it.
"""

import copy
import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import LostVariableError, ProgramError
from replica_engine.keras import replicate_model
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.executable import NO_STORES, Executable
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS

X = np.random.default_rng(0).normal(size=[48, 6]).astype("float32")
AHEAD = "put 1 put 2 put 3 wait1 put 4 wait2 put 5 wait3 put 6"
"""Of six steps, whose numbers are those of their launches: at most two are ahead of the one that runs."""
EACH = " ".join(f"put {step} wait{step} read{step}" for step in range(1, 7))


class Result:
    """An array that a program computes. It is there once somebody has waited for it, or for a later one.

    Args:
        value: what the program has computed.
        program: its number.
        queue: the queue.
    """

    def __init__(self, value, program, queue):
        self.value, self._program, self._queue = value, program, queue

    def is_ready(self):
        return self._queue.has_ended(self._program)

    def block_until_ready(self):
        if self._program in self._queue.failed:
            raise RUNTIME_ERRORS[0]("INTERNAL: the core has halted")

    @property
    def _arrays(self):
        self._queue.note(f"read{self._program - self._queue.before}")
        return self.value._arrays

    def __getattr__(self, name):
        return getattr(self.value, name)


class Queue:
    """What happens on the devices, in order: "put", the number of a launch, "wait1", "read1"."""

    def __init__(self, monkeypatch):
        self.failed = set()
        self.interrupts = {}  # by the number of a launch, how often it has not ended before Ctrl-C comes
        self.before = self._launched = self._ended = 0
        self._events = []
        launch, put = Executable.launch, DeviceGroup.put

        def launched(executable, arrays, stores=NO_STORES, compared=None):
            self._launched += 1
            number = self._launched
            self.note(str(number - self.before))
            if any(isinstance(each, Result) and each._program in self.failed for each in arrays):
                self.failed.add(number)
            results = launch(executable, [getattr(each, "value", each) for each in arrays], stores, compared)
            executable._devices.running.block_until_ready()
            for variable in stores.objects:
                variable.on_devices = Result(variable.on_devices, number, self)
            return [Result(each, number, self) for each in results]

        def noted(devices, values, *others):
            if np.ndim(values[0]) > 1:  # a batch, and no number or seed
                self.note("put")
            return put(devices, values, *others)

        monkeypatch.setattr(DeviceGroup, "has_queue", True)
        monkeypatch.setattr(Executable, "launch", launched)
        monkeypatch.setattr(DeviceGroup, "put", noted)

    def note(self, event):
        if self._events[-1:] != [event]:
            self._events.append(event)

    def has_ended(self, program):
        number = program - self.before
        if number in self.interrupts:
            self.interrupts[number] -= 1
            if self.interrupts[number] >= 0:
                return False
            del self.interrupts[number]
            raise KeyboardInterrupt
        if program > self._ended:
            self.note(f"wait{number}")
            self._ended = program
        return True

    def begin(self):
        """From here on events are noted, and launches are counted from 1; all programs have ended."""
        self._events.clear()
        self.before = self._ended = self._launched

    def fail(self, number):
        self.failed.add(self.before + number)

    @property
    def events(self):
        return " ".join(self._events)


@pytest.fixture
def queue(monkeypatch):
    return Queue(monkeypatch)


def batches(strategy):
    return strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(X).batch(8))


def made(size, in_scope=True, kind=keras.Sequential, **options):
    strategy = replica_engine.TPUStrategy(num_cores=size)
    keras.utils.set_random_seed(1)
    if not in_scope:
        model = made_under(kind, **options)
        return replicate_model(model, strategy=strategy)
    with strategy.scope():
        return made_under(kind, **options)


def made_under(kind, **options):
    model = kind([keras.Input([6]), keras.layers.Dense(2)])
    model.compile("sgd", "mse", metrics=["mae"], **options)
    return model


def fit(model, verbose=0, **options):
    return model.fit(X, X[:, :2], batch_size=8, verbose=verbose, shuffle=False, **options).history


class LooksAtEpochs(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        assert {type(each) for each in logs.values()} == {float}


class LooksAtBatches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen += [logs["loss"], logs.get("mae")]


@pytest.mark.parametrize("in_scope", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_fit_waits_for_no_loss_that_nobody_reads(queue, size, in_scope):
    model = made(size, in_scope)
    fit(model)
    for verbose, callbacks in ((0, []), (2, []), (0, [LooksAtEpochs()])):
        queue.begin()
        fit(model, verbose, callbacks=callbacks)
        begin, _, end = queue.events.partition(" 6")
        assert re.sub(r"read\S+ ", "", begin + " 6") == AHEAD  # a replicated model may read weights before
        assert end.startswith(" wait6 read6")
    validated = {"validation_data": (X, X[:, :2]), "validation_batch_size": 8}
    fit(model, **validated)
    queue.begin()
    fit(model, **validated)
    shifted = re.sub(r"\d+", lambda number: str(int(number[0]) + 6), AHEAD)
    assert f"{AHEAD} wait6 {shifted} wait12" in re.sub(r"read\S+ ?", "", queue.events)


def test_the_progress_bar_and_a_callback_that_look_at_each_batch_get_floats(queue):
    model = made(2)
    fit(model)
    queue.begin()
    fit(model, verbose=1)
    assert queue.events.startswith(EACH)
    looks = LooksAtBatches()
    queue.begin()
    fit(model, callbacks=[looks])
    assert queue.events.startswith(EACH)
    assert len(looks.seen) == 12
    assert {type(each) for each in looks.seen} == {float}


def test_however_a_callback_looks_it_gets_floats(queue):
    ways = {
        "[]": lambda logs: {name: logs[name] for name in ("loss", "mae")},
        "get": lambda logs: {"loss": logs.get("loss"), "mae": logs.get("mae", 0.0)},
        "dict": dict,
        "**": lambda logs: {**logs},
        "copy": lambda logs: logs.copy(),
        "copy.copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "items": lambda logs: dict(logs.items()),
        "values": lambda logs: dict(zip(logs, logs.values(), strict=True)),
        "pop": lambda logs: {"mae": logs.pop("mae"), **logs},
        "|": lambda logs: {} | logs,
        "update": lambda logs: (into := {}, into.update(logs))[0],
        "json": lambda logs: json.loads(json.dumps(logs)),
        "repr": lambda logs: json.loads(repr(logs).replace("'", '"')),
    }
    found = {}

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5 and logs:
                found[self.way] = ways[self.way](logs)

    model = made(1)
    fit(model)
    for way in ways:
        model.set_weights([np.ones([6, 2]), np.zeros([2])])
        looks = Looks()
        looks.way = way
        history = fit(model, callbacks=[looks])
        expected = {name: values[0] for name, values in history.items()}
        assert dict(found[way]) == expected, way
        assert {type(each) for each in dict(found[way]).values()} == {float}, way


def test_a_single_batch_is_read_at_once(queue):
    model = made(1)
    logs = model.train_on_batch(X, X[:, :2], return_dict=True)
    assert {type(float(each)) for each in logs.values()} == {float}
    assert type(logs) is dict
    assert float(model.test_on_batch(X, X[:, :2])[0]) > 0.0


def test_several_steps_in_an_execution(queue):
    model = made(2, steps_per_execution=2)
    fit(model)
    queue.begin()
    fit(model)
    assert re.match("put 1 put 2 put 3 wait3 read3", queue.events)


def test_an_own_loop_is_two_steps_ahead(queue):
    for size, returns in ((2, True), (1, False), (2, False)):
        strategy = replica_engine.TPUStrategy(num_cores=size)
        with strategy.scope():
            total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

        def step(x, total=total, returns=returns):
            total.assign_add(tf.reduce_sum(x))
            return tf.reduce_mean(x) if returns else None

        data = batches(strategy)
        strategy.run(step, args=(next(iter(data)),))
        total.numpy()
        queue.begin()
        results = [strategy.run(step, args=(batch,)) for batch in data]
        numbered = re.sub(r"(wait|read)(0|-\d+) ?", "", queue.events)  # of programs before
        assert numbered == AHEAD, (size, returns)
        if returns:
            assert float(results[5].values[0]) == pytest.approx(X[40:44].mean())
            assert queue.events.endswith("put 6 wait6 read6")
        assert float(total) != 0.0


def test_run_steps_leaves_its_last_launches_to_the_queue(queue):
    for size in (1, 2):
        strategy = replica_engine.TPUStrategy(num_cores=size)
        with strategy.scope():
            total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

        def step(context, x, total=total):
            total.assign_add(tf.reduce_sum(x))
            context.set_last_step_output("mean", tf.reduce_mean(x), "MEAN")
            context.set_last_step_output("each", tf.reduce_mean(x))
            context.set_non_tensor_output("name", "step")

        def silent(context, x, total=total):
            total.assign_add(tf.reduce_sum(x))

        for fn in (step, silent):
            for _ in range(2):
                queue.begin()
                context = strategy.run_steps(fn, iter(batches(strategy)), 6, prefetch=2)
                assert queue.events == "put 1 put 2 wait1 put 3 wait2 put 4 wait3 put 5 wait4 put 6 wait5"
                assert context.steps == 6
        context = strategy.run_steps(step, iter(batches(strategy)), 6)
        queue.begin()
        assert context.non_tensor_outputs["name"][0] == "step"
        assert not queue.events
        assert float(context.last_step_outputs["mean"]) == pytest.approx(X[40:].mean())
        each = context.last_step_outputs["each"]
        assert float(each if size == 1 else each.values[0]) == pytest.approx(X[40 : 40 + 8 // size].mean())
        assert context.last_step_outputs is context.last_step_outputs


def results_of(size):
    """The numbers of a training, with a queue or without."""
    model, several = made(size), made(size, in_scope=False, steps_per_execution=3)
    found = [fit(model, epochs=2), fit(several, epochs=2)]
    found += [model.evaluate(X, X[:, :2], batch_size=8, verbose=0), several.evaluate(X, X[:, :2], verbose=0)]
    found += [model.predict(X, verbose=0).tolist(), [each.tolist() for each in several.get_weights()]]
    strategy = model.distribute_strategy
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def step(context, x):
        total.assign_add(tf.reduce_sum(x))
        context.set_last_step_output("mean", tf.reduce_mean(x) + total, "MEAN")

    outputs = strategy.run_steps(step, iter(batches(strategy)), 6).last_step_outputs
    return [*found, float(outputs["mean"]), float(total)]


@pytest.mark.parametrize("size", [1, 2])
def test_the_numbers_are_those_without_a_queue(monkeypatch, size):
    expected = results_of(size)
    Queue(monkeypatch)
    assert results_of(size) == expected


class OwnStep(keras.Sequential):
    """A model whose step returns a loss that is no metric, so that nothing else reads it at the end of an epoch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}

    def test_step(self, data):
        return {"own": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_fails_comes_out_of_fit_by_its_name(queue, size):
    model = made(size)
    fit(model)
    weights = model.get_weights()
    for number in (2, 6):  # met by a later step, or at the end of the epoch
        queue.begin()
        queue.fail(number)
        with pytest.raises((ProgramError, LostVariableError)) as caught:
            fit(model)
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert re.search(r"`train_step`(?s:.)*the core has halted", said), number
        assert isinstance(caught.value, ProgramError) == (number == 2)
        model.set_weights(weights)
        model.optimizer.iterations.assign(0)
        model.optimizer.learning_rate = 0.01
        fit(model)


def test_a_loss_of_ones_own_that_is_lost_is_no_number_of_the_history(queue):
    model = made(2, kind=OwnStep)
    assert {type(each) for each in fit(model)["own"]} == {float}
    model.evaluate(X, X[:, :2], batch_size=8, verbose=0)
    evaluate = lambda: model.evaluate(X, X[:, :2], batch_size=8, verbose=0)  # noqa: E731
    for call, step in ((evaluate, "test_step"), (lambda: fit(model), "train_step")):
        queue.begin()
        queue.fail(6)
        with pytest.raises(ProgramError, match=f"`{step}`(?s:.)*the core has halted"):
            call()


def test_ctrl_c_ends_the_wait_before_a_launch(queue):
    model = made(2)
    fit(model)
    queue.begin()
    queue.interrupts[2] = 3
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert queue.events.endswith("put 4 wait2")
    fit(model)
    queue.begin()
    fit(model)
    assert queue.events.startswith(AHEAD)


def test_a_late_failure_of_run_steps_comes_out_where_its_outputs_are_read(queue):
    strategy = replica_engine.TPUStrategy(num_cores=1)
    with strategy.scope():
        total = tf.Variable(0.0)

    def step(context, x):
        total.assign_add(tf.reduce_sum(x))
        context.set_last_step_output("mean", tf.reduce_mean(x), "MEAN")

    strategy.run_steps(step, iter(batches(strategy)), 2)
    queue.begin()
    queue.fail(1)
    context = strategy.run_steps(step, iter(batches(strategy)), 2)
    assert context.steps == 2
    for _ in range(2):
        with pytest.raises(ProgramError, match=r"`step` at (?s:.)*the core has halted"):
            len(context.last_step_outputs)
    with pytest.raises(LostVariableError):
        total.numpy()
    total.assign(0.0)
    context = strategy.run_steps(step, iter(batches(strategy)), 2)
    assert float(context.last_step_outputs["mean"]) == pytest.approx(X[8:16].mean())
    assert float(total) == pytest.approx(X[:16].sum(), rel=1e-4)
