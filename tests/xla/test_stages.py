"""Traced, lowered, compiled: stages to look at, each done once for what it serves."""

import contextlib
import functools
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import portable
from helpers.host_work import values

from replica_engine import xla
from replica_engine.errors import InputsError, LoweringError, ReplicaEngineError
from replica_engine.pjrt.devices import device_group
from replica_engine.pjrt.jaxlib import VERSION
from replica_engine.xla import Counts
from replica_engine.xla.calls import program_table

ONCE = Counts(traces=1, lowerings=1, compiles=1, launches=1)
FOUND = Counts(launches=1)
X = [[tf.constant([1.0, 2.0])], [tf.constant([3.0, 4.0])]]

REPLICATE = sys.modules["replica_engine.xla.replicate"]  # the module; the package's name is the function

# Read by functions below, and changed between their calls.
FACTOR = 1.0


def used(call, *args):
    """What a call traced, lowered, compiled and launched."""
    before = xla.counts()
    call(*args)
    return xla.counts() - before


class TestStages:
    def test_a_lowered_body_can_be_read(self):
        before = xla.counts()
        lowered = xla.lower(xla.cross_replica_sum, X)
        text = lowered.as_text()
        assert isinstance(lowered, xla.Lowered)
        assert "all_reduce" in text
        assert "tensor<2xf32>" in text
        assert xla.counts() - before == Counts(traces=1, lowerings=1)

    @pytest.mark.parametrize(("shapes", "got"), [([[2]], "1"), ([[2]] * 3, "3"), ([], "0"), (2, "int 2")])
    def test_as_many_shapes_as_slots_are_lowered(self, shapes, got):
        traced = xla.lower(lambda x, y: x + y, [[x, x] for (x,) in X]).traced
        with pytest.raises(InputsError, match=rf"each slot of `lambda`: 2, which are .* \(2,\), \(2,\)\. Got {got}\."):
            traced.lower(shapes)
        with pytest.raises(InputsError, match=r"each captured tensor of `lambda`: 0, .* Got 1\. Write captured=None"):
            traced.lower([[2], [2]], captured=[[1]])
        assert isinstance(traced.lower([[2], [2]], captured=[]), xla.Lowered)

    def test_lowering_runs_nothing(self):
        variable = tf.Variable(1.0)
        xla.lower(lambda: variable.assign(5.0), num_replicas=2).compile()
        assert float(variable) == 1.0

    def test_a_compiled_body_is_called_like_replicate(self):
        compiled = xla.lower(lambda x: {"sum": xla.cross_replica_sum(x), "none": None}, X).compile()
        assert isinstance(compiled, xla.Compiled)
        before = xla.counts()
        results = compiled([[tf.constant([10.0, 20.0])], [tf.constant([1.0, 2.0])]])
        assert xla.counts() - before == FOUND
        assert values([result["sum"] for result in results]) == [[11.0, 22.0]] * 2
        assert [result["none"] for result in results] == [None, None]

    def test_a_compiled_body_without_inputs_is_called_without(self):
        variable = tf.Variable(1.0)
        compiled = xla.lower(lambda: variable.assign_add(1.0), num_replicas=2).compile()
        assert values(compiled()) == [2.0, 2.0]
        assert values(compiled()) == [3.0, 3.0]
        assert float(variable) == 3.0

    def test_lowering_inside_a_function_works(self):
        texts = []
        tf.function(lambda: texts.append(xla.lower(lambda x: x, X).as_text()))()
        assert "stablehlo" in texts[0] or "func.func" in texts[0]

    def test_a_compiled_body_inside_a_function_runs_or_says_why_not(self):
        compiled = xla.lower(lambda x: x * 2.0, X).compile()
        with contextlib.suppress(ReplicaEngineError):
            results = tf.function(lambda x: compiled([[x], [x]]))(tf.constant([1.0, 2.0]))
            assert values(results) == [[2.0, 4.0]] * 2

    @pytest.mark.parametrize(
        ("inputs", "differs"),
        [
            ([[tf.zeros([3])]] * 2, r"args\[0\] has shape \(3,\) instead of \(2,\)"),
            ([[tf.zeros([2], tf.int32)]] * 2, r"args\[0\] has dtype int32 instead of float32"),
            ([[[tf.zeros([2])]]] * 2, r"the structure differs, args\[0\] is missing"),
            ([[tf.zeros([2]), 1]] * 2, r"the structure differs, args\[1\] is unexpected"),
            ([[], []], r"the structure differs, args\[0\] is missing"),
            (None, r"the structure differs, args\[0\] is missing"),
        ],
        ids=["shape", "dtype", "structure", "number", "empty", "none"],
    )
    def test_other_inputs_than_compiled_for_are_refused(self, inputs, differs):
        compiled = xla.lower(lambda x: x * 2.0, X).compile()
        with pytest.raises(InputsError, match=rf"compiled for these inputs: {differs}.*xla.lower"):
            compiled(inputs)
        assert values(compiled(X)) == [[2.0, 4.0], [6.0, 8.0]]

    @pytest.mark.parametrize("same", [True, False])
    @pytest.mark.parametrize("n", [1, 3])
    def test_other_numbers_of_replicas_than_compiled_for_are_refused(self, n, same):
        compiled = xla.lower(lambda x: x * 2.0, X).compile()
        with pytest.raises(InputsError, match="2"):
            compiled([[tf.fill([2], 0.0 if same else float(i))] for i in range(n)])

    @pytest.mark.parametrize("inputs", [5, X[0][0], [tf.zeros([2])] * 2])
    def test_what_is_no_list_over_replicas_is_refused(self, inputs):
        with pytest.raises(InputsError):
            xla.lower(lambda x: x * 2.0, X).compile()(inputs)

    def test_numbers_may_be_equal_now_that_were_not_when_it_was_lowered(self):
        compiled = xla.lower(lambda x: x * 2.0, [[1.0], [2.0]]).compile()
        assert values(compiled([[5.0], [6.0]])) == [10.0, 12.0]
        assert values(compiled([[5.0], [5.0]])) == [10.0, 10.0]

    def test_it_is_compiled_for_as_many_devices_as_there_are_replicas(self):
        lowered = xla.lower(xla.cross_replica_sum, X)
        assert values(lowered.compile(device_group("cpu", 2))(X)) == [[4.0, 6.0]] * 2
        for wrong in (1, 3):
            with pytest.raises(ReplicaEngineError, match="2"):
                lowered.compile(device_group("cpu", wrong))


