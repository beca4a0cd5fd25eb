"""Gradients through operators with merge calls are those of one device.

Each program is written once, for a batch and for what makes a sum over replicas. On two replicas each gets half of the
batch, and a gradient with respect to a weight is summed over the replicas; on one device it is plain TensorFlow.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import FORMS, context, locally, run, shares, stepping, total

ROWS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
WEIGHT = np.array([0.3, -0.2, 0.5], np.float32)


def alone(x):
    """The sum over replicas, where there is one."""
    return x


@pytest.fixture
def check(mirrored):
    """`check(program)`: gradients that `program(weight, rows, total)` returns, on two replicas and on one device.

    Gradients with respect to the weight, which the program returns under "weight", are summed over the replicas; those
    with respect to rows, under "rows", are each replica's own.
    """

    def check(program, form="graph"):
        with mirrored.scope():
            weight = tf.Variable(WEIGHT)
        results = run(mirrored, lambda rows: program(weight, rows, total), shares(mirrored, ROWS), form=form)
        expected = program(tf.Variable(WEIGHT), tf.constant(ROWS), alone)
        for key, value in expected.items():
            own = [np.asarray(result[key]) for result in results]
            got = np.concatenate(own) if key == "rows" else sum(own)
            np.testing.assert_allclose(got, value.numpy(), 1e-4, 1e-5)

    return check


def normed(weight, rows, total):
    """Rows that are divided by what all replicas know together."""
    values = rows * weight
    return values / (1.0 + total(tf.reduce_sum(values * values)))


def loss_of(weight, rows, total, steps=2):
    def body(i, rows):
        return i + 1, tf.tanh(rows) + normed(weight, rows, total)

    return tf.reduce_sum(tf.sin(tf.while_loop(lambda i, _: i < steps, body, (0, rows))[1]))


@pytest.mark.parametrize("operator", ["cond", "while"])
def test_a_tape_around_an_operator(check, operator):
    @check
    def program(weight, rows, total):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            if operator == "cond":
                yes = total(tf.reduce_sum(rows * rows)) > 0.0
                loss = tf.reduce_sum(tf.cond(yes, lambda: normed(weight, rows, total), lambda: rows) ** 3)
            else:
                loss = loss_of(weight, rows, total)
        of_weight, of_rows = tape.gradient(loss, [weight, rows])
        return {"weight": of_weight, "rows": of_rows}


def test_a_tape_inside_a_loop(check):
    """Gradient descent in a loop: replicas sum their gradients in it."""

    def program(weight, rows, total):
        def body(i, value):
            with tf.GradientTape() as tape:
                tape.watch(value)
                loss = tf.reduce_sum(normed(value, rows, total) ** 2)
            return i + 1, value - total(tape.gradient(loss, value))

        return {"all": tf.while_loop(lambda i, _: i < 3, body, (0, weight + 0.0))[1]}

    def halved(weight, rows, total_):
        result = program(weight, rows, total_)["all"]
        return {"weight": result / 2.0 if total_ is total else result}

    check(halved)


def test_a_tape_in_a_tape(check):
    """A gradient penalty: the inner tape in a condition, and the outer one around it."""

    @check
    def program(weight, rows, total):
        def penalized():
            with tf.GradientTape() as inner:
                inner.watch(rows)
                value = tf.reduce_sum(tf.sin(normed(weight, rows, total)))
            return value + tf.reduce_sum(inner.gradient(value, rows) ** 2)

        with tf.GradientTape() as tape:
            loss = tf.cond(total(1.0) > 0.0, penalized, lambda: 0.0)
        return {"weight": tape.gradient(loss, weight)}


@pytest.mark.parametrize("where", ["cond", "while", "function"])
def test_second_order(check, where):
    """Both tapes around the operator."""

    @check
    def program(weight, rows, total):
        function = tf.function(lambda rows: tf.reduce_sum(tf.sin(normed(weight, rows, total))))
        with tf.GradientTape() as outer:
            outer.watch(rows)
            with tf.GradientTape() as inner:
                inner.watch(rows)
                if where == "cond":
                    yes = tf.constant(0.0) + total(1.0) > 0.0
                    value = tf.cond(yes, lambda: tf.reduce_sum(tf.sin(normed(weight, rows, total))), lambda: 0.0)
                elif where == "while":
                    value = loss_of(weight, rows, total)
                else:
                    value = function(rows)
            slope = inner.gradient(value, rows)
            loss = tf.reduce_sum(slope**2)
        of_weight, of_rows = outer.gradient(loss, [weight, rows])
        return {"weight": of_weight, "rows": of_rows}


def test_a_persistent_tape(check):
    @check
    def program(weight, rows, total):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(rows)
            value = tf.cond(total(1.0) > 0.0, lambda: normed(weight, rows, total), lambda: rows)
            one, other = tf.reduce_sum(value**2), tf.reduce_sum(tf.sin(value))
        return {
            "weight": tape.gradient(one, weight) + 2.0 * tape.gradient(other, weight),
            "rows": tape.gradient(other, rows) - tape.gradient(one, rows),
        }


def test_a_persistent_tape_asked_inside(check):
    @check
    def program(weight, rows, total):
        def yes():
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(rows)
                value = normed(weight, rows, total)
                square = value**2
            return tape.gradient(value, weight) + total(tape.gradient(square, weight)) / total(1.0)

        return {"weight": tf.cond(total(1.0) > 0.0, yes, lambda: weight * 1.0)}


def test_a_jacobian_without_pfor(check):
    @check
    def program(weight, rows, total):
        with tf.GradientTape(persistent=True) as tape:  # which a jacobian on one device needs, in eager mode
            value = tf.cond(total(1.0) > 0.0, lambda: normed(weight, rows, total), lambda: rows)
            value = tf.reduce_sum(value, 0)
        return {"weight": tape.jacobian(value, weight, experimental_use_pfor=False)}


def custom(total):
    """x, whose gradient is the upstream gradient divided by its sum over all replicas: it merges."""

    @tf.custom_gradient
    def scaled(x):
        return tf.identity(x), lambda upstream: upstream / (2.0 + total(tf.reduce_sum(upstream * upstream)))

    return scaled


@pytest.mark.parametrize("tape_is", ["inside", "around"])
@pytest.mark.parametrize("operator", ["cond", "while", "function"])
def test_a_custom_gradient_that_merges(check, operator, tape_is):
    """The only merge calls are in the gradient."""

    @check
    def program(weight, rows, total):
        def value_of(rows):
            scaled = custom(total)
            if operator == "while":
                return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, scaled(tf.sin(x) * weight)), (0, rows))[1]
            return tf.cond(tf.reduce_sum(weight) > -9.0, lambda: scaled(tf.sin(rows) * weight), lambda: rows)

        def inside(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(value_of(rows) ** 2)
            return tape.gradient(loss, weight)

        if operator == "function":
            value_of, inside = tf.function(value_of), tf.function(inside)
        if tape_is == "inside" and operator == "cond":
            return {"weight": tf.cond(tf.reduce_sum(weight) > -9.0, lambda: inside(rows), lambda: weight * 0.0)}
        if tape_is == "inside":
            return {"weight": inside(rows)}
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(value_of(rows) ** 2)
        return {"weight": tape.gradient(loss, weight)}


def test_a_shared_tensor_is_not_counted_twice(mirrored):
    """Both replicas read one tensor of the step; each has the gradient of its own use."""

    @tf.function
    def step(rows, shared):
        shared = shared * 1.0

        def body(rows):
            with tf.GradientTape() as tape:
                tape.watch(shared)
                loss = tf.cond(total(1.0) > 0.0, lambda: total(0.0) + tf.reduce_sum(rows * shared), lambda: 0.0)
            return tape.gradient(loss, shared)

        return mirrored.run(body, args=(rows,))

    results = locally(mirrored, step(shares(mirrored, ROWS), tf.constant(WEIGHT)))
    np.testing.assert_allclose(results, [ROWS[:2].sum(0), ROWS[2:].sum(0)], 1e-5)


def test_a_tape_outside_the_replicas(mirrored):
    """It sees all replicas at once."""

    @tf.function
    def step(weight):
        losses = mirrored.run(lambda rows: loss_of(weight, rows, total), args=(shares(mirrored, ROWS),))
        return mirrored.reduce("SUM", losses, axis=None)

    weight = tf.constant(WEIGHT)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(weight)
        loss, expected = step(weight), loss_of(weight, tf.constant(ROWS), alone)
    np.testing.assert_allclose(loss, expected, 1e-5)
    np.testing.assert_allclose(tape.gradient(loss, weight), tape.gradient(expected, weight), 1e-4, 1e-5)


def test_all_gather_under_a_tape(mirrored):
    """As without the condition: each replica's gradient counts what all replicas made of its rows."""

    def body(rows, cond):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            value = cond(
                total(1.0) > 0.0, lambda: tf.reduce_sum(context().all_gather(rows * rows, axis=0)), lambda: 0.0
            )
        return tape.gradient(value, rows)

    parts, conds = shares(mirrored, ROWS), (tf.cond, lambda condition, yes, no: yes())
    results = [run(mirrored, lambda rows, each=each: body(rows, each), parts) for each in conds]
    np.testing.assert_allclose(*results)
    np.testing.assert_allclose(np.concatenate(results[0]), 4.0 * ROWS, 1e-5)


