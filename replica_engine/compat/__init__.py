"""Names of earlier TensorFlow versions, for programs that were written for them.

- `contrib`: the TPUStrategy of TensorFlow's contrib package, 2018.
"""
