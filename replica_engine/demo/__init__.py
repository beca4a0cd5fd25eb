"""The demo behind `python -m replica_engine demo`: a model trained on N replicas and checked against one device.

To copy into your own program:

- `custom_loop`: a training loop of your own, in plain TensorFlow.
- `keras_fit`: a Keras model and `fit`.

Around them:

- `cli`: the flags.
- `trial`: trains on N replicas and again on one device, and judges.
- `report`: the comparisons, and their wording.
- `data`: handwritten digits, in batches.
- `progress`: the progress bar and the line for each epoch.
- `quiet`: TensorFlow imported without its start-up notes.
"""
