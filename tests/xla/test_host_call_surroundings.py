"""What only the host has, in host calls: strings, tables, files, summaries and its own variables."""

import threading

import pytest
import tensorflow as tf
from helpers.host_work import on_two, values
from helpers.summaries import summaries

from replica_engine import xla

TABLE = {0: 0, 1: 10, 2: 20}


def of_a_table(x):
    initializer = tf.lookup.KeyValueTensorInitializer(list(TABLE), list(TABLE.values()))
    return tf.lookup.StaticHashTable(initializer, -1).lookup(x)


@pytest.mark.parametrize(
    "fn",
    [
        of_a_table,
        lambda x: tf.py_function(lambda x: TABLE[int(x)], [x], tf.int32),
        lambda x: tf.strings.to_number(tf.strings.join([tf.strings.as_string(x), "0"]), tf.int32),
        lambda x: tf.size(tf.where(tf.range(1000) < x * 10)),
    ],
    ids=["lookup", "py_function", "strings", "where"],
)
def test_ops_of_the_host_work(fn):
    def body(x):
        declared = xla.returns(tf.TensorSpec([], tf.int32))(fn)
        return tf.reshape(xla.outside_compilation(declared, x), []) + 1

    assert values(on_two(body, 1, 2)) == [11, 21]


def test_a_table_of_the_program_can_be_asked():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([10, 20]))
    table = tf.lookup.StaticHashTable(initializer, -1)
    assert values(on_two(lambda x: xla.outside_compilation(table.lookup, x), 2, 3)) == [20, -1]


def test_files_can_be_read_and_written(tmp_path):
    def count(x):
        path = str(tmp_path / f"{int(xla.replica_id())}")
        tf.io.write_file(path, tf.io.read_file(path) + "x" if tf.io.gfile.exists(path) else "")
        return tf.strings.length(tf.io.read_file(path)) + x

    count = xla.returns(tf.TensorSpec([], tf.int32))(count)

    def body(x):
        for _ in tf.range(3):
            x = xla.outside_compilation(count, x)
        return x

    assert values(on_two(body, 10, 20)) == [13, 23]


def test_printing_works(tmp_path, run):
    path = tmp_path / "printed"

    def body(x):
        for i in tf.range(2):
            xla.outside_compilation(tf.print, "replica", x, "step", i, output_stream=f"file://{path}")
        xla.outside_compilation(lambda: tf.print("done", x, output_stream=f"file://{path}"))

    run(body, 1.0, 2.0)
    lines = path.read_text().splitlines()
    for x in (1, 2):
        own = [line for line in lines if str(x) in line.split()[1]]
        assert own == [f"replica {x} step 0", f"replica {x} step 1", f"done {x}"]


def scalars(directory):
    """(tag, step, value) of all scalars in the event files of a directory, in order."""
    return [(each.tag, step, float(tf.make_ndarray(each.tensor))) for step, each in summaries(directory)]


def test_summaries_are_written(tmp_path, run):
    def log(x, step):
        tf.summary.scalar(f"loss/{int(xla.replica_id())}", x, step=step)

    def body(x):
        for i in tf.range(3, dtype=tf.int64):
            x *= 10.0
            xla.outside_compilation(log, x, i)
        return x

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        run(body, 1.0, 2.0)
    run(body, 7.0, 7.0)  # to no writer
    found = scalars(tmp_path)
    for replica, x in enumerate([1.0, 2.0]):
        expected = [(f"loss/{replica}", i, x * 10 ** (i + 1)) for i in range(3)]
        assert [each for each in found if each[0] == f"loss/{replica}"] == expected
    assert len(found) == 6


def test_summaries_take_the_step_and_the_condition_around_the_run(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    body = lambda x: xla.outside_compilation(lambda x: tf.summary.scalar("loss", x), x)  # noqa: E731
    with writer.as_default(step=tf.constant(7, tf.int64)):
        xla.replicate(body, [[tf.constant(1.0)]])
        with tf.summary.record_if(False):
            xla.replicate(body, [[tf.constant(2.0)]])
    with writer.as_default(step=8):
        xla.replicate(body, [[tf.constant(3.0)]])
    writer.close()
    assert scalars(tmp_path) == [("loss", 7, 1.0), ("loss", 8, 3.0)]


def test_a_writer_can_be_entered_in_the_function(tmp_path):
    writers = [tf.summary.create_file_writer(str(tmp_path / str(i))) for i in range(2)]

    def log(x):
        with writers[int(xla.replica_id())].as_default(step=5):
            tf.summary.scalar("loss", x)

    on_two(lambda x: xla.outside_compilation(log, x))
    for i, writer in enumerate(writers):
        writer.close()
        assert scalars(tmp_path / str(i)) == [("loss", 5, 1.0 + i)]
    assert tf.summary.experimental.get_step() is None


def test_variables_of_the_host_are_read_and_written(run):
    total = tf.Variable(0.0)
    factor = tf.Variable(3.0)

    def add(x):
        total.assign_add(x)

    def body(x):
        xla.outside_compilation(add, x)
        return xla.outside_compilation(lambda x: x * factor, x)

    assert values(run(body, 1.0, 2.0)) == [3.0, 6.0]
    factor.assign(10.0)
    assert values(run(body, 1.0, 2.0)) == [10.0, 20.0]
    assert total.numpy() == 6.0


def test_a_variable_that_the_body_writes_arrives_as_its_value():
    """In `xla.replicate` any variable is on the devices while the body runs."""
    variable = tf.Variable(1.0)

    def body(x):
        variable.assign_add(x)
        return xla.outside_compilation(lambda value: value * 10.0, variable)

    assert values(on_two(body)) == [20.0, 30.0]


def test_a_variable_made_in_them_is_one_of_the_host(run):
    made, lock = [], threading.Lock()

    def add(x):
        with lock:
            if not made:
                made.append(tf.Variable(0.0))
        made[0].assign_add(x)

    for _ in range(2):
        run(lambda x: xla.outside_compilation(add, x), 1.0, 2.0)
    assert type(made[0]) is type(tf.Variable(0.0))
    assert made[0].numpy() == 6.0
