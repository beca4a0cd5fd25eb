"""Moved ops keep the order of the program, in loops and their conditions; odd shapes, functions and writers."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of, on_two, plain
from helpers.summaries import summaries

from replica_engine import xla
from replica_engine.errors import LoweringError


class TestOrder:
    def test_effects_on_other_values_keep_theirs(self):
        seen = collections.defaultdict(list)

        def body(x):
            text = tf.strings.as_string(x)
            tf.py_function(lambda text: seen[0].append(text.numpy()), [text], [])
            tf.py_function(lambda: seen[0].append(2), [], [])
            tf.py_function(lambda text: seen[0].append(text.numpy()), [text], [])
            return x

        xla.replicate(body, [[tf.constant(7)]])
        assert seen[0] == [b"7", 2, b"7"]

    def test_a_table_is_read_after_it_was_written(self):
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)

        def body(x):
            key = tf.strings.as_string(x)
            before = table.lookup(key)
            table.insert(key, tf.cast(x, tf.int64))
            return before, table.lookup(key)

        assert on_two(body, [3, 5]) == [(0, 3), (0, 5)]

    def test_host_calls_of_the_users_have_their_place_in_a_loop(self):
        seen = []

        def body(x):
            for number in tf.range(2):
                tf.py_function(lambda n: seen.append(("before", int(n))), [number], [])
                xla.outside_compilation(note, number)
                tf.py_function(lambda n: seen.append(("after", int(n))), [number], [])
            return x

        def note(number):
            seen.append(("between", int(number)))

        xla.replicate(body, [[tf.constant(1.0)]])
        assert seen == [(name, number) for number in range(2) for name in ("before", "between", "after")]

    def test_functions_with_ops_of_the_same_name(self):
        @tf.function
        def parts(text):
            upper = tf.strings.upper(text)
            return tf.strings.lower(upper), tf.strings.length(text) * 2

        assert on_two(lambda text: parts(tf.strings.lower(text)), ["Ab", "CDE"]) == [(b"ab", 4), (b"cde", 6)]


class TestConditionsOfLoops:
    def test_a_check_in_one_is_made(self):
        def goes_on(number):
            tf.debugging.assert_less(number, 2)
            return number < 4

        with pytest.raises(tf.errors.InvalidArgumentError):
            on_two(lambda x: tf.while_loop(goes_on, lambda number: [number + 1], [x])[0], [0, 0])

    def test_what_one_prints_is_printed(self):
        seen = []

        def goes_on(number):
            tf.py_function(lambda number: seen.append(int(number)), [number], [])
            return number < 2

        xla.replicate(lambda x: tf.while_loop(goes_on, lambda number: [number + 1], [x])[0], [[tf.constant(0)]])
        assert seen == [0, 1, 2]

    def test_a_python_function_ends_a_loop(self):
        goes_on = lambda number: tf.py_function(lambda number: bool(10 / float(number) > 2), [number], tf.bool)  # noqa: E731
        assert on_two(lambda x: tf.while_loop(goes_on, lambda number: [number + 1.0], [x])[0], [1.0, 4.0]) == [5.0, 5.0]


class TestShapes:
    def test_what_is_cut_out_outside_of_a_branch_that_prints_it(self):
        def body(x):
            found = tf.where(x > 0)
            tf.cond(x[0] > 0, lambda: tf.print(found), tf.no_op)
            return x

        assert on_two(body, [[1, 0], [0, 1]]) == [[1, 0], [0, 1]]

    def test_shares_of_different_sizes(self, two):
        dataset = tf.data.Dataset.from_tensor_slices(list("abcde")).batch(4)
        found = []
        for batch in two.strategy.experimental_distribute_dataset(dataset):
            results = two.strategy.run(lambda text: (tf.strings.length(text), tf.strings.upper(text)), args=(batch,))
            pairs = zip(*map(two.strategy.experimental_local_results, results), strict=True)
            found += [plain(each) for pair in pairs for each in pair]
        assert found == [[1, 1], [b"A", b"B"], [1, 1], [b"C", b"D"], [1], [b"E"], [], []]

    def test_shares_of_different_sizes_in_python(self, two):
        dataset = tf.data.Dataset.from_tensor_slices(tf.range(3.0)).batch(3)
        (batch,) = two.strategy.experimental_distribute_dataset(dataset)
        results = two.strategy.run(lambda x: tf.py_function(lambda x: x * 2.0, [x], tf.float32), args=(batch,))
        assert [plain(each) for each in results.values] == [[0.0, 2.0], [4.0]]

    def test_columns_that_a_separator_makes(self):
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["x", "y"], [1, 2]), 0)
        body = lambda text: tf.reduce_sum(table.lookup(tf.strings.split(text, sep="|")).to_tensor(), axis=1)  # noqa: E731
        assert on_two(body, [["x|y", "y"], ["y|y|x", "z"]]) == [[3, 2], [5, 0]]

    @pytest.mark.parametrize("separator", [None, "|", " and "])
    def test_padded_words_meet_on_the_devices(self, separator):
        def body(text):
            words = tf.strings.split(text, sep=separator).to_tensor(shape=[None, 3])
            return xla.all_gather(tf.strings.length(words))

        texts = [(separator or " ").join(words) for words in (["a", "bb"], ["c"], [""], ["a", "b", "c", "d"])]
        assert on_two(body, [texts[:2], texts[2:]]) == [[[1, 2, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]] * 2

    def test_lists_of_strings_and_of_numbers(self):
        def body(x):
            texts = tf.TensorArray(tf.string, 2).write(0, tf.strings.as_string(x)).write(1, "b")
            numbers = tf.TensorArray(tf.float32, 2).write(0, 1.0).write(1, 2.0)
            return texts.stack(), numbers.stack()

        assert on_two(body, [1, 2]) == [([b"1", b"b"], [1.0, 2.0]), ([b"2", b"b"], [1.0, 2.0])]
        alone = lambda x: tf.TensorArray(tf.float32, 2).write(0, x).write(1, x).stack()  # noqa: E731
        assert xla.lower(alone, [[1.0], [2.0]]).host_calls == ()


class TestShapesOfPythonFunctions:
    @pytest.fixture(params=[tf.numpy_function, tf.py_function])
    def positive(self, request):
        return lambda x: request.param(lambda x: x[x > 0], [x], tf.float32)

    def test_one_that_is_returned_may_be_another_each_time(self, positive):
        body = lambda x: {"found": positive(x), "twice": x * 2.0, "again": tf.identity(positive(-x))}  # noqa: E731
        assert on_two(body, [[1.0, 2.0], [-3.0, 4.0]]) == [
            {"found": [1.0, 2.0], "twice": [2.0, 4.0], "again": []},
            {"found": [4.0], "twice": [-6.0, 8.0], "again": [3.0]},
        ]

    def test_one_that_is_returned_is_not_tried(self):
        seen = []
        body = lambda x: tf.numpy_function(lambda x: seen.append(float(x)) or x, [x], tf.float32)  # noqa: E731
        assert on_two(body, [1.0, 2.0]) == [1.0, 2.0]
        assert sorted(seen) == [1.0, 2.0]

    def test_one_that_the_body_ensures(self, positive):
        def body(x):
            for _ in tf.range(2):
                x = tf.ensure_shape(positive(x), [2]) * 2.0
            return xla.all_gather(tf.ensure_shape(positive(x - 4.0), [1]))

        assert on_two(body, [[1.0, 2.0], [0.5, 3.0]]) == [[4.0, 8.0]] * 2

    def test_one_that_the_body_sets_among_several(self):
        def body(x):
            found, count = tf.numpy_function(lambda x: (x[x > 0], np.sum(x > 0)), [x], [tf.float32, tf.int64])
            found.set_shape([1])
            return found * 2.0, count + 1

        assert on_two(body, [[1.0, 0.0], [0.0, 3.0]]) == [([2.0], 2), ([6.0], 2)]


class TestOddPythonFunctions:
    def test_one_that_declares_no_results(self):
        seen = []
        on_two(lambda x: (tf.numpy_function(lambda x: seen.append(float(x)), [x], []) and None) or x, [1.0, 2.0])
        assert sorted(seen) == [1.0, 2.0]

    def test_one_that_returns_more_than_it_declares(self):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"2 values, and Tout declares 1"):
            on_two(lambda x: tf.ensure_shape(tf.numpy_function(lambda x: [x, x], [x], [tf.float32])[0], []), [1.0, 2.0])

    def test_gradients_of_two_calls_of_one_function_are_refused(self):
        @tf.function
        def squared(x):
            y = tf.py_function(lambda x: x**2, [x], tf.float32)
            y.set_shape([])
            return y

        body = gradient_of(lambda x: squared(x) + squared(10.0 * x))
        with pytest.raises(LoweringError, match="called more than once"):
            on_two(body, [1.0, 2.0])


def test_a_writer_that_a_body_names_is_not_that_of_the_caller(two, tmp_path):
    named, others = (tf.summary.create_file_writer(str(tmp_path / name)) for name in ("named", "others"))

    def body(x):
        with named.as_default(step=0):
            tf.summary.scalar("x", x)

    for writer in (named, others):
        with writer.as_default(step=1):
            two.strategy.run(body, args=(tf.constant(1.0),))
    named.close()
    others.close()
    assert [len(summaries(tmp_path / name)) for name in ("named", "others")] == [2, 0]
