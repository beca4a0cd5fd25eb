"""Sums in the order of the replicas: every layout of a job has the same bits."""

import json

import ml_dtypes
import numpy as np
import pytest
from helpers.jobs import LONGER, job

PROGRAM = """
import json, os
import numpy as np
import tensorflow as tf
import replica_engine
from replica_engine import xla

me, workers = (int(os.environ[f"REPLICA_ENGINE_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES"))
if os.environ["KIND"] == "compiled":
    strategy = replica_engine.TPUStrategy(num_cores=4)
else:
    replica_engine.logical_devices(4 // workers)
    strategy = replica_engine.MultiWorkerMirroredStrategy()
context = tf.distribute.get_replica_context


def values(of):
    chance = np.random.default_rng(of.replica_id_in_sync_group)
    large, small = chance.standard_normal(30_000, np.float32), chance.standard_normal(6, np.float32)
    more = {"empty": np.zeros([0], np.float32), "complex": tf.complex(small, large[:6])}
    return {"large": large, "small": small, "narrow": tf.cast(small, tf.bfloat16), "number": np.int64(1), **more}


own = strategy.experimental_distribute_values_from_function(values)
eager = strategy.run(lambda x: context().all_reduce("SUM", x), args=(own,))
step = tf.function(lambda x: strategy.run(lambda y: context().all_reduce("MEAN", [y["large"], y["small"]]), args=(x,)))
found = [strategy.experimental_local_results(each)[-1] for each in tf.nest.flatten([eager, step(own)])]
found += [strategy.reduce("SUM", own["large"], axis=None)]
if os.environ["KIND"] == "compiled":
    scattered = strategy.run(lambda x: xla.all_gather(xla.reduce_scatter(x["large"])), args=(own,))
    found += [strategy.experimental_local_results(scattered)[-1]]
else:
    found += [strategy.reduce("MEAN", own["large"], axis=None) * 4]
print(json.dumps([each.numpy().tobytes().hex() for each in found]), flush=True)
"""


def sums():
    """What the program finds, by additions one after the other."""
    chances = [np.random.default_rng(replica) for replica in range(4)]
    large = [each.standard_normal(30_000, np.float32) for each in chances]
    small = [each.standard_normal(6, np.float32) for each in chances]
    narrow = [each.astype(ml_dtypes.bfloat16).astype(np.float32) for each in small]
    large, small, narrow = (((a + b) + c) + d for a, b, c, d in (large, small, narrow))
    of_both = (small + 1j * large[:6]).astype(np.complex64)
    found = [of_both, small[:0], large, narrow.astype(ml_dtypes.bfloat16), np.int64(4), small]
    found += [large / 4, small / 4, large, large]
    return [each.tobytes().hex() for each in found]


FOUR = pytest.mark.full("two workers make the same exchange")


@pytest.mark.parametrize("kind", ["threads", "compiled"])
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=FOUR)])
def test_each_layout_adds_alike(programs, kind, workers):
    with job(workers, join=LONGER) as made:
        started = made.start_all(programs, PROGRAM, KIND=kind, REPLICA_ENGINE_ORDERED_SUMS="1")
        for each in started:
            out, err = each.communicate(LONGER)
            assert each.returncode == 0, err[-4000:]
            assert json.loads(out) == sums()


OTHERS = """
import os, sys
import tensorflow as tf
import replica_engine

me = int(os.environ["REPLICA_ENGINE_PROCESS_ID"])
strategy = replica_engine.MultiWorkerMirroredStrategy()
context = tf.distribute.get_replica_context


def sums(*shapes):
    return strategy.run(lambda: context().all_reduce("SUM", [tf.ones(shape) for shape in shapes]))


def step():
    return strategy.run(lambda: context().all_reduce("SUM", tf.ones([3000])))


case = sys.argv[1]
if case == "another shape":
    attempt = lambda: sums([2, 3] if me else [3, 2])
elif case == "shapes that swap":
    attempt = lambda: sums(*([2], [4]) if me else ([4], [2]))
else:
    replica_engine.set_ordered_sums(False)
    traced = tf.function(step).get_concrete_function()
    replica_engine.set_ordered_sums(bool(me))
    attempt = traced if case == "another order" else step
try:
    attempt()
except replica_engine.errors.ProgramDisagreementError:
    print("refused", flush=True)
"""


@pytest.mark.parametrize("case", ["another shape", "shapes that swap", "another order", "another order of a new trace"])
def test_workers_that_do_not_add_alike_are_refused(programs, case):
    with job(2, join=LONGER) as made:
        on = {"REPLICA_ENGINE_ORDERED_SUMS": "1"}
        started = [programs.start(OTHERS, case, env=made.environment(worker, **on)) for worker in range(2)]
        for each in started:
            out, err = each.communicate(LONGER)
            assert (each.returncode, out.strip()) == (0, "refused"), err[-4000:]
