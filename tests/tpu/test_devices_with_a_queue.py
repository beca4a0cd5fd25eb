"""Devices that return from a launch before the program has run, as TPUs and GPUs do.

CPU devices stand in for them. Where a program must still run, a stand-in for its results says when it has ended.
"""

import itertools
import re
import threading

import pytest
import tensorflow as tf
from helpers.interrupted import ctrl_c_at_line, ctrl_c_raises
from helpers.time_limits import PATIENT, wait_until_time_is_up

import replica_engine
from replica_engine import xla
from replica_engine.errors import LostVariableError, ProgramError, ReplicaTimeoutError
from replica_engine.pjrt import device_group
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.executable import NO_STORES, Executable
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.process import threads
from replica_engine.watch import watchdog
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.state.device_value import find_device_value


@pytest.fixture(autouse=True)
def a_queue(monkeypatch):
    monkeypatch.setattr(DeviceGroup, "has_queue", True)


class Result:
    """An array that a program computes.

    Args:
        is_ready: called each time that somebody asks; returns whether the program has ended, or raises.
        error: what the program fails with.
    """

    def __init__(self, is_ready, error=None):
        self.is_ready = is_ready
        self._error = error

    def block_until_ready(self):
        assert self.is_ready(), "jaxlib would block here, and nothing could end that"
        if self._error is not None:
            raise self._error


def launches(monkeypatch, result):
    """Has launches return at once, while `result` says how far their program is."""
    at_once = Executable.launch

    def launch(executable, *arguments):
        results = at_once(executable, *arguments)
        executable._devices.running.block_until_ready()  # what runs on the CPU is not looked at
        executable._devices.running = result
        return results

    monkeypatch.setattr(Executable, "launch", launch)


def stuck_until_set(monkeypatch):
    """Has programs run until the event that is returned is set; before, the limit `PATIENT` runs out."""
    ended = threading.Event()

    def is_ready():
        if not ended.is_set():
            wait_until_time_is_up()
        return ended.is_set()

    launches(monkeypatch, Result(is_ready))
    return ended


MEAN = tf.VariableAggregation.MEAN


@pytest.fixture
def awaited(monkeypatch):
    """How many arrays each wait was for."""
    waited, wait_for = [], DeviceGroup.wait_for

    def noted(devices, *arrays, **options):
        waited.append(len(arrays))
        return wait_for(devices, *arrays)

    monkeypatch.setattr(DeviceGroup, "wait_for", noted)
    return waited


def test_steps_have_the_numbers_that_they_have_without_a_queue(two):
    total, strategy = two.variable(0.0, MEAN), two.strategy

    def step(x):
        total.assign_add(xla.all_reduce(x, "SUM"))
        return x * total

    for _ in range(2):
        results = strategy.run(step, args=(tf.constant(3.0),))
    assert [float(each) for each in results.values] == [36.0, 36.0]
    assert total.numpy() == 12.0
    assert float(tf.function(strategy.run)(step, args=(tf.constant(3.0),)).values[1]) == 54.0


def test_without_a_limit_a_launch_leaves_the_program_to_the_queue(monkeypatch, replicas):
    """Else the devices would idle while the host prepares the next step."""
    launches(monkeypatch, Result(lambda: False))
    one = replicas(1)
    total = one.variable(0.0)
    for _ in range(3):
        one.strategy.run(lambda: total.assign_add(1.0))
    assert total.numpy() == 3.0


def test_the_limit_covers_the_wait_for_the_end(monkeypatch, replicas):
    some = replicas(2, timeout=PATIENT)
    strategy, total = some.strategy, some.variable(1.0)
    strategy.run(lambda: total.assign(2.0))
    ended = stuck_until_set(monkeypatch)
    with pytest.raises(ReplicaTimeoutError, match="The compiled program did not end") as caught:
        strategy.run(lambda: total.assign(5.0))
    assert [row.state for row in caught.value.rows] == ["running on the device"] * 2
    assert total.numpy() == 2.0
    ended.set()
    strategy.run(lambda: total.assign_add(5.0))
    assert total.numpy() == 7.0


