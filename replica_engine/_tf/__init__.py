"""Every private TensorFlow and Keras name that this library needs, each with the reason beside its import.

- `thread_state`: the state that TensorFlow keeps separately for each thread.
- `keras_state`: the state that Keras keeps separately for each thread.
- `autograph`: conversion of the user's function; exceptions as the user raised them.
- `function`: the parts of a `tf.function`. `gradients`: gradients of values in a graph.
- `distribute`: TensorFlow's distributed values, strategies and collectives.
- `eager`, `variables`, `random_ops`, `host_ops`, `subgraphs`, `xla_ops`: tensors, variables, ops and graphs.
- `keras_model`, `keras_trainer`: parts of Keras models without a public name.
- `profiler`, `tpu_hardware`: TensorFlow's profiler, and its description of TPU hardware.
- `names`, `keras_names`: private attributes and hooks, as lists that a test checks.

Nothing outside this package imports from `tensorflow.python`. The engine must not import this package.
"""
