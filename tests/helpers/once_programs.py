"""Programs of tests/replica/once: each takes a strategy of two replicas, and returns what is compared.

Most call a step twice, because TensorFlow traces a function that makes variables twice.
"""

import glob
import tempfile

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

ON_READ = tf.VariableSynchronization.ON_READ
SUM = tf.VariableAggregation.SUM


def context():
    return tf.distribute.get_replica_context()


def per(s, *values):
    return s.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def variable(s, *args, **kwargs):
    with s.scope():
        return tf.Variable(*args, **kwargs)


def twice(s, body, *args):
    step = tf.function(lambda *args: s.run(body, args=args))
    return [step(*args), step(*args)]


def local(s, value):
    return list(s.experimental_local_results(value))


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def captured_tensors(s):
    big, small = (tf.reshape(tf.range(400.0), [20, 20]), tf.constant(3.0))
    return twice(s, lambda x: tf.reduce_sum(big) * x + small, per(s, 1.0, 2.0))


def outer_tensor_and_shared_arg(s):
    @tf.function
    def step(x, y):
        z = y * 2
        return s.run(lambda a, b: a * z + b, args=(x, z))

    return step(per(s, 1.0, 2.0), tf.constant(5.0))


def nested_function_with_gradient(s):
    w = variable(s, 3.0)

    @tf.function
    def inner(x):
        return tf.sin(w * x)

    def body(x):
        with tf.GradientTape() as t:
            y = inner(x)
        return (y, t.gradient(y, w))

    return twice(s, body, per(s, 1.0, 2.0))


def nested_function_gradient_across_sync(s):
    w = variable(s, 3.0)

    @tf.function
    def inner(x):
        return tf.sin(w * x)

    def body(x):
        with tf.GradientTape() as t:
            y = inner(x)
            y = y * context().all_reduce("SUM", y)
        g = t.gradient(y, w)
        return (y, context().all_reduce("MEAN", g))

    return twice(s, body, per(s, 1.0, 2.0))


def cond_gradient_across_sync(s):
    w = variable(s, 3.0)

    def body(x):
        with tf.GradientTape() as t:
            y = tf.cond(x > 1.5, lambda: tf.sin(w * x), lambda: w * w * x)
            y = y * context().all_reduce("SUM", y)
        return (y, t.gradient(y, w))

    return twice(s, body, per(s, 1.0, 2.0))


def while_gradient_across_sync(s):
    w = variable(s, 1.1)

    def body(x):
        with tf.GradientTape() as t:
            y = x
            for _ in tf.range(3):
                y = tf.sin(y * w)
            y = y * context().all_reduce("SUM", y)
        return (y, t.gradient(y, w))

    return twice(s, body, per(s, 1.0, 2.0))


def autograph_if_on_replica_id(s):
    def body(x):
        i = context().replica_id_in_sync_group
        if i == 1:
            x = x * 100.0
        return x + tf.cast(i, tf.float32)

    return twice(s, body, per(s, 1.0, 2.0))


def side_effects_in_order(s):
    v = variable(s, 0.0, synchronization=ON_READ, aggregation=SUM)
    shared = tf.Variable(1.0)

    def body(x):
        v.assign_add(x)
        a = v.read_value()
        v.assign(v * 2.0)
        shared.assign(shared * 2.0 + x)
        return a

    r = twice(s, body, per(s, 1.0, 2.0))
    return (r, v.values, shared)


def assign_result_returned(s):
    v = variable(s, 0.0, synchronization=ON_READ, aggregation=SUM)
    return twice(s, lambda x: v.assign_add(x), per(s, 1.0, 2.0))


def aggregated_assign(s):
    v = variable(s, 0.0, aggregation=tf.VariableAggregation.MEAN)

    def body(x):
        v.assign_add(x)
        return v * 1.0

    return (twice(s, body, per(s, 1.0, 2.0)), v.values)


def batch_norm_moving_averages(s):
    with s.scope():
        bn = keras.layers.BatchNormalization()
        bn.build((None, 4))
    x = random(2, 8, 4)
    return (
        twice(s, lambda x: bn(x, training=True), per(s, *x)),
        [local(s, v.value) for v in bn.non_trainable_variables],
    )