def test_the_limit_covers_the_wait_for_a_program_of_each_replica(monkeypatch, replicas):
    some = replicas(2, timeout=PATIENT)
    run = lambda: some.each(some.strategy.run(lambda x: 2.0 * x, args=(values,)))  # noqa: E731
    values = some.spread(lambda i: tf.ones([1 + i]))
    ended = stuck_until_set(monkeypatch)
    with pytest.raises(ReplicaTimeoutError, match="The compiled program did not end"):
        run()
    ended.set()
    assert run()[1] == [2.0, 2.0]


def test_the_exit_waits_a_while_for_a_launch_that_was_given_up(monkeypatch):
    """Some launches return at the end of their program. If Python has gone by then, the process is aborted."""
    waited, left = [], threading.Event()
    monkeypatch.setattr(DeviceGroup, "ends_within", lambda devices, seconds: waited.append(seconds) or seconds > 0)
    monkeypatch.setattr(device_group, "_left", {})
    devices = replica_engine.TPUStrategy(num_cores=1).extended.device_group
    thread = threads.LeftCall(left.wait, "a launch", lambda: None)
    thread.start()
    try:
        devices.leave_to(thread)
        device_group.add(devices)
        waited.clear()
        device_group._at_exit()
        assert waited == [5.0]
    finally:
        left.set()
        thread.join()
    waited.clear()
    monkeypatch.setattr(device_group, "_left", {devices: False})
    monkeypatch.setattr(device_group.ctypes.pythonapi, "Py_IncRef", lambda _: None)
    device_group._at_exit()
    assert waited == [0.0]


def test_nothing_is_fetched_before_it_is_there(monkeypatch, two):
    """jaxlib would block, and neither Ctrl-C nor the watchdog could reach the thread."""
    waited, fetch_all, fetch = [], DeviceGroup.fetch_all, DeviceGroup.fetch

    def checked(fetch):
        def fetched(devices, array, *others):
            assert id(array) in waited
            return fetch(devices, array, *others)

        return fetched

    monkeypatch.setattr(DeviceGroup, "wait_for", lambda _, *arrays, **__: waited.extend(map(id, arrays)))
    monkeypatch.setattr(DeviceGroup, "fetch_all", checked(fetch_all))
    monkeypatch.setattr(DeviceGroup, "fetch", checked(fetch))
    strategy, elsewhere = two.strategy, tf.Variable(1.0)
    same, each = two.variable(1.0), two.variable(1.0, tf.VariableAggregation.SUM, on_read=True)

    def step(x):
        same.assign_add(1.0)
        elsewhere.assign(5.0)
        each.assign_add(tf.reduce_sum(x))
        return x

    strategy.run(step, args=(tf.ones([2]),))
    assert (same.numpy(), each.numpy(), elsewhere.numpy()) == (2.0, 6.0, 5.0)
    values = two.spread(lambda i: tf.ones([1 + i]))
    strategy.run(lambda x: 2.0 * x, args=(values,))  # a program for each replica
    strategy.run(step, args=(tf.ones([2]),))
    assert strategy.gather(strategy.run(lambda: same.read_value()[None]), axis=0).numpy().tolist() == [3.0, 3.0]


def group():
    return xla.PjrtClusterResolver("cpu").devices


def test_a_wait_for_a_result_is_watched(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "WARN_AFTER", 0.01)
    devices, warned = group(), threading.Event()
    devices.running_name = "step"
    caplog.handler.addFilter(lambda record: warned.set() if "last of them is `step`" in record.getMessage() else True)
    devices.wait_for(Result(lambda: True), Result(lambda: warned.wait(0.01)))
    assert warned.is_set()


def test_ctrl_c_ends_the_wait_for_a_result_and_the_next_launch_waits():
    answers = iter([False, False, KeyboardInterrupt(), False, False, True])

    def is_ready():
        answer = next(answers)
        if isinstance(answer, KeyboardInterrupt):
            raise answer
        return answer

    devices = group()
    with pytest.raises(KeyboardInterrupt):
        devices.wait_for(Result(is_ready))
    assert devices.wait_for_interrupted()
    assert next(answers, None) is None
    assert not devices.interrupted


