"""The command `python -m replica_engine timeline`: a recorded timeline as a picture, and the slowest replica in words.

- `cli`: the flags of the command.
- `spans`: reads the file as tracks of spans, and computes each span's own time, without the spans inside it.
- `steps`: the steps of a recording, and the replica that works longest in them.
- `picture`: the picture, drawn with matplotlib.

The command reads files that `replica_engine.timeline` wrote. It does not need TensorFlow. Zooming, and how long each
kind of span takes, are Perfetto's: ui.perfetto.dev opens the same file.
"""
