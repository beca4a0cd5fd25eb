"""Steps that are already traced: where their replicas are while they run, and how a step that stands still ends."""

import gc
import os
import re
import signal
import statistics
import threading
import time
import types
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.interrupted import ctrl_c_at_line
from helpers.on_mirrored import context, index, line_of
from helpers.time_limits import PATIENT, time_runs_out
from helpers.warned import when_warned
from tensorflow.python.util import _pywrap_determinism  # nothing public turns it off again

from replica_engine import MirroredStrategy, logical_devices, timeline
from replica_engine.__main__ import main
from replica_engine.errors import ReplicaTimeoutError
from replica_engine.keras import replicate_model
from replica_engine.traced_steps import supervised_call
from replica_engine.watch import timeline_report, watchdog

DEVICES = logical_devices(4)
HERE = "test_traced_steps.py"
WARN_AFTER = 0.25  # seconds; a warning that comes too early is no failure
TIMEOUT = 2.0  # seconds: replicas that do not stand still come to their merge calls in less, on a busy machine too
STUCK = 2  # the replica that stands still


@pytest.fixture
def release():
    """An event that ends all waits of a test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def said():
    """Waits for the first warning with some words, and returns its text."""
    texts: list[str] = []
    more = threading.Condition()

    def note(text):
        with more:
            texts.append(text)
            more.notify_all()

    def wait(words, *others):
        def found():
            return [text for text in texts if all(re.search(each, text) for each in (words, *others))]

        with more:
            assert more.wait_for(found, 60), texts
            return found()[0]

    wait.forget = texts.clear  # type: ignore[attr-defined]
    with when_warned(note):
        yield wait


class Program:
    """A step of four replicas in a `tf.function`, of which one can be made to stand still.

    Args:
        how: where it stands then: "queue", "python" (asleep), "generator" (of a dataset, asleep) or "busy" (in Python).
        loops: whether a loop in the function makes several steps.
        release: ends the wait in Python.
    """

    def __init__(self, how, loops, release, **options):
        self.strategy = MirroredStrategy(DEVICES, **options)
        self.loops = loops
        with self.strategy.scope():
            self.weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
            self.other = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
        self.stands = tf.Variable(False)
        self.queue = tf.queue.FIFOQueue(4, [tf.float32], [[]])

        def sleep(x):
            release.wait(120)  # sleeps
            return x

        def generator():
            release.wait(120)
            yield 1.0

        numbers = iter(tf.data.Dataset.from_generator(generator, output_signature=tf.TensorSpec([])))

        def be_busy(x):
            while not release.is_set():
                pass
            return x

        waits = {
            "queue": lambda x: self.queue.dequeue(),
            "python": lambda x: tf.ensure_shape(tf.py_function(sleep, [x], tf.float32), []),
            "generator": lambda x: next(numbers),
            "busy": lambda x: tf.ensure_shape(tf.numpy_function(be_busy, [x], tf.float32), []),
        }[how]

        def step(x):
            total = context().all_reduce("SUM", x)
            if index() == STUCK:
                total = tf.cond(self.stands, lambda: waits(total), lambda: total)
            mean = context().all_reduce("MEAN", total)
            self.weight.assign_add(mean, read_value=False)
            self.other.assign_add(mean, read_value=False)

        @tf.function
        def train(x, steps):
            for _ in tf.range(steps):
                self.strategy.run(step, args=(x,))

        @tf.function
        def train_once(x):
            self.strategy.run(step, args=(x,))

        self._run = train if loops else train_once
        self()

    def __call__(self):
        """Makes one step, or two in a loop."""
        one = tf.constant(1.0)
        self._run(one, tf.constant(2)) if self.loops else self._run(one)

    def values(self):
        """All components of both variables."""
        of = self.strategy.experimental_local_results
        return {float(each) for variable in (self.weight, self.other) for each in of(variable)}


LOOPS = pytest.mark.parametrize("loops", [False, True], ids=["one step", "loop"])


@LOOPS
def test_the_table_names_the_replica_that_stands_still(loops, release, said):
    program = Program("python", loops, release, warn_after=WARN_AFTER)
    program.stands.assign(True)
    asked = threading.Thread(target=program)
    asked.start()
    table = said(rf"replica {STUCK} of 4 \(CPU:{STUCK}\) may be waiting in the Python function")
    release.set()
    asked.join(60)
    first, second = line_of('total = context().all_reduce("SUM", x)'), line_of('context().all_reduce("MEAN", total)')
    step = r" in iteration 1" if loops else ""
    for replica in range(4):
        row = rf"replica {replica} of 4 \(CPU:{replica}\): "
        if replica == STUCK:
            row += rf"running for [\d.]+ s{step}; 1 merge call, last: all_reduce at .*{HERE}:{first} in step"
        else:
            row += rf"waiting in a merge call for [\d.]+ s{step}; 2 merge calls, last: .* at .*{HERE}:{second} in step"
        assert re.search(row, table), table
    assert "release.wait(120)" in table
    assert "has made no progress" in table if loops else "has not returned" in table


def test_an_op_that_waits_is_named(release, said):
    program = Program("queue", False, release, warn_after=WARN_AFTER)
    program.stands.assign(True)
    asked = threading.Thread(target=program)
    asked.start()
    line = line_of("self.queue.dequeue()")  # in a branch, and not the line of the branch
    table = said(rf"replica {STUCK} of 4 .* may be waiting in QueueDequeueV2 at .*{HERE}:{line} in ")
    program.queue.enqueue(1.0)
    asked.join(60)
    assert len(re.findall("may be waiting in", table)) == 1, table


@LOOPS
@pytest.mark.parametrize("how", ["queue", "python", "generator", "busy"])
def test_time_runs_out(how, loops, release):
    program = Program(how, loops, release, timeout=TIMEOUT)
    before = program.values()
    program.stands.assign(True)
    began = time.perf_counter()
    with pytest.raises(ReplicaTimeoutError) as caught:
        program()
    waited = time.perf_counter() - began
    assert all(row.seconds <= waited for row in [*caught.value.rows, caught.value.coordinator])
    states = [row.state for row in caught.value.rows]
    assert states == ["running" if replica == STUCK else "waiting in a merge call" for replica in range(4)]
    notes = "\n".join(caught.value.__notes__)
    assert "variables have the values of the last whole step" in notes
    assert "a note says which updates were made" in str(caught.value)
    assert "writes on its own" not in notes
    assert ("abandoned" in notes) == (how in ("python", "generator"))
    assert ("release.wait(120)" in notes) == (how == "python")
    assert program.values() == before
    assert len(before) == 1
    program.stands.assign(False)
    program()  # also while the abandoned function sleeps
    after = program.values()
    assert len(after) == 1
    assert max(after) > max(before)
    release.set()


def test_what_was_abandoned_changes_nothing_when_it_wakes_up(release):
    program = Program("python", False, release, timeout=TIMEOUT)
    before = program.values()
    program.stands.assign(True)
    with pytest.raises(ReplicaTimeoutError):
        program()
    release.set()
    deadline = time.monotonic() + 60
    while not all(done.is_set() for _, done in supervised_call._abandoned):
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert program.values() == before


EXITS = """
import threading, time
import tensorflow as tf
from replica_engine import MirroredStrategy, logical_devices

