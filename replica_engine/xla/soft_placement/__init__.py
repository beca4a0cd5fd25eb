"""Soft placement: ops of a body that XLA cannot compile run on the host, without a request from the user.

TensorFlow does the same on TPUs: strings, tables, summaries, `tf.print`, `tf.py_function` and checks run on the host,
between the ops that run on the devices. Read `graph_copy` first.

- `host_op_kinds`: which ops run on the host; the summary writer and the step of the caller.
- `graph_copy`: a copy of the body's graph, in which host calls stand for these ops, and the list of them for the user.
- `host_piece`: how ops become calls, a call in a launch, and the rules by which shapes are known.
"""