class TestFoundAgain:
    def test_the_second_call_neither_traces_nor_compiles(self):
        fn = lambda x: x * 11.0  # noqa: E731
        assert used(xla.replicate, fn, X) == ONCE
        assert used(xla.replicate, fn, X) == FOUND
        assert used(xla.replicate, fn, X[::-1]) == FOUND

    @pytest.mark.parametrize(
        ("value", "replicas"),
        [(tf.zeros([3]), 2), (tf.zeros([2], tf.float64), 2), (tf.zeros([2]), 3), (np.zeros([2, 1], np.float32), 2)],
        ids=["shape", "dtype", "replicas", "rank"],
    )
    def test_another_shape_dtype_or_number_of_replicas_is_compiled(self, value, replicas):
        other = [[value]] * replicas
        fn = lambda x: x * tf.cast(12, x.dtype)  # noqa: E731
        xla.replicate(fn, X)
        again = used(xla.replicate, fn, other)
        assert (again.lowerings, again.compiles) == (1, 1)
        assert used(xla.replicate, fn, X) == FOUND
        assert used(xla.replicate, fn, other) == FOUND

    def test_another_python_value_is_traced(self):
        fn = lambda x, k: x * 13.0 + float(k)  # noqa: E731
        call = lambda k: xla.replicate(fn, [[part, k] for (part,) in X])  # noqa: E731
        assert [used(call, k) for k in (3, 4, 3, True)] == [ONCE, ONCE, FOUND, ONCE]
        assert used(call, 1).traces == 1  # to the program of True
        assert values(call(4)) == [[17.0, 30.0], [43.0, 56.0]]
        assert used(call, 1) == FOUND

    def test_zeros_of_both_signs_are_two_values(self):
        fn = lambda x: tf.constant(x)  # noqa: E731
        signs = [np.signbit(xla.replicate(fn, [[zero]] * 2)[0].numpy()) for zero in (0.0, -0.0)]
        assert signs == [False, True]

    def test_another_structure_is_traced(self):
        fn = lambda x: tf.nest.flatten(x)[0] * 14.0  # noqa: E731
        inputs = [lambda x: x, lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: [x]]
        calls = [used(xla.replicate, fn, [[wrap(part)] for (part,) in X]) for wrap in inputs]
        assert [call.traces for call in calls] == [1, 1, 1, 1, 0]

    def test_another_variable_is_traced(self):
        fn = lambda v: v * 15.0  # noqa: E731
        first, second = tf.Variable(1.0), tf.Variable(2.0)
        assert values(xla.replicate(fn, [[first]] * 2)) == [15.0, 15.0]
        assert values(xla.replicate(fn, [[second]] * 2)) == [30.0, 30.0]
        assert used(xla.replicate, fn, [[first]] * 2) == FOUND

    def test_a_new_lambda_with_the_same_closure_is_the_same(self):
        variable, constant = tf.Variable(2.0), tf.constant(3.0)
        call = lambda k: xla.replicate(lambda x: x * variable + constant + k, X)  # noqa: E731
        assert [used(call, k) for k in (16, 16, 17, 16)] == [ONCE, FOUND, ONCE, FOUND]
        assert values(call(17)) == [[22.0, 24.0], [26.0, 28.0]]

    def test_lambdas_that_differ_in_what_they_close_over_do_not_mix(self):
        results = [xla.replicate(lambda x: x * k + tf.constant(c), X)[0][0] for k in (1.0, 2.0) for c in (10.0, 20.0)]  # noqa: B023
        assert values(results) == [11.0, 21.0, 12.0, 22.0]

    def test_lambdas_that_differ_in_defaults_do_not_mix(self):
        results = [xla.replicate(lambda x, k=k: x * k, X)[0][0] for k in (2.0, 3.0)]
        assert values(results) == [2.0, 3.0]

    def test_functions_close_over_functions(self):
        def call(power):
            inner = lambda x: x**power  # noqa: E731
            return xla.replicate(lambda x: inner(x) + 18.0, X)

        assert values([call(k)[0][1] for k in (2, 3, 2)]) == [22.0, 26.0, 22.0]
        assert used(call, 3) == FOUND

    def test_a_new_function_sees_the_globals_as_they_are(self):
        """A loop at the top level of a program or a notebook: what the function uses is global there."""
        results = []
        for factor in (2.0, 3.0):
            globals()["FACTOR"] = factor
            results.append(xla.replicate(lambda x: x * FACTOR, X)[0])
        assert values(results) == [[2.0, 4.0], [3.0, 6.0]]

    def test_methods_partials_and_callable_objects_are_found_again(self):
        class Model:
            def __init__(self, k):
                self.k = tf.constant(k)

            def method(self, x):
                return x * self.k

            __call__ = method

        one, other = Model(19.0), Model(20.0)
        for make in (lambda m: m.method, lambda m: functools.partial(Model.method, m), lambda m: m):
            assert used(xla.replicate, make(one), X).traces == 1
            assert used(xla.replicate, make(one), X) == FOUND
            assert values(xla.replicate(make(other), X)) == [[20.0, 40.0], [60.0, 80.0]]
            assert values(xla.replicate(make(one), X)) == [[19.0, 38.0], [57.0, 76.0]]

    def test_a_function_that_makes_variables_is_traced_twice_once(self):
        class Model:
            w = None

            def __call__(self, x):
                if self.w is None:
                    self.w = tf.Variable(21.0)
                return x * self.w + 21.0  # a program that no other test has compiled

        model = Model()
        first = used(xla.replicate, model, X)
        assert (first.traces, first.compiles) == (2, 1)
        assert used(xla.replicate, model, X) == FOUND

    def test_equal_programs_of_different_functions_are_compiled_once(self):
        first = lambda x: x * 22.0 + 1.0  # noqa: E731
        second = lambda y: y * 22.0 + 1.0  # noqa: E731
        assert used(xla.replicate, first, X) == ONCE
        assert used(xla.replicate, second, X) == Counts(traces=1, lowerings=1, launches=1)
        assert values(xla.replicate(second, X)) == [[23.0, 45.0], [67.0, 89.0]]

    def test_programs_that_differ_in_a_constant_only_are_two(self):
        big = [np.arange(1000.0), np.arange(1000.0)]
        big[1][500] = 0.0
        sums = [float(xla.replicate(lambda: tf.reduce_sum(tf.constant(part)), num_replicas=2)[0]) for part in big]  # noqa: B023
        assert sums == [499500.0, 499000.0]

    def test_a_failed_compilation_is_tried_again(self):
        fn = lambda x: tf.where(x > 1.0)  # noqa: E731
        for _ in range(2):
            before = xla.counts()
            with pytest.raises(LoweringError):
                xla.replicate(fn, X)
            assert (xla.counts() - before).launches == 0