strategy = MirroredStrategy(logical_devices(2), timeout=5.0)

def sleep(x):
    threading.Event().wait(100)
    return x

def step():
    x = tf.ensure_shape(tf.numpy_function(sleep, [tf.ones([])], tf.float32), [])
    return tf.distribute.get_replica_context().all_reduce("SUM", x)

try:
    tf.function(lambda: strategy.run(step))()
except TimeoutError:
    print(time.time())
"""


def test_the_exit_of_the_process_does_not_wait_for_what_was_abandoned(programs):
    done = programs.run(EXITS)
    assert done.returncode == 0, done.stderr
    assert time.time() - float(done.stdout) < 60


@LOOPS
@pytest.mark.parametrize("how", ["queue", "python"])
def test_ctrl_c_ends_a_step_that_stands_still(how, loops, release, said):
    program = Program(how, loops, release, warn_after=WARN_AFTER)
    said.forget()  # its first step may have been slow
    before = program.values()
    program.stands.assign(True)
    pressed = []

    def press():
        said("waiting in a merge call", "in the tf.function")
        pressed.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        program()
    assert time.perf_counter() - pressed[0] < 20  # about half a second
    assert "variables have the values of the last whole step" in "\n".join(caught.value.__notes__)
    assert program.values() == before
    program.stands.assign(False)
    program()
    assert max(program.values()) > max(before)


def test_ctrl_c_ends_a_loop_that_is_well_after_a_whole_step(release):
    """A loop of a million steps, in the graph."""
    strategy = MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight, other = (tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM) for _ in range(2))

    def step():
        weight.assign_add(tf.ones([], tf.int64), read_value=False)
        other.assign_add(tf.ones([], tf.int64), read_value=False)

    @tf.function
    def train(steps):
        for _ in tf.range(steps):
            strategy.run(step)

    train(tf.constant(1))

    def press():
        while weight.numpy() < 20:
            threading.Event().wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tf.constant(10_000_000))
    values = {int(each) for variable in (weight, other) for each in strategy.experimental_local_results(variable)}
    notes = "\n".join(caught.value.__notes__)
    if len(values) > 1:
        assert "while it wrote variables" in notes
    else:
        assert "last whole step" in notes or "while it wrote variables" in notes
    train(tf.constant(1))


def test_what_replicas_write_on_their_own_is_named():
    """Such a write does not wait for the replica that stands still."""
    strategy = MirroredStrategy(DEVICES[:2], timeout=5.0)  # time to write first, also on a busy machine
    with strategy.scope():
        seen = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )
    queue = tf.queue.FIFOQueue(4, [tf.float32], [[]])

    def step():
        seen.assign_add(1.0)
        return context().all_reduce("SUM", tf.ones([]) if index() == 0 else queue.dequeue())

    with pytest.raises(ReplicaTimeoutError) as caught:
        strategy.run(tf.function(step))
    notes = "\n".join(caught.value.__notes__)
    line = line_of("seen.assign_add(1.0)")
    assert re.search(rf"each replica writes on its own may be written .*: \S+{HERE}:{line} in step\.", notes), notes


def test_without_marks_the_table_says_so(release, said):
    program = Program("queue", False, release, warn_after=WARN_AFTER, marks=False)
    program.stands.assign(True)
    asked = threading.Thread(target=program)
    asked.start()
    table = said("has not returned")
    program.queue.enqueue(1.0)
    asked.join(60)
    assert "The graph has no marks (marks=)" in table
    assert "replica 0" not in table


def test_without_marks_time_runs_out_too(release):
    program = Program("queue", False, release, timeout=PATIENT, marks=False)
    program.stands.assign(True)
    with time_runs_out(), pytest.raises(ReplicaTimeoutError) as caught:
        program()
    assert "it is not known which of its updates were made" in "\n".join(caught.value.__notes__)


def takes_long(x):
    threading.Event().wait(0.2)
    return x


def works_longer(x, weight):
    """A step in which one replica takes a fifth of a second, however busy the machine is."""
    if index() == STUCK:
        x = tf.ensure_shape(tf.numpy_function(takes_long, [x], tf.float32), x.shape)
    x = tf.tanh(x @ weight)
    return context().all_reduce("MEAN", x)


@pytest.mark.parametrize("form", ["around run", "given to run", "fit"])
def test_the_slowest_replica_of_traced_steps_is_named(form, tmp_path, capsys):
    strategy = MirroredStrategy(DEVICES)
    weight = tf.random.normal([256, 256]) / 16.0
    x = tf.random.normal([256, 256])
    given = tf.function(works_longer)

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            return inputs + 0.0 * tf.reduce_sum(works_longer(x, weight))

    @tf.function
    def around():
        strategy.run(works_longer, args=(x, weight))

    if form == "fit":
        model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        fast = replicate_model(model, strategy=strategy)
        batches = np.ones([64, 4], np.float32), np.ones([64, 1], np.float32)
    step = {
        "around run": around,
        "given to run": lambda: strategy.run(given, args=(x, weight)),
        "fit": lambda: fast.fit(*batches, batch_size=8, verbose=0),
    }[form]
    step()
    path = str(tmp_path / "run.json")
    with timeline(path):
        for _ in range(1 if form == "fit" else 8):
            step()
    assert main(["timeline", path, "--output", str(tmp_path / "run.svg")]) == 0
    out = capsys.readouterr().out
    assert f"Slowest: replica {STUCK} of 4 (CPU:{STUCK}): it works" in out
    assert "MirroredStrategy, 8 steps in" in out
    if form != "fit":
        waited = {replica: [] for replica in range(4)}
        for point in strategy.sync_points():
            waited[point.replica].append(point.waited)
        medians = [statistics.median(of) for of in waited.values()]
        assert medians.index(min(medians)) == STUCK


def test_of_steps_in_a_loop_nothing_is_drawn_and_the_command_says_so(tmp_path, capsys):
    strategy = MirroredStrategy(DEVICES[:2])

    @tf.function
    def loop():
        for _ in tf.range(8):
            strategy.run(lambda: context().all_reduce("SUM", tf.ones([])))

    path = str(tmp_path / "run.json")
    with timeline(path):
        loop()
    main(["timeline", path, "--output", str(tmp_path / "run.svg")])
    assert "no whole step is recorded; of steps in a loop of a tf.function" in capsys.readouterr().out
    with timeline(path):
        loop()
    assert main(["timeline", path]) == 1
    assert "nothing to draw; steps in a loop of a tf.function are not" in capsys.readouterr().err


def test_spans_lie_between_the_sync_points(tmp_path):
    """What writes variables in a merge waits for the marks of all arrivals, so each merge takes some time."""
    strategy = MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        merges = tf.Variable(0.0)

    def mean(strategy, x):
        strategy.extended.update(merges, lambda each: each.assign_add(1.0))
        return strategy.reduce("MEAN", x, axis=None)

    def step(x):
        return context().merge_call(mean, args=(tf.tanh(context().merge_call(mean, args=(x,)) @ x),))

    @tf.function
    def train(x):
        strategy.run(step, args=(x,))

    x = tf.random.normal([100, 100])
    train(x)
    path = str(tmp_path / "run.json")
    with timeline(path):
        train(x)
    tracks = [track for track in timeline_report.read(path).tracks if track.is_replica]
    for track in tracks:
        # Nothing waits for a mark: one that comes after the next takes the time of the run between them.
        assert [span.kind for span in track.spans if span.kind == "merge"] == ["merge", "merge"]
        ends = [span.end for span in track.spans]
        assert all(span.begin >= end - 1e-6 for span, end in zip(track.spans[1:], ends, strict=False))


@pytest.mark.parametrize(
    ("late", "of_first"),
    [
        ((0, 2, 1, 2, 2.5, 3), [("run", 1.0), ("run", 1.0), ("waiting", 0.25), ("merge", 0.25), ("run", 0.5)]),
        ((0, 0.5, 2.1, 2, 2.5, 3), [("run", 0.5), ("merge", 1.5), ("waiting", 0.25), ("merge", 0.25), ("run", 0.5)]),
        ((0, 0.5, 1, 2, 3.5, 3), [("run", 0.5), ("merge", 0.5), ("run", 1.0), ("waiting", 0.25), ("merge", 0.75)]),
    ],
    ids=["arrival", "departure", "last departure"],
)
def test_a_mark_that_is_late_makes_no_spans_that_overlap(late, of_first, tmp_path):
    class Late:
        names, group = ("CPU:0", "CPU:1"), "a run"
        points = (types.SimpleNamespace(points=[types.SimpleNamespace(name="all_reduce", where="train.py:40")]),) * 2
        began = time.time() + 1

        def times(self):  # begin, and an arrival and a departure at each point, and end
            return [[self.began + each for each in own] for own in (late, (0, 0.5, 1.5, 2.25, 2.5, 3))]

    path = str(tmp_path / "run.json")
    with timeline(path):
        supervised_call.draw(Late(), Late.began)
    tracks = [track for track in timeline_report.read(path).tracks if track.is_replica]
    assert [(span.kind, round(span.end - span.begin, 3)) for span in tracks[0].spans] == of_first
    ends = [span.end for span in tracks[0].spans]
    assert all(span.begin >= end - 1e-6 for span, end in zip(tracks[0].spans[1:], ends, strict=False))


def test_sync_points_have_the_times_of_the_last_execution():
    strategy = MirroredStrategy(DEVICES[:2])
    step = tf.function(lambda: context().all_reduce("SUM", tf.ones([3])))
    strategy.run(step)
    first = strategy.sync_points()
    before = time.time()
    strategy.run(step)
    last = strategy.sync_points()
    assert len(first) == len(last) == 2
    for point in last:
        assert point.traced
        assert before < point.arrived <= point.left < time.time()


def test_a_step_that_is_well_is_not_warned_of(said, release, caplog):
    program = Program("queue", True, release, warn_after=30.0, timeout=30.0)
    for _ in range(5):
        program()
    # TensorFlow counts the traces of all tests.
    assert not [each for each in caplog.records if each.name == "replica_engine"]


def test_a_traced_step_runs_where_ops_must_be_deterministic():
    """TensorFlow then refuses the op of the time, so the step has no marks."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    tf.config.experimental.enable_op_determinism()
    try:
        total = tf.function(lambda: strategy.run(lambda: context().all_reduce("SUM", 1.0)))()
    finally:
        _pywrap_determinism.enable(False)
    assert [float(each) for each in strategy.experimental_local_results(total)] == [2.0, 2.0]