def test_a_program_that_fails_while_it_runs(monkeypatch, replicas):
    """On these devices nobody knows of it before the results are awaited."""
    one = replicas(1)
    strategy, total = one.strategy, one.variable(1.0)
    strategy.run(lambda: total.assign_add(1.0))
    failed = Result(lambda: True, RUNTIME_ERRORS[0]("INTERNAL: the core has halted"))
    failed.is_deleted = lambda: False
    wait_for = DeviceGroup.wait_for
    with monkeypatch.context() as patch:
        patch.setattr(DeviceGroup, "wait_for", lambda devices, *_, **options: wait_for(devices, failed, **options))
        with pytest.raises(ProgramError, match=r"(?s)step.*the core has halted") as caught:
            strategy.run(_step)
        assert "CPU:0" in str(caught.value)
        with pytest.raises(LostVariableError):
            total.numpy()
    with pytest.raises(LostVariableError):
        total.numpy()
    total.assign(3.0)
    assert float(strategy.run(lambda: total + 1.0)) == 4.0


def test_nobody_waits_for_a_result_that_nobody_reads(awaited, two):
    """Else the devices would idle while the host prepares the next step."""
    for run in range(3):
        result = two.strategy.run(lambda x: (x * 2.0, x + 1.0), args=(tf.constant(float(run)),))
        assert not awaited
    assert two.each(result[0]) == [4.0, 4.0]
    assert len(awaited) == 1


def lost_at(monkeypatch, number):
    """Has the program that is launched as the `number`-th from now on fail, which shows when it is awaited.

    What takes its values fails too, with the same error.
    """

    def lost(value):
        failed = Result(lambda: True, RUNTIME_ERRORS[0]("INTERNAL: the core has halted"))
        failed.value, failed.is_deleted = value, lambda: False
        return failed

    at_once, launched = Executable.launch, itertools.count(1)

    def launch(executable, arrays, stores=NO_STORES, compared=None):
        fails = next(launched) == number or any(isinstance(each, Result) for each in arrays)
        results = at_once(
            executable, [each.value if isinstance(each, Result) else each for each in arrays], stores, compared
        )
        executable._devices.running.block_until_ready()
        if not fails:
            return results
        for variable in stores.objects:
            variable.on_devices = lost(variable.on_devices)
        return list(map(lost, results))

    monkeypatch.setattr(Executable, "launch", launch)


def test_a_failure_that_comes_late_names_its_own_step_and_loses_what_that_step_wrote(monkeypatch, tmp_path, two):
    strategy, total, other = two.strategy, two.variable(0.0, MEAN), two.variable(7.0, MEAN)

    def train(x):
        total.assign_add(x)
        return x + 1.0

    evaluate = lambda x: x * other  # noqa: E731
    lost_at(monkeypatch, 3)
    steps = [train, train, train, evaluate, evaluate, evaluate]
    results = [strategy.run(step, args=(tf.constant(float(number)),)) for number, step in enumerate(steps)]
    assert [float(each.values[1]) for each in (results[1], *results[3:])] == [2.0, 21.0, 28.0, 35.0]
    own = _failure_of(train)
    for _ in range(2):
        with pytest.raises(ProgramError, match=own):
            len(results[2].values)
    with pytest.raises(LostVariableError, match="is lost") as caught:
        tf.train.Checkpoint(total=total).save(tmp_path / "checkpoint")
    assert re.search(own, str(caught.value.__context__))
    with pytest.raises(LostVariableError):
        total.numpy()
    with pytest.raises(LostVariableError):
        strategy.run(train, args=(tf.constant(1.0),))
    assert other.numpy() == 7.0
    total.assign(3.0)
    strategy.run(train, args=(tf.constant(1.0),))
    assert total.numpy() == 4.0


def test_a_large_value_that_was_lost_and_is_assigned_again_stays(monkeypatch, two):
    """The host's copy of a large value that nobody reads is freed while the devices have a newer one."""
    strategy, wide = two.strategy, two.variable(tf.zeros([1 << 15]), MEAN)

    def train():
        wide.assign_add(tf.ones([1 << 15]))

    strategy.run(train)
    lost_at(monkeypatch, 2)
    for _ in range(2):
        strategy.run(train)
    with pytest.raises(LostVariableError):
        wide.numpy()
    wide.assign(tf.fill([1 << 15], 3.0))
    tf.debugging.assert_equal(wide.read_value(), 3.0)
    strategy.run(train)
    tf.debugging.assert_equal(wide.read_value(), 4.0)