def sync_batch_norm(s):
    with s.scope():
        bn = keras.layers.BatchNormalization(synchronized=True)
        bn.build((None, 4))
    x = random(2, 8, 4)

    def body(x):
        with tf.GradientTape() as t:
            y = tf.reduce_sum(bn(x, training=True) ** 3)
        g = t.gradient(y, bn.trainable_variables)
        return (y, [context().all_reduce("SUM", e) for e in g])

    return (twice(s, body, per(s, *x)), [local(s, v.value) for v in bn.non_trainable_variables])


def dropout_keras(s):
    with s.scope():
        d = keras.layers.Dropout(0.5, seed=3)
        d.build((None, 4))
    return twice(s, lambda x: d(x, training=True), per(s, *np.ones((2, 2, 4), "float32")))


def random_ops_seeded(s):
    def body(x):
        a = tf.random.normal([2])
        b = context().all_reduce("SUM", a)
        return (a, b, tf.random.uniform([], seed=5), tf.random.shuffle(tf.range(5)))

    return twice(s, body, per(s, 1.0, 2.0))


def random_generator(s):
    with s.scope():
        g = tf.random.Generator.from_seed(3)
    return twice(s, lambda x: g.normal([2]), per(s, 1.0, 2.0))


def optimizer_slots_in_first_run(s):
    with s.scope():
        m = keras.Sequential([keras.layers.Dense(3)])
        m.build((None, 4))
        o = keras.optimizers.Adam(0.1)
    x = random(2, 8, 4)

    def body(x):
        with tf.GradientTape() as t:
            loss = tf.reduce_mean(m(x, training=True) ** 2)
        o.apply_gradients(zip(t.gradient(loss, m.trainable_variables), m.trainable_variables, strict=True))
        return loss

    return (twice(s, body, per(s, *x)), [local(s, w.value) for w in m.weights], len(o.variables))


def model_built_in_first_run(s):
    x = random(2, 8, 4)

    class M(tf.Module):
        w = None

        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(tf.ones([4, 2]))
            return x @ self.w

    mm = M()

    def body(x):
        return tf.reduce_sum(mm(x))

    with s.scope():
        r = twice(s, body, per(s, *x))
    return (r, type(mm.w).__name__, len(mm.w.values))


def keras_fit(s):
    with s.scope():
        m = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=1),
                keras.layers.Dense(1),
            ]
        )
        m.compile("adam", "mse", metrics=["mae"])
    x = random(24, 4)
    h = m.fit(x, x.sum(1, keepdims=True), batch_size=12, shuffle=False, verbose=0)
    return ([v for k in sorted(h.history) for v in h.history[k]], [local(s, w.value)[1] for w in m.weights])


def print_and_summary(s):
    d = tempfile.mkdtemp()
    w = tf.summary.create_file_writer(d)

    def body(x):
        with w.as_default(step=1):
            tf.summary.write("x", x, step=1)
        tf.print("p", x, output_stream="file://" + d + "/printed")
        return x

    r = twice(s, body, per(s, 1.0, 2.0))
    w.flush()
    events = [e for f in glob.glob(d + "/events*") for e in tf.compat.v1.train.summary_iterator(f)]
    return (
        r,
        sorted(open(d + "/printed").read().split("\n")),
        [float(tf.make_ndarray(v.tensor)) for e in events for v in e.summary.value],
    )


def lookup_table(s):
    t = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2, 3]), tf.constant([10, 20, 30])), -1
    )
    return twice(s, lambda x: t.lookup(x), per(s, 1, 9))


def iterator_in_body(s):
    it = iter(tf.data.Dataset.range(100))
    return twice(s, lambda x: next(it) * x, per(s, np.int64(1), np.int64(1)))


def distributed_iterator_loop(s):
    ds = s.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(tf.range(24.0)).batch(6))
    v = variable(s, 0.0)

    def body(x):
        g = context().all_reduce("SUM", tf.reduce_sum(x))
        v.assign_add(g)
        return g

    @tf.function
    def loop():
        for x in ds:
            s.run(body, args=(x,))
        return v.read_value()

    return loop()