def _keep_most(monkeypatch, most):
    for name in ("_MOST_PROGRAMS", "_MOST_UNUSED"):
        monkeypatch.setattr(program_table, name, most)
    programs = program_table.ProgramTable(device_group("cpu", 2))
    monkeypatch.setattr(REPLICATE, "_programs", lambda devices: programs)


def test_caches_are_bounded(monkeypatch):
    _keep_most(monkeypatch, 2)
    call = lambda k: xla.replicate(lambda x: x * float(k), X)  # noqa: E731
    for k in range(5):
        assert used(call, k) == ONCE
    assert used(call, 4) == FOUND
    assert used(call, 3) == FOUND
    assert used(call, 0) == ONCE  # was dropped
    assert used(call, 3) == FOUND  # was used after 4
    assert used(call, 4).traces == 1


def test_what_a_cache_drops_can_still_be_used(monkeypatch):
    _keep_most(monkeypatch, 1)
    step = tf.function(lambda x: xla.replicate(lambda x: x * 2.0, [[x], [x]]))
    assert values(step(X[0][0])) == [[2.0, 4.0]] * 2
    for k in range(3):
        xla.replicate(lambda x, k=k: x + float(k), X)
    assert values(step(X[1][0])) == [[6.0, 8.0]] * 2


def test_a_lowered_body_says_what_its_program_takes_and_gives():
    variable = tf.Variable([1.0, 2.0])

    def body(x, text):
        variable.assign_add(x)
        return tf.reduce_sum(x), tf.strings.upper(text)

    lowered = xla.lower(body, [[tf.ones([2]), tf.constant("a")], [tf.ones([2]), tf.constant("b")]])
    assert lowered.shapes == ((2,), ())
    assert lowered.captured == []
    assert [shape for shape, _ in lowered.results][:2] == [(), (2,)]
    assert lowered.writes[0] == (0, 1)
    assert lowered.host_slots == {1}
    assert list(lowered.host_results) == [1]


def test_a_program_is_portable():
    """What every test asks of each program: `helpers/portable.py`. No plugin takes the `mhlo.copy` of TensorFlow."""
    one, other = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

    def swap():
        first = one.read_value()
        one.assign(other)
        other.assign(first)

    text = xla.lower(swap, None, 2).as_text()
    assert portable.artifact(text).startswith(b"ML")
    assert text.count("may_alias") == 2
    if VERSION >= (0, 10):  # older jaxlib writes it, and the plugin that reads it fails
        with pytest.raises(Exception, match=r"mhlo\.copy"):
            portable.artifact(text.replace("stablehlo.reshape %arg0", '"mhlo.copy"(%arg0)'))


def test_the_text_does_not_depend_on_what_was_traced_before():
    """TensorFlow numbers the functions of a process; workers compare texts, and may have traced other functions."""

    body = lambda x: tf.cumsum(tf.map_fn(lambda each: tf.cond(each > 0, lambda: 2.0 * each, lambda: each), x))  # noqa: E731
    first = xla.lower(body, [[tf.ones([3])]]).as_text()
    tf.function(lambda x: x + 1.0)(1.0)
    assert first.count("func.func") > 1
    assert xla.lower(body, [[tf.ones([3])]]).as_text() == first