@pytest.mark.parametrize("how", ["queue", "python"])
def test_an_error_goes_without_the_garbage_collector(how, release):
    """Its frames have the values of the step."""
    program = Program(how, False, release, timeout=PATIENT)
    program.stands.assign(True)
    gc.collect()
    gc.disable()
    try:
        with time_runs_out():
            try:
                program()
            except ReplicaTimeoutError as error:
                left = weakref.ref(error)
        assert left() is None
    finally:
        gc.enable()


def test_no_wait_stays_behind_when_ctrl_c_comes_as_a_step_is_left():
    """It would warn for ever of a step that has ended."""
    strategy = MirroredStrategy(DEVICES[:2])
    step = tf.function(lambda x: strategy.run(lambda x: x + 1.0, args=(x,)))
    one = tf.constant(1.0)
    step(one)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        codes = [watchdog.Wait.__exit__.__code__, supervised_call._SupervisedCall.__call__.__code__]
        for code in codes:
            number = 1
            while ctrl_c_at_line(number, code, lambda: step(one)):
                waits = [wait._describe for wait in list(watchdog._watchdog._watches.values())]
                owners = [getattr(each, "__self__", None) for each in waits]
                assert not any(isinstance(each, supervised_call._SupervisedCall) for each in owners), (
                    f"{code.co_name}, {number}"
                )
                number += 1
            assert number > 3
    finally:
        signal.signal(signal.SIGINT, before)
