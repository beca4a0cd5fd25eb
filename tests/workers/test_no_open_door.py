"""On CPUs no worker opens a port that takes commands; and what travels without TensorFlow's server."""

from helpers.jobs import LONGER, job
from helpers.workers import outputs

PROGRAM = """
import pathlib, socket

strategy = KIND()


def listening():
    # The addresses at which this process listens, in hexadecimal digits, as the kernel shows them.
    own = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except FileNotFoundError:  # the folder itself
            pass
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def of_all(value):
    return strategy.experimental_local_results(value)[0]


def add(value):
    return lambda: strategy.reduce("SUM", strategy.run(lambda: tf.identity(value)), axis=None)


def join(value, axis):
    return lambda: strategy.gather(strategy.run(lambda: tf.identity(value)), axis)


ports = [address.rpartition(":") for address in listening()]
found["hosts"] = sorted({host for host, _, _ in ports})
for _, _, port in ports:  # whoever sends bytes there ends nothing
    with socket.create_connection(("127.0.0.1", int(port, 16))) as stranger:
        stranger.sendall(os.urandom(200))
values = {
    "float16": tf.constant([1.5, 2.0], tf.float16), "int8": tf.constant([3], tf.int8),
    "uint8": tf.constant([200], tf.uint8), "int64": tf.constant([2**40], tf.int64),
    "complex64": tf.constant([1 + 2j], tf.complex64), "complex128": tf.constant([1 - 2j], tf.complex128),
    "double": tf.constant(0.5, tf.float64), "empty": tf.zeros([0, 3]),
}
for name, value in values.items():
    for form, fn in (("eager", add(value)), ("traced", tf.function(add(value)))):
        result = of_all(fn())
        found[f"sum of {name}, {form}"] = [result.dtype.name, str(result.numpy().tolist())]
rows = {
    "bool": tf.constant([True, False, True])[: me + 1], "string": tf.constant(["", "ab", "c"])[: me + 1],
    "int8": tf.constant([3, 4, 5], tf.int8)[: me + 1], "bfloat16": tf.constant([1.0, 2.0], tf.bfloat16)[: me + 1],
    "complex128": tf.constant([1 + 2j])[: me + 1], "none of the chief": tf.ones([me, 2]),
}
for name, value in rows.items():
    for form, fn in (("eager", join(value, 0)), ("traced", tf.function(join(value, 0)))):
        result = of_all(fn())
        found[f"gather of {name}, {form}"] = [result.dtype.name, str(result.numpy().tolist())]
found["columns"] = of_all(join(tf.fill([2, me + 1], float(me)), -1)()).numpy().tolist()
for name, value in (("bool", tf.constant([True])), ("string", tf.constant(["a"]))):
    try:
        add(value)()
    except replica_engine.errors.ReplicaEngineError as error:
        found[f"sum of {name}"] = type(error).__name__

with strategy.scope():
    first = tf.Variable(-1.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    signs = tf.Variable([-0.0 if me == 0 else 0.0])
    flags = tf.Variable([me == 0, me == 1])
    words = tf.Variable(["chief's" if me == 0 else "own"])
found["initial"] = [bool(np.signbit(signs.numpy())[0]), flags.numpy().tolist(), words.numpy()[0].decode()]


def assigns(value):
    first.assign(tf.cast(context().replica_id_in_sync_group, tf.float32) + value)


strategy.run(assigns, args=(5.0,))
found["first"] = [float(first)]
strategy.run(tf.function(assigns), args=(6.0,))
found["first"].append(float(first))
"""


def test_no_worker_listens_for_commands(programs):
    with job(join=LONGER) as made:
        first, second = outputs(programs, made, PROGRAM, local=2)
    assert first == second
    assert set(first.pop("hosts")) <= {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
    sums = {
        "float16": ["float16", "[6.0, 8.0]"],
        "int8": ["int8", "[12]"],
        "uint8": ["uint8", "[32]"],
        "int64": ["int64", f"[{2**42}]"],
        "complex64": ["complex64", "[(4+8j)]"],
        "complex128": ["complex128", "[(4-8j)]"],
        "double": ["float64", "2.0"],
        "empty": ["float32", "[]"],
    }
    gathers = {
        "bool": ["bool", str([True, True, True, False, True, False])],
        "string": ["string", str([b"", b"", b"", b"ab", b"", b"ab"])],
        "int8": ["int8", str([3, 3, 3, 4, 3, 4])],
        "bfloat16": ["bfloat16", str([1.0, 1.0, 1.0, 2.0, 1.0, 2.0])],
        "complex128": ["complex128", str([1 + 2j] * 4)],
        "none of the chief": ["float32", str([[1.0, 1.0]] * 2)],
    }
    for form in ("eager", "traced"):
        assert {name: first.pop(f"sum of {name}, {form}") for name in sums} == sums
        assert {name: first.pop(f"gather of {name}, {form}") for name in gathers} == gathers
    assert first.pop("columns") == [[0.0] * 2 + [1.0] * 4] * 2
    assert (first.pop("sum of bool"), first.pop("sum of string")) == ("ReplicaValueError", "ReplicaValueError")
    assert first == {"initial": [True, [True, False], "chief's"], "first": [5.0, 6.0]}
