"""What no device computes (strings, summaries, prints, Python) works in a body, with every strategy."""

import numpy as np
import pytest
import tensorflow as tf


def written(path):
    """(step, tag, value) of each summary; of anything but a single number the shape."""
    found = []
    for file in sorted(path.iterdir()):
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                array = tf.make_ndarray(value.tensor)
                found.append((event.step, value.tag, array.item() if array.size == 1 else array.shape))
    return found


def test_strings_in_the_middle(run, local):
    def fn(x):
        return tf.strings.to_number(tf.strings.join([tf.strings.as_string(x), "5"]))

    assert set(local(run(fn, args=(tf.constant(7),)))) == {75.0}


def test_strings_in_and_out(run, local):
    def fn(text):
        return {"upper": tf.strings.upper(text), "length": tf.strings.length(text)}

    for result in local(run(fn, args=(tf.constant("abc"),))):
        assert result == {"upper": b"ABC", "length": 3}


def test_a_python_function(run, local):
    def fn(x):
        y = tf.numpy_function(lambda x: np.sort(x), [x], tf.float32)
        return tf.ensure_shape(y, [3]) * 2.0

    for result in local(run(fn, args=(tf.constant([3.0, 1.0, 2.0]),))):
        assert result == [2.0, 4.0, 6.0]


def test_a_failed_check_is_an_error(run):
    def fn(x):
        tf.debugging.assert_positive(x, message="must be positive")
        return tf.debugging.check_numerics(tf.math.log(x), "log")

    run(fn, args=(tf.constant(1.0),))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
        run(fn, args=(tf.constant(-1.0),))


def test_a_check_that_passes_is_one_again_after_one_that_failed(strategy, local):
    fn = lambda x: tf.debugging.check_numerics(1.0 / x, "inverse")  # noqa: E731
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="inverse"):
            strategy.run(fn, args=(tf.constant(0.0),))
        assert set(local(strategy.run(fn, args=(tf.constant(2.0),)))) == {0.5}


class TestSummaries:
    def test_they_go_to_the_writer_and_the_step_of_each_caller(self, strategy, tmp_path):
        def fn(x):
            tf.summary.scalar("x", x)
            return x

        for name in ("first", "second"):
            writer = tf.summary.create_file_writer(str(tmp_path / name))
            for step in range(2):
                with writer.as_default(step=step):
                    strategy.run(fn, args=(tf.constant(10.0 + step),))
            writer.close()
        strategy.run(fn, args=(tf.constant(0.0),))  # no writer, no summary
        for name in ("first", "second"):
            assert written(tmp_path / name) == [(0, "x", 10.0), (1, "x", 11.0)]

    def test_every_kind_in_a_function(self, strategy, tmp_path):
        writer = tf.summary.create_file_writer(str(tmp_path))

        def fn(x):
            tf.summary.scalar("scalar", x[0])
            tf.summary.histogram("histogram", x)
            tf.summary.image("image", tf.reshape(x, [1, 2, 2, 1]))
            tf.summary.text("text", tf.strings.as_string(x[1], precision=1))

        @tf.function
        def step(x, number):
            with writer.as_default(step=number):
                strategy.run(fn, args=(x,))

        for number in range(2):
            step(tf.constant([0.5, 0.25, 0.75, 1.0]), tf.constant(number, tf.int64))
        writer.close()
        each = [("scalar", 0.5), ("histogram", (30, 3)), ("image", (3,)), ("text", b"0.2")]
        assert written(tmp_path) == [(number, *one) for number in range(2) for one in each]

    def test_only_every_third_step(self, strategy, tmp_path):
        with strategy.scope():
            steps = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
        writer = tf.summary.create_file_writer(str(tmp_path))

        def fn():
            with tf.summary.record_if(lambda: steps % 3 == 0):
                tf.summary.scalar("steps", tf.cast(steps, tf.float32), step=steps)
            steps.assign_add(1)

        with writer.as_default():
            for _ in range(5):
                strategy.run(fn)
        writer.close()
        assert written(tmp_path) == [(0, "steps", 0.0), (3, "steps", 3.0)]

    def test_recording_off_is_off_and_on_again(self, strategy, tmp_path):
        writer = tf.summary.create_file_writer(str(tmp_path))

        def fn(x):
            tf.summary.scalar("x", x, step=1)

        with writer.as_default():
            for recording in (True, False, True):
                with tf.summary.record_if(recording):
                    strategy.run(fn, args=(tf.constant(2.0),))
        writer.close()
        assert written(tmp_path) == [(1, "x", 2.0)] * 2
