"""What a process has of the two backends, if its program uses one of them."""

import textwrap

import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

_INSTALLED = """
    import pkgutil
    import sys
    import tensorflow as tf
    import replica_engine
    from replica_engine._tf.patches import PATCHES

    strategy = {strategy}
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.cond(variable > 0, lambda: variable * 2.0, lambda: variable)
        variable.assign_add(tape.gradient(loss, variable))
        return tf.distribute.get_replica_context().all_reduce("SUM", loss)

    tf.function(lambda: strategy.run(step))()
    strategy.run(step)
    found = set()
    for patch in PATCHES:
        module, _, owner = patch.owner.rpartition(".")
        replaced = getattr(pkgutil.resolve_name(module), owner, None) if module else sys.modules[owner]
        each = getattr(replaced, patch.name, None)
        while each is not None:
            found.add(getattr(getattr(each, "_replica_engine_around", None), "__module__", ""))
            each = getattr(each, "_replica_engine_original", None)
    print(sorted({{name.split(".")[1] for name in found if name.startswith("replica_engine")}}))
"""


@pytest.mark.parametrize(
    ("made", "packages"),
    [
        ("replica_engine.MirroredStrategy(['CPU:0'])", ["_tf", "threads"]),
        pytest.param(
            "replica_engine.TPUStrategy(num_cores=1)",
            ["_tf", "xla"],
            marks=pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA),
        ),
    ],
    ids=["threads", "compiled"],
)
def test_a_program_that_uses_one_backend_has_no_hooks_of_the_other(made, packages, programs):
    assert programs.run(textwrap.dedent(_INSTALLED).format(strategy=made)).stdout == f"{packages}\n"


_FIT_OF_ANOTHER_LIBRARY = """
    import keras
    import numpy as np
    import replica_engine

    trainer = next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))
    own = trainer.fit

    def fit(self, *args, **kwargs):
        print("another library")
        return own(self, *args, **kwargs)

    trainer.fit = fit
    with replica_engine.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones([4, 1]), np.ones([4, 1]), verbose=0)
"""


def test_what_another_library_puts_around_fit_is_called(programs):
    assert programs.run(textwrap.dedent(_FIT_OF_ANOTHER_LIBRARY)).stdout == "another library\n"
