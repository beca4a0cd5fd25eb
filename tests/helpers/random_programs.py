"""Random programs with merge calls in nested operators, and what they compute on one device.

A program is a tree of statements over two values of each replica and a variable of the strategy. The same interpreter
runs it in two ways: on a replica, with TensorFlow's operators (`OnReplica`), and eagerly on one device for all replicas
at once, with Python's control flow (`InLockStep`). A tape of a replica sees what other replicas made of its values
through all-reduces; that is the gradient of the sum over all replicas, which is how `InLockStep` computes it.
"""

import random

import tensorflow as tf

KINDS = ("own", "mean", "sum", "gather", "merged", "read", "assign", "aggregate")
BLOCKS = ("cond", "own cond", "switch", "loop", "map", "function", "python", "gradient")


def make(seed, depth=3):
    """A program: nested tuples."""
    return _block(random.Random(seed), depth, own=False, taped=0)


def run(program, ops, x, y):
    """What a program makes of two values."""
    for kind, *rest in program:
        x, y = globals()[f"_{kind.replace(' ', '_')}"](ops, x, y, *rest)
    return x, y


class OnReplica:
    """A value is a tensor, and operators are TensorFlow's."""

    def __init__(self, variable, total):
        self.variable, self.total = variable, total

    def each(self, fn, *values):
        return fn(*values)

    def reduce(self, op, value):
        return tf.distribute.get_replica_context().all_reduce(op, value)

    def gather(self, value):
        return tf.distribute.get_replica_context().all_gather(value[tf.newaxis], axis=0)

    def merged(self, value):
        def total(strategy, value):
            return strategy.reduce("SUM", value, axis=None)

        return tf.distribute.get_replica_context().merge_call(total, args=(value,))

    def read(self):
        return self.variable + 0.0

    def assign(self, value):
        self.variable.assign(0.5 * self.variable + 0.1 * value)

    def aggregate(self, value):
        self.total.assign_add(value)

    def cond(self, condition, yes, no):
        return tf.cond(condition, yes, no)

    def switch(self, index, branches):
        return tf.switch_case(index, branches)

    def loop(self, count, body, x, y):
        return tf.while_loop(lambda i, *_: i < count, lambda i, x, y: (i + 1, *body(x, y)), (0, x, y))[1:]

    def map(self, body, x, y):
        rows = tf.map_fn(
            lambda step: body(x + step, y), tf.constant([0.0, 0.5], x.dtype), fn_output_signature=(x.dtype, y.dtype)
        )
        return tuple(tf.reduce_mean(each, 0) for each in rows)

    def function(self, body, x, y):
        return tf.function(body, autograph=False)(x, y)

    def gradient(self, body, x, y):
        with tf.GradientTape() as tape:
            tape.watch(x)
            new_x, new_y = body(x, y)
            loss = tf.reduce_sum(new_x) + tf.reduce_sum(new_y)
        of_x, of_variable = tape.gradient(loss, [x, self.variable], unconnected_gradients="zero")
        return of_x, self.reduce("SUM", of_variable), new_y


class InLockStep:
    """A value is a list with a tensor for each replica, and operators are Python's."""

    def __init__(self, size, variable, total):
        self.size, self.variable, self.total = size, variable, total

    def each(self, fn, *values):
        return [fn(*own) for own in zip(*values, strict=True)]

    def reduce(self, op, value):
        total = tf.add_n(value)
        return [total / (self.size if op == "MEAN" else 1.0)] * self.size

    def gather(self, value):
        return [tf.stack(value)] * self.size

    def merged(self, value):
        return [tf.stop_gradient(tf.add_n(value))] * self.size

    def read(self):
        return [self.variable + 0.0 for _ in range(self.size)]

    def assign(self, value):
        self.variable.assign(0.5 * self.variable + 0.1 * value[0])

    def aggregate(self, value):
        self.total.assign_add(tf.add_n(value))

    def cond(self, condition, yes, no):
        (condition,) = {bool(each) for each in condition}
        return yes() if condition else no()

    def switch(self, index, branches):
        (index,) = {int(each) for each in index}
        return branches[index]()

    def loop(self, count, body, x, y):
        (count,) = {int(each) for each in count}
        for _ in range(count):
            x, y = body(x, y)
        return x, y

    def map(self, body, x, y):
        rows = [body([each + step for each in x], y) for step in (0.0, 0.5)]
        return tuple([(a + b) / 2.0 for a, b in zip(*of, strict=True)] for of in zip(*rows, strict=True))

    def function(self, body, x, y):
        return body(x, y)

    def gradient(self, body, x, y):
        x = [tf.identity(each) for each in x]
        with tf.GradientTape() as tape:
            tape.watch(x)
            new_x, new_y = body(x, y)
            loss = tf.add_n([tf.reduce_sum(each) for each in [*new_x, *new_y]])
        of_x, of_variable = tape.gradient(loss, [x, self.variable], unconnected_gradients="zero")
        return of_x, [of_variable] * self.size, new_y


