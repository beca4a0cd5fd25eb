"""Workers of TPUStrategy that swap two launches: an error on each, and no number in a program, a variable or a file."""

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import TPU_HEAD, TPU_TAIL, read

SWAPPED = """
what, folder, workers = os.environ["WHAT"], os.environ["FOLDER"], int(os.environ["REPLICA_ENGINE_NUM_PROCESSES"])
divided = {"distribution": "fsdp", "cores_per_replica": 2} if what == "parts" else {}
strategy = replica_engine.TPUStrategy(num_cores=2 * workers, **divided)
size = 1000 if what == "sizes" else 1
with strategy.scope():
    total = tf.Variable(tf.zeros([]))
    weight = tf.Variable(tf.ones([1024, 64]))  # in parts, if weights are divided


def sums(x):
    if what == "order of replicas":
        both = xla.all_gather(x, groups=[[2, 0], [3, 1]])
        total.assign_add(both[0] + both[1])
    else:
        total.assign_add(context().all_reduce("SUM", x)[0])
    return total.read_value()


def others(x):
    return context().all_reduce("SUM", 10 * x) * weight[0, 0]


def loop(step, size):
    data = [np.ones(size, "float32")] * 4
    several = lambda loop, x: loop.set_last_step_output("sum", step(x))
    return lambda: strategy.run_steps(several, iter(data), 4).last_step_outputs["sum"]


def number(result):
    return float(tf.reshape(strategy.experimental_local_results(result)[0], [-1])[-1])


first, second = lambda: strategy.run(sums, args=(tf.ones([1]),)), lambda: strategy.run(others, args=(tf.ones([size]),))
if what == "functions":
    first, second = tf.function(first), tf.function(second)
elif what == "loops":
    first, second = loop(sums, 1), loop(others, 1)
elif what == "batches":
    batches = tf.data.Dataset.from_tensors(3.0).repeat(100).batch(4, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    second = lambda: next(batches)
found["right"] = [number(each()) for each in (second, first, second, first)]
if what not in ("repeated", "order of replicas"):  # there, worker 0 launches what it launched last
    strategy.run(lambda: context().all_reduce("MAX", tf.ones([])))
before = float(total)
kept = tf.train.Checkpoint(total=total)
kept.write(folder + "/kept")
found["numbers"] = []
try:
    for each in (second, first) if me == 1 else (first, second):
        found["numbers"].append(number(each()))
except replica_engine.errors.ProgramDisagreementError as error:
    found["error"] = str(error)
try:
    found["changed"] = float(total) != before
except replica_engine.errors.LostVariableError:
    found["changed"] = False
try:
    kept.write(folder + "/kept")
    found["saved"] = True
except replica_engine.errors.ProgramDisagreementError:
    saved = tf.train.load_checkpoint(folder + "/kept").get_tensor("total/.ATTRIBUTES/VARIABLE_VALUE")
    found["saved"] = float(saved) != before
"""

EQUAL = """
strategy = replica_engine.TPUStrategy(num_cores=2)


def one(x):
    return context().all_reduce("SUM", x)


def other(x):
    return context().all_reduce("SUM", x)


def helper(number):
    return strategy.reduce("SUM", values(number), axis=None)


def values(number):
    return strategy.experimental_distribute_values_from_function(lambda context: tf.constant(number))


if os.environ["WHAT"] == "functions":
    first, second = lambda: strategy.run(one, args=(values(1.0),)), lambda: strategy.run(other, args=(values(10.0),))
else:
    first = lambda: helper(1.0)
    second = lambda: helper(10.0)
found["numbers"] = []
try:
    for each in (first, second, first, second, *((second, first) if me else (first, second))):
        found["numbers"].append(float(strategy.experimental_local_results(each())[0]))
except replica_engine.errors.ProgramDisagreementError as error:
    found["error"] = str(error)
"""


@pytest.mark.parametrize("what", ["functions", "reduce in a helper"])
def test_swapped_launches_of_equal_programs_give_no_number(programs, what):
    """They share one compiled program; their lines differ."""
    with job(2, join=LONGER) as made:
        for process in made.start_all(programs, TPU_HEAD + EQUAL + TPU_TAIL, WHAT=what):
            found, _ = read(process)
            assert found["numbers"] == [2.0, 20.0, 2.0, 20.0]
            assert "the workers differ" in found["error"]


