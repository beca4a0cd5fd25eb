"""A `fit` that is killed and goes on in another process.

- `backup_and_restore`: `BackupAndRestore`, what a user writes, and one `fit`: when it saves, what it restores at which
  moment, and how a signal ends it.
- `training_state`: `TrainingState`, for loops of one's own.
- `saved_state`: what is saved: variables as a checkpoint of TensorFlow, the state of other callbacks, random numbers.
- `backup_files`: the folder of backups, each complete or not there, and plain data in it.
- `data_place`: the place in the data.
- `preemption`: the signal with which a scheduler announces the end.
"""
