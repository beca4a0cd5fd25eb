"""Ctrl-C in a `tf.function` with a run in it, in the moment in which TensorFlow makes an exception of its own."""

import pytest
import tensorflow as tf

MISMATCH = (  # what pybind11 raises then
    "pybind11::error_already_set: MISMATCH of original and normalized active exception types: ORIGINAL UnknownError "
    "REPLACED BY KeyboardInterrupt: "
)


@pytest.mark.replicas(2)
def test_it_is_a_keyboard_interrupt(strategy):
    @tf.function(autograph=False)
    def step(is_interrupted):
        strategy.run(lambda: tf.constant(1.0))
        if is_interrupted:
            raise RuntimeError(MISMATCH)

    step(False)
    with pytest.raises(KeyboardInterrupt):
        step(True)
    step(False)


@pytest.mark.replicas(2)
def test_other_errors_stay(strategy):
    @tf.function(autograph=False)
    def step():
        strategy.run(lambda: tf.constant(1.0))
        raise RuntimeError("MISMATCH of things")

    with pytest.raises(RuntimeError, match="MISMATCH of things"):
        step()