@pytest.mark.parametrize("yes", [True, False])
def test_a_merge_function_that_gets_what_stands_two_graphs_outside(check, yes):
    """It comes before the replicas use the same tensor in a branch of a branch."""

    @check
    def program(weight, rows, total):
        def summed(strategy, value):
            return strategy.reduce("SUM", value, axis=None)

        def merged():
            if total is alone:
                return tf.reduce_sum(tf.stop_gradient(tf.reduce_sum(rows[:2] + rows[2:])))
            return tf.reduce_sum(context().merge_call(summed, args=(rows,)))

        def outer():
            with tf.GradientTape() as tape:
                tape.watch(rows)
                condition = (total(1.0) > 0.0) == tf.constant(yes)
                value = tf.cond(condition, lambda: tf.sin(rows) * weight, lambda: merged() * tf.cos(rows) * weight)
                loss = tf.reduce_sum(value**2)
            return tape.gradient(loss, [weight, rows])

        of_weight, of_rows = tf.cond(total(1.0) > 0.0, outer, lambda: [weight * 0.0, rows * 0.0])
        return {"weight": of_weight, "rows": of_rows}


def test_embeddings(check):
    """IndexedSlices as gradients, inside and through an operator."""

    @check
    def program(weight, rows, total):
        indices = tf.constant([0, 2, 2])

        def looked_up():
            return tf.nn.embedding_lookup(weight, indices) * total(tf.reduce_sum(rows))

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows * tf.cond(total(1.0) > 0.0, looked_up, lambda: rows[0]))
        around = tf.convert_to_tensor(tape.gradient(loss, weight))

        def inside():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(rows * tf.nn.embedding_lookup(weight, indices)) * total(1.0)
            gradient = tape.gradient(loss, weight)
            assert isinstance(gradient, tf.IndexedSlices)
            return tf.convert_to_tensor(gradient) / total(1.0)

        return {"weight": around + tf.cond(total(1.0) > 0.0, inside, lambda: weight * 0.0)}


