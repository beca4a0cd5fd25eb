"""Distributed datasets and the threads that they need."""

import functools
import logging
import os
import subprocess
import sys
import textwrap

import pytest

from replica_engine import startup

DATASET_IN_A_FUNCTION = """
    import os, sys
    import tensorflow as tf
    import replica_engine
    from replica_engine.testing import logical_devices

    strategy = replica_engine.MirroredStrategy(logical_devices({n}))
    dataset = tf.data.Dataset.range({n} * 100).map(lambda x: tf.cast(x, tf.float32)).batch(4 * {n})
    distributed = strategy.experimental_distribute_dataset(dataset)

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))

    @tf.function
    def epoch():
        total = 0.0
        for batch in distributed:
            total += strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]
        return total

    assert all(float(epoch()) == sum(range({n} * 100)) for _ in range(3))
    print("threads", os.environ["TF_NUM_INTEROP_THREADS"])
"""


@pytest.fixture
def run(tmp_path):
    """Runs a program in a process of its own; from a file, for AutoGraph reads the source."""
    return functools.partial(_run, tmp_path / "program.py")


def _run(path, code, **environment):
    path.write_text(textwrap.dedent(code))

    return subprocess.run(
        [sys.executable, path],
        capture_output=True,
        text=True,
        timeout=110,
        env=_environment(**environment),
        check=False,
    )


def _environment(**more):
    return {**{k: v for k, v in os.environ.items() if k != startup.VARIABLE}, **more}


@pytest.fixture
def run_warm(programs):
    """The same for a program that imports TensorFlow before this library: there it is imported already."""
    return lambda code: programs.run(textwrap.dedent(code), env=_environment(), timeout=110)


@pytest.mark.parametrize(("n", "threads"), [(2, 16), (16, 18)])
def test_a_dataset_inside_a_function_does_not_hang(run_warm, n, threads):
    result = run_warm(DATASET_IN_A_FUNCTION.replace("{n}", str(n)))
    assert result.stdout == f"threads {threads}\n", result.stderr[-2000:]
    assert "can hang" not in result.stderr


def test_a_number_that_the_user_chose_is_kept(run):
    result = run("import os, replica_engine; print(os.environ['TF_NUM_INTEROP_THREADS'])", TF_NUM_INTEROP_THREADS="5")
    assert result.stdout == "5\n"


def test_when_it_comes_too_late_it_is_said(run_warm):
    result = run_warm("""
        import tensorflow as tf
        tf.config.threading.set_inter_op_parallelism_threads(2)
        tf.constant(1.0)
        import replica_engine
        strategy = replica_engine.MirroredStrategy([tf.config.list_logical_devices("CPU")[0].name])
        strategy.experimental_distribute_dataset(tf.data.Dataset.range(4))  # one device: nothing to say
        from replica_engine.startup import warn_if_cramped
        warn_if_cramped(2, tf.config.threading.get_inter_op_parallelism_threads())
    """)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stderr.count("can hang") == 1
    assert "set_inter_op_parallelism_threads(4)" in result.stderr


def test_a_number_that_is_none_is_passed_over(monkeypatch):
    monkeypatch.setenv(startup.VARIABLE, "many")
    startup.warn_if_cramped(4, 0)


def test_only_cores_that_the_process_may_use_count(run):
    code = "import replica_engine; from replica_engine.startup import _cores; print(_cores())"
    pinned = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert run(pinned + code).stdout == "1\n"


@pytest.mark.parametrize(("replicas", "chosen", "warns"), [(4, 2, True), (4, 6, False), (1, 1, False)])
def test_the_warning_counts_threads(caplog, replicas, chosen, warns):
    with caplog.at_level(logging.WARNING, "replica_engine"):
        startup.warn_if_cramped(replicas, chosen)
    assert bool(caplog.records) == warns
