"""A launch on CPU devices gets the memory of the one before it, in a process with a dataset of Python code too."""

import sys
import textwrap

import pytest

# A launch has buffers of 8 MiB: 2,048 pages each.
PROGRAM = """
    import resource
    import tensorflow as tf
    import replica_engine

    def batches():
        yield tf.ones([1 << 20, 2])

    data = tf.data.Dataset.from_generator(batches, output_signature=tf.TensorSpec([1 << 20, 2], tf.float32))
    (batch,) = data
    strategy = replica_engine.TPUStrategy(num_cores=2)

    def faults_of(launches):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(launches):
            strategy.run(lambda x: tf.reduce_sum(tf.sort(x + 1.0)), (batch,))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults_of(10)
    print(faults_of(20) // 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of glibc")
def test_no_launch_maps_its_buffers_anew(programs):
    assert int(programs.run(textwrap.dedent(PROGRAM)).stdout) < 1000
