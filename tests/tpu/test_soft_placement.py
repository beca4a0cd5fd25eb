"""Ops that XLA cannot compile run on the host by themselves, in the program's order, once on each replica."""

import collections
import logging

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import Failing
from helpers.loop_steps import at_once
from helpers.on_two import gradient_of, on_two
from helpers.summaries import summaries

from replica_engine import TPUStrategy, xla
from replica_engine.errors import InputsError, LoweringError


@pytest.fixture
def logged(caplog):
    """`logged()`: what was logged about ops on the host."""
    caplog.set_level(logging.INFO, logger="replica_engine")
    return lambda: [record.getMessage() for record in caplog.records if "cannot compile all of" in record.getMessage()]


class TestStrings:
    def test_numbers_become_strings_and_numbers_again(self):
        assert on_two(lambda x: tf.strings.length(tf.strings.as_string(x)) * 10, [7, 1234]) == [10, 40]

    def test_they_come_in_as_arguments(self):
        body = lambda text: tf.strings.to_number(text) * 2.0  # noqa: E731
        assert on_two(body, [tf.constant(["1", "2"]), tf.constant(["3.5", "0"])]) == [[2.0, 4.0], [7.0, 0.0]]

    def test_they_go_out_as_results_beside_numbers(self):
        def body(x):
            text = tf.strings.as_string(x)
            return {"text": text, "next": x + 1, "parts": tf.strings.split(text, "1")}

        assert on_two(body, [512, 713]) == [
            {"text": b"512", "next": 513, "parts": [b"5", b"2"]},
            {"text": b"713", "next": 714, "parts": [b"7", b"3"]},
        ]

    @pytest.mark.parametrize("size", [7, 1])
    def test_a_branch_chooses_one(self, size):
        def body(x):
            text = tf.strings.as_string(x)
            return tf.strings.length(tf.cond(x > 5, lambda: text, lambda: tf.constant("small")))

        assert on_two(body, [size, size]) == [1 if size > 5 else 5] * 2

    def test_a_choice_among_many_is_one(self):
        def body(x):
            text = tf.strings.as_string(x)
            return tf.switch_case(x, [lambda: tf.constant("a"), lambda: text, lambda: tf.constant("three")])

        assert on_two(body, [0, 2]) == [b"a", b"three"]

    def test_two_that_change_places_in_a_loop(self):
        def body(x):
            one, other = tf.constant("a"), tf.constant("bc")
            for _ in tf.range(x):
                one, other = other, one
            return one, other

        assert on_two(body, [2, 3]) == [(b"a", b"bc"), (b"bc", b"a")]

    def test_ragged_ones(self):
        def body(text):
            words = tf.strings.split(text)
            return words.row_lengths(), tf.strings.reduce_join(words, axis=-1)

        texts = [tf.constant(["a b", "c"]), tf.constant(["d", "e f g"])]
        assert on_two(body, texts) == [([2, 1], [b"ab", b"c"]), ([1, 3], [b"d", b"efg"])]

    @pytest.mark.parametrize("count", [1, 4])
    def test_the_words_of_some_texts_on_each_replica(self, count):
        """Of one text, and of four."""
        body = lambda text: tf.strings.length(tf.strings.split(text)).to_tensor(shape=[count, 3])  # noqa: E731
        expected = [[[1, 2, 0]] * count, [[1, 1, 3]] * count]
        assert on_two(body, [tf.constant(["a bc"] * count), tf.constant(["d e fgh"] * count)]) == expected

    def test_a_variable_of_strings(self):
        variable = tf.Variable("abc")
        assert on_two(lambda: tf.strings.length(variable)) == [3, 3]

    def test_they_are_on_the_host_while_numbers_meet_on_the_devices(self):
        def body(x):
            length = tf.strings.length(tf.strings.as_string(x))
            return xla.cross_replica_sum(length), tf.strings.as_string(xla.cross_replica_sum(x))

        assert on_two(body, [7, 1234]) == [(5, b"1241")] * 2


