"""TensorFlow's own MultiWorkerMirroredStrategy on this engine, by overriding the hook that calls the replicas.

Two processes run on one machine, with one replica in each, or one for each GPU. TensorFlow's collectives compute the
all-reduces between the processes. Run both, in two terminals:

    python examples/multi_worker.py 0
    python examples/multi_worker.py 1
"""

import json
import os
import sys

import tensorflow as tf

from replica_engine.strategies import MultiWorkerMirroredExtended, ReplicaThreads


class MultiWorkerOnReplicaThreads(tf.distribute.MultiWorkerMirroredStrategy):
    """A MultiWorkerMirroredStrategy whose replicas run on this library's threads."""

    class Extended(ReplicaThreads, MultiWorkerMirroredExtended):
        """ReplicaThreads comes first, so Python finds its `_call_for_each_replica`."""

    def __init__(self, cluster_resolver=None, communication_options=None):
        options = communication_options or tf.distribute.experimental.CommunicationOptions()
        extended = self.Extended(self, cluster_resolver=cluster_resolver, communication_options=options)
        tf.distribute.Strategy.__init__(self, extended)


def main(task: int, ports: list[str]) -> None:
    """Runs worker number `task`. The cluster has one worker for each port."""
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": task}})
    strategy = MultiWorkerOnReplicaThreads()

    def step():
        context = tf.distribute.get_replica_context()
        mine = tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
        return context.all_reduce("SUM", mine)

    total = strategy.run(tf.function(step))
    print(f"worker {task}: the sum over {strategy.num_replicas_in_sync} replicas is {float(total):g}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or ["45671", "45672"])
