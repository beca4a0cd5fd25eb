"""Without jax, or with one that does not serve: the rest of the library works, and the error says what to install."""

import textwrap

WITHOUT = """
    import sys

    class NoJax:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("jax", "jaxlib"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoJax())
    for name in [name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib")]:
        del sys.modules[name]  # Keras imports it where there is one

    import replica_engine

    strategy = replica_engine.MirroredStrategy(["CPU:0"])
    assert int(strategy.run(lambda x: x + 1, args=(1,))) == 2

    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replicated = replica_engine.keras.replicate_model(model)
    assert isinstance(replicated.strategy, replica_engine.MirroredStrategy)
    assert np.isfinite(replicated.train_on_batch(np.ones((3, 2)), np.ones((3, 1))))

    def use_strategy():
        replica_engine.TPUStrategy(num_cores=2)

    def use_package():
        replica_engine.xla.replicate(lambda: 1, num_replicas=2)

    def import_package():
        import replica_engine.xla

    def import_from():
        from replica_engine import xla

    for use in (use_strategy, use_package, import_package, import_from, use_strategy):
        try:
            use()
        except ImportError as error:
            assert isinstance(error, replica_engine.errors.BackendMissingError), type(error)
            assert 'pip install "replica-engine[xla]"' in str(error), error
            assert "jax" in str(error)
        else:
            raise AssertionError(use)
    assert "xla" in dir(replica_engine) and "TPUStrategy" in dir(replica_engine)
    print("done")
"""

UNFIT = """
    import jax
    import jaxlib._jax
    import replica_engine

    def refused(*messages):
        try:
            replica_engine.TPUStrategy(num_cores=2)
        except ImportError as error:
            assert isinstance(error, replica_engine.errors.BackendMissingError), type(error)
            for message in messages:
                assert message in str(error), error
        else:
            raise AssertionError(messages)

    version = jax.__version__
    for old in ("0.4.30", "0.7.2", "0.6"):
        jax.__version__ = old
        refused(f"jax {old} is installed", "0.8.0", "pip install --upgrade")
    jax.__version__ = version

    needed = jaxlib._jax.batched_device_put
    del jaxlib._jax.batched_device_put
    refused(f"jax {version}", "batched_device_put", 'pip install "jax<0.13" "jaxlib<0.13"')
    jaxlib._jax.batched_device_put = needed

    for new in (version, "0.12.10", "0.13", "1.0.0.dev20300101", "0.13.0rc1"):
        jax.__version__ = new
        for name in [name for name in __import__("sys").modules if name.startswith("replica_engine.pjrt")]:
            del __import__("sys").modules[name]
        import replica_engine.pjrt.jaxlib
    assert [int(i) for i in replica_engine.xla.replicate(replica_engine.xla.replica_id, num_replicas=2)] == [0, 1]
    print("done")
"""


def said(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_without_jax_the_error_names_the_install_command(programs):
    chosen, done = said(programs.run(textwrap.dedent(WITHOUT))).splitlines()
    assert "(1 replica: CPU:0): TPUStrategy cannot be used" in chosen
    assert chosen.endswith("replica_engine.logical_devices(n) makes n devices of this CPU, before TensorFlow starts")
    assert done == "done"


def test_with_an_unfit_jax_the_error_names_the_install_command(programs):
    assert said(programs.run(textwrap.dedent(UNFIT))) == "done"
