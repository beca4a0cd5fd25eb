"""A call like the last one is recognised at once, and its results stay on the devices until somebody looks at them."""

import copy
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import at_once
from helpers.on_two import spread
from helpers.summaries import summaries

from replica_engine import TPUStrategy, xla
from replica_engine.errors import ReplicaValueError
from replica_engine.strategies.compiled_backend import CompiledBackend
from replica_engine.strategies.tpu import TPUExtended
from replica_engine.xla.stages.body_graph import _MOST_BYTES
from replica_engine.xla.stages.launch import Launch

SIZES = (1, 2)


@pytest.fixture(params=SIZES)
def tpu(request):
    return TPUStrategy(num_cores=request.param)


def values(strategy, result):
    return [np.asarray(each).tolist() for each in strategy.experimental_local_results(result)]


@pytest.fixture
def recognised(monkeypatch):
    """For each call, whether it was recognised."""
    found = []
    original = CompiledBackend.run_again

    def run_again(self, fn, args):
        results = original(self, fn, args)
        found.append(results is not None)
        return results

    monkeypatch.setattr(CompiledBackend, "run_again", run_again)
    return found


def test_a_result_that_nobody_has_looked_at_keeps_its_value(tpu):
    with tpu.scope():
        number = tf.Variable(0.0)
        large = tf.Variable(tf.zeros([_MOST_BYTES]))
    step = lambda: (number.assign_add(1.0), large.assign_add(tf.ones_like(large))[:2], large.read_value())  # noqa: E731
    results = [tpu.run(step) for _ in range(5)]
    for count, (small, part, whole) in reversed(list(enumerate(results, start=1))):
        size = tpu.num_replicas_in_sync
        assert values(tpu, small) == [count] * size
        assert values(tpu, part) == [[count, count]] * size
        assert all(set(each) == {count} for each in values(tpu, whole))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "bfloat16", "float16", "float64", "complex64", "float8_e5m2"]
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (_MOST_BYTES,)])
def test_results_of_all_dtypes_and_shapes(two, dtype, shape):
    given = tf.cast(tf.ones(shape), dtype)
    for _ in range(3):
        for result in two.strategy.experimental_local_results(two.strategy.run(tf.identity, args=(given,))):
            assert isinstance(result, tf.Tensor)
            assert (result.dtype, result.shape, result.device) == (given.dtype, given.shape, given.device)
            np.testing.assert_array_equal(result.numpy(), given.numpy())


@pytest.mark.parametrize(
    "look",
    [copy.copy, copy.deepcopy, lambda x: tf.nest.flatten(x, expand_composites=True), repr, lambda x: x.values],
    ids=["copy", "deepcopy", "flatten", "repr", "values"],
)
def test_it_is_a_plain_distributed_value_for_everybody_who_looks(two, look):
    result = two.strategy.run(lambda: xla.replica_id() + 1)
    assert isinstance(result, tf.distribute.DistributedValues)
    assert not hasattr(result, "numpy")
    look(result)
    assert type(result).__name__ == "PerReplica"
    assert values(two.strategy, result) == [1, 2]
    copied = copy.deepcopy(two.strategy.run(lambda: xla.replica_id() + 1))
    assert values(two.strategy, copied) == [1, 2]


def test_it_goes_into_reductions_functions_and_later_runs(two):
    step = lambda x: x + tf.cast(xla.replica_id(), tf.float32)  # noqa: E731
    result = tf.constant(1.0)
    for _ in range(3):
        result = two.strategy.run(step, args=(result,))
    assert values(two.strategy, result) == [1.0, 4.0]
    assert float(two.strategy.reduce("SUM", two.strategy.run(step, args=(result,)), axis=None)) == 6.0
    doubled = tf.function(lambda each: two.strategy.run(lambda x: 2.0 * x, args=(each,)))
    assert values(two.strategy, doubled(two.strategy.run(step, args=(result,)))) == [2.0, 10.0]


def test_several_threads_look_at_once(two):
    for _ in range(20):
        result = two.strategy.run(lambda: xla.replica_id() + 1)
        assert at_once(*[lambda result=result: [int(each) for each in result.values]] * 4) == [[1, 2]] * 4


_scale = 2.0


def test_a_call_like_the_last_one_is_recognised(tpu, recognised):
    step = lambda x: x * 2.0  # noqa: E731
    before = None
    for count in range(4):
        result = tpu.run(step, args=(tf.fill([2], float(count)),))
        assert values(tpu, result) == [[2.0 * count] * 2] * tpu.num_replicas_in_sync
        before = before or xla.counts()
    assert recognised == [False, True, True, True]
    assert (xla.counts() - before) == xla.Counts(launches=3)


def test_what_a_function_uses_may_change(tpu, recognised, monkeypatch):
    scale, size = 2.0, tpu.num_replicas_in_sync
    inner = lambda x: x * scale * _scale  # noqa: E731
    step = lambda x: inner(x)  # noqa: E731
    one = (tf.constant(1.0),)
    for _ in range(2):
        assert values(tpu, tpu.run(step, args=one)) == [4.0] * size
    scale = 3.0
    for _ in range(2):
        assert values(tpu, tpu.run(step, args=one)) == [6.0] * size
    monkeypatch.setitem(globals(), "_scale", 5.0)
    for _ in range(2):
        assert values(tpu, tpu.run(step, args=one)) == [15.0] * size
    assert recognised == [False, True] * 3


