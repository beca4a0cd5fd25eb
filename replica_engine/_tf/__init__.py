"""Every private name of TensorFlow and Keras that this library needs, each with the reason next to its import.

TensorFlow:

- `thread_state`: the state that TensorFlow keeps separately for each thread. `quick_scopes`: faster scopes.
- `distribute`: distributed values, strategies and collectives.
- `autograph`, `function`: conversion of the user's function; the parts of a `tf.function`.
- `variables`, `eager`: handles of variables; eager tensors and arrays without ops.
- `xla_ops`, `host_ops`, `subgraphs`, `random_ops`, `gradients`: graphs that XLA compiles, and ops that it cannot.
- `profiler`, `tpu_hardware`: the profiler, and the description of TPU hardware.
- `names`: private attributes and hooks, as a list that a test checks.

Keras:

- `keras_model`, `keras_trainer`: parts of models, and training functions.
- `keras_state`: the state that Keras keeps separately for each thread.
- `keras_names`: private attributes and hooks, as a list that a test checks.

Nothing outside this package imports from `tensorflow.python` or `keras.src`. The engine must not import this package.
"""
