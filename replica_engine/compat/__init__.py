"""Names of the past, for programs that were written for them.

- `contrib`: TensorFlow's contrib TPUStrategy of 2018.
"""