def run_in_tf_range_loop(s):
    v = variable(s, 1.0)

    def body(x):
        v.assign_add(context().all_reduce("SUM", x * v))
        return tf.random.uniform([])

    @tf.function
    def loop(x):
        t = 0.0
        for _ in tf.range(3):
            t = t + s.reduce("SUM", s.run(body, args=(x,)), axis=None)
        return (v.read_value(), t)

    return loop(per(s, 0.1, 0.2))


def run_of_tf_function(s):
    w = variable(s, 2.0)

    @tf.function
    def body(x):
        return context().all_reduce("SUM", w * x) + x

    return s.run(body, args=(per(s, 1.0, 2.0),))


def merge_call_sees_per_replica(s):
    seen = []

    def merge(strategy, x, y):
        seen.append(
            (
                type(x).__name__,
                [v.device[-5:] for v in x.values],
                type(y).__name__,
                x.values[0].graph is tf.compat.v1.get_default_graph(),
            )
        )
        return (strategy.extended.reduce_to("SUM", x, x), tf.constant(1.0))

    def body(x):
        return context().merge_call(merge, args=(x * 2.0, 7))

    return (twice(s, body, per(s, 1.0, 2.0)), str(seen))


def merge_returns_per_replica_python(s):
    def body(x):
        return x * context().merge_call(lambda strategy: PerReplica((1, 2)))

    return twice(s, body, per(s, 1.0, 2.0))


def all_gather_other_shapes(s):
    def body(x):
        return context().all_gather(x, 0)

    a = s.experimental_distribute_values_from_function(lambda c: tf.ones([c.replica_id_in_sync_group + 1, 2]))
    return twice(s, body, a)


def args_other_shapes(s):
    a = s.experimental_distribute_values_from_function(lambda c: tf.ones([c.replica_id_in_sync_group + 1, 2]))
    return twice(s, lambda x: tf.reduce_sum(x), a)


def args_python_per_replica(s):
    @tf.function
    def step():
        return s.run(lambda k: tf.constant(1.0) * k, args=(PerReplica((1, 2)),))

    return step()


def python_counter(s):
    n = []

    def body(x):
        return x * (n.append(0) or len(n))

    return (twice(s, body, per(s, 1.0, 2.0)), len(n))


def python_id(s):
    def body(x):
        return x * (tf.get_static_value(context().replica_id_in_sync_group) + 1)

    return twice(s, body, per(s, 1.0, 2.0))


def private_python_id(s):
    def body(x):
        return x * (context()._replica_id_in_sync_group + 1)

    return twice(s, body, per(s, 1.0, 2.0))


def id_in_nested_function(s):
    @tf.function
    def inner(x):
        return x * tf.cast(context().replica_id_in_sync_group, tf.float32)

    return twice(s, lambda x: inner(x), per(s, 1.0, 2.0))


def tensor_kept_outside(s):
    kept = []

    @tf.function
    def step(x):
        s.run(lambda x: kept.append(x * 2.0), args=(x,))
        return tf.add_n(kept)

    return (step(per(s, 1.0, 2.0)), len(kept))


def closure_of_merge_fn(s):
    def body(x):
        y = x * 2.0
        return context().merge_call(lambda strategy: y + 1.0)

    return twice(s, body, per(s, 1.0, 2.0))


def py_function(s):
    return twice(s, lambda x: tf.py_function(lambda v: v * 2.0, [x], tf.float32), per(s, 1.0, 2.0))


def py_function_gradient(s):
    def body(x):
        with tf.GradientTape() as t:
            t.watch(x)
            y = tf.py_function(lambda v: v**2, [x], tf.float32)
        return t.gradient(y, x)

    return twice(s, body, per(s, 1.0, 2.0))


def numpy_function(s):
    return twice(s, lambda x: tf.numpy_function(lambda v: v * np.float32(2.0), [x], tf.float32), per(s, 1.0, 2.0))


def custom_gradient(s):
    w = variable(s, 2.0)

    @tf.custom_gradient
    def f(x):
        return (x * x, lambda d: d * 100.0 * x)

    def body(x):
        with tf.GradientTape() as t:
            y = f(w * x)
        return t.gradient(y, w)

    return twice(s, body, per(s, 1.0, 2.0))


