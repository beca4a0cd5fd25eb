"""Collectives that only some replicas reach: an error or a warning before the launch, and no false alarm."""

import logging

import pytest
import tensorflow as tf
from helpers.on_two import spread

from replica_engine import TPUStrategy, xla
from replica_engine.errors import CollectiveError
from replica_engine.xla import cross_replica_sum as total

# TensorFlow's parser uses names that Python is about to lose.
pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.filterwarnings("ignore::DeprecationWarning:gast")]


@pytest.fixture(scope="module")
def two():
    return TPUStrategy(num_cores=2, timeout=300.0)


def logged(caplog):
    """What this library has logged; TensorFlow warns of functions that it traces often, by what ran before."""
    return [each.message for each in caplog.records if each.name == "replica_engine"]


@pytest.fixture
def run(two, caplog):
    """`run(body)`: runs it with a value for each replica; returns the results and the warnings."""

    def call(body, *args):
        own = spread(two, lambda i: tf.constant([1.0 + i, 2.0]))
        with caplog.at_level(logging.WARNING, "replica_engine"):
            results = two.run(body, args=(own, *args)).values
        return [each.numpy().tolist() for each in results], logged(caplog)

    return call


@pytest.fixture
def own(two):
    """A variable with a value for each replica."""
    options = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
    with two.scope():
        return tf.Variable([0.0, 0.0], **options)


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def if_statement(x):
    y = x
    if replica_id() == 0:
        y = total(x)
    return y


def cond(x):
    return tf.cond(tf.equal(xla.replica_id(), 1), lambda: total(x), lambda: x)


def switch_case(x):
    return tf.switch_case(xla.replica_id(), [lambda: x, lambda: xla.all_gather(x)[:2]])


def both_sides(x):
    return tf.cond(xla.replica_id() == 0, lambda: total(x), lambda: total(2.0 * x))


def for_statement(x):
    for _ in tf.range(replica_id() + 1):
        x = total(x)
    return x


def while_statement(x):
    i = 0
    while i < replica_id():
        x = total(x)
        i += 1
    return x


def in_the_condition(x):
    return tf.while_loop(
        lambda i, x: (tf.size(total(x)) > 0) & (i < xla.replica_id()), lambda i, x: (i + 1, x), (0, x)
    )[1]


def in_a_function_in_a_branch(x):
    inner = tf.function(total)
    if replica_id() == 0:
        x = inner(x)
    return x


def by_an_argument_of_a_function(x):
    @tf.function
    def inner(x, first):
        if first:
            x = total(x)
        return x

    return inner(x, replica_id() == 0)


def in_a_branch_on_data_of_all(x):
    if tf.reduce_sum(total(x)) > 0.0:
        x = 2.0 * x
        if replica_id() == 0:
            x = total(x)
    return x


def in_one_iteration(x):
    for i in tf.range(3):
        if replica_id() == i:
            x = total(x)
    return x


def after_a_return(x):
    if replica_id() == 0:
        return x
    return total(x)


def after_a_break(x):
    for i in tf.range(3):
        if i == replica_id():
            break
        x = total(x)
    return x


def in_its_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(xla.replica_id() == 0, lambda: tf.reduce_sum(xla.all_gather(x) ** 2), lambda: 0.0)
    return tape.gradient(y, x)


def in_the_gradient_only(x):
    @tf.custom_gradient
    def same(x):
        return tf.identity(x), total

    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(xla.replica_id() == 0, lambda: same(x), lambda: x)
    return tape.gradient(y, x)


def of_a_computed_id(x):
    table = tf.constant([5, 7])
    if tf.gather(table, replica_id()) > 6:
        x = total(x)
    return x


def that_nothing_uses(x):
    if replica_id() == 0:
        total(x)
    return x


def that_nothing_uses_beside_a_result(x):
    y = x
    if replica_id() == 1:
        y = 2.0 * x
        xla.all_gather(x)
    return y


def in_a_loop_that_nothing_uses(x):
    for _ in tf.range(replica_id()):
        total(x)
    return x


def in_a_function_that_nothing_uses(x):
    @tf.function
    def inner(first):
        if first:
            tf.distribute.get_replica_context().all_reduce("MEAN", x)

    inner(replica_id() == 0)
    return x


def whose_branch_nothing_uses(x):
    tf.switch_case(xla.replica_id(), [lambda: x, lambda: total(x)])
    return x