def test_reduced_indexed_slices(mirrored):
    def body(rows):
        def reduced():
            slices = tf.IndexedSlices(rows, tf.constant([0, 1]), tf.constant([3, 3], tf.int64))
            return tf.convert_to_tensor(total(slices))

        return tf.cond(total(1.0) > 0.0, reduced, lambda: tf.zeros([3, 3]))

    expected = np.concatenate([ROWS[:2] + ROWS[2:], np.zeros([1, 3])])
    np.testing.assert_allclose(run(mirrored, body, shares(mirrored, ROWS)), [expected, expected], 1e-5)


def test_tensor_arrays(check):
    """As a loop variable, under a tape."""

    @check
    def program(weight, rows, total):
        with tf.GradientTape() as tape:
            array = tf.TensorArray(tf.float32, size=3, element_shape=[])

            def body(i, array):
                return i + 1, array.write(i, tf.reduce_sum(normed(weight, rows, total)) * tf.cast(i + 1, tf.float32))

            array = tf.while_loop(lambda i, _: i < 3, body, (0, array))[1]
            loss = tf.reduce_sum(array.stack())
        return {"weight": tape.gradient(loss, weight)}


def test_ragged_loop_variables(mirrored):
    def body(rows):
        ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(rows, [-1]), [2, 4])
        ragged = tf.while_loop(
            lambda i, _: i < 2, lambda i, ragged: (i + 1, ragged * (1.0 + 0.0 * total(1.0))), (0, ragged)
        )[1]
        return tf.reduce_sum(ragged, axis=1)

    results = run(mirrored, body, shares(mirrored, ROWS))
    flat = [part.reshape(-1) for part in np.split(ROWS, 2)]
    np.testing.assert_allclose(results, [[part[:2].sum(), part[2:].sum()] for part in flat], 1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tape_is", ["around", "inside"])
def test_a_nested_function_and_a_tape(check, form, tape_is):
    def program(weight, rows, total):
        @tf.function
        def value_of(rows):
            return tf.tanh(normed(weight, rows, total))

        @tf.function
        def gradient_of(rows):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(normed(weight, rows, total) ** 2)
            return tape.gradient(loss, weight)

        if tape_is == "inside":
            return {"weight": gradient_of(rows)}
        with tf.GradientTape() as tape:
            tape.watch(rows)
            loss = tf.reduce_sum(value_of(value_of(rows)) ** 2)
        of_weight, of_rows = tape.gradient(loss, [weight, rows])
        return {"weight": of_weight, "rows": of_rows}

    check(program, form)


def test_gradients_of_a_variable_that_the_loop_updates(mirrored):
    """Steps of gradient descent in one loop, with a mean over replicas, as on one device on the whole batch."""

    def trained(weight, rows, mean):
        def body(i):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.reduce_sum(rows * weight, 1) - 1.0) ** 2)
            weight.assign_sub(0.1 * mean(tape.gradient(loss, weight)))
            return [i + 1]

        tf.while_loop(lambda i: i < 4, body, [0])
        return weight + 0.0

    with mirrored.scope():
        weight = tf.Variable(WEIGHT)
    step = stepping(mirrored, lambda rows: trained(weight, rows, lambda x: total(x, "MEAN")))
    for got in locally(mirrored, step(shares(mirrored, ROWS))):
        np.testing.assert_allclose(got, trained(tf.Variable(WEIGHT), tf.constant(ROWS), alone), 1e-5)
        break
