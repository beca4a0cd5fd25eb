"""A strategy that changes one thing: gradients move between devices as bfloat16.

This halves the bytes between devices. The values that move keep eight bits of mantissa, and in eager mode the sum is
rounded to bfloat16 as well; the variables stay float32. Run it:

    python examples/bfloat16_all_reduce.py
"""

import tensorflow as tf

import replica_engine
from replica_engine import logical_devices
from replica_engine.replica import regroup
from replica_engine.strategies import MirroredExtended


class CompressedExtended(MirroredExtended):
    """Casts float32 values to bfloat16 before a batched reduction, and the results back to float32 after it."""

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        values, destinations = zip(*value_destination_pairs, strict=True)
        compressed = [self._cast(value, tf.float32, tf.bfloat16) for value in values]
        reduced = super()._batch_reduce_to(reduce_op, list(zip(compressed, destinations, strict=True)), options)
        return [self._cast(value, tf.bfloat16, tf.float32) for value in reduced]

    def _cast(self, value, source, target):
        components = self._container_strategy().experimental_local_results(value)
        if any(isinstance(part, tf.IndexedSlices) or part.dtype != source for part in components):
            return value
        cast = []
        for part in components:
            with tf.device(part.device):
                cast.append(tf.cast(part, target))
        return regroup(cast)


class CompressedMirroredStrategy(replica_engine.MirroredStrategy):
    """A MirroredStrategy whose gradients are all-reduced in bfloat16."""

    extended_class = CompressedExtended


if __name__ == "__main__":
    strategy = CompressedMirroredStrategy(logical_devices(2))
    gradient = strategy.experimental_distribute_values_from_function(lambda context: tf.constant([1.0, 1 / 3]))
    total = strategy.run(lambda g: tf.distribute.get_replica_context().all_reduce("SUM", g), args=(gradient,))
    print("1/3 + 1/3 through bfloat16:", strategy.experimental_local_results(total)[0].numpy()[1])