# Statements: how they are made, and what they do.


def _block(chance, depth, own, taped):
    """Some statements; with `own` without merge calls, so that replicas may go different ways."""
    statements = []
    for _ in range(chance.randint(1, 3)):
        if depth and chance.random() < 0.6:
            statements.append(_operator(chance, depth - 1, own, taped))
        else:
            kind = chance.choice(("own", "read") if own else KINDS)
            statements.append((kind, chance.uniform(0.1, 0.9)))
    return tuple(statements)


def _operator(chance, depth, own, taped):
    def block(**options):
        return _block(chance, depth, **{"own": own, "taped": taped} | options)

    kind = chance.choice(BLOCKS)
    if kind == "gradient" and (taped > 1 or own):
        kind = "function"
    if kind == "cond":
        of = chance.choice(("constant", "variable") if own else ("constant", "variable", "reduced"))
        return kind, of, chance.uniform(-0.5, 1.0), block(), block()
    if kind == "own cond":
        return kind, chance.uniform(-0.5, 0.5), block(own=True), block(own=True)
    if kind == "switch":
        return kind, chance.randrange(3), block(), block(), block()
    if kind == "loop":
        return kind, chance.randint(0, 3), block()
    return kind, block(taped=taped + 1) if kind == "gradient" else block()


def _own(ops, x, y, factor):
    return ops.each(lambda x, y: tf.sin(x) + factor * y, x, y), ops.each(lambda x, y: tf.tanh(y - factor * x), x, y)


def _mean(ops, x, y, factor):
    return ops.each(lambda x, mean: x * factor + tf.tanh(mean), x, ops.reduce("MEAN", x)), y


def _sum(ops, x, y, factor):
    return x, ops.each(lambda y, total: y * factor - tf.sin(total), y, ops.reduce("SUM", y))


def _gather(ops, x, y, factor):
    return ops.each(lambda x, rows: x + factor * tf.tanh(tf.reduce_max(rows, 0)), x, ops.gather(y)), y


def _merged(ops, x, y, factor):
    return ops.each(lambda x, total: x - factor * tf.tanh(total), x, ops.merged(x)), y


def _read(ops, x, y, factor):
    return x, ops.each(lambda y, value: y + factor * value, y, ops.read())


def _assign(ops, x, y, factor):
    ops.assign(ops.reduce("MEAN", ops.each(lambda x: tf.tanh(x * factor), x)))
    return x, y


def _aggregate(ops, x, y, factor):
    ops.aggregate(ops.each(lambda x: factor * tf.reduce_sum(tf.tanh(x)), x))
    return x, y


def _cond(ops, x, y, of, threshold, yes, no):
    if of == "constant":
        value = ops.each(lambda x: tf.constant(0.3), x)
    elif of == "variable":
        value = ops.each(tf.reduce_sum, ops.read())
    else:
        value = ops.each(tf.reduce_mean, ops.reduce("MEAN", x))
    condition = ops.each(lambda value: value > threshold, value)
    return ops.cond(condition, lambda: run(yes, ops, x, y), lambda: run(no, ops, x, y))


def _own_cond(ops, x, y, threshold, yes, no):
    if isinstance(ops, InLockStep):
        one = InLockStep(1, ops.variable, ops.total)
        made = []
        for own_x, own_y in zip(x, y, strict=True):
            chosen = yes if tf.reduce_sum(own_x) > threshold else no
            made.append(run(chosen, one, [own_x], [own_y]))
        return [each[0][0] for each in made], [each[1][0] for each in made]
    return ops.cond(tf.reduce_sum(x) > threshold, lambda: run(yes, ops, x, y), lambda: run(no, ops, x, y))


def _switch(ops, x, y, index, *branches):
    value = ops.each(lambda value: tf.cast(tf.reduce_sum(value) * 0.0, tf.int32) + index, ops.read())
    return ops.switch(value, [lambda block=block: run(block, ops, x, y) for block in branches])


def _loop(ops, x, y, count, block):
    return ops.loop(ops.each(lambda x: tf.constant(count), x), lambda x, y: run(block, ops, x, y), x, y)


def _map(ops, x, y, block):
    return ops.map(lambda x, y: run(block, ops, x, y), x, y)


def _function(ops, x, y, block):
    return ops.function(lambda x, y: run(block, ops, x, y), x, y)


def _python(ops, x, y, block):
    for _ in range(2):
        x, y = run(block, ops, x, y)
    return x, y


def _gradient(ops, x, y, block):
    of_x, of_variable, y = ops.gradient(lambda x, y: run(block, ops, x, y), x, y)
    return ops.each(lambda x, g, v: x + 0.1 * tf.tanh(g) - 0.1 * tf.tanh(v), x, of_x, of_variable), y
