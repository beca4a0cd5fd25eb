"""TPUStrategy: the replica body, compiled to one program that runs on N devices.

- `strategy`: TPUStrategy and its extended half.
- `variables`: distributed variables whose values live on the devices.
- `workers`: what is different where the job has several workers.
- `device_loops`: `run_steps`. `keras_steps`: `steps_per_execution` of Keras.
- `api`: attributes and methods that libraries expect of a `tf.distribute.TPUStrategy`.
"""

from replica_engine.strategies.tpu.strategy import TPUExtended, TPUStrategy

__all__ = ["TPUExtended", "TPUStrategy"]
