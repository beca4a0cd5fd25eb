"""A launch on CPU devices gets the memory that the one before it freed."""

import os
import sys
import textwrap

import pytest

PROGRAM = """
    import resource, sys
    import tensorflow as tf
    import replica_engine

    if sys.argv[1] == "with a dataset of Python code":  # with which TensorFlow lowers a limit of the allocator
        (_,) = tf.data.Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([], tf.float32))
    value = tf.ones([int(sys.argv[2]) << 17, 2])  # so many MiB in all, half of them on each device
    strategy = replica_engine.TPUStrategy(num_cores=2)

    def faults_of(launches):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(launches):
            strategy.run(lambda x: tf.reduce_sum(tf.sort(x + 1.0)), (value,))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults_of(6)
    print(faults_of(4) // 4)
"""


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of glibc")


@pytest.mark.parametrize(
    ("before", "size"),
    [
        ("with a dataset of Python code", 8),
        pytest.param("with nothing", 48, marks=pytest.mark.full("the same limits, without what makes them matter")),
    ],
)
def test_no_launch_maps_its_buffers_anew(programs, before, size):
    """A buffer has a page fault for each of its pages, of 4 kB, if it is mapped anew."""
    assert int(programs.run(textwrap.dedent(PROGRAM), before, size).stdout) < size * 128


@pytest.mark.full("two processes each")
@pytest.mark.parametrize("chosen", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_limits_that_the_environment_sets_stay(programs, chosen):
    env = {**os.environ, chosen: "glibc.malloc.trim_threshold=131072" if chosen == "GLIBC_TUNABLES" else "131072"}
    done = programs.run(textwrap.dedent(PROGRAM), "with a dataset of Python code", 8, env=env)
    assert int(done.stdout) > 8 * 128
