"""Host work that fails: the exception leaves the run as it was raised, and says where."""

import gc
import threading
import traceback
import weakref

import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, Failing, X, check_works, fails_on, line_of, raised_by

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostResultError


def frames(error):
    """The names of the functions in a traceback."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
def test_the_exception_is_the_users_own(results):
    error = Failing(7)

    def helper():
        raise error

    def fn(x):
        if x.numpy() == 2.0:
            helper()

    @xla.returns(SCALAR)
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
    call = f"outside_compilation({'with_results' if results else 'fn'}) at {line_of(__file__, 'the call')} in body"
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
    assert f"replica 1 of 2, CPU:1, in outside_compilation(fn) at {line_of(__file__, 'the call in a graph')}" in str(
        raised.value
    )
    assert "test_host_failures.py" in str(raised.value)


def test_when_several_replicas_fail_all_are_named():
    barrier = threading.Barrier(4)

    def fn():
        replica = int(xla.replica_id())
        barrier.wait(300)  # none is so early that the others are not even called
        if replica != 2:
            raise Failing(replica)

    found = raised_by(lambda: xla.replicate(lambda: xla.outside_compilation(fn), num_replicas=4))
    first, *others = found.__notes__
    assert first.startswith(f"replica {found.code} of 4, CPU:{found.code}, in outside_compilation(fn) at")
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


def test_an_execution_in_a_loop_has_its_number():
    """Replicas meet in the loop: those that did not fail must not wait for ever."""
    error = Failing(1)
    fn = fails_on(1, error, when=lambda x: x > 100.0)

    def body(x):
        for _ in tf.range(20):
            x = xla.cross_replica_sum(xla.outside_compilation(fn, x))
        return x

    x, times = 1.0, 1
    while x <= 100.0:
        x, times = (x + 10.0) * 2, times + 1
    assert raised_by(lambda: xla.replicate(body, [[tf.constant(1.0)]] * 2)) is error
    assert error.__notes__[0].endswith(f"execution {times} of it there")
    assert error.__notes__[0].startswith("replica 1 of 2")


def test_of_several_calls_it_is_said_which():
    def fine():
        return 1.0

    def body(x):
        x += xla.outside_compilation(fine)
        y = xla.outside_compilation(fails_on(0, Failing(1)), x)  # the second call
        return y + xla.outside_compilation(fine)

    found = raised_by(lambda: xla.replicate(body, X))
    assert (
        f"replica 0 of 2, CPU:0, in outside_compilation(fn) at {line_of(__file__, 'the second call')}"
        in found.__notes__[0]
    )


def test_in_a_device_loop_the_iteration_is_said(two):
    with two.scope():
        total = tf.Variable(5.0, aggregation=tf.VariableAggregation.MEAN)
    fn = fails_on(1, Failing(3), when=lambda x: x == 2.0)

    def train(context, x):
        total.assign_add(x)
        total.assign_add(xla.all_reduce(xla.outside_compilation(fn, x), "MEAN"))

    batches = [tf.constant(float(i)) for i in range(4)]
    found = raised_by(lambda: two.run_steps(train, batches, iterations=4))
    assert found.code == 3
    assert found.__notes__[0].startswith("replica 1 of 2, CPU:1, iteration 2 of the device loop, in")
    assert found.__notes__[0].endswith("execution 1 of it there")
    kept = 5.0 + (0.0 + 10.0) + (1.0 + 11.0)  # of the steps before
    assert total.numpy() == kept
    assert two.run_steps(train, [tf.constant(7.0)] * 2, iterations=2).steps == 2
    assert total.numpy() == kept + 2 * (7.0 + 17.0)


def test_a_stop_iteration_of_a_step_is_not_the_end_of_its_inputs(two):
    error = StopIteration("of the user's own")

    def fn():
        raise error

    def step(context, x):
        xla.outside_compilation(fn)

    with pytest.raises(StopIteration) as raised:
        two.run_steps(step, [tf.constant(1.0)] * 2, iterations=2)
    assert raised.value is error


def test_what_is_raised_while_the_function_is_traced_is_named_where_its_results_are_used():
    def fn(x):
        if tf.is_symbolic_tensor(x):
            raise Failing(7)  # in the function
        return x

    with pytest.raises(HostResultError, match="Failing: code 7") as raised:
        xla.replicate(lambda x: xla.outside_compilation(fn, x) + 1.0, X)  # traced
    assert line_of(__file__, "in the function") in str(raised.value)
    assert line_of(__file__, "traced") in str(raised.value)
    assert isinstance(raised.value.__cause__, Failing)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_host_knows_who_calls_in_launch_after_launch(size):
    """Also after one that failed; the order of a replica's calls goes on from each to the next."""
    strategy = TPUStrategy(num_cores=size)
    seen = []

    @xla.returns(None)
    def note(replica, number):
        seen.append((int(xla.replica_id()), int(replica), int(number)))
        if number == 7 and replica == size - 1:
            raise Failing(1)

    def step(last):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        for number in tf.range(last + 1):
            xla.outside_compilation(note, replica, number)

    for last in (2, 7, 0, 7, 4):  # several calls a launch, and not as many in each
        seen.clear()
        if last == 7:
            with pytest.raises(Failing):
                strategy.run(step, args=(tf.constant(last),))
        else:
            strategy.run(step, args=(tf.constant(last),))
            assert sorted(seen) == [(replica, replica, number) for replica in range(size) for number in range(last + 1)]
        assert all(known == own for known, own, _ in seen)


def test_an_error_of_a_launch_in_a_function_is_let_go_of(two):
    """Its frames have the values of the step."""
    wrong = xla.returns(tf.TensorSpec([2], tf.float32))(lambda: tf.ones([3]))

    @tf.function
    def step():
        return two.run(lambda: xla.outside_compilation(wrong))

    with pytest.raises(HostResultError) as caught:
        step()
    error = weakref.ref(caught.value)
    del caught
    gc.collect()
    assert error() is None