class TestTables:
    def test_a_vocabulary(self):
        words = tf.lookup.KeyValueTensorInitializer(tf.constant(["a", "b"]), tf.constant([1, 2]))
        table = tf.lookup.StaticHashTable(words, -1)
        body = lambda text: table.lookup(text) * 10  # noqa: E731
        assert on_two(body, [tf.constant(["a", "c"]), tf.constant(["b", "a"])]) == [[10, -10], [20, 10]]

    def test_one_that_a_body_writes(self):
        table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)

        def body(x):
            table.insert(tf.strings.as_string(x), tf.cast(x, tf.int64))
            return table.lookup(tf.strings.as_string(x))

        assert on_two(body, [3, 5]) == [3, 5]
        assert int(table.size()) == 2


class TestPython:
    def test_a_function_need_not_declare_its_shape(self):
        def body(x):
            one = tf.py_function(lambda x: x * 2.0, [x], tf.float32)
            other = tf.numpy_function(lambda x: x * 3.0, [x], tf.float32)
            return one + 1.0, other

        assert on_two(body, [[1.0, 2.0], [3.0, 4.0]]) == [([3.0, 5.0], [3.0, 6.0]), ([7.0, 9.0], [9.0, 12.0])]

    def test_calls_keep_the_order_of_the_program_and_happen_once_a_replica(self):
        seen = collections.defaultdict(list)

        def body(x):
            for number in range(3):
                tf.py_function(lambda x, number=number: seen[int(x)].append(number), [x], [])
            xla.outside_compilation(note, x)
            for number in tf.range(4, 6):
                tf.py_function(lambda x, number: seen[int(x)].append(int(number)), [x, number], [])

        def note(x):
            seen[int(x)].append(3)

        on_two(body, [10, 20])
        assert seen == {10: [0, 1, 2, 3, 4, 5], 20: [0, 1, 2, 3, 4, 5]}

    def test_a_function_knows_which_replica_calls(self):
        seen = set()
        body = lambda: tf.py_function(lambda: seen.add(int(xla.replica_id())), [], [])  # noqa: E731
        on_two(lambda: body() and None)
        assert seen == {0, 1}

    def test_gradients_go_through_it(self):
        body = gradient_of(lambda x: tf.py_function(lambda x: x**3, [x], tf.float32) * 2.0)
        assert on_two(body, [2.0, 3.0]) == [24.0, 54.0]

    def test_gradients_go_through_it_in_a_loop(self):
        def body(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = x
                for _ in tf.range(3):
                    y = tf.py_function(lambda y: y * y, [y], tf.float32)
                    y.set_shape([])
            return tape.gradient(y, x)

        assert on_two(body, [1.5, 1.0]) == pytest.approx([8 * 1.5**7, 8.0])

    def test_an_exception_keeps_its_type_and_nothing_is_written(self, two):
        def fail(x):
            raise Failing("on purpose")

        with two.strategy.scope():
            variable = tf.Variable(1.0)

        def body(x):
            variable.assign_add(x)
            tf.py_function(fail, [x], [])  # here

        with pytest.raises(Failing, match="on purpose") as raised:
            two.strategy.run(body, args=(tf.constant(2.0),))
        assert "of 2, CPU:" in raised.value.__notes__[0]  # of the replica that came first
        assert "in EagerPyFunc at" in raised.value.__notes__[0]
        assert __file__ in raised.value.__notes__[0]
        assert float(variable) == 1.0
        two.strategy.run(lambda x: variable.assign_add(x), args=(tf.constant(2.0),))
        assert float(variable) == 3.0


class TestChecks:
    def test_an_assertion_that_holds_calls_nobody(self):
        def body(x):
            tf.debugging.assert_greater(x, 1.0)
            return x * 2.0

        assert on_two(body, [2.0, 3.0]) == [4.0, 6.0]

    @pytest.mark.parametrize("check", ["assert_greater", "Assert"])
    def test_an_assertion_that_fails_says_what_and_on_which_replica(self, check):
        def body(x):
            if check == "Assert":
                tf.debugging.Assert(x > 2.0, ["it is", x])
            else:
                tf.debugging.assert_greater(x, 2.0, message="it is")
            return x

        with pytest.raises(tf.errors.InvalidArgumentError, match=r"it is.*\[1\]") as raised:
            on_two(body, [3.0, 1.0])
        assert "replica 1 of 2, CPU:1, in Assert at" in raised.value.__notes__[0]

    def test_a_nan_does_not_pass(self):
        body = lambda x: tf.debugging.check_numerics(tf.math.log(x), "the logarithm") * 2.0  # noqa: E731
        assert on_two(body, [1.0, 1.0]) == [0.0, 0.0]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"the logarithm.*NaN") as raised:
            on_two(body, [2.0, -3.0])
        assert "replica 1 of 2, CPU:1, in CheckNumerics" in raised.value.__notes__[0]

    def test_a_nan_does_not_pass_in_a_gradient(self):
        def body(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.debugging.check_numerics(x, "forward") ** 2 * tf.sqrt(x)
            return tf.debugging.check_numerics(tape.gradient(y, x), "backward")

        assert on_two(body, [0.0, 4.0]) == [0.0, 20.0]  # as on one device, where nothing comes back to the root of 0
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"in gradient|backward"):
            on_two(body, [-1.0, 4.0])

    def test_the_iteration_of_a_device_loop_is_said(self, two):
        def step(context, x):
            tf.debugging.assert_less(x, 3.0)

        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            two.strategy.run_steps(step, [tf.constant(float(number)) for number in range(5)], iterations=5)
        assert "iteration 3 of the device loop" in "".join(raised.value.__notes__)


