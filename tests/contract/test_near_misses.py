"""Calls that are nearly right: a keyword that is misspelt, an exception whose text fails, one device without a list."""

import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy


@pytest.mark.parametrize(("name", "near"), [("arg", "args"), ("kwarg", "kwargs"), ("option", "options")])
def test_a_misspelt_keyword_of_run(strategy, name, near):
    said = rf"strategy\.run got an unexpected keyword argument '{name}'\. Did you mean {near}=\?"
    with pytest.raises(TypeError, match=said):
        strategy.run(lambda: None, **{name: ()})


@pytest.mark.parametrize(
    ("name", "near"), [("device", "devices"), ("warn_afer", "warn_after"), ("time_out", "timeout")]
)
def test_a_misspelt_keyword_of_a_constructor(name, near):
    with pytest.raises(TypeError, match=rf"MirroredStrategy got .*'{name}'\. Did you mean {near}=\?"):
        MirroredStrategy(**{name: None})


def test_a_keyword_like_none_that_there_is():
    with pytest.raises(TypeError, match=r"It takes fn=, args=, kwargs=, options=\."):
        MirroredStrategy(["CPU:0"]).run(lambda: None, xyz=1)


@pytest.mark.parametrize(
    "device", ["CPU:0", "/cpu:1", "/device:CPU:0", tf.config.LogicalDevice("/device:CPU:1", "CPU")]
)
def test_one_device_without_a_list(device):
    assert MirroredStrategy(device).num_replicas_in_sync == 1


@pytest.mark.parametrize("base", [ValueError, TypeError, AttributeError, RuntimeError])
def test_an_exception_whose_text_fails_arrives(base):
    class Mine(base):
        def __str__(self):
            raise KeyError("no text")

    def step():
        raise Mine

    with pytest.raises(Mine):
        MirroredStrategy(["CPU:0", "CPU:1"]).run(step)
