"""What does not come back: the table, as a warning and as an error, and what is left after it."""

import re
import threading

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index
from helpers.time_limits import LEFT, PATIENT, elapse, time_is_nearly_up, time_runs_out, wait_until_time_is_up
from helpers.versions import HAS_XLA, WHY_NO_XLA
from helpers.warned import when_warned

import replica_engine
from replica_engine import logical_devices
from replica_engine.errors import ReplicaTimeoutError, StuckProgramError

DEVICES = logical_devices(8)[:2]
LIMIT = 0.4  # seconds; what is to come back in time does so in a few milliseconds
LONGER = 5.0  # where a program is launched within the limit, also on a busy machine


def mirrored(**options):
    return replica_engine.MirroredStrategy(DEVICES, **options)


def tpu(**options):
    return replica_engine.TPUStrategy(num_cores=2, **options)


@pytest.fixture(params=[mirrored, tpu] if HAS_XLA else [mirrored])
def make(request):
    """Makes a strategy of two replicas with limits."""
    return request.param


@pytest.fixture
def release():
    """An event that is set at the end of the test, for those who wait for it to go on."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def said():
    """An event that is set when the library has logged a warning with the words `expected`; `text` is the warning."""
    event = threading.Event()
    event.expected = ""

    def note(text):
        if event.expected in text:
            event.text = text
            event.set()

    with when_warned(note):
        yield event


@pytest.fixture(params=[True, False], ids=["main thread", "another thread"])
def runs_out(request):
    """`runs_out(run)`: the error when the time of a run is up, on the main thread or on another one."""

    def runs_out(run):
        caught = []

        def call():
            with pytest.raises(ReplicaTimeoutError) as raised:
                run()
            caught.append(raised.value)

        if request.param:
            call()
        else:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(300)
        (error,) = caught
        return error

    runs_out.on_main = request.param
    return runs_out


def counting(strategy):
    """A variable of a strategy, and a step that adds 1 to it and returns the sum over replicas."""
    with strategy.scope():
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

    def step():
        count.assign_add(1.0)
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))

    return count, step


def check_goes_on(strategy, count, step, steps):
    """The variable has the value of the last whole step, and the next run works."""
    assert count.numpy() == steps
    assert [float(value) for value in strategy.experimental_local_results(strategy.run(step))] == [2.0, 2.0]
    assert count.numpy() == steps + 1


def test_a_replica_that_is_stuck_in_python(release):
    strategy = mirrored(timeout=PATIENT)
    count, step = counting(strategy)
    strategy.run(step)

    def stuck():
        context().all_reduce("SUM", tf.ones([3]))
        if index() == 1:
            time_is_nearly_up()
            release.wait()
        context().all_reduce("SUM", tf.ones([3]))

    with pytest.raises(ReplicaTimeoutError) as caught:
        strategy.run(stuck)
    first, second = caught.value.rows
    assert (first.state, first.merge_calls) == ("waiting in a merge call", 2)
    assert (second.state, second.merge_calls) == ("running", 1)
    assert LEFT / 2 <= second.seconds < 1000
    assert "test_timeouts.py" in second.where
    assert "release.wait()" in second.stack
    assert "release.wait()" in caught.value.table
    assert caught.value.coordinator.state == "waiting for the replicas"
    check_goes_on(strategy, count, step, 1)


def test_a_merge_function_that_is_stuck(runs_out, release):
    """On the main thread out of a lock, on another one out of a loop."""
    strategy = mirrored(timeout=PATIENT)
    count, step = counting(strategy)
    strategy.run(step)

    def merge_fn(_):
        time_is_nearly_up()
        while not release.wait(1000 if runs_out.on_main else 0.001):
            pass

    error = runs_out(lambda: strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge_fn)))
    assert [row.state for row in error.rows] == ["waiting in a merge call"] * 2
    assert "in the merge function" in error.coordinator.state
    assert "release.wait" in error.coordinator.stack
    check_goes_on(strategy, count, step, 1)


def test_a_merge_function_that_ends_at_the_last_moment():
    """Time runs out while it ends: either the result or the error, and nothing else, then or later."""
    strategy, never = mirrored(timeout=0.05), threading.Event()
    outcomes = set()
    for tenths in range(40, 60):
        try:
            strategy.run(
                lambda delay=tenths / 1000: tf.distribute.get_replica_context().merge_call(
                    lambda strategy: never.wait(delay)
                )
            )
            outcomes.add("result")
        except ReplicaTimeoutError:
            outcomes.add("error")
    never.wait(0.1)  # nothing arrives late
    assert outcomes <= {"result", "error"}
    assert "error" in outcomes


def test_a_merge_function_may_fail_by_itself():
    strategy = mirrored(timeout=30.0)

    def merge_fn(strategy):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge_fn))


def test_the_warning_has_the_same_table(said):
    said.expected = "assert said.wait(300)"  # what comes before may be slow enough for a warning, too
    strategy = mirrored(warn_after=LIMIT / 4)

    def merge_fn(_):
        assert said.wait(300)

    strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge_fn))
    text = said.text
    assert re.search(r"replica 1 of 2 \(CPU:1\): waiting in a merge call for [\d.]+ s", text)
    assert "test_timeouts.py" in text
    assert text.startswith("The merge function ")
    assert "site-packages/tensorflow" not in text


@pytest.mark.parametrize("is_around", [False, True], ids=["given to run", "around run"])
def test_a_tf_function_that_does_not_return_is_warned_of(said, is_around):
    said.expected = "has not returned"  # tracing it may be slow enough for a warning, too
    strategy = mirrored(warn_after=LIMIT / 4)

    def wait():
        assert said.wait(300)
        return 0.0

    def body():
        return tf.py_function(wait, [], tf.float32)

    @tf.function
    def step():
        return strategy.run(body) if is_around else body()

    if is_around:
        step()
    else:
        strategy.run(step)
    assert re.match(r"The tf\.function `step` has not returned for [\d.]+ s:", said.text)
    assert "in test_a_tf_function_that_does_not_return_is_warned_of" in said.text


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
@pytest.mark.parametrize("size", [1, 2])
class TestCompiled:
    @pytest.fixture
    def compiled(self, size):
        return replica_engine.TPUStrategy(num_cores=size, timeout=PATIENT)

    @pytest.mark.parametrize("distribution", [None, "fsdp"])
    def test_a_body_without_results(self, size, distribution, release):
        each = 1 if distribution is None else 2
        compiled = replica_engine.TPUStrategy(
            num_cores=size * each, cores_per_replica=each, timeout=PATIENT, distribution=distribution
        )

        def unused():
            tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))

        def endless():
            while not release.wait(0.001):
                pass

        assert compiled.run(lambda: None) is None
        assert compiled.run(unused) is None
        with time_runs_out(), pytest.raises(ReplicaTimeoutError):
            compiled.run(lambda: replica_engine.xla.outside_compilation(endless))
        release.set()
        assert compiled.run(unused) is None

    def test_a_host_call_that_is_stuck(self, compiled, size, release):
        with compiled.scope():
            count = tf.Variable(0.0)

        def step():
            count.assign_add(1.0)

        compiled.run(step)
        together = threading.Barrier(size)

        def endless():
            together.wait(300)  # each call is a sign of life
            time_is_nearly_up()
            while not release.wait(0.001):
                pass

        def stuck():
            count.assign_add(10.0)
            replica_engine.xla.outside_compilation(endless)

        with pytest.raises(ReplicaTimeoutError) as caught:
            compiled.run(stuck)
        for row in caught.value.rows:
            assert (row.state, row.merge_calls, row.points) == ("in a host call", 1, "host call")
            assert "outside_compilation(endless)" in row.where
            assert "test_timeouts.py" in row.where
            assert "release.wait(0.001)" in row.stack
        assert caught.value.coordinator.state == "waiting for the program"
        assert count.numpy() == 1.0
        compiled.run(step)
        assert count.numpy() == 2.0

    def test_a_host_op_that_waits_takes_nothing_from_the_next_run(self, compiled, size):
        queue = tf.queue.FIFOQueue(size, [tf.float32], [[]])

        def step():
            return replica_engine.xla.cross_replica_sum(queue.dequeue())

        with time_runs_out(), pytest.raises(ReplicaTimeoutError) as caught:
            compiled.run(step)
        assert [row.state for row in caught.value.rows] == ["in a host call"] * size
        queue.enqueue_many([[2.0] * size])
        result = compiled.run(step)
        assert [float(value) for value in compiled.experimental_local_results(result)] == [2.0 * size] * size

    def test_host_calls_are_signs_of_life(self, compiled, size):
        """The whole launch takes longer than the limit, no call does."""

        def call():
            if int(replica_engine.xla.replica_id()) == 0:
                elapse(0.4 * PATIENT)
            threading.Event().wait(LIMIT / 8)  # in which the watchdog looks

        def steps():
            for _ in tf.range(4):
                replica_engine.xla.outside_compilation(call)
            return replica_engine.xla.cross_replica_sum(1.0)

        result = compiled.run(steps)
        assert [float(value) for value in compiled.experimental_local_results(result)] == [size] * size

    def test_a_failure_of_a_host_call_comes_out_as_it_is(self, compiled, size):
        def fails():
            raise KeyError("own")

        with pytest.raises(KeyError, match="own"):
            compiled.run(lambda: replica_engine.xla.outside_compilation(fails))


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_replicas_of_a_program_that_wait_for_each_other(monkeypatch):
    """Replica 1 never comes to the all-reduce. The variables are still there, the devices are not."""
    monkeypatch.setattr(StuckProgramError, "PATIENCE", 0.1)
    strategy = tpu(timeout=PATIENT)
    count, step = counting(strategy)
    strategy.run(step)

    def stuck():
        x = tf.zeros([])
        if replica_engine.xla.replica_id() == 0 and count > 0.0:  # only in part known before the run
            x = replica_engine.xla.cross_replica_sum(x)
        count.assign_add(10.0)
        return x

    with time_runs_out(), pytest.raises(ReplicaTimeoutError) as caught:
        strategy.run(stuck)
    assert [row.state for row in caught.value.rows] == ["running on the device", "finished"]
    assert re.search(r"all_reduce at .*test_timeouts.py:\d+ in stuck \(perhaps not all", str(caught.value))
    with pytest.raises(StuckProgramError):
        strategy.run(step)
    value = count.numpy()
    assert value == 1.0
    again = tpu()
    with again.scope():
        kept = tf.Variable(value)
    assert [float(value) for value in again.run(lambda: replica_engine.xla.cross_replica_sum(kept)).values] == [
        2.0,
        2.0,
    ]


@pytest.mark.parametrize("option", ["timeout", "warn_after"])
@pytest.mark.parametrize("value", [0, -1.0, "30", True, float("nan")])
def test_limits_are_positive_seconds(make, option, value):
    with pytest.raises(ValueError, match=f"{option} is in seconds and must be positive, or None; got"):
        make(**{option: value})


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_a_run_that_waits_for_anothers_program_has_a_limit_too(release):
    """Programs take turns on CPU devices; one is stuck in a host call, and the other's time runs out."""
    patient, other = tpu(), tpu(timeout=LONGER)
    count, step = counting(other)
    other.run(step)
    began = threading.Event()

    def wait():
        began.set()
        release.wait(60)

    thread = threading.Thread(target=lambda: patient.run(lambda: replica_engine.xla.outside_compilation(wait)))
    thread.start()
    assert began.wait(60)
    with pytest.raises(ReplicaTimeoutError) as caught:
        other.run(step)
    assert [row.state for row in caught.value.rows] == ["not started"] * 2
    assert caught.value.coordinator.state == "waiting for its turn on the devices"
    release.set()
    thread.join(60)
    check_goes_on(other, count, step, 1)


