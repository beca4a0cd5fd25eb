"""Devices, the table of strategies, and a check on every test that no replica thread stays behind.

A new strategy joins the contract suite with a row in `STRATEGIES`.
"""

import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
import tensorflow as tf
from helpers import fork_server

import replica_engine
from replica_engine import MirroredStrategy
from replica_engine.testing import logical_devices, no_leaked_threads

# Tests compile many small programs and run each a few times: LLVM need not spend long on them, in subprocesses either,
# nor XLA on fused loops of its newer kind. With XLA_FLAGS= in the environment they are compiled as users' are.
QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
)
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_TO_COMPILE))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEVICES = logical_devices(8)  # at import, before anything starts TensorFlow


def _no_tuning():
    """Has no iterator of tf.data tune itself: deleting one that does waits for that, the longer the older it is."""
    options, iterate = tf.data.experimental.AutotuneOptions, tf.data.Dataset.__iter__
    enabled = options.enabled
    options.enabled = property(lambda self: bool(enabled.fget(self)), enabled.fset)
    # Iterators that have no options of their own: one for each device of a strategy.
    tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(tf.data.Options()))


_no_tuning()

SIZES = (1, 4)  # 2 where a test asks for it: the suite has 6 minutes
OF_ANY_SIZE = ("test_run", "test_merge_call", "test_collectives", "test_uneven_batches", "test_cross_replica_optimizer")
FORMS = ("eager", "run-in-function", "function-in-run")


class Row(NamedTuple):
    """A strategy under test.

    Attributes:
        make: makes it, of a list of devices.
        forms: in which of the forms of `run` it differs from the rows above.
        sizes: with how many replicas.
        threads: whether each replica runs the function's Python code, on a thread; if not, it is traced once for
            all of them.
    """

    make: Callable[[list[str]], tf.distribute.Strategy]
    forms: tuple[str, ...] = FORMS
    sizes: tuple[int, ...] = SIZES
    threads: bool = True


def _tpu(devices: list[str]) -> tf.distribute.Strategy:
    return replica_engine.TPUStrategy(num_cores=len(devices))


STRATEGIES = {
    "mirrored": Row(MirroredStrategy),
    # Eager mode only: graphs are built in order with and without `concurrent` (test_options.py sees to that).
    "mirrored-concurrent": Row(functools.partial(MirroredStrategy, concurrent=True), ("eager",), (4,)),
}
if sys.version_info >= (3, 11):  # which jax needs
    STRATEGIES["tpu"] = Row(_tpu, sizes=(4,), threads=False)  # of 1 and 2 see tests/xla and tests/tpu
else:
    collect_ignore = ["xla", "tpu"]

_FAILED = pytest.StashKey[bool]()


def pytest_configure(config):
    config.addinivalue_line("markers", "replicas(*sizes): run the test with these numbers of replicas only")
    config.addinivalue_line(
        "markers", "threads(why): for strategies that run each replica on a thread, since it needs that"
    )
    config.addinivalue_line(
        "markers", "graphs: replicas run in graphs alone, so for strategies that differ from the others in those"
    )


def pytest_generate_tests(metafunc):
    """Runs a test that takes `strategy` once for each row of the table and each number of replicas.

    One that takes `run` too is run once for each form of that as well.
    """
    if "strategy" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("replicas")
        rows = [
            (name, size) for name in _names(metafunc) for size in (marker.args if marker else _sizes(metafunc, name))
        ]
        if "run" in metafunc.fixturenames:
            both = [(row, form) for row in rows for form in STRATEGIES[row[0]].forms]
            ids = [f"{name}-{size}-{form}" for (name, size), form in both]
            metafunc.parametrize(("strategy", "run"), both, ids=ids, indirect=True)
        else:
            metafunc.parametrize("strategy", rows, ids=[f"{name}-{size}" for name, size in rows], indirect=True)
    if "make_strategy" in metafunc.fixturenames:
        metafunc.parametrize("make_strategy", _names(metafunc), indirect=True)


def _sizes(metafunc, name):
    """All sizes of a strategy where they are what a module is about; the largest elsewhere, which saves a minute."""
    sizes = STRATEGIES[name].sizes
    return sizes if metafunc.module.__name__.rpartition(".")[2] in OF_ANY_SIZE else sizes[-1:]


def _names(metafunc):
    only_threads, only_graphs = (metafunc.definition.get_closest_marker(mark) for mark in ("threads", "graphs"))
    rows = STRATEGIES.items()
    return [
        name for name, row in rows if (row.threads or not only_threads) and (row.forms != ("eager",) or not only_graphs)
    ]


@pytest.fixture(autouse=True, scope="module")
def _little_garbage():
    # The leak check collects garbage after most tests. What is there before a module's first one stays anyway,
    # so the collector need not look at it each time: 200 ms a test without. Tracing makes many objects that stay
    # for as long as the graph: by itself the collector looks at them less often than Python's 700 would have it.
    # TensorFlow's global graph must not be there: it lists each variable that is made, and once frozen it never goes.
    tf.compat.v1.reset_default_graph()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _replica_threads_go(request, caplog):
    """Fails a test that leaves replica threads behind. Set up first, so it looks after all other fixtures."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_leaked_threads(grace=2.0))
        yield
        # What holds on to strategies after the test, and is none of theirs: pytest the fixtures' values and the
        # arguments of log messages, TensorFlow's global graph the variables made inside a tf.function.
        request.node.funcargs.clear()
        caplog.get_records("call").clear()
        tf.compat.v1.reset_default_graph()
        if request.node.stash.get(_FAILED, False):
            stack.pop_all()  # the traceback holds on to everything; one failure is enough


@pytest.fixture(scope="session")
def programs():
    """Programs in processes of their own that have TensorFlow imported: for those that would import it first anyway."""
    with contextlib.closing(fork_server.Programs()) as programs:
        yield programs


@pytest.fixture
def strategy(request):
    name, size = request.param
    return STRATEGIES[name].make(DEVICES[:size])


@pytest.fixture
def make_strategy(request):
    """`make_strategy(size)`, for tests that need several strategies."""
    return lambda size: STRATEGIES[request.param].make(DEVICES[:size])


@pytest.fixture
def traces(strategy, request):
    """How often a function is traced for one signature: once for each replica, or once for all."""
    name, size = request.node.callspec.params["strategy"]
    return size if STRATEGIES[name].threads else 1
