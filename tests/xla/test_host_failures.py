"""Host work that fails: the exception leaves the run as it was raised, and all variables are as before the run."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostAccessError, HostResultError
from replica_engine.xla import host_run

SCALAR = tf.TensorSpec([], tf.float32)
X = [[tf.constant(1.0)], [tf.constant(2.0)]]


class Failing(Exception):
    def __init__(self, code, *, reason="of the user's own"):
        super().__init__(f"code {code}")
        self.code, self.reason = code, reason


def values(results):
    """Tensors as plain Python values, all else as it is."""
    plain = lambda value: value.numpy().tolist() if tf.is_tensor(value) else value  # noqa: E731
    return tf.nest.map_structure(plain, results)


def line_of(text):
    """The line of this file that ends in a comment."""
    with open(__file__) as file:
        numbers = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return f"{__file__}:{numbers[0]}"


def raised_by(run):
    """What a call raises, which must be of one of the tests' kinds."""
    with pytest.raises((Failing, HostResultError)) as raised:
        run()
    return raised.value


def frames(error):
    """The names of the functions in a traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@xla.returns(tf.TensorSpec([], tf.int32))
def doubled_id():
    return int(xla.replica_id()) * 2


def works():
    return xla.outside_compilation(doubled_id) + 1


def check_works():
    """The next run works."""
    assert values(xla.replicate(works, num_replicas=2)) == [1, 3]


def check_strategy_works(strategy):
    assert list(values(strategy.experimental_local_results(strategy.run(works)))) == [1, 3]


def fails_on(replica, error, when=lambda x: True):
    """A host function that raises on one replica, if told so."""

    @xla.returns(SCALAR)
    def fn(x):
        if int(xla.replica_id()) == replica and when(float(x)):
            raise error
        return x + 10.0

    return fn


# What leaves the run.


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
def test_the_exception_is_the_users_own(results):
    error = Failing(7)

    def helper():
        raise error

    def fn(x):
        if x.numpy() == 2.0:
            helper()

    def with_results(x):
        fn(x)
        return x * 2.0

    def body(x):
        return xla.outside_compilation(with_results if results else fn, x)  # the call

    found = raised_by(lambda: xla.replicate(body, X))
    assert found is error
    assert (found.code, found.reason, str(found)) == (7, "of the user's own", "code 7")
    assert frames(found)[-2:] == ["fn", "helper"]
    assert frames(found)[0].startswith("raised_by")
    (note,) = found.__notes__
    call = f"outside_compilation '0' at {line_of('the call')} in body"
    assert note == f"replica 1 of 2, CPU:1, in {call}, execution 1 of it there"
    check_works()


def test_a_chain_of_exceptions_stays_one():
    def fn():
        try:
            {}["key"]
        except KeyError as error:
            raise Failing(1) from error

    found = raised_by(lambda: xla.replicate(lambda: xla.outside_compilation(fn), num_replicas=2))
    assert isinstance(found.__cause__, KeyError)


@pytest.mark.parametrize(
    "error",
    [ValueError("of Python"), tf.errors.OutOfRangeError(None, None, "of TensorFlow"), StopIteration("no more")],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_of_all_kinds_leave_it(error):
    def fn():
        raise error

    with pytest.raises(type(error)) as raised:
        xla.replicate(lambda: xla.outside_compilation(fn), num_replicas=2)
    assert raised.value is error


def test_in_a_host_function_its_text_leaves_it():
    """TensorFlow makes an error of its own of an exception in a graph."""

    def body(x):
        xla.outside_compilation(fails_on(1, Failing(7)), x)  # the call in a graph

    with pytest.raises(tf.errors.UnknownError, match="Failing: code 7") as raised:
        tf.function(lambda: xla.replicate(body, X))()
    assert f"replica 1 of 2, CPU:1, in outside_compilation '0' at {line_of('the call in a graph')}" in str(raised.value)
    assert "test_host_failures.py" in str(raised.value)


def test_when_several_replicas_fail_all_are_named():
    barrier = threading.Barrier(4)

    def fn():
        replica = int(xla.replica_id())
        barrier.wait(10)  # none is so early that the others are not even called
        if replica != 2:
            raise Failing(replica)

    found = raised_by(lambda: xla.replicate(lambda: xla.outside_compilation(fn), num_replicas=4))
    first, *others = found.__notes__
    assert first.startswith(f"replica {found.code} of 4, CPU:{found.code}, in outside_compilation '0' at")
    named = {found.code}
    for note in others:
        assert note.startswith("also failed: replica ")
        named.add(int(note.split("replica ")[1][0]))
        assert note.endswith(f"Failing: code {note.split('replica ')[1][0]}")
    assert named == {0, 1, 3}


def test_the_same_object_may_be_raised_by_all_and_again():
    error = Failing(1)

    def fn():
        raise error

    for _ in range(2):
        assert raised_by(lambda: xla.replicate(lambda: xla.outside_compilation(fn), num_replicas=2)) is error
    check_works()


@pytest.mark.parametrize("n", [1, 2])
def test_an_execution_in_a_loop_has_its_number(n):
    """Replicas meet in the loop: those that did not fail must not wait for ever."""
    error = Failing(1)
    fn = fails_on(n - 1, error, when=lambda x: x > 100.0)

    def body(x):
        for _ in tf.range(20):
            x = xla.cross_replica_sum(xla.outside_compilation(fn, x))
        return x

    x, times = 1.0, 1
    while x <= 100.0:
        x, times = (x + 10.0) * n, times + 1
    assert raised_by(lambda: xla.replicate(body, [[tf.constant(1.0)]] * n)) is error
    assert error.__notes__[0].endswith(f"execution {times} of it there")
    assert error.__notes__[0].startswith(f"replica {n - 1} of {n}")


def test_of_several_calls_it_is_said_which():
    def fine():
        return 1.0

    def body(x):
        x += xla.outside_compilation(fine)
        y = xla.outside_compilation(fails_on(0, Failing(1)), x)  # the second call
        return y + xla.outside_compilation(fine)

    found = raised_by(lambda: xla.replicate(body, X))
    assert f"replica 0 of 2, CPU:0, in outside_compilation '1' at {line_of('the second call')}" in found.__notes__[0]


@pytest.mark.parametrize("step", [0, 2])
def test_in_a_device_loop_the_iteration_is_said(step):
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        total = tf.Variable(5.0, aggregation=tf.VariableAggregation.MEAN)
    fn = fails_on(1, Failing(3), when=lambda x: x == step)

    def train(context, x):
        total.assign_add(x)
        total.assign_add(xla.all_reduce(xla.outside_compilation(fn, x), "MEAN"))

    batches = [tf.constant(float(i)) for i in range(4)]
    found = raised_by(lambda: strategy.run_steps(train, batches, iterations=4))
    assert found.code == 3
    assert found.__notes__[0].startswith(f"replica 1 of 2, CPU:1, iteration {step} of the device loop, in")
    assert found.__notes__[0].endswith(f"execution {step + 1} of it there")
    assert total.numpy() == 5.0
    assert strategy.run_steps(train, [tf.constant(7.0)] * 2, iterations=2).steps == 2
    assert total.numpy() == 5.0 + 2 * (7.0 + 17.0)


def test_a_stop_iteration_of_a_step_is_not_the_end_of_its_inputs():
    strategy = TPUStrategy(num_cores=2)
    error = StopIteration("of the user's own")

    def fn():
        raise error

    def step(context, x):
        xla.outside_compilation(fn)

    with pytest.raises(StopIteration) as raised:
        strategy.run_steps(step, [tf.constant(1.0)] * 2, iterations=2)
    assert raised.value is error


def test_what_fails_while_the_body_is_traced_says_so():
    """To know what it returns it is called with zeros."""

    def fn(x):
        return 1.0 / float(x.numpy().item() or Failing(0).code)

    with pytest.raises(ZeroDivisionError) as raised:
        xla.replicate(lambda x: xla.outside_compilation(fn, x), X)  # traced
    assert "was called with zeros" in raised.value.__notes__[0]
    assert line_of("traced") in raised.value.__notes__[0]
    assert "xla.returns" in raised.value.__notes__[0]
    declared = xla.returns(SCALAR)(fn)
    assert values(xla.replicate(lambda x: xla.outside_compilation(declared, x), X)) == [1.0, 0.5]


# Results unlike what the body was compiled for.


@pytest.mark.parametrize(
    ("spec", "fn", "messages"),
    [
        (SCALAR, lambda x: tf.stack([x, x]), ["shape (2,)", "shape ()"]),
        (tf.TensorSpec([2], tf.float32), lambda x: np.zeros(3, np.float32), ["shape (3,)", "shape (2,)"]),
        (SCALAR, lambda x: tf.cast(x, tf.float64), ["float64", "float32"]),
        (SCALAR, lambda x: int(x), ["int32", "float32"]),
        (SCALAR, lambda x: None, ["None", "a tensor"]),
        (SCALAR, lambda x: [x], ["a list of length 1", "a tensor"]),
        (SCALAR, lambda x: "text", ["string"]),
        (SCALAR, lambda x: object(), ["object", "no tensor"]),
        ([SCALAR] * 2, lambda x: [x], ["a list of length 1", "a list of length 2"]),
        ([SCALAR] * 2, lambda x: (x, x), ["a tuple of length 2", "a list of length 2"]),
        ({"a": [SCALAR, SCALAR]}, lambda x: {"a": [x, x > 0.0]}, ["result['a'][1]", "bool", "float32"]),
        ({"a": {"b": SCALAR}}, lambda x: {"a": {"c": x}}, ["result['a']", "'c'", "'b'"]),
        ({"a": [SCALAR, SCALAR]}, lambda x: {"a": [x, tf.stack([x])]}, ["result['a'][1]", "shape (1,)"]),
        (None, lambda x: x if x > 1.5 else tf.stack([x, x]), ["shape (2,)"]),
        (None, lambda x: x.numpy() if x > 0.5 else 0, ["float32", "int32"]),
    ],
)
def test_other_results_than_it_was_compiled_for_are_an_error(spec, fn, messages):
    fn = fn if spec is None else xla.returns(spec)(fn)
    variable = tf.Variable(1.0)

    def body(x):
        variable.assign(5.0)
        xla.outside_compilation(fn, x)  # other results

    with pytest.raises(HostResultError) as raised:
        xla.replicate(body, X)
    for message in messages:
        assert message in str(raised.value)
    assert line_of("other results") in raised.value.__notes__[0]
    assert variable.numpy() == 1.0
    check_works()


def test_a_result_that_is_sometimes_none_is_an_error():
    def fn(x):
        if x.numpy() > 1.5:
            return x
        return None

    with pytest.raises(HostResultError, match=r"returned a tensor.* compiled for None"):
        xla.replicate(lambda x: xla.outside_compilation(fn, x), X)


# What is left behind.


@pytest.mark.parametrize("form", ["eager", "in a function"])
def test_variables_of_a_strategy_are_as_before(form):
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        mirrored = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        apart = tf.Variable(1.0)
        on_read = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
    fn = fails_on(1, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        mirrored.assign_add(x)
        apart.assign_add(tf.cast(xla.replica_id(), tf.float32))
        on_read.assign_add(xla.outside_compilation(fn, x))
        mirrored.assign_add(x)

    def contents():
        return [list(values(strategy.experimental_local_results(each))) for each in (mirrored, apart, on_read)]

    run = lambda x: strategy.run(body, args=(x,))  # noqa: E731
    run = tf.function(run) if form == "in a function" else run
    run(tf.constant(2.0))
    before = contents()
    assert before == [[5.0, 5.0], [1.0, 2.0], [13.0, 13.0]]
    for _ in range(2):
        with pytest.raises((Failing, tf.errors.UnknownError), match="code 1"):
            run(tf.constant(-1.0))
        assert contents() == before
    run(tf.constant(2.0))
    assert contents() == [[9.0, 9.0], [1.0, 3.0], [25.0, 25.0]]


def test_plain_variables_are_as_before():
    variable = tf.Variable([1.0])
    fn = fails_on(0, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        variable.assign_add([x])
        return xla.outside_compilation(fn, x) + variable

    for x, expected in ((1.0, 2.0), (-5.0, 2.0), (1.0, 3.0)):
        with pytest.raises(Failing) if x < 0.0 else contextlib.nullcontext():
            xla.replicate(body, [[tf.constant(x)]] * 2)
        assert variable.numpy() == [expected]


def test_random_numbers_go_on():
    """A failed run draws as any other; the next one does not repeat an earlier one's."""
    fn = fails_on(0, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        drawn = tf.random.normal([4])
        xla.outside_compilation(fn, x)
        return drawn

    first = xla.replicate(body, X)[0].numpy()
    with pytest.raises(Failing):
        xla.replicate(body, [[tf.constant(-1.0)]] * 2)
    assert not np.array_equal(first, xla.replicate(body, X)[0])


def test_of_replicas_with_different_shapes_one_may_fail():
    """Each has a program of its own."""
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0)
    share = lambda context: tf.ones([2 + context.replica_id_in_sync_group])  # noqa: E731
    x = strategy.experimental_distribute_values_from_function(share)

    def fn(x):
        if x.shape[0] == 3:
            raise Failing(3)

    def body(x):
        variable.assign(5.0)
        xla.outside_compilation(fn, x)

    found = raised_by(lambda: strategy.run(body, args=(x,)))
    assert found.__notes__[0].startswith("replica 1 of 2, CPU:1, in outside_compilation '0' at")
    assert variable.numpy() == 1.0
    strategy.run(body, args=(tf.ones([2]),))
    assert variable.numpy() == 5.0


