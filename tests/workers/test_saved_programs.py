"""What a job of several workers has compiled is found by one that starts again, and not by one of another size.

Workers may have folders of their own, and what one has lost it compiles alone.
"""

import numpy as np
from helpers.jobs import LONGER, job
from helpers.workers import TPU_HEAD, TPU_TAIL, read

STEPS = """
strategy = replica_engine.TPUStrategy(num_cores=2 * int(os.environ.get("REPLICA_ENGINE_NUM_PROCESSES", 2)))
with strategy.scope():
    w = tf.Variable([1.0, 2.0])


def step(x):
    gradient = context().all_reduce("SUM", x * w)
    w.assign_sub(gradient / 8)
    return xla.outside_compilation(lambda: np.float32(10 + me))


x = strategy.experimental_distribute_values_from_function(lambda each: tf.constant(each.replica_id_in_sync_group + 1.0))
for _ in range(2):
    result = strategy.run(step, args=(x,))
found["w"] = w.numpy().tolist()
found["sum"] = float(strategy.reduce("SUM", result, axis=None))
counts = xla.counts()
parts.update(compiles=counts.compiles, hits=counts.cache_hits)
"""


def run(programs, size, folders):
    """For each worker of a job, what all found, and its counts."""
    with job(size, join=LONGER) as made:
        started = [
            programs.start(
                TPU_HEAD + STEPS + TPU_TAIL, env={**made.environment(worker), "REPLICA_ENGINE_CACHE_DIR": str(folder)}
            )
            for worker, folder in enumerate(folders)
        ]
        return [read(each) for each in started]


def right(size):
    replicas = 2 * size
    w = np.array([1.0, 2.0])
    for _ in range(2):
        w = w - replicas * (replicas + 1) / 2 * w / 8
    return {"w": w.tolist(), "sum": float(sum(2 * (10 + worker) for worker in range(size)))}


def test_a_job_that_starts_again_compiles_nothing(programs, tmp_path):
    shared = [tmp_path / "programs"] * 2
    first = run(programs, 2, shared)
    assert [found for found, _ in first] == [right(2)] * 2
    assert [each["hits"] for _, each in first] == [0, 0]
    again = run(programs, 2, shared)
    assert [found for found, _ in again] == [right(2)] * 2
    assert [each for _, each in again] == [{"compiles": 0, "hits": each["compiles"]} for _, each in first]

    # A worker with an empty folder, or a broken file, compiles; the other one reads, and their programs are compared.
    for file in shared[0].glob("replica_engine_step-*"):
        file.write_bytes(b"not a program")
    (_, broken), (found, empty) = run(programs, 2, [shared[0], tmp_path / "another"])
    assert found == right(2)
    assert (broken["compiles"], empty["hits"]) == (1, 0)
    assert broken["hits"] == first[0][1]["compiles"] - 1


def test_a_job_of_another_size_reads_none_of_them(programs, tmp_path):
    folder = tmp_path / "programs"
    run(programs, 2, [folder] * 2)
    more = run(programs, 3, [folder] * 3)
    assert [found for found, _ in more] == [right(3)] * 3
    assert [each["hits"] for _, each in more] == [0] * 3
    alone, counts = read(programs.start(TPU_HEAD + STEPS + TPU_TAIL, env={"REPLICA_ENGINE_CACHE_DIR": str(folder)}))
    assert (alone["w"], counts["hits"]) == (right(2)["w"], 0)