def embedding_sparse_gradient(s):
    w = variable(s, tf.ones([5, 2]))

    def body(i):
        with tf.GradientTape() as t:
            y = tf.reduce_sum(tf.nn.embedding_lookup(w, i) * tf.cast(i[:, None], tf.float32))
        g = t.gradient(y, w)
        return tf.convert_to_tensor(context().all_reduce("SUM", g))

    return twice(s, body, per(s, [0, 1], [1, 2]))


def explicit_device_in_body(s):
    def body(x):
        with tf.device("CPU:0"):
            y = x * 2.0
        return y + 1.0

    step = tf.function(lambda x: s.run(body, args=(x,)))
    c = step.get_concrete_function(per(s, 1.0, 2.0))
    return (
        sorted(op.device for op in c.graph.get_operations() if op.type == "Mul"),
        sorted(op.device for op in c.graph.get_operations() if op.type == "AddV2"),
    )


def control_dependencies_across_sync(s):
    v = tf.Variable(0.0)

    def body(x):
        a = tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=x)
        with tf.control_dependencies([a]):
            r = context().all_reduce("SUM", x)
            return r + tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32)

    return (twice(s, body, per(s, 1.0, 2.0)), v)


def assertion_fails_on_one(s):
    def body(x):
        tf.debugging.assert_less(x, 1.5)
        return x

    return twice(s, body, per(s, 1.0, 2.0))


def lstm_keras(s):
    with s.scope():
        m = keras.Sequential([keras.Input((5, 4)), keras.layers.LSTM(3), keras.layers.Dense(1)])
        o = keras.optimizers.SGD(0.1)
        o.build(m.trainable_variables)
    x = random(2, 2, 5, 4)

    def body(x):
        with tf.GradientTape() as t:
            loss = tf.reduce_mean(m(x, training=True) ** 2)
        o.apply_gradients(zip(t.gradient(loss, m.trainable_variables), m.trainable_variables, strict=True))
        return loss

    return (twice(s, body, per(s, *x)), [local(s, w.value)[1] for w in m.weights])


def jit_compiled_inner(s):
    @tf.function(jit_compile=True)
    def inner(x):
        return tf.sin(x) * 2.0

    return twice(s, lambda x: inner(x), per(s, 1.0, 2.0))


def string_and_ragged(s):
    def body(x):
        r = tf.ragged.range(tf.stack([x, x + 1]))
        return (tf.strings.as_string(x), r.to_tensor(shape=[2, 6]))

    return twice(s, body, per(s, 1, 2))


def returns_none_and_structures(s):
    r = twice(s, lambda x: {"a": None, "b": (x, 3, "text")}, per(s, 1.0, 2.0))
    return (str(type(r[0]["a"])), r)


def gradient_of_run_from_outside(s):
    w = variable(s, 2.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as t:
            y = s.reduce("SUM", s.run(lambda x: w * x * context().all_reduce("SUM", x * w), args=(x,)), axis=None)
        return t.gradient(y, list(w.values))

    return step(per(s, 1.0, 2.0))


def gradient_tape_around_function(s):
    w = variable(s, 2.0)

    @tf.function
    def step(x):
        return s.reduce("SUM", s.run(lambda x: w * w * x, args=(x,)), axis=None)

    x = per(s, 1.0, 2.0)
    with tf.GradientTape() as t:
        y = step(x)
    return t.gradient(y, list(w.values))


def tape_around_run_in_function_captured_tensor(s):
    @tf.function
    def step(c, x):
        with tf.GradientTape() as t:
            t.watch(c)
            y = s.reduce("SUM", s.run(lambda x: c * x, args=(x,)), axis=None)
        return t.gradient(y, c)

    return step(tf.constant(2.0), per(s, 1.0, 2.0))


def merge_update_with_closure_components(s):
    w = variable(s, [1.0, 2.0])

    def body(x):

        def merge(strategy, g):
            return strategy.extended.update(
                w, lambda v, g: v.assign_sub(g), args=(strategy.extended.reduce_to("SUM", g, w),), group=True
            )

        context().merge_call(merge, args=(x * w,))
        return w * 1.0

    return twice(s, body, per(s, 1.0, 2.0))
