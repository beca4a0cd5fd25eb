"""How many threads TensorFlow gets: as many as it makes itself, and more where compiled programs are launched."""

import os
import subprocess
import sys
import textwrap

import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

from replica_engine.process import cores, setup

LAUNCHES_WITH_HOST_CALLS = """
    import faulthandler, os, threading
    faulthandler.dump_traceback_later(280, exit=True)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as on a machine with one core
    import tensorflow as tf
    import replica_engine
    from replica_engine import xla

    if {started}:
        tf.constant(1.0)
    strategy = replica_engine.TPUStrategy(num_cores=2)

    @tf.function
    def on_the_host(x):
        for _ in tf.range(3):
            x += 1.0
        return x

    called = xla.returns(tf.TensorSpec([], tf.float32))(lambda x: on_the_host(x))

    def steps():
        @tf.function
        def step(x):
            return strategy.reduce("SUM", strategy.run(lambda y: xla.outside_compilation(called, y), args=(x,)), None)

        assert all(step(tf.constant(1.0)) == 8.0 for _ in range(5))

    threads = [threading.Thread(target=steps) for _ in range({users})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done with", os.environ["TF_NUM_INTEROP_THREADS"])
"""


def environment(**more):
    return {**{name: value for name, value in os.environ.items() if name != setup.VARIABLE}, **more}


def run(source, **more):
    program = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(program, capture_output=True, text=True, timeout=300, env=environment(**more), check=False)


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
@pytest.mark.parametrize(("started", "users", "threads"), [(True, 1, 2), (False, 3, 16)])
def test_launches_inside_functions_leave_threads_for_what_they_call(programs, started, users, threads):
    source = LAUNCHES_WITH_HOST_CALLS.replace("{started}", str(started)).replace("{users}", str(users))
    result = programs.run(textwrap.dedent(source), env=environment(), timeout=300)
    assert result.stdout == f"done with {threads}\n", result.stderr[-3000:]


def test_threads_of_replicas_need_no_more_than_there_are(programs):
    source = """
        import os
        import replica_engine
        replica_engine.MirroredStrategy(replica_engine.logical_devices(4))
        print(os.environ.get("TF_NUM_INTEROP_THREADS"))
    """
    result = programs.run(textwrap.dedent(source), env=environment(), timeout=300)
    enough = cores() >= setup.FOR_ONE_LAUNCH
    assert result.stdout == ("None\n" if enough else f"{setup.FOR_ONE_LAUNCH}\n"), result.stderr[-2000:]


def test_a_number_that_the_user_chose_is_kept():
    source = """
        import os
        import replica_engine
        replica_engine.process.setup.make_room(replica_engine.process.setup.FOR_LAUNCHES)
        print(os.environ["TF_NUM_INTEROP_THREADS"])
    """
    assert run(source, TF_NUM_INTEROP_THREADS="5").stdout == "5\n"


def test_only_cores_that_the_process_may_use_count():
    source = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        import replica_engine
        print(os.environ["TF_NUM_INTEROP_THREADS"])
    """
    assert run(source).stdout == f"{setup.FOR_ONE_LAUNCH}\n"


@pytest.mark.parametrize(("value", "said"), [(None, 0), ("0", 1)])
def test_a_variable_of_an_earlier_release_is_warned_of(value, said):
    more = {} if value is None else {"REPLICA_ENGINE_QUICK_SCOPES": value}
    ended = run("import replica_engine", **more)
    assert ended.returncode == 0
    assert ended.stderr.count("REPLICA_ENGINE_QUICK_SCOPES has no effect any more") == said
