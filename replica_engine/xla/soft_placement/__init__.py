"""Soft placement: ops of a body that XLA cannot compile run on the host, without a request from the user.

TensorFlow does the same on TPUs: strings, tables, summaries, `tf.print`, `tf.py_function` and checks run on the host,
between the ops that run on the devices. Read `rewrite` first.

- `kinds`: which ops run on the host.
- `rewrite`: a copy of the body's graph, in which host calls stand for these ops.
- `values`: a value while the copy is made, and the rules by which shapes are known.
- `pending`: how ops become calls. `piece`: a call in a launch.
- `summaries`: the summary writer and the step of the caller.
- `moved`: the rewritten body, and the list of its host calls for the user.
"""
