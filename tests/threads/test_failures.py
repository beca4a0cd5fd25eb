"""Failures as users see them on replica threads; those that every strategy has are in `tests/contract`."""

import _thread
import concurrent.futures
import os
import pickle
import signal
import sys
import textwrap
import threading

import attrs
import keras
import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index
from helpers.time_limits import PATIENT, elapse

import replica_engine
from replica_engine.engine.run import UNWIND_GRACE
from replica_engine.errors import (
    DeviceError,
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    ReplicaTimeoutError,
    StructureMismatchError,
    VariableMismatchError,
)

HERE = os.path.basename(__file__)


def works(strategy):
    """Does the next run work?"""
    total = strategy.run(lambda: context().all_reduce("SUM", tf.constant(1.0)))
    return float(strategy.experimental_local_results(total)[0]) == strategy.num_replicas_in_sync


class CustomError(Exception):
    def __init__(self, code, *, reason):
        super().__init__(f"code {code}")
        self.code, self.reason = code, reason


def fail_on_replica_1():
    context().merge_call(lambda strategy: None)
    if index() == 1:
        raise CustomError(7, reason="of the user's own")


class TestAReplicaRaises:
    @pytest.mark.parametrize("form", ["eager", "tf.function", "inside tf.function"])
    def test_its_own_exception_leaves_with_a_note(self, mirrored, form):
        def run():
            if form == "eager":
                mirrored.run(fail_on_replica_1)
            elif form == "tf.function":
                mirrored.run(tf.function(fail_on_replica_1))
            else:
                tf.function(lambda: mirrored.run(fail_on_replica_1))()

        with pytest.raises(CustomError) as raised:
            run()
        assert (raised.value.code, raised.value.reason) == (7, "of the user's own")
        notes = "\n".join(raised.value.__notes__)
        assert "replica 1 of 2, CPU:1, after 1 merge call" in notes
        assert HERE in notes
        assert works(mirrored)

    @pytest.mark.parametrize("place", ["replica", "merge function"])
    @pytest.mark.parametrize("traced", [False, True])
    def test_it_is_not_taken_for_one_that_the_user_handled(self, mirrored, place, traced):
        def inner():
            raise CustomError(1, reason="handled")

        def outer(strategy=None):
            try:
                inner()
            except CustomError as error:
                raise OSError("what the user raised") from error

        def fn():
            if place == "replica":
                outer()
            context().merge_call(outer)

        with pytest.raises(OSError, match="what the user raised") as raised:
            mirrored.run(tf.function(fn) if traced else fn)
        # TensorFlow makes another exception of one that a traced function raises, without its cause.
        assert traced or place == "merge function" or isinstance(raised.value.__cause__, CustomError)

    def test_a_frozen_one_leaves_as_it_is(self, mirrored):
        @attrs.frozen
        class Frozen(Exception):
            code: int

        def fn():
            raise Frozen(5)

        with pytest.raises(Frozen):
            mirrored.run(fn)

    def test_in_a_function_defined_in_a_converted_one_its_line_is_in_a_note(self, mirrored):
        @tf.function
        def step():
            def fn():
                raise CustomError(2, reason="nested")

            return mirrored.run(fn)

        with pytest.raises(CustomError) as raised:
            step()
        line = step.python_function.__code__.co_firstlineno + 3
        assert f'File "{__file__}", line {line}, in fn' in "\n".join(raised.value.__notes__)

    def test_variables_keep_the_values_of_the_last_whole_step(self, mirrored):
        with mirrored.scope():
            variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

        def step(fail):
            if fail and index() == 1:
                raise ValueError("before the assignment is merged")
            variable.assign_add(1.0)

        mirrored.run(step, args=(False,))
        with pytest.raises(ValueError, match="before"):
            mirrored.run(step, args=(True,))
        assert [float(v) for v in mirrored.experimental_local_results(variable)] == [2.0, 2.0]
        mirrored.run(step, args=(False,))
        assert float(variable.numpy()) == 3.0


