"""The version, alone, so that packaging can read it without importing TensorFlow."""

__version__ = "0.3.0"
