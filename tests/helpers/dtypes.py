"""The dtypes that XLA has."""

import tensorflow as tf

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = (*INTEGERS, *FLOATS, "complex64", "complex128")
# TensorFlow has hardly any operations for these. XLA moves and casts them.
WITHOUT_VARIABLES = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
_NARROW = ("int4", "uint4", "float8_e4m3fn", "float8_e5m2", *WITHOUT_VARIABLES)
NARROW = [name for name in _NARROW if hasattr(tf.dtypes.experimental, name)]
EVERY = ["bool", *NUMBERS, *NARROW]


def dtype_of(name):
    return getattr(tf.dtypes.experimental, name) if name in NARROW else tf.as_dtype(name)