class TestMismatch:
    @pytest.mark.parametrize("traced", [False, True])
    def test_reductions_of_different_kinds(self, mirrored, traced):
        def fn():
            return context().all_reduce("SUM" if index() == 0 else "MEAN", tf.constant(1.0))

        with pytest.raises(MergeCallMismatchError, match=r"replica 0 .*all_reduce\(SUM\)(.|\n)*all_reduce\(MEAN\)"):
            mirrored.run(tf.function(fn) if traced else fn)

    def test_different_builtins(self, mirrored):
        with pytest.raises(MergeCallMismatchError, match="different merge functions"):
            mirrored.run(lambda: context().merge_call(print if index() == 0 else repr))

    @pytest.mark.parametrize("traced", [False, True])
    def test_each_replicas_own_closure_is_the_same_merge_function(self, mirrored, traced):
        def fn():
            scale = 2.0 + index()

            def merge_fn(strategy, x):
                return strategy.reduce("SUM", x, axis=None) * scale

            return context().merge_call(merge_fn, args=(tf.constant(1.0),))

        def run():
            return mirrored.run(fn)

        assert float(tf.function(run)() if traced else run()) == 4.0  # replica 0's closure is the one that runs

    @pytest.mark.parametrize("nested", [False, True], ids=["converted", "defined in a converted function"])
    def test_lines_are_the_users(self, mirrored, nested):
        def outer(x):
            def fn(x):
                if index() == 0:
                    x = context().all_reduce("SUM", x)
                return x

            if nested:
                return mirrored.run(fn, args=(x,))
            return fn(x)

        line = outer.__code__.co_firstlineno + 3
        step = tf.function(outer)
        with pytest.raises(MergeCallMismatchError) as raised:
            step(tf.constant(1.0)) if nested else mirrored.run(step, args=(tf.constant(1.0),))
        assert f"all_reduce at {__file__}:{line} in fn" in str(raised.value)


class TestStructure:
    def test_results_that_differ(self, mirrored):
        with pytest.raises(StructureMismatchError) as raised:
            mirrored.run(lambda: {"loss": 1.0, "parts": [1, 2] if index() == 0 else [1, 2, 3]})
        assert raised.value.path == "result['parts']"
        assert raised.value.replicas == (0, 1)
        assert works(mirrored)

    def test_arguments_of_a_merge_call_that_differ_have_their_line(self, mirrored):
        def fn():
            value = (1, {"a": 1}) if index() == 0 else (1, {"b": 1})
            context().merge_call(lambda strategy, x: x, args=(value,))

        with pytest.raises(StructureMismatchError, match=rf"{HERE}:{fn.__code__.co_firstlineno + 2} in fn"):
            mirrored.run(fn)
        assert works(mirrored)

    def test_a_leaf_against_a_container(self, mirrored):
        words = "replica 0 has one value of type int, replica 1 has a list of length 1"
        with pytest.raises(StructureMismatchError, match=words):
            mirrored.run(lambda: 5 if index() == 0 else [5])


def test_a_merge_call_from_a_thread_of_the_users_own(mirrored):
    def fn():
        here = context()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: here._merge_call(lambda strategy: None, (), {})).result()

    with pytest.raises(NotInReplicaError, match="not running a replica"):
        mirrored.run(fn)
    assert works(mirrored)


def test_the_timeout_is_for_one_replica_not_for_all():
    strategy = replica_engine.MirroredStrategy([f"CPU:{i}" for i in range(4)], timeout=PATIENT)

    def fn():
        elapse(0.4 * PATIENT)  # 1.6 of the limit in all
        threading.Event().wait(0.05)  # in which the watchdog looks

    strategy.run(fn)