RIGHT = {  # of four replicas: the numbers of each of the two launches
    "sizes": [40, 4, 40, 8],
    "repeated": [40, 4, 40, 8],
    "eager": [40, 4, 40, 8],
    "functions": [40, 4, 40, 8],
    "loops": [40, 16, 40, 32],
    "parts": [20, 2, 20, 4],
    "batches": [3, 4, 3, 8],
    "order of replicas": [40, 2, 40, 4],
}


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("sizes", 2),
        ("repeated", 2),
        *(
            pytest.param(what, workers, marks=pytest.mark.full("swaps other launches, or on more workers"))
            for what, workers in [*((each, 2) for each in list(RIGHT)[2:]), ("three workers", 3)]
        ),
    ],
)
def test_no_number_comes_of_swapped_launches(programs, tmp_path, what, workers):
    with job(workers, join=LONGER) as made:
        asked = {"WHAT": what, "FOLDER": str(tmp_path)}
        started = [
            programs.start(TPU_HEAD + SWAPPED + TPU_TAIL, env=made.environment(each, **asked))
            for each in range(workers)
        ]
        for process in started:
            found, _ = read(process)
            assert found["right"] == RIGHT.get(what, [60, 6, 60, 12])
            assert found["numbers"] == []
            assert "the workers differ" in found["error"]
            assert "\n  worker 1: " in found["error"]
            assert not found["changed"]
            assert not found["saved"]


LEFT = """
import logging
from replica_engine.workers import member

strategy = replica_engine.TPUStrategy(num_cores=4, warn_after=0.5)
limited = replica_engine.TPUStrategy(num_cores=4, timeout=10)  # all compile in that time
(connection,) = member._members
totals = {}
for each in (strategy, limited):
    with each.scope():
        totals[each] = tf.Variable(0.0)


def sums():
    return context().all_reduce("SUM", totals[tf.distribute.get_strategy()].assign_add(1.0))


def others():
    return context().all_reduce("MAX", 7.0)


def number(of, step):
    return float(of.experimental_local_results(of.run(step))[0])


def leaves(of, by, name):  # worker 0, while it waits for worker 1, which waits for that
    if me:
        connection.get(name)
        return []
    if by is KeyboardInterrupt:
        actions.append(lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        number(of, sums)
    except by:
        return [float(totals[of])]
    finally:
        connection.put(name, True)


class Acts(logging.Handler):  # when the warning comes that a launch waits
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr)
        if "`sums`" in record.getMessage() and actions:
            actions.pop()()


actions = []
logging.getLogger("replica_engine").addHandler(Acts())
signal.signal(signal.SIGINT, signal.default_int_handler)
found["numbers"] = [number(of, step) for of in (strategy, limited) for step in (sums, others)]
found["numbers"] += leaves(strategy, KeyboardInterrupt, "the other was interrupted")
found["numbers"] += [number(strategy, sums), number(strategy, others)]
found["numbers"] += leaves(limited, replica_engine.errors.ReplicaTimeoutError, "its time was up")
found["numbers"] += [number(limited, sums), number(limited, others)]
connection.meet("the same launches")
if os.environ["LEFT_FOR"]:  # what both have launched last, of which worker 1 asks nothing, on other devices
    smaller = replica_engine.TPUStrategy(num_cores=2)
    number(smaller, others)
    leaves(strategy, KeyboardInterrupt, "the other has left it")
    try:
        number(smaller, others)
    except replica_engine.errors.ProgramDisagreementError as error:
        found["error"] = str(error)
    print(json.dumps([found, parts]), flush=True)
    os._exit(0)
if me:
    connection.get("the other waits")
    os.kill(os.getpid(), signal.SIGKILL)
actions.append(lambda: connection.put("the other waits", True))
try:
    number(strategy, sums)
except replica_engine.errors.WorkerLostError as error:
    found["lost"] = [error.worker, float(totals[strategy])]
"""


def test_a_launch_that_waits_for_the_comparison_is_left_and_made_again(programs):
    """With Ctrl-C, at the limit, and when another worker is lost: the launch is taken back, and no variable is lost."""
    with job(join=LONGER) as made:
        environments = [made.environment(each, LEFT_FOR="") for each in range(2)]
        waits, late = (programs.start(TPU_HEAD + LEFT + TPU_TAIL, env=each) for each in environments)
        try:
            found, _ = read(waits)
            late.communicate(LONGER)
        finally:
            late.kill()
    assert found["numbers"] == [4, 7, 4, 7, 1, 8, 7, 1, 8, 7]
    assert found["lost"] == [1, 2.0]


def test_a_launch_that_is_left_for_one_that_others_make_without_a_question_is_an_error(programs):
    """Nobody waits for ever: worker 0 for the comparison that it has asked for, and worker 1 in its collective."""
    with job(join=LONGER) as made:
        environments = [made.environment(each, LEFT_FOR="the last one") for each in range(2)]
        for process in [programs.start(TPU_HEAD + LEFT + TPU_TAIL, env=each) for each in environments]:
            found, _ = read(process)
            assert "after another one was left" in found["error"]
