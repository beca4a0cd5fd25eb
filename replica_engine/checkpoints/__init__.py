"""Checkpoints: how variables are written and read.

`tf.train.Checkpoint` and `tf.train.CheckpointManager` stay what users call. This package replaces what they do with the
values of a checkpoint that has variables of a strategy:

1. `save` is one save from beginning to end, on one worker or on several. It waits for the save before it, takes the
   values, and writes them, at once or on a thread.
2. `checkpoint_files` has the values that a save takes: those of the step at which `save` was called, whatever is
   launched next. It writes them as TensorFlow's V2 bundle: at the final name there is always a complete checkpoint, the
   one before or the new one. Its thread writes asynchronous saves, one for the process, and keeps an error for the next
   save, or the exit. It also says how a variable that is divided over devices is saved and read: as slices, without the
   whole on one host.
3. `file_owners` says which strategy and which workers a saved object belongs to; their chief writes its files.

What must never happen: a file at a final name that is not whole; a failed write that nobody hears of; values of two
steps in one checkpoint. The hooks in TensorFlow are in `upstream/checkpoint_hooks.py`.
"""
