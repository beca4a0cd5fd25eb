"""What host functions cannot do: use variables of the devices, meet, nest, and return what no device has."""

import pytest
import tensorflow as tf
from helpers.host_work import COLLECTIVES, line_of, on_two, values

from replica_engine import xla
from replica_engine.errors import HostAccessError, HostResultError, NestedHostCallError, NotInBodyError

USES = {
    "read_value": lambda variable: variable.read_value(),
    "numpy": lambda variable: variable.numpy(),
    "add": lambda variable: variable + 1.0,
    "read a component": lambda variable: variable.values[1].read_value(),
    "assign": lambda variable: variable.assign(5.0),
    "assign_add": lambda variable: variable.assign_add(5.0),
    "assign a component": lambda variable: variable.values[0].assign(5.0),
}


@pytest.mark.parametrize(
    ("use", "kind"), [*((use, "AUTO") for use in USES), *((use, "ON_READ") for use in ("numpy", "assign_add"))]
)
def test_variables_of_a_strategy_cannot_be_used(two, use, kind):
    """Their values are on the devices, where the body is running."""
    kind = tf.VariableSynchronization[kind]
    with two.scope():
        variable = tf.Variable(1.0, synchronization=kind, aggregation=tf.VariableAggregation.MEAN, name="weight")
    initial = values(two.experimental_local_results(variable))

    def fn():
        USES[use](variable)

    def with_results():
        USES[use](variable)
        return 1.0

    def body(fn):
        variable.assign_add(tf.ones([]))
        xla.outside_compilation(fn)  # the call

    for each in (fn, with_results):
        with pytest.raises(HostAccessError, match=r"'weight.*outside_compilation") as raised:
            two.run(body, args=(each,))
        assert line_of(__file__, "the call") in str(raised.value)
        assert values(two.experimental_local_results(variable)) == initial


def test_a_variable_of_a_strategy_as_an_argument_arrives_as_its_value(two, run_with):
    with two.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    seen = []

    def look(first, nest, last):
        seen.append([float(each) for each in (first, nest["v"], last)])
        return isinstance(first, tf.Variable), isinstance(nest["v"], tf.Variable)

    look = xla.returns((tf.TensorSpec([], tf.bool),) * 2)(look)

    def body(x):
        before = variable.read_value()
        variable.assign_add(tf.ones([]))
        return xla.outside_compilation(look, variable, {"v": variable}, last=before)

    assert values(run_with(two)(body, tf.constant(1.0), tf.constant(2.0))) == [(False, False)] * 2
    assert seen == [[3.0, 3.0, 1.0]] * 2


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_replicas_cannot_meet_in_them(name, results):
    def fn():
        getattr(xla, name)([1.0], *COLLECTIVES[name])

    body = lambda: xla.outside_compilation((lambda: (fn(), 1.0)[1]) if results else fn)  # noqa: E731
    with pytest.raises(NotInBodyError, match=rf"xla\.{name}\(\).*outside_compilation.*pass its result"):
        xla.replicate(body, num_replicas=2)


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
def test_they_cannot_be_nested(results):
    def outer():
        inner = xla.outside_compilation(lambda: 1.0)  # the inner call
        return inner if results else None

    with pytest.raises(NestedHostCallError) as raised:
        xla.replicate(lambda: xla.outside_compilation(outer), num_replicas=2)  # the outer call
    assert isinstance(raised.value, NotImplementedError)
    assert line_of(__file__, "the inner call") in str(raised.value)
    assert line_of(__file__, "the outer call") in str(raised.value)


def test_tensors_that_it_cannot_see_are_an_error():
    class Holder:
        pass

    def body(x):
        holder = Holder()
        holder.x = x
        return xla.outside_compilation(lambda: holder.x + 1.0)

    with pytest.raises(HostAccessError, match="Pass it as an argument"):
        on_two(body)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: "text", r"dtype string,.*no device"),
        (lambda x: {"a": [x, tf.strings.as_string(x)]}, r"result\['a'\]\[1\] has dtype string"),
        (lambda x: {"a": object()}, r"result\['a'\], which is not a tensor"),
        (xla.returns(tf.TensorSpec([None], tf.float32))(lambda x: x), r"shape \(None,\)"),
    ],
    ids=["text", "string", "object", "shape"],
)
def test_results_that_no_device_has_are_an_error(fn, message):
    with pytest.raises(HostResultError, match=message):
        on_two(lambda x: xla.outside_compilation(fn, x))
