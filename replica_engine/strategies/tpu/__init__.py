"""TPUStrategy: the replica body, compiled to one program that runs on N devices.

- `strategy`: TPUStrategy and its extended half.
- `context`: the replica context of a compiled body.
- `variables`: distributed variables whose values live on the devices.
- `own_values`: what each replica gets of a value of several replicas from outside.
- `workers`: what is different where the job has several workers.
- `device_loops`: `run_steps`. `keras_steps`: `steps_per_execution` of Keras.
- `api`: attributes and methods that libraries expect of a `tf.distribute.TPUStrategy`.
"""

from replica_engine.strategies.tpu.strategy import TPUExtended, TPUStrategy

__all__ = ["TPUExtended", "TPUStrategy"]