class TestNumbers:
    def test_an_op_without_a_kernel_runs_on_the_host(self):
        body = lambda x: tf.linalg.sqrtm(x) * 2.0  # noqa: E731
        assert on_two(body, [4.0 * tf.eye(2), 9.0 * tf.eye(2)]) == [
            (4.0 * tf.eye(2)).numpy().tolist(),
            [[6, 0], [0, 6]],
        ]

    def test_a_sparse_argument_becomes_dense(self):
        sparse = [tf.SparseTensor([[0, 1]], [5.0], [2, 2]), tf.SparseTensor([[1, 1]], [6.0], [2, 2])]
        assert on_two(lambda x: tf.sparse.to_dense(x) * 2.0, sparse) == [[[0, 10], [0, 0]], [[0, 0], [0, 12]]]

    def test_sparse_arguments_of_other_sizes_are_no_other_program(self):
        def dense(count):
            indices = [[row, 0] for row in range(count)]
            return on_two(sparse_sum, [tf.SparseTensor(indices, [1.0] * count, [4, 4])] * 2)

        sparse_sum = lambda x: tf.reduce_sum(tf.sparse.to_dense(x))  # noqa: E731
        assert dense(1) == [1.0, 1.0]
        before = xla.counts()
        assert dense(3) == [3.0, 3.0]
        assert (xla.counts() - before).compiles == 0

    def test_what_is_cut_out_by_data_can_be_printed(self, capfd):
        def body(x):
            tf.print("over two:", tf.boolean_mask(x, x > 2))
            return x

        on_two(body, [tf.constant([1, 2, 3]), tf.constant([4, 5, 6])])
        printed = capfd.readouterr().err
        assert "over two: [3]" in printed
        assert "over two: [4 5 6]" in printed

    def test_a_training_step_with_prints_and_checks_learns_as_without(self, capfd):
        def train(checked):
            strategy = TPUStrategy(num_cores=2)
            with strategy.scope():
                weight = tf.Variable([[0.5, -0.2], [0.1, 0.3]])

            def step(x):
                with tf.GradientTape() as tape:
                    state = tf.zeros([2, 2])
                    for time in tf.range(3):
                        state = tf.tanh(x[time] + state @ weight)
                        if checked:
                            state = tf.debugging.check_numerics(state, "state")
                            tf.print(time)
                    loss = tf.reduce_sum(state**2)
                gradient = tape.gradient(loss, weight)
                weight.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce("MEAN", gradient))

            for _ in range(3):
                strategy.run(step, args=(tf.reshape(tf.range(12.0), [3, 2, 2]) / 12.0,))
            return weight.numpy()

        np.testing.assert_allclose(train(checked=True), train(checked=False), rtol=1e-6)
        assert sorted(capfd.readouterr().err.split()) == sorted(["0", "1", "2"] * 6)