def test_after_a_failure_the_later_calls_are_not_made():
    calls = []
    fails = fails_on(0, Failing(1))

    def note(_):
        calls.append(int(xla.replica_id()))

    def body(x):
        x = xla.cross_replica_sum(xla.outside_compilation(fails, x))
        xla.outside_compilation(note, x)

    raised_by(lambda: xla.replicate(body, X))
    assert calls == []


def endless_in_its_condition(fn):
    def body(x):
        while xla.outside_compilation(fn, x) < 1000.0:
            x = x * 1.0
        return x

    return body


def endless_with_collectives(fn):
    def body(x):
        while xla.outside_compilation(fn, x) < 1000.0:
            x = xla.cross_replica_sum(x) * 0.5
        return x

    return body


def endless_in_its_body(fn):
    def body(x):
        while x < 1000.0:
            x = xla.outside_compilation(fn, x)
        return x

    return body


@pytest.mark.parametrize("make", [endless_in_its_condition, endless_with_collectives, endless_in_its_body])
def test_a_loop_that_does_not_end_on_zeros_ends(make, monkeypatch):
    monkeypatch.setattr(host_run, "_PATIENCE", 200)
    error = Failing(1)
    body = make(fails_on(0, error))
    assert raised_by(lambda: xla.replicate(body, X)) is error
    check_works()


