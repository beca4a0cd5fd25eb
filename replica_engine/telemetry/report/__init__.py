"""The command `python -m replica_engine timeline`: a recorded timeline as a picture and a table.

- `cli`: its flags.
- `spans`: the file as tracks of spans, each with the time that is its own.
- `shares`: the table.
- `picture`: the picture, with matplotlib.

It reads files that `replica_engine.timeline` wrote, and needs no TensorFlow.
"""
