"""What a process has of the two backends, if its program uses one of them."""

import textwrap

import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

_INSTALLED = """
    import tensorflow as tf
    import replica_engine
    from replica_engine.upstream.hook import hooks

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
    calls = [getattr(each.call, "func", each.call) for each in hooks() if each.call is not None]
    print(sorted({{call.__module__.split(".")[1] for call in calls}}))
"""


@pytest.mark.parametrize(
    ("made", "packages"),
    [
        ("replica_engine.MirroredStrategy(['CPU:0'])", ["strategies", "threads", "traced_steps", "upstream"]),
        pytest.param(
            "replica_engine.TPUStrategy(num_cores=1)",
            ["strategies", "traced_steps", "upstream", "xla"],
            marks=pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA),
        ),
    ],
    ids=["threads", "compiled"],
)
def test_a_program_that_uses_one_backend_has_no_hooks_of_the_other(made, packages, programs):
    assert programs.run(textwrap.dedent(_INSTALLED).format(strategy=made)).stdout == f"{packages}\n"


_IMPORTED = """
    import gc, sys
    import types
    import tensorflow as tf
    import keras
    {jax}

    tf.nn.sparse_softmax_cross_entropy_with_logits  # each lazy module of TensorFlow is there
    OWNERS = ("tensorflow", "keras", "jax", "jaxlib")

    def attributes():
        found = {{}}
        for name, module in [*sys.modules.items()]:
            if name.partition(".")[0] not in OWNERS or not isinstance(module, types.ModuleType):
                continue
            for owner in [module, *[each for each in [*vars(module).values()] if isinstance(each, type)]]:
                for each, value in [*vars(owner).items()]:
                    found[name, getattr(owner, "__qualname__", ""), each] = value
        return found

    def contents(values):
        return {{
            name: (value, [*map(id, value)], [*map(id, value.values())] if isinstance(value, dict) else [])
            for name, value in values.items()
            if isinstance(value, (dict, list, set)) and "__warningregistry__" not in name
        }} | {{
            (*name, index): (cell, [id(cell.cell_contents)], [])
            for name, value in values.items()
            if isinstance(value, types.FunctionType) and "traceback_utils" in value.__code__.co_filename
            for index, cell in enumerate(value.__closure__ or ())
        }}

    before = attributes()
    inside = contents(before)
    collects = [*gc.callbacks]  # jax has one there
    import replica_engine, replica_engine.errors, replica_engine.keras, replica_engine.testing
    for package in {packages}:
        __import__(package)
    after = attributes()
    modules = {{name for name, _, _ in before}}
    changed = [
        name
        for name, value in after.items()
        if name[0] in modules and value is not before.get(name, before) and not isinstance(value, types.ModuleType)
        and "_pb2" not in name[0] and "__annotate" not in name[-1]  # Python 3.14 makes these when they are asked for
    ]
    for name, (value, *known) in contents(before).items():
        if inside[name][1:] != (*known,):
            changed.append(name)
    if gc.callbacks != collects:
        changed.append("gc.callbacks")
    print(changed)
"""


@pytest.mark.parametrize(
    ("jax", "packages"),
    [
        ("", ["replica_engine.strategies", "replica_engine.strategies.multi_worker", "replica_engine.replica"]),
        pytest.param(
            "import jax",
            ["replica_engine.xla", "replica_engine.strategies.tpu", "replica_engine.compat.contrib"],
            marks=pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA),
        ),
    ],
    ids=["threads", "compiled"],
)
def test_an_import_changes_nothing(jax, packages, programs):
    program = textwrap.dedent(_IMPORTED).format(jax=jax, packages=packages)
    assert programs.run(program).stdout == "[]\n"


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