def test_a_loop_on_the_devices_that_does_not_end_on_zeros_is_left(tmp_path):
    """It calls the host no more. In a process of its own, since nothing ends it."""
    lines = run_program(
        tmp_path,
        """
        from replica_engine.xla import host_run
        host_run._STUCK_AFTER = 0.5

        @xla.returns(tf.TensorSpec([], tf.float32))
        def fails():
            raise ArithmeticError("of the user's own")

        def body():
            x = xla.outside_compilation(fails)
            while x < 100.0:
                x = x * 2.0
            return x

        try:
            xla.replicate(body, num_replicas=2)
        except ArithmeticError as error:
            print(error, len(error.__notes__) > 1)
        print([int(each) for each in xla.replicate(lambda: xla.replica_id(), num_replicas=2)])
        """,
    )
    assert lines == ["of the user's own True", "[0, 1]"]


@pytest.mark.parametrize("threads", [False, True], ids=["one after the other", "at the same time"])
def test_a_failing_strategy_leaves_another_one_alone(threads):
    failing, fine = TPUStrategy(num_cores=2), TPUStrategy(num_cores=4)
    with fine.scope():
        total = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
    error = Failing(1)
    fails = fails_on(1, error, when=lambda x: x > 2.0)

    def fails_later(x):
        for _ in tf.range(4):
            x = xla.cross_replica_sum(xla.outside_compilation(fails, x)) / 10.0
        return x

    def works():
        total.assign_add(xla.outside_compilation(lambda: xla.replica_id().numpy()))

    def fail(times):
        for _ in range(times):
            assert raised_by(lambda: failing.run(fails_later, args=(tf.constant(1.0),))) is error

    def work(times):
        for _ in range(times):
            fine.run(works)

    for _ in range(2):
        fail(1)
        work(1)
    if threads:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(fail, 10), pool.submit(work, 10)]:
                done.result()
    assert total.numpy() == (12 if threads else 2) * 6
    check_strategy_works(failing)