class TestWhatIsSaid:
    def test_one_line_a_body_names_the_ops_and_the_lines(self, logged):
        def body(x):
            for _ in tf.range(2):
                tf.print(x)  # here
            return tf.strings.length(tf.strings.as_string(x))

        on_two(body, [1, 2])
        on_two(body, [3, 4])
        (line,) = logged()
        assert "`body`" in line
        assert "StringFormat, PrintV2 at " in line
        assert "AsString, StringLength at " in line
        assert __file__ in line
        assert line.count("in a loop") == 1

    def test_a_program_has_it_as_data(self):
        def body(x):
            xla.outside_compilation(print, x)
            return tf.strings.length(tf.strings.as_string(x))

        written, moved = xla.lower(body, [[1], [2]]).host_calls
        assert (written.moved, written.ops) == (False, ())
        assert [op for op, _ in moved.ops] == ["AsString", "StringLength"]
        assert all(__file__ in where for _, where in moved.ops)
        assert (moved.moved, moved.in_loop) == (True, False)
        assert [(tuple(spec.shape), spec.dtype) for spec in moved.results] == [((), tf.int32)]

    def test_a_body_without_such_ops_says_nothing(self, logged):
        assert on_two(lambda x: x + 1, [1, 2]) == [2, 3]
        assert xla.lower(lambda x: x + 1, [[1], [2]]).host_calls == ()
        assert logged() == []


class TestTheSwitch:
    def body(self, x):
        return tf.strings.length(tf.strings.as_string(x))

    def test_off_is_an_error(self):
        strategy = TPUStrategy(num_cores=2, soft_placement=False)
        with pytest.raises(LoweringError, match="AsString"):
            strategy.run(self.body, args=(tf.constant(1),))

    def test_none_follows_the_configuration_call_by_call(self, two):
        always = TPUStrategy(num_cores=2, soft_placement=True)
        tf.config.set_soft_device_placement(False)
        try:
            with pytest.raises(LoweringError, match="AsString"):
                two.strategy.run(self.body, args=(tf.constant(1),))
            assert always.run(self.body, args=(tf.constant(1),)).values[0].numpy() == 1
        finally:
            tf.config.set_soft_device_placement(True)
        assert two.strategy.run(self.body, args=(tf.constant(1),)).values[0].numpy() == 1

    @pytest.mark.parametrize("wrong", [1, "yes", []])
    def test_it_is_a_bool(self, wrong):
        with pytest.raises(TypeError, match="soft_placement"):
            TPUStrategy(num_cores=2, soft_placement=wrong)


TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [10, 20]), -1)

INSIDE = {
    "a branch to numbers": lambda x: tf.cond(x > 5, lambda: tf.strings.length(tf.strings.as_string(x)), lambda: 0),
    "a branch to strings": lambda x: tf.cond(x > 5, lambda: tf.strings.as_string(x), lambda: tf.constant("small")),
    "a case": lambda x: tf.strings.length(tf.switch_case(x, [lambda: tf.strings.as_string(x), lambda: "a"])),
    "a loop": lambda x: tf.while_loop(
        lambda text: tf.strings.length(text) < 6, lambda text: text + text, [tf.strings.as_string(x)]
    )[0],
    "elements": lambda x: tf.map_fn(tf.strings.as_string, x + tf.range(2), fn_output_signature=tf.string),
    "a function in a branch": lambda x: tf.cond(x > 5, lambda: tf.function(tf.strings.as_string)(x), lambda: "a"),
    "a table in a loop": lambda x: tf.while_loop(lambda y: y < 9, lambda y: TABLE.lookup(y), [x])[0],
    "words in a loop": lambda x: tf.while_loop(
        lambda y: y < 9, lambda y: tf.size(tf.strings.split(tf.strings.as_string(y))) + y, [x]
    )[0],
}


@pytest.mark.parametrize("name", INSIDE)
def test_work_with_strings_in_branches_and_loops_says_what_to_write(name):
    with pytest.raises(
        LoweringError, match=r"in a branch or a loop: \w+ at \S*test_soft_placement\.py.*xla\.outside_compilation"
    ):
        on_two(INSIDE[name], [1, 2])