def _failure_of(step):
    """What is said of a program that took values of programs before it."""
    line = rf"`{step.__name__}` at .*test_devices_with_a_queue.py:{step.__code__.co_firstlineno}"
    return rf"{line}, or a program before it whose values it took, failed(?s:.*)the core has halted"


def test_a_failure_that_a_second_writer_took_over_is_not_laid_at_its_door_alone(monkeypatch, two):
    strategy, total = two.strategy, two.variable(0.0, MEAN)

    def first(x):
        total.assign_add(x)
        return x

    def second():
        total.assign_add(1.0)

    lost_at(monkeypatch, 2)
    for _ in range(2):
        strategy.run(first, args=(tf.constant(1.0),))
    strategy.run(second)
    with pytest.raises(LostVariableError) as caught:
        total.numpy()
    assert re.search(_failure_of(second), str(caught.value.__context__))


def test_a_program_that_took_no_values_failed_itself(monkeypatch, two):
    lost_at(monkeypatch, 1)
    result = two.strategy.run(lambda x: x + 1.0, args=(tf.constant(1.0),))
    with pytest.raises(ProgramError, match=r"`lambda` at .*test_devices_with_a_queue.py:\d+ failed while"):
        len(result.values)


def test_ctrl_c_comes_before_a_new_value_and_the_name_of_its_writer_or_after_both(two):
    strategy, total, came = two.strategy, two.variable(0.0, MEAN), 0
    home = find_device_value(total.handle)

    def first():
        total.assign(1.0)

    def second():
        total.assign(2.0)

    strategy.run(first)
    strategy.run(second)
    with ctrl_c_raises():
        for code in (Launch.__call__.__code__, Launch._execute.__code__, Executable.launch.__code__):
            number = 1
            while ctrl_c_at_line(number, code, lambda: strategy.run(second)):
                assert home.written_by.name == ("first" if float(total) == 1.0 else "second")
                strategy.run(first)
                number, came = number + 1, came + 1
    assert came > 20


def test_large_results_do_not_stay_on_the_devices(awaited, two):
    """A loop that keeps its predictions would fill the devices' memory."""
    large, small = two.strategy.run(lambda: (tf.ones([1 << 19]), tf.ones([1 << 18])))
    assert awaited == [1]
    assert large.values[1].shape == [1 << 19]
    assert awaited == [1]
    assert small.values[1].shape == [1 << 18]
    assert awaited == [1, 1]


def test_results_that_are_all_looked_at_are_awaited_together(awaited, two):
    step = lambda: ({1.0: tf.ones([]), 2.0: tf.zeros([])}, tf.IndexedSlices(tf.ones([1]), tf.constant([0])))  # noqa: E731
    xla.replicate(step, num_replicas=2)
    xla.lower(step, num_replicas=2).compile()()
    two.strategy.run(step)
    assert len(awaited) == 3


def test_a_host_call_that_fails_in_the_third_of_six_steps_leaves_what_the_second_wrote(two):
    strategy, total, made = two.strategy, two.variable(0.0, MEAN), []

    def host(x):
        if float(x) == 3.0:
            raise KeyError("the third")

    def train(x):
        total.assign_add(1.0)
        xla.outside_compilation(host, x)
        return x + 1.0

    def six_steps():
        for number in range(1, 7):
            made.append(strategy.run(train, args=(tf.constant(float(number)),)))

    with pytest.raises(KeyError, match="the third") as caught:
        six_steps()
    assert len(made) == 2
    assert re.search(r"test_devices_with_a_queue.py:\d+", "\n".join(caught.value.__notes__))
    assert total.numpy() == 2.0
    assert [float(each) for each in made[1].values] == [3.0, 3.0]
    strategy.run(train, args=(tf.constant(4.0),))
    assert total.numpy() == 3.0


def _step():
    return tf.ones([2])