# Interruptions.


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=lambda error: type(error).__name__)
def test_what_is_to_end_the_program_leaves_the_run(error):
    variable = tf.Variable(1.0)

    def fn():
        raise error

    def body():
        variable.assign(2.0)
        xla.outside_compilation(fn)

    with pytest.raises(type(error)) as raised:
        xla.replicate(body, num_replicas=2)
    assert raised.value is error
    assert variable.numpy() == 1.0
    check_works()


def test_an_interrupt_while_it_is_called_with_zeros_leaves_the_strategy_usable():
    def fn(x):
        x.numpy()
        raise KeyboardInterrupt

    strategy = TPUStrategy(num_cores=2)
    with pytest.raises(KeyboardInterrupt):
        strategy.run(lambda: xla.outside_compilation(lambda x: [fn(x)], tf.constant(1.0)))
    check_strategy_works(strategy)


@contextlib.contextmanager
def interrupts():
    """`go, interrupt`: a host function that calls `interrupt` is in it while Ctrl-C is pressed, and stays till `go`."""
    go, asleep = threading.Event(), threading.Barrier(2)

    def interrupt():
        asleep.wait(10)
        if int(xla.replica_id()) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        go.wait(20)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield go, interrupt
    finally:
        go.set()
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_answered_while_a_host_call_sleeps():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    with interrupts() as (go, interrupt):

        def body():
            variable.assign_add(tf.ones([]))
            xla.outside_compilation(interrupt)
            xla.cross_replica_sum(variable.read_value())

        before = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            strategy.run(body)
        assert time.monotonic() - before < 5.0
        go.set()
        check_strategy_works(strategy)
        assert variable.numpy() == 1.0


