"""The function that a body runs, its parameters and its results.

- `function_spec`: the function with the options of its `tf.function`, and the key it is found by.
- `arguments`: the arguments, split into parameters of the program and compiled-in values.
- `argument_names`: names of arguments for messages.
- `outputs`: the results, split into results of the program and the structure around them.
"""
