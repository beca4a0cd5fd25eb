"""The function that a body runs, its parameters and its results.

- `function_spec`: the function with the options of its `tf.function`, and how to know it again.
- `arguments`: what becomes a parameter of the program, and what is compiled in. `argument_names`: names for messages.
- `outputs`: what becomes a result.
"""
