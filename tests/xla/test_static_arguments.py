"""Arguments that are not tensors are compiled in, so each value of them has a program of its own."""

import dataclasses
import functools

import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.xla.calls.program_table import ProgramTable
from replica_engine.xla.function_spec import FunctionSpec

ONE = tf.constant([1.0])


class Mode(tf.experimental.ExtensionType):
    values: tf.Tensor
    mode: str


class Scaled:
    def __init__(self, value, scale):
        self.value, self.scale = value, scale

    def __tf_flatten__(self):
        return (self.scale,), (self.value,)

    @classmethod
    def __tf_unflatten__(cls, metadata, components):
        return cls(*components, *metadata)


@dataclasses.dataclass
class Point:
    value: tf.Tensor


def point(extra):
    made = Point(ONE)
    made.extra = extra
    return made


@pytest.mark.parametrize(
    ("fn", "arguments", "expected"),
    [
        (
            lambda x: x.values * (2.0 if x.mode == "double" else 1.0),
            [Mode(values=ONE, mode="double"), Mode(values=ONE, mode="single")],
            [2.0, 1.0],
        ),
        (lambda x: x.value * x.scale, [Scaled(ONE, 2.0), Scaled(ONE, 5.0)], [2.0, 5.0]),
        (lambda x: x.value * x.extra, [point(2.0), point(7.0)], [2.0, 7.0]),
    ],
    ids=["extension-type", "tf-flatten", "attribute-of-a-dataclass"],
)
def test_of_structures(fn, arguments, expected):
    for argument, result in [*zip(arguments, expected, strict=True)] * 2:
        found = xla.replicate(fn, [[argument], [argument]])
        assert [each.numpy().tolist() for each in found] == [[result]] * 2


def test_of_ragged_tensors():
    values = tf.constant([1, 2, 3, 4])
    uniform = tf.RaggedTensor.from_uniform_row_length(values, 2)
    other = tf.RaggedTensor.from_row_splits(values, [0, 1, 4])
    for ragged in (uniform, other, uniform):
        found = xla.replicate(lambda x: x, [[ragged], [ragged]])
        assert [each.to_list() for each in found] == [ragged.to_list()] * 2


def test_a_list_that_is_closed_over_counts_by_what_it_holds():
    rates = [2.0]
    fn = lambda x: x * rates[0]  # noqa: E731
    assert xla.replicate(fn, [[ONE]])[0].numpy().tolist() == [2.0]
    rates[0] = 3.0
    assert xla.replicate(fn, [[ONE]])[0].numpy().tolist() == [3.0]
    before = xla.counts()
    xla.replicate(lambda x, rates=[3.0]: x * rates[0], [[ONE]])
    for _ in range(3):
        made = [4.0]
        xla.replicate(lambda x: x * made[0], [[ONE]])  # noqa: B023
    assert (xla.counts() - before).traces == 2


def test_many_traces_of_one_function_are_warned_of(caplog):
    def fn(x, rate):
        return x * rate

    for step in range(10):
        xla.replicate(fn, [[ONE, float(step) / 7]])
    assert next(record.message for record in caplog.records if "has been traced" in record.message).startswith("`fn`")
    assert "tf.constant(count)" in caplog.text


def test_the_function_of_a_data_set_reads_what_the_last_step_wrote(two):
    with two.scope():
        variable = tf.Variable(0.0)
    dataset = tf.data.Dataset.range(1).map(lambda _: variable + 0.0)
    for step in range(1, 4):
        two.run(lambda: variable.assign_add(1.0))
        assert [float(each) for each in dataset] == [float(step)]


factor = 2.0
factors = [2.0]


def test_a_function_is_found_again_by_the_objects_that_it_uses(two, monkeypatch):
    """Each of them may be bound to another object, or change; only what is the very same needs no comparison."""
    offset, inner, held = 1.0, (lambda x: x), {"held": 1.0}
    closed = 1.0

    def make(power):
        nested = lambda x: x**power + closed  # noqa: E731
        return nested

    nested = make(2.0)
    uses = {
        "a global": lambda: ONE * factor,
        "a list that is a global": lambda: ONE * factors[0],
        "a closed-over number": lambda: ONE + offset,
        "a closed-over function": lambda: inner(ONE),
        "what a closed-over function closes over": lambda: nested(ONE + 1.0),
        "a closed-over dictionary": lambda: ONE * held["held"],
    }
    results = lambda: [float(two.experimental_local_results(two.run(fn))[1][0]) for fn in uses.values()]  # noqa: E731
    first = [2.0, 2.0, 2.0, 1.0, 5.0, 1.0]
    assert results() == results() == first
    monkeypatch.setitem(globals(), "factor", 3.0)
    factors[0] = 3.0
    offset, inner, held["held"] = 2.0, (lambda x: -x), 2.0
    closed = 2.0
    assert results() == results() == [3.0, 3.0, 3.0, -1.0, 6.0, 2.0]
    nested = make(3.0)
    assert results()[4] == 10.0
    monkeypatch.undo()
    factors[0] = 2.0
    offset, inner, held["held"] = 1.0, (lambda x: x), 1.0
    closed, nested = 1.0, make(2.0)
    assert results() == first

    def no_key(self, hosts):
        raise AssertionError("compared")

    monkeypatch.setattr(FunctionSpec, "key", no_key)
    for name in ("a global", "a closed-over number", "a closed-over function"):
        two.run(uses[name])
    with pytest.raises(AssertionError, match="compared"):
        two.run(uses["a list that is a global"])


def test_a_name_that_another_thread_binds_during_a_call(monkeypatch):
    strategy = replica_engine.TPUStrategy(num_cores=1)
    rate = 1.0
    body = lambda: ONE[0] * rate  # noqa: E731
    result = lambda: float(strategy.run(body))  # noqa: E731
    assert result() == 1.0
    rate = 3.0
    assert result() == 3.0
    rate = 1.0
    by_key = ProgramTable._by_key

    def interrupted(self, *args):
        nonlocal rate
        entry = by_key(self, *args)
        rate = 2.0
        return entry

    with monkeypatch.context() as patched:
        patched.setattr(ProgramTable, "_by_key", interrupted)
        assert result() == 1.0
    assert result() == result() == 2.0


def test_a_function_that_calls_the_host_is_found_again_by_its_cells():
    strategy = replica_engine.TPUStrategy(num_cores=2)
    seen, rate = [], 1.0

    @xla.returns(None)
    def note(x):
        seen.append(float(x))

    def make(scale):
        def body():
            xla.outside_compilation(note, ONE[0] * scale * rate)

        return body

    one, two = make(1.0), make(2.0)
    for fn in (one, one, two, one, two, two):
        strategy.run(fn)
    rate = 3.0
    strategy.run(one)
    assert seen == [1.0] * 4 + [2.0] * 2 + [1.0] * 2 + [2.0] * 4 + [3.0] * 2


@pytest.mark.parametrize("of_body", [False, True], ids=["the body", "what the body calls"])
def test_partials_with_other_arguments_are_other_functions(of_body):
    scaled = lambda x, factor=1.0, *, added=0.0: factor * x + added  # noqa: E731

    def run(*args, **kwargs):
        fn = functools.partial(scaled, *args, **kwargs)
        body = (lambda x: fn(x)) if of_body else fn
        return [float(each) for each in xla.replicate(body, [[tf.constant(1.0)], [tf.constant(2.0)]])]

    assert [run(), run(factor=3.0), run(factor=4.0), run(added=1.0)] == [[1.0, 2.0], [3.0, 6.0], [4.0, 8.0], [2.0, 3.0]]