def test_ctrl_c_in_a_device_loop_ends_it():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    steps = []

    with interrupts() as (go, interrupt):

        def third(x):
            steps.append(float(x))
            if float(x) == 2.0:
                interrupt()

        def step(context, x):
            variable.assign_add(x)
            xla.outside_compilation(third, x)

        with pytest.raises(KeyboardInterrupt):
            strategy.run_steps(step, (tf.constant(float(i)) for i in range(1000)), iterations=1000)
        go.set()
        check_strategy_works(strategy)
        assert variable.numpy() == 1.0
        assert sorted(steps) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_the_next_run_waits_for_the_one_that_was_interrupted():
    strategy = TPUStrategy(num_cores=2)
    ended = []

    with interrupts() as (go, interrupt):

        def fn():
            interrupt()
            ended.append(int(xla.replica_id()))

        with pytest.raises(KeyboardInterrupt):
            strategy.run(lambda: xla.outside_compilation(fn))
        assert ended == []
        timer = threading.Timer(0.1, go.set)
        timer.start()
        strategy.run(lambda: tf.zeros([]))
        assert sorted(ended) == [0, 1]
        timer.join()


def run_program(tmp_path, text):
    """What a program prints, line by line. From a file: AutoGraph reads the source."""
    begin = "import os, tensorflow as tf\nfrom replica_engine import TPUStrategy, xla\n"
    path = tmp_path / "program.py"
    path.write_text(begin + textwrap.dedent(text) + "print(end='', flush=True)\nos._exit(0)\n")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# What would wait for the very step that it is called from.


WAITING = {
    "the values of a variable": lambda strategy, variable: variable.values,
    "local results of a variable": lambda strategy, variable: strategy.experimental_local_results(variable),
    "a step": lambda strategy, variable: strategy.run(lambda: tf.zeros([])),
    "a step of another strategy": lambda strategy, variable: TPUStrategy(num_cores=2).run(lambda: tf.zeros([])),
    "a replicated function": lambda strategy, variable: xla.replicate(lambda: tf.zeros([]), num_replicas=2),
    "a checkpoint": lambda strategy, variable: tf.train.Checkpoint(v=variable).write("/nonexistent/path"),
    "a function with the variable": lambda strategy, variable: tf.function(lambda: variable + 1.0)(),
    "an op with Python in it": lambda strategy, variable: tf.py_function(variable.numpy, [], tf.float32),
    "a device loop": lambda strategy, variable: strategy.run_steps(lambda c, x: None, [tf.zeros([])], iterations=1),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING.keys())
def test_what_would_wait_for_the_step_is_an_error(wait):
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0)

    def fn():
        wait(strategy, variable)

    def body():
        variable.assign_add(1.0)
        xla.outside_compilation(fn)

    strategy.run(lambda: variable.assign_add(1.0))
    with pytest.raises((HostAccessError, tf.errors.UnknownError), match="outside_compilation"):
        strategy.run(body)
    assert variable.numpy() == 2.0
    check_strategy_works(strategy)


def test_a_function_traced_before_cannot_use_the_variable_either():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    read = tf.function(lambda: variable + 1.0)
    read()
    seen = []

    def fn():
        seen.append(float(read()))

    def body():
        variable.assign(tf.constant(10.0))
        xla.outside_compilation(fn)

    with pytest.raises(HostAccessError):
        strategy.run(body)
    assert seen == []
    assert variable.numpy() == 1.0
