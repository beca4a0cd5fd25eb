"""Every private TensorFlow name this library needs, each with the reason beside its import.

- `thread_state`: what TensorFlow keeps a copy of for each thread.
- `keras_state`: what Keras does.
- `autograph`: converting the user's function, and keeping exceptions whole.
- `function`: tf.function, taken apart.
- `distribute`: TensorFlow's distributed values, strategies and collectives.
- `names`: private attributes and hooks, as a list that a test walks through.

Nothing outside this package imports from `tensorflow.python`. The engine may not use it.
"""