def updating(strategy, update):
    """A step that updates a variable in a merge function, and the variable."""
    with strategy.scope():
        variable = tf.Variable(0.0)

    def step():
        merge_fn = lambda strategy: strategy.extended.update(variable, update)  # noqa: E731
        tf.distribute.get_replica_context().merge_call(merge_fn)

    return step, variable


def test_time_that_runs_out_in_an_update_leaves_all_replicas_equal(runs_out):
    """The update is made on all of them, and then the run is given up."""
    strategy = mirrored(timeout=PATIENT)

    def update(component):
        wait_until_time_is_up()
        component.assign(1.0)

    step, variable = updating(strategy, update)
    assert "updates that were merged before stay" in str(runs_out(lambda: strategy.run(step)))
    assert [float(component.numpy()) for component in strategy.experimental_local_results(variable)] == [1.0, 1.0]


def test_an_update_that_never_ends_is_left_too(release):
    strategy = mirrored(timeout=LIMIT / 2)

    def update(component):
        while not release.wait(0.001):
            pass

    step, _ = updating(strategy, update)
    with pytest.raises(ReplicaTimeoutError):
        strategy.run(step)


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_a_program_that_gives_signs_of_life_may_be_waited_for_longer_than_the_limit():
    busy, other = tpu(), tpu(timeout=LONGER)
    count, step = counting(other)
    other.run(step)
    began, never = threading.Event(), threading.Event()

    def call():
        began.set()
        never.wait(LONGER / 20)

    def calls():
        for _ in tf.range(30):
            replica_engine.xla.outside_compilation(call)

    thread = threading.Thread(target=lambda: busy.run(calls))
    thread.start()
    assert began.wait(60)
    check_goes_on(other, count, step, 1)
    thread.join(60)