@pytest.mark.parametrize(
    "args",
    [
        (tf.constant([1.0, 2.0]),),
        (tf.constant(1),),
        (tf.constant(1.0, tf.float64),),
        (np.float32(1),),
        (1.0,),
        ((tf.constant(1.0),),),
        (tf.constant(1.0), 1),
        [tf.constant(1.0)],
    ],
    ids=["shape", "dtype", "precision", "array", "number", "nested", "more", "list"],
)
def test_other_arguments_are_looked_at_closely(tpu, recognised, args):
    step = lambda *given: tf.nest.map_structure(tf.identity, given)  # noqa: E731
    one = (tf.constant(1.0),)
    for _ in range(2):
        tpu.run(step, args=one)
    results = tpu.run(step, args=args)
    wanted = tf.nest.flatten(tuple(args))
    for result, value in zip(tf.nest.flatten(results), wanted, strict=True):
        for each in tpu.experimental_local_results(result):
            assert each.dtype == tf.convert_to_tensor(value).dtype
            np.testing.assert_array_equal(each, value)
    assert recognised == [False, True, False]


@pytest.mark.parametrize(
    "kwargs", [tf.ones([2, 2]), np.ones(2), np.False_, ()], ids=["tensor", "array", "bool", "tuple"]
)
def test_keyword_arguments_of_a_wrong_kind_are_refused_as_ever(tpu, recognised, kwargs):
    step = lambda: tf.constant(1.0)  # noqa: E731
    for _ in range(2):
        tpu.run(step)
    with pytest.raises(ReplicaValueError, match="kwargs"):
        tpu.run(step, kwargs=kwargs)
    assert recognised == [False, True]


def test_values_of_each_replica_and_of_all_differ(two, recognised):
    step = lambda x: x + 1.0  # noqa: E731
    one = tf.constant(1.0)
    each = spread(two.strategy, lambda i: tf.constant(float(i)))
    for given, wanted in ((one, [2.0, 2.0]), (each, [1.0, 2.0]), (one, [2.0, 2.0]), (each, [1.0, 2.0])):
        assert values(two.strategy, two.strategy.run(step, args=(given,))) == wanted
    uneven = spread(two.strategy, lambda i: tf.ones([1 + i]))
    for _ in range(2):
        assert values(two.strategy, two.strategy.run(step, args=(uneven,))) == [[2.0], [2.0, 2.0]]


def test_another_context_is_looked_at_closely(tpu, recognised, tmp_path):
    def step(x):
        tf.summary.scalar("x", x)
        return x + 1.0

    one = (tf.constant(1.0),)
    for _ in range(2):
        tpu.run(step, args=one)
    with tpu.scope():
        tpu.run(step, args=one)
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):
        tpu.run(step, args=one)
    assert recognised == [False, True, False, False]
    assert [value.tag for _, value in summaries(tmp_path)] == ["x"]


def test_a_strategy_of_the_user_runs_functions_in_its_own_way(two):
    class Noting(TPUExtended):
        seen = 0

        def _call_for_each_replica(self, fn, args, kwargs):
            self.seen += 1
            return super()._call_for_each_replica(fn, args, kwargs)

    two.strategy.extended.__class__ = Noting
    step = lambda: tf.constant(1.0)  # noqa: E731
    for _ in range(3):
        two.strategy.run(step)
    assert two.strategy.extended.seen == 3


def test_failures_of_a_recognised_call_undo_its_writes(tpu, recognised):
    with tpu.scope():
        number = tf.Variable(0.0)
    fails = threading.Event()

    def on_host(x):
        if fails.is_set():
            raise ValueError("the host has had enough")
        return x

    def step():
        xla.outside_compilation(on_host, number.assign_add(1.0))

    for _ in range(3):
        tpu.run(step)
    fails.set()
    with pytest.raises(ValueError, match="had enough") as raised:
        tpu.run(step)
    assert raised.traceback[-1].name == "on_host"
    assert float(number) == 3.0
    fails.clear()
    tpu.run(step)
    assert float(number) == 4.0
    assert recognised[2:] == [True, True]  # the third call, and the last; the failed one raised


def test_calls_of_many_functions_in_turn_are_recognised(two, recognised):
    steps = [function(f"def step(x): return x + {number}.0") for number in range(40)]
    x = tf.ones([])
    for _ in range(3):
        recognised.clear()
        for number, step in enumerate(steps):
            assert values(two.strategy, two.strategy.run(step, args=(x,))) == [number + 1.0] * 2
    assert recognised == [True] * len(steps)


def function(source):
    names = {}
    exec(source, names)
    return names["step"]


def test_a_partial_that_is_made_anew_of_a_callable_without_code_is_traced_once():
    traces = []

    class Step:
        def __call__(self, x, factor):
            traces.append(factor)
            return x * factor

    strategy, step = TPUStrategy(num_cores=2), Step()
    for _ in range(3):
        strategy.run(functools.partial(step, factor=2.0), args=(tf.ones([2]),))
    assert traces == [2.0]


def _unlike_shares(strategy):
    return spread(strategy, lambda i: tf.ones([1 + i]))


def test_what_is_compiled_for_unlike_shares_computes_in_each_launch(monkeypatch):
    strategy, launched, begin = TPUStrategy(num_cores=2), [], Launch.__init__
    monkeypatch.setattr(Launch, "__init__", lambda self, compiled: launched.append(compiled) or begin(self, compiled))
    assert values(strategy, strategy.run(lambda x: 2.0 * x, args=(_unlike_shares(strategy),))) == [[2.0], [2.0, 2.0]]
    others = [np.array([5.0], np.float32), np.array([6.0, 7.0], np.float32)]
    (column,) = Launch(launched[0])([others]).columns()
    assert [each.tolist() for each in column] == [[10.0], [12.0, 14.0]]
