"""Ctrl-C while a compiled program runs, and programs whose replicas wait for each other. In processes of their own."""

import re
import signal
import textwrap

import pytest

BEGIN = """
import logging, signal, threading, time
import tensorflow as tf
import replica_engine
from replica_engine import errors, xla
from replica_engine.watch import watchdog

strategy = replica_engine.TPUStrategy(num_cores=2)
with strategy.scope():
    steps = tf.Variable(0.0)


def interrupt_when_it_runs():
    while strategy.extended.device_group.running is None:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def interrupted(fn):
    thread = threading.Thread(target=interrupt_when_it_runs)
    thread.start()
    try:
        strategy.run(fn)
        thread.join()
    except KeyboardInterrupt:
        print("interrupted")
"""


def start(programs, text, flags=None):
    """Starts a program, with these flags of XLA and no others."""
    before = f"os.environ['XLA_FLAGS'] = {flags!r}" if flags else "del os.environ['XLA_FLAGS']"
    return programs.start(f"import os\n{before}\n{BEGIN}{textwrap.dedent(text)}")


def printed(process):
    """What a program prints, line by line, and its errors."""
    try:
        output, errors = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return output.split("\n"), errors


def run_program(programs, text):
    return printed(start(programs, text))


def test_ctrl_c_in_a_step_leaves_whole_steps(programs):
    """The step is under way on the devices and ends there; the next one begins after it."""
    lines, _ = run_program(
        programs,
        """
        def long():
            total = tf.zeros([])
            for _ in tf.range(50):
                total += tf.reduce_sum(tf.random.normal([600, 600]) @ tf.random.normal([600, 600]))
            steps.assign_add(1.0)
            return total

        errors.StuckProgramError.PATIENCE = 90.0  # a busy machine takes long to end the step

        interrupted(long)
        print(float(steps.numpy()))
        strategy.run(lambda: steps.assign_add(10.0))
        print(float(steps.numpy()))
        """,
    )
    assert lines[:3] == ["interrupted", "1.0", "11.0"]


@pytest.mark.parametrize("timeout", [None, 3600.0])
def test_replicas_that_wait_for_each_other_are_warned_of_and_can_be_left(programs, timeout):
    """A collective that only replica 0 reaches. Its devices are lost; a new strategy has new ones.

    With a limit, the launch has a thread of its own, which ends too though the program does not.
    """
    lines, stderr = run_program(
        programs,
        f"""
        import sys

        strategy = replica_engine.TPUStrategy(num_cores=2, timeout={timeout})
        with strategy.scope():
            steps = tf.Variable(0.0)

        watchdog.WARN_AFTER = 0.1
        errors.StuckProgramError.PATIENCE = 0.2
        warned = threading.Event()
        launching = []

        def emit(record):
            print(record.getMessage(), file=sys.stderr)
            if "has been running" in record.getMessage():
                warned.set()

        def interrupt_when_it_runs():
            warned.wait(60)
            launching.extend(each for each in threading.enumerate() if "launch of stuck" in each.name)
            os.kill(os.getpid(), signal.SIGINT)

        handler = logging.Handler(logging.WARNING)
        handler.emit = emit
        logging.getLogger("replica_engine").addHandler(handler)

        def stuck():
            x = tf.zeros([])
            if xla.replica_id() == 0 and steps < 1.0:
                x = xla.cross_replica_sum(x)
            return x

        interrupted(stuck)
        try:
            strategy.run(lambda: steps.assign_add(1.0))
        except errors.StuckProgramError:
            print("stuck")
        for thread in launching:
            thread.join(100)
            print("the thread has ended:", not thread.is_alive())
        strategy = replica_engine.TPUStrategy(num_cores=2)
        print([float(each) for each in strategy.run(lambda: xla.cross_replica_sum(1.0)).values])
        print("done", flush=True)
        os._exit(0)
        """,
    )
    assert lines[:2] == ["interrupted", "stuck"]
    assert lines[-3:] == ["[2.0, 2.0]", "done", ""]
    assert lines[2:-3] == ["the thread has ended: True"] * (timeout is not None)
    assert "The replicas of `stuck` may wait for each other forever." in stderr
    assert "The compiled program of `stuck` has been running on 2 replicas" in stderr
    table = stderr.partition("The cross-replica operations of the program:\n")[2]
    assert re.match(r"  all_reduce at .* in stuck \(perhaps not all replicas reach it\)\n", table)


def test_a_collective_that_takes_long_does_not_end_the_process(programs):
    """XLA's own limit is 40 s, and a flag of jaxlib's: read with ours in it, and then put back."""
    lines, _ = run_program(
        programs,
        """
        from replica_engine.pjrt.jaxlib import CompileOptions

        print(os.environ.get("XLA_FLAGS"))
        print(bytes([0xC0, 0x84, 0x3D]) in CompileOptions().SerializeAsString())  # a protocol buffer's 1,000,000
        """,
    )
    assert lines[:2] == ["None", "True"]


def test_a_limit_that_the_user_chose_is_kept(programs):
    """So it is this limit that ends a process."""
    process = start(
        programs,
        """
        def stuck():
            x = tf.zeros([])
            if xla.replica_id() == 0 and steps < 1.0:  # only in part known before the run
                x = xla.cross_replica_sum(x)
            return x

        strategy.run(stuck)
        """,
        flags=" ".join(f"--xla_cpu_collective_call_{each}_timeout_seconds=1" for each in ("warn_stuck", "terminate")),
    )
    try:
        _, errors = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGABRT
    assert "Termination timeout" in errors
