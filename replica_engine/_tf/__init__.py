"""Every private name of TensorFlow, Keras and CPython that this library needs, each with the reason beside its import.

Of TensorFlow:

- `thread_state`: what it keeps a copy of for each thread. `quick_scopes`: its scopes, entered in less time.
- `distribute`: distributed values, strategies and collectives.
- `autograph`, `function`: converting the user's function; `tf.function`, taken apart.
- `variables`, `eager`: handles of variables; eager tensors and arrays without ops.
- `xla_ops`, `host_ops`, `subgraphs`, `random_ops`, `gradients`: graphs that XLA compiles, and ops that it cannot.
- `profiler`, `tpu_hardware`: small facts. `names`: attributes and hooks, as a list that a test walks through.

Of Keras:

- `keras_model`, `keras_trainer`, `keras_state`: models, training functions, and what Keras keeps for each thread.
- `keras_names`: attributes and hooks, as a list that a test walks through.

Nothing outside this package imports from `tensorflow.python` or `keras.src`. The engine may not use this package.
"""