def test_there_may_be_no_limit_at_all(make):
    strategy = make(timeout=float("inf"), warn_after=float("inf"))
    count, step = counting(strategy)
    check_goes_on(strategy, count, step, 0)


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
@pytest.mark.parametrize("calls_host", [False, True])
def test_what_waits_for_a_program_that_was_given_up_names_that_program(release, calls_host):
    """The wait may take longer than the limit, which counts from the start of the program."""
    strategy = tpu(timeout=PATIENT, warn_after=0.1)
    texts = []

    def time_runs_out():
        wait_until_time_is_up()
        release.set()

    def releases(text):
        if "was given up" in text and not texts:
            texts.append(text)
            threading.Thread(target=time_runs_out).start()

    together = threading.Barrier(2)

    def endless():
        together.wait(300)  # each call is a sign of life
        time_is_nearly_up()
        release.wait()

    def step(x):
        replica_engine.xla.outside_compilation(endless)
        return x

    def after(x):
        if calls_host:
            replica_engine.xla.outside_compilation(lambda value: None, x)
        return replica_engine.xla.cross_replica_sum(x)

    with pytest.raises(ReplicaTimeoutError):
        strategy.run(step, args=(tf.constant(1.0),))
    with when_warned(releases):
        result = strategy.run(after, args=(tf.constant(1.0),))
    assert [float(each) for each in strategy.experimental_local_results(result)] == [2.0, 2.0]
    (text,) = texts
    assert text.startswith("The compiled program of `after` has been waiting for")
    assert "the program of `step`, which was given up earlier" in text
    assert "replica 0 of 2 (CPU:0): not started" in text
    assert "coordinator (MainThread): waiting for a program that was given up" in text
    assert "running on the device" not in text
    assert text.endswith("or its replicas wait for each other. Ctrl-C ends the wait.")