def in_a_gradient_that_nothing_uses(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(xla.replica_id() == 0, lambda: tf.reduce_sum(xla.all_gather(x) ** 2), lambda: 0.0)
    tape.gradient(y, x)
    return x


APART = [
    *(that_nothing_uses, that_nothing_uses_beside_a_result, in_a_loop_that_nothing_uses),
    *(in_a_function_that_nothing_uses, whose_branch_nothing_uses, in_a_gradient_that_nothing_uses),
    *(if_statement, cond, switch_case, both_sides, for_statement, while_statement, in_a_function_in_a_branch),
    *(by_an_argument_of_a_function, in_a_branch_on_data_of_all, in_one_iteration, after_a_return, after_a_break),
    *(in_its_gradient, in_the_gradient_only, of_a_computed_id),
]


@pytest.mark.parametrize("body", APART)
def test_it_is_an_error_before_anything_is_launched(run, two, body):
    before = len(two.sync_points())
    with pytest.raises(CollectiveError, match=r"depends on the replica id: it is reached .* by replica") as raised:
        run(body)
    text, first = str(raised.value), body.__code__.co_firstlineno
    lines = [int(each.split(" ")[0]) for each in text.split("test_replicas_apart.py:")[1:]]
    assert len(lines) == 2, "the operation, and the condition"
    assert all(first < line < first + 12 for line in lines), text
    assert len(two.sync_points()) == before


def test_the_lines_are_those_of_the_operation_and_of_the_condition(run):
    first = if_statement.__code__.co_firstlineno
    pattern = (
        rf"^all_reduce at .*:{first + 3} in if_statement is in a branch whose condition at .*:{first + 2} in "
        rf"if_statement depends on the replica id: it is reached once by replica 0 and never by replica 1\."
    )
    with pytest.raises(CollectiveError, match=pattern):
        run(if_statement)


@pytest.mark.parametrize("body", [*APART, in_the_condition])
def test_one_replica_is_never_apart(body):
    x = tf.constant([1.0, 2.0])
    assert TPUStrategy(num_cores=1).run(body, args=(x,)).shape == x.shape


def test_many_replicas_are_named_in_short():
    def body():
        x = tf.ones([])
        if xla.replica_id() > 0:
            x = total(x)
        return x

    with pytest.raises(CollectiveError, match=r"once by replicas 1, 2, 3, 4, 5, 6, 7, 8 and 3 more and never by rep"):
        xla.replicate(body, num_replicas=12)


def if_so(condition):
    """A body with a sum in a branch."""

    def body(x):
        if condition(x):
            x = total(x)
        return x

    return body


def a_reduced_error(x):
    error = tf.reduce_sum(total(x))
    while error > 1.0:
        x *= 0.5
        error = tf.reduce_sum(total(x))
    return x


def a_counter(x):
    for i in tf.range(3):
        if i % 2 == 0:
            x = total(x)
    return x


def a_group_of_its_own(x):
    if replica_id() == 0:
        x = xla.cross_replica_sum(x, groups=[[0], [1]])
    return x


def nothing_in_the_branch(x):
    if replica_id() == 0:
        x *= 2.0
    return total(x)


def a_gradient_of_a_loop(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x
        for _ in tf.range(3):
            y = total(y)
    return tape.gradient(y, x)


def nothing_uses_it_and_the_data_decide(x):
    if tf.reduce_sum(x) > 3.5:
        total(x)
    return x


def nothing_uses_it_and_all_reach_it(x):
    if replica_id() < 100:
        total(x)
    return x


NAMED = [
    *(nothing_uses_it_and_the_data_decide, nothing_uses_it_and_all_reach_it, a_reduced_error, a_counter),
    *(a_group_of_its_own, nothing_in_the_branch, a_gradient_of_a_loop),
]
MEET = {body.__name__: body for body in NAMED} | {
    "equal_ids": if_so(lambda x: replica_id() < 100),
    "a_reduced_value": if_so(lambda x: tf.reduce_sum(total(x)) > 0.0),
    "a_gathered_value": if_so(lambda x: xla.all_gather(x)[0] > 0.0),
    "a_shape": if_so(lambda x: tf.shape(x)[0] > 1),
    "the_host": if_so(lambda x: xla.outside_compilation(lambda: True)),
    "what_the_id_rules_out": if_so(lambda x: replica_id() == 5 and tf.reduce_sum(x) > 0.0),
    "a_branch_that_no_replica_takes": lambda x: tf.switch_case(
        xla.replica_id(), [lambda: x, lambda: 2.0 * x, lambda: total(x)]
    ),
}


@pytest.mark.parametrize("body", MEET.values(), ids=MEET)
def test_there_is_no_false_alarm(run, body):
    assert run(body)[1] == []


def test_variables_that_are_equal_on_all_replicas_are_no_alarm(run, two):
    with two.scope():
        scale, steps = tf.Variable(1.0), tf.Variable(0)
    plain = tf.Variable(1.0)

    def body(x):
        if steps % 10 == 0 and scale > 0.0 and plain > 0.0:
            x = total(x)
        steps.assign_add(1)
        scale.assign(tf.reduce_sum(total(x)))
        if scale > 0.0:
            x = total(x)
        return x

    assert run(body) == ([[6.0, 8.0]] * 2, [])


def test_a_variable_whose_value_goes_into_another_one_is_no_alarm(run, two, own):
    """A counter, such as that of an optimizer, scales what each replica writes to a variable of its own."""
    with two.scope():
        steps = tf.Variable(3.0)

    def body(x):
        own.assign_add(x * steps)
        if steps > 2.0:
            x = total(x)
        return x

    assert run(body) == ([[3.0, 4.0]] * 2, [])


def test_an_argument_that_all_replicas_share_is_no_alarm(run):
    def body(x, rate):
        if rate > 0.0:
            x = total(x)
        return x

    assert run(body, tf.constant(0.5)) == ([[3.0, 4.0]] * 2, [])


def own_data(x):
    if tf.reduce_sum(x) > 0.0:
        x = total(x)
    return x


def own_data_in_a_loop(x):
    while tf.reduce_sum(x) < 20.0:
        x += total(x)
    return x


def own_random_numbers(x):
    if tf.random.uniform([]) < 2.0:
        x = total(x)
    return x


def id_and_data(x):
    if replica_id() < 5 and tf.reduce_sum(x) > 0.0:
        x = total(x)
    return x


def id_and_a_reduced_value(x):
    if tf.cast(replica_id(), tf.float32) < tf.reduce_sum(total(x)):
        x = total(x)
    return x


def in_a_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.reduce_sum(xla.all_gather(x) ** 2), lambda: 0.0)
    return tape.gradient(y, x)


@pytest.mark.parametrize(
    "body", [own_data, own_data_in_a_loop, own_random_numbers, id_and_data, id_and_a_reduced_value, in_a_gradient]
)
def test_what_may_differ_is_a_warning_with_both_lines(run, body):
    _, (warning,) = run(body)
    first = body.__code__.co_firstlineno
    on = "the replica id" if body.__name__.startswith("id_") else "values that each replica has of its own"
    assert warning.count("test_replicas_apart.py") == 2
    assert f"test_replicas_apart.py:{first + (3 if body is in_a_gradient else 2)} in {body.__name__}" in warning
    assert f"depends on {on}\n" in warning
    assert run(body)[1] == [warning], "once"


def test_a_variable_with_a_value_for_each_replica_is_a_warning(run, own):
    assert len(run(if_so(lambda x: own[0] + 1.0 > 0.0))[1]) == 1


def test_a_variable_that_a_replica_writes_alone_is_a_warning(run, two):
    with two.scope():
        last = tf.Variable(1.0)

    def body(x):
        y = x
        for _ in tf.range(2):
            if last > 0.0:
                y = total(x)
            last.assign(x[0])
        return y

    assert len(run(body)[1]) == 1


def test_batches_of_a_device_loop_are_data_of_each_replica(two, caplog):
    batches = two.experimental_distribute_dataset(tf.data.Dataset.from_tensors([1.0, 2.0]).repeat().batch(2))

    def step(context, x):
        loss = tf.reduce_sum(x)
        if loss > 0.0:
            loss = total(loss)
        context.set_last_step_output("loss", loss, "MEAN")

    def apart(context, x):
        if xla.replica_id() == 0:
            x = total(x)
        context.set_last_step_output("loss", tf.reduce_sum(x), "MEAN")

    with caplog.at_level(logging.WARNING, "replica_engine"):
        two.run_steps(step, iter(batches), iterations=2)
    (warning,) = logged(caplog)
    assert "all_reduce at" in warning
    with pytest.raises(CollectiveError, match="it is reached once by replica 0 and never by replica 1"):
        two.run_steps(apart, iter(batches), iterations=2)


def test_a_function_of_which_only_tensorflow_knows_the_graph_is_not_run_to_find_out(run):
    """It may take any time."""

    @tf.function
    def counts(i):
        return tf.while_loop(lambda i: i < 3, lambda i: i + 1, [i])[0]

    calls = tf.function(lambda i: counts(i)).get_concrete_function(tf.TensorSpec([], tf.int32)).graph
    (given,), ended = calls.inputs, calls.outputs[0].op.inputs[0]

    def body(x):
        inputs = {given.op.name: replica_id() * 0}
        (number,) = tf.graph_util.import_graph_def(calls.as_graph_def(), inputs, [ended.name])
        if number > 2:
            x = total(x)
        return x

    results, (warning,) = run(body)
    assert results == [[3.0, 4.0]] * 2
    assert "depends on the replica id" in warning


def sums_and_gathers(strategy, x):
    return strategy.reduce("SUM", x, axis=None) + strategy.gather(x, axis=0)[:2]


@pytest.mark.parametrize("merge_fn", [sums_and_gathers, lambda _, x: xla.all_gather(x)[:2]], ids=["def", "lambda"])
def test_a_merge_call_of_one_replica_is_named_and_not_what_its_function_does(run, merge_fn):
    def body(x):
        if replica_id() == 0:
            x = tf.distribute.get_replica_context().merge_call(merge_fn, args=(x,))
        return x

    line = body.__code__.co_firstlineno + 2
    with pytest.raises(CollectiveError, match=rf"^merge_call at \S+:{line} in body is in a branch .*once by replica 0"):
        run(body)


def test_a_merge_call_that_perhaps_one_replica_makes_is_named(run):
    def body(x):
        if x[0] > 5.0:
            x = tf.distribute.get_replica_context().merge_call(sums_and_gathers, args=(x,))
        return x

    _, (warned,) = run(body)
    assert f"  merge_call at {__file__}:{body.__code__.co_firstlineno + 2} in body: in a branch" in warned
