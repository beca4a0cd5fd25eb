"""The demo behind `python -m replica_engine demo`: trains a model on N replicas and compares it with one device.

To copy into your own program:

- `custom_loop`: a custom training loop in plain TensorFlow.
- `keras_fit`: a Keras model and `fit`.

The rest of the demo:

- `cli`: the flags.
- `trial`: trains on N replicas, then on one device, and compares.
- `report`: the comparisons and their wording.
- `picture`: the losses and the throughput.
- `data`: handwritten digits, in batches.
- `progress`: the progress bar and the line for each epoch.
- `quiet`: imports TensorFlow without its start-up messages.
"""