def test_what_is_only_told_may_be_in_branches_and_loops(capfd, tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def body(x):
        for number in tf.range(2):
            tf.print(tf.strings.join(["number ", tf.strings.as_string(number)]))
        with tf.summary.record_if(lambda: x > 1.0):
            tf.summary.text("text", tf.strings.as_string(x, precision=1), step=3)
            tf.summary.image("image", tf.ones([1, 2, 2, 1]) * x, step=3)
            tf.summary.audio("audio", tf.ones([1, 4, 1]) * x, 8000, step=3)
        return x

    with writer.as_default():
        assert on_two(body, [2.0, 1.0]) == [2.0, 1.0]
    writer.close()
    printed = [each for each in capfd.readouterr().err.splitlines() if each.startswith("number")]  # TensorFlow may warn
    assert sorted(printed) == ["number 0"] * 2 + ["number 1"] * 2
    found = [(step, value.tag) for step, value in summaries(tmp_path)]
    assert found == [(3, "text"), (3, "image"), (3, "audio")]


def test_a_loop_carries_a_string_that_it_prints_and_changes(capfd):
    def body(x):
        text = tf.constant("first")
        for _ in tf.range(x):
            tf.print(text)
            text = tf.constant("later")
        return tf.strings.length(text) + x

    assert on_two(body, [1, 2]) == [6, 7]
    assert sorted(capfd.readouterr().err.split()) == ["first", "first", "later"]


def test_ops_that_follow_each_other_are_one_call():
    def body(x):
        words = tf.strings.split(tf.strings.as_string(x), "1")
        text = tf.strings.as_string(2 * x)
        return tf.strings.length(text) + tf.size(words)

    (call,) = xla.lower(body, [[312], [415]]).host_calls
    assert {"AsString", "StringSplitV2", "StringLength"} <= {op for op, _ in call.ops}
    assert on_two(body, [312, 415]) == [5, 5]


def test_a_shape_that_the_host_computes():
    """With what the shape is made of, in the call that makes the number."""

    def body(text, x):
        count = tf.strings.length(text)
        parts = [tf.range(count), tf.zeros([count], tf.int32), x[:count], tf.reshape(x, [count, -1])[:, 0]]
        return tf.reduce_sum([tf.reduce_sum(part) for part in parts])

    rows = [[tf.constant(text), tf.range(6)] for text in ("ab", "abc")]
    (call,) = xla.lower(body, rows).host_calls
    assert {"Range", "Fill", "StridedSlice", "Reshape"} <= {op for op, _ in call.ops}
    assert [int(each) for each in xla.replicate(body, rows)] == [int(body(*row)) for row in rows]


class TestWhatStillCannot:
    @pytest.mark.parametrize("in_function", [False, True])
    def test_iterators_and_datasets_as_arguments(self, two, in_function):
        dataset = tf.data.Dataset.range(8).batch(2)
        spread = two.strategy.experimental_distribute_dataset(dataset)
        made = two.strategy.distribute_datasets_from_function(lambda context: dataset)
        run = lambda given: two.strategy.run(lambda given: 0, kwargs={"given": {"x": given}})  # noqa: E731
        for each in (dataset, spread, made):
            with pytest.raises(InputsError, match=r"(?s)^kwargs\['given'\]\['x'\] is a .*Dataset.*for batch in \S+"):
                (tf.function(run) if in_function else run)(each)
            with pytest.raises(InputsError, match=r"^kwargs\['given'\]\['x'\] is a .*Iterator.*args=\(next\(iterator"):
                (tf.function(run) if in_function else run)(iter(each))

    def test_a_variable_that_gets_what_cannot_leave_the_host(self, two):
        with two.strategy.scope():
            variable = tf.Variable([0, 0])

        def body(text):
            lengths = tf.strings.length(tf.strings.split(text))  # as many as there are words
            variable.assign(lengths)

        with pytest.raises(LoweringError, match=r"AssignVariableOp at .* cannot leave the host, made by StringLength"):
            two.strategy.run(body, args=(tf.constant("a bc"),))

    @pytest.mark.parametrize("made", ["in a loop", "by a slice"])
    def test_what_is_told_and_has_a_shape_that_depends_on_data(self, made):
        def body(x):
            if made == "by a slice":
                tf.print(x[: tf.cast(x[0], tf.int32)])
                return x
            step = lambda y: [2 * tf.debugging.check_numerics(y, "huge")]  # noqa: E731
            any_size = [tf.TensorShape([None])]
            return tf.while_loop(lambda y: y[0] < 9.0, step, [x[x > 1.0]], shape_invariants=any_size)[0][0]

        with pytest.raises(LoweringError, match=r"at \S*test_soft_placement\.py.*needs a value from the devices whose"):
            on_two(body, [tf.constant([1.0, 2.0]), tf.constant([2.0, 3.0])])

    def test_a_list_of_numbers_that_a_loop_fills_on_the_host(self):
        def body(x):
            copied = lambda each: tf.numpy_function(lambda each: each, [each], tf.float32)  # noqa: E731
            return tf.reduce_sum(tf.map_fn(copied, x[x > 1.0]))

        with pytest.raises(LoweringError, match=r"TensorListSetItem at \S*test_soft_placement\.py.* leave the devices"):
            on_two(body, [tf.constant([1.0, 2.0]), tf.constant([2.0, 3.0])])

    def test_a_collective_of_what_cannot_leave_the_host(self):
        body = lambda text: xla.cross_replica_sum(tf.ensure_shape(tf.strings.length(tf.strings.split(text)), [2]))  # noqa: E731
        assert on_two(body, [tf.constant("a bc"), tf.constant("de f")]) == [[3, 3]] * 2


def test_threads_that_trace_and_run_at_once(two):
    def work(number):
        body = lambda x: tf.strings.length(tf.strings.as_string(x)) + number  # noqa: E731
        return two.each(two.strategy.run(body, args=(tf.constant(123),)))

    found = at_once(*(lambda number=number: work(number) for number in range(4)))
    assert found == [[3 + number] * 2 for number in range(4)]


class TestDeviceLoops:
    def test_strings_among_the_inputs_of_the_steps(self, two):
        with two.strategy.scope():
            total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
        dataset = tf.data.Dataset.from_tensor_slices((["a", "bb", "ccc", "dddd", "e", "ff"], tf.range(6.0))).batch(2)

        def step(context, text, x):
            total.assign_add(tf.reduce_sum(tf.cast(tf.strings.length(text), tf.float32) * x))
            context.set_last_step_output("last", tf.reduce_max(tf.strings.length(text)))

        before = xla.counts()
        batches = iter(two.strategy.experimental_distribute_dataset(dataset))
        context = two.strategy.run_steps(step, batches, iterations=3)
        assert (xla.counts() - before).launches == 3
        assert float(total) == 0 * 1 + 1 * 2 + 2 * 3 + 3 * 4 + 4 * 1 + 5 * 2
        last = two.strategy.experimental_local_results(context.last_step_outputs["last"])
        assert [int(each) for each in last] == [1, 2]

    def test_padded_words_of_the_inputs_have_the_shape_that_they_have_in_a_run(self):
        words = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        table = tf.lookup.StaticVocabularyTable(words, 1)
        texts = tf.data.Dataset.from_tensor_slices(["a b", "b", "c a a b a b", "", "b b", "a", "c", "a c b"]).batch(4)

        def step(embeddings, text):
            indices = table.lookup(tf.strings.split(text).to_tensor("", shape=[None, 6]))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(embeddings, indices) ** 2)
            gradient = tape.gradient(loss, embeddings)  # of the words that the text has
            every = tf.distribute.get_replica_context().all_reduce("SUM", gradient.values)
            embeddings.scatter_sub(tf.IndexedSlices(0.01 * every, gradient.indices))

        def train(in_a_loop):
            strategy = TPUStrategy(num_cores=2)
            with strategy.scope():
                embeddings = tf.Variable([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
            batches = iter(strategy.experimental_distribute_dataset(texts))
            if in_a_loop:
                before = xla.counts()
                strategy.run_steps(lambda context, text: step(embeddings, text), batches, iterations=2)
                assert (xla.counts() - before).launches == 2
            else:
                for batch in batches:
                    strategy.run(step, args=(embeddings, batch))
            return embeddings.numpy()

        np.testing.assert_allclose(train(in_a_loop=True), train(in_a_loop=False), rtol=1e-6)

    def test_a_summary_in_each_step_at_a_step_of_its_own(self, two, tmp_path):
        with two.strategy.scope():
            count = tf.Variable(0, dtype=tf.int64)
        writer = tf.summary.create_file_writer(str(tmp_path))

        def step(context, x):
            tf.summary.scalar("x", x, step=count)
            count.assign_add(1)

        with writer.as_default():
            two.strategy.run_steps(step, [tf.constant(10.0 * number) for number in range(4)], iterations=4)
        writer.close()
        found = [(step, tf.make_ndarray(value.tensor).item()) for step, value in summaries(tmp_path)]
        assert found == [(0, 0.0), (1, 10.0), (2, 20.0), (3, 30.0)]