@pytest.mark.parametrize(
    "error",
    [
        ReplicaTimeoutError.after(1.0, ()),
        MergeCallGraphError("a message"),
        StructureMismatchError.between("The results", "result[0]", (0, 1), ("a", "b")),
        VariableMismatchError("a message"),
        NotInReplicaError("a message"),
        DeviceError("a message"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


CTRL_C = """
    import os, signal, sys, threading, time
    import tensorflow as tf
    import replica_engine
    from replica_engine import logical_devices

    strategy = replica_engine.MirroredStrategy(logical_devices(2))
    strategy.run(lambda: None)
    queue = tf.queue.FIFOQueue(1, [tf.float32])
    asked = threading.Semaphore(0)
    sent = None

    def interrupt():
        global sent
        while True:
            asked.acquire()
            sent = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()

    def replica_id():
        return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))

    def stuck_in_an_op():
        if replica_id() == 1:
            asked.release()
            queue.dequeue()  # nobody ever puts anything in

    def stuck_in_python():
        if replica_id() == 1:
            asked.release()
            while True:
                pass

    def stuck_in_merge():
        def merge_fn(strategy):
            asked.release()
            while not threading.Event().wait(0.1):  # Python misses a signal that comes in the moment before a wait
                pass
        tf.distribute.get_replica_context().merge_call(merge_fn)

    for stuck in (stuck_in_an_op, stuck_in_merge, stuck_in_python):
        try:
            strategy.run(stuck)
        except KeyboardInterrupt:
            total = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))
            total = float(strategy.experimental_local_results(total)[0])
            print(stuck.__name__, "interrupted", total, time.monotonic() - sent, flush=True)
"""


def test_ctrl_c_raises_within_a_second_and_the_next_run_works(programs):
    """Again and again, wherever a replica is stuck; and the process ends, though they still are."""
    done = programs.run(textwrap.dedent(CTRL_C))
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(" ", 1) for line in done.stdout.splitlines()]
    places = ("stuck_in_an_op", "stuck_in_merge", "stuck_in_python")
    assert [line for line, _ in lines] == [f"{place} interrupted 2.0" for place in places]
    # A second to raise, and the runs after it. On a busy machine these may take longer, but the replica that is stuck
    # is not waited for as after another failure.
    assert max(float(seconds) for _, seconds in lines) < UNWIND_GRACE


def test_ctrl_c_in_the_moment_before_a_wait():
    """The interpreter has been told of it, and the thread that waits is not woken."""
    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])
    go, waited = threading.Event(), []

    def stuck():
        if index() == 1:
            _thread.interrupt_main()
            waited.append(go.wait(300))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(stuck)
        assert not waited, "it did not end the wait"
    finally:
        go.set()
        signal.signal(signal.SIGINT, before)
    assert works(strategy)


def test_under_keras_the_location_is_the_line_that_called_fit():
    class Extended(replica_engine.strategies.MirroredExtended):
        def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
            raise OSError("no route between devices")

    class Strategy(replica_engine.MirroredStrategy):
        extended_class = Extended

    with Strategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(OSError, match="no route") as raised:
        model.fit(tf.zeros([4, 1]), tf.zeros([4, 1]), batch_size=4, verbose=0)
    here = f"{HERE}:{sys._getframe().f_lineno - 1} in test_under_keras_the_location_is_the_line_that_called_fit"
    assert any(note.endswith(here) for note in raised.value.__notes__), raised.value.__notes__


def test_ctrl_c_in_an_update_comes_when_all_replicas_have_it():
    """Else one replica's copy of a variable would be another than the others', for ever."""
    strategy = replica_engine.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    with strategy.scope():
        variable = tf.Variable(1.0)
    updated = []

    def update(component):
        if not updated:
            signal.raise_signal(signal.SIGINT)
        updated.append(component.device)
        return component.assign(2.0)

    with pytest.raises(KeyboardInterrupt), strategy.scope():
        strategy.extended.update(variable, update)
    assert len(updated) == 4
    assert [component.numpy() for component in strategy.experimental_local_results(variable)] == [2.0] * 4


def test_ctrl_c_again_is_raised_at_once():
    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = tf.Variable(1.0)
    reached = []

    def update(component):
        signal.raise_signal(signal.SIGINT)
        reached.append("once")
        signal.raise_signal(signal.SIGINT)
        reached.append("twice")

    with pytest.raises(KeyboardInterrupt), strategy.scope():
        strategy.extended.update(variable, update)
    assert reached == ["once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
