"""The table of strategies, and a check on every test that no replica thread stays behind.

A new strategy joins the contract suite with a row in `STRATEGIES`. The tests in `tests/engine` run without TensorFlow,
so nothing here imports it before a test module of another folder is collected.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import pathlib
import signal
import sys
import unittest.mock
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import pytest
from helpers import environment, fork_server, progress, quiet, tiers
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine.testing import no_leaked_threads
from replica_engine.workers.cluster import held_address, split_address

if TYPE_CHECKING:
    import tensorflow as tf

environment.set_up()

# Rewriting the assertions of all tests takes seconds, and compiling this library takes one: processes share what the
# first one made.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Imports and tracing make many objects that stay: the collector looks less often than Python's 700 would have it.
gc.set_threshold(50_000, 20, 20)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

SIZES = (1, 4)  # where they are what a module is about; each trace takes time for each replica
OF_ANY_SIZE = ("test_run", "test_merge_call", "test_collectives", "test_uneven_batches", "test_cross_replica_optimizer")
FORMS = ("eager", "run-in-function", "function-in-run")
ABOUT_ORDER = ("test_merge_call", "test_options", "test_run", "test_sync_points", "test_timeouts")
ABOUT_FUNCTIONS = ("test_merge_call", "test_run", "test_sync_points", "test_tf_function", "test_variables")


_OF_WORKERS = (
    *("another_order", "backups", "both_strategies", "given_up", "links", "multi_worker", "no_open_door"),
    *("tpu_faults", "tpu_workers", "workers_random", "workers_saving"),
)


class Row(NamedTuple):
    """A strategy under test.

    Attributes:
        make: makes it, of a list of devices.
        forms: in which of the forms of `run` it differs from the rows above.
        sizes: with how many replicas in the modules that are about that.
        size: with how many elsewhere.
        threads: whether each replica runs the function's Python code, on a thread; if not, it is traced once for
            all of them.
        modules: the modules about what differs from the rows above; empty for all.
        quick: the modules in which `make test` has it too; None for all.
    """

    make: Callable[[list[str]], tf.distribute.Strategy]
    forms: tuple[str, ...] = FORMS
    sizes: tuple[int, ...] = SIZES
    size: int = 4
    threads: bool = True
    modules: tuple[str, ...] = ()
    quick: tuple[str, ...] | None = None


def _only_worker(size: int) -> tf.distribute.Strategy:
    """The strategy of several workers, which takes all devices, as if there were `size`."""
    devices = "replica_engine.strategies.multi_worker._devices"
    with unittest.mock.patch(devices, return_value=("CPU", size)):
        return replica_engine.MultiWorkerMirroredStrategy()


STRATEGIES = {
    # The other rows with threads have 4 everywhere.
    "mirrored": Row(lambda devices: replica_engine.MirroredStrategy(devices), size=2),
    # Eager mode only: graphs are built in order with and without `concurrent` (test_options.py sees to that).
    "mirrored-concurrent": Row(
        lambda devices: replica_engine.MirroredStrategy(devices, concurrent=True), ("eager",), (4,), quick=ABOUT_ORDER
    ),
}
STRATEGIES["multi-worker"] = Row(  # as the only worker: on the threads and with the sum of the first row
    lambda devices: _only_worker(len(devices)),
    ("run-in-function",),
    (4,),
    modules=(
        "test_backend",
        "test_collectives",
        "test_datasets",
        "test_datasets_on_host",
        "test_graph_v1",
        "test_sync_points",
        "test_tf_function",
        "test_variables",
    ),
    quick=("test_backend", "test_datasets", "test_sync_points"),
)
if HAS_XLA:
    STRATEGIES["tpu"] = Row(  # tests/xla and tests/tpu have 1 and 2 replicas
        lambda devices: replica_engine.TPUStrategy(_platform(devices), num_cores=len(devices)),
        sizes=(4,),
        threads=False,
    )
    STRATEGIES["tpu-parts"] = Row(  # what differs where a replica has two devices; tests/sharding has more
        lambda devices: replica_engine.TPUStrategy(
            num_cores=2 * len(devices), cores_per_replica=2, distribution="fsdp"
        ),
        ("eager",),
        (2,),
        size=2,
        threads=False,
        modules=("test_collectives", "test_host_ops", "test_keras", "test_uneven_batches", "test_variables"),
    )
else:
    collect_ignore = ["baseline", "keras_table", "sharding", "xla", "tpu"]
    collect_ignore += [f"bad_input/test_{name}.py" for name in ("collectives", "replicate")]
    collect_ignore += [
        "faults/test_parts.py",
        *(f"workers/test_{name}.py" for name in _OF_WORKERS),
        "threads/test_user_lines.py",
        "watch/test_timeline.py",
    ]


def _platform(devices):
    """The platform of compiled replicas: GPUs in tests/gpu, and elsewhere what `TPUStrategy` chooses."""
    return replica_engine.xla.PjrtClusterResolver("gpu") if devices[0].startswith("GPU") else None


# They wait for processes, up to half a minute each. One that begins last would keep the other workers waiting.
FIRST = {"workers", "faults", "test_demo.py", "test_few_threads.py", "test_resuming.py"}
TESTS = pathlib.Path(__file__).parent
WITHOUT_TENSORFLOW = TESTS / "engine"

_FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser):
    parser.addoption(
        "--replicas", type=int, help="run each test of the contract suite with this number of replicas, and no other"
    )
    parser.addoption(
        "--portable", action="store_true", help="see whether TPUs and GPUs take each program, also of the quick tests"
    )
    parser.addoption(
        "--tier", choices=(tiers.QUICK, tiers.REST, tiers.ALL), help="which tests; see tests/helpers/tiers.py"
    )


def pytest_configure(config):
    # Folders that are asked for have been read: what TensorFlow said as it started would follow pytest's last line.
    config.pluginmanager.getplugin("capturemanager").read_global_capture()
    if not hasattr(config, "workerinput"):  # worker processes of xdist share one
        server = fork_server.Server()
        os.environ[fork_server.ADDRESS] = server.address
        config.add_cleanup(server.close)
        if config.get_verbosity() == 0:
            config.pluginmanager.register(progress.Progress(config))
    paths = [pathlib.Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if any(WITHOUT_TENSORFLOW not in (path, *path.parents) for path in paths) and _runs_tests(config):
        _set_tensorflow_up()  # before the conftest.py of a folder imports it
    config.addinivalue_line(
        "markers", "full(why): left for `make test-full`, since it says nothing new, but takes long"
    )
    config.addinivalue_line("markers", "replicas(*sizes): run the test with these numbers of replicas only")
    config.addinivalue_line(
        "markers", "threads(why): for strategies that run each replica on a thread, since it needs that"
    )
    config.addinivalue_line(
        "markers", "graphs: replicas run in graphs alone, so for strategies that differ from the others in those"
    )


def pytest_unconfigure():
    """What libraries log as the process ends, of threads that they join, is not about a test."""
    logging.disable(logging.INFO)


def pytest_collectstart(collector):
    """Sets TensorFlow up before a test module that may start it is imported."""
    if isinstance(collector, pytest.Module) and WITHOUT_TENSORFLOW not in collector.path.parents:
        _set_tensorflow_up()
        looks = collector.config.getoption("--portable") or tiers.tier(collector.config) != tiers.QUICK
        if HAS_XLA and looks and "helpers.portable" not in sys.modules:
            importlib.import_module("helpers.portable").look_at_each_program()
        if os.environ.get("KEPT_PROGRAMS") and "helpers.kept_programs" not in sys.modules:
            importlib.import_module("helpers.kept_programs").keep_each_program()


def _runs_tests(config):
    """Whether this process runs tests: a worker of xdist, or the only process."""
    return hasattr(config, "workerinput") or not config.getoption("numprocesses", None)


def _set_tensorflow_up():
    with quiet.quiet_start():
        importlib.import_module("helpers.devices")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Lets each worker process begin with another folder, so that it finds bytecode in the folders of the others."""
    report = yield
    if collector.path == TESTS and "PYTEST_XDIST_WORKER" in os.environ:
        number, count = int(os.environ["PYTEST_XDIST_WORKER"][2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        first = number * len(report.result) // count
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    tiers.select(config, items)
    items.sort(key=lambda item: (FIRST.isdisjoint(item.path.parts[-2:]), item.path))


def pytest_generate_tests(metafunc):
    """Runs a test that takes `strategy` once for each row of the table and each number of replicas.

    One that takes `run` too is run once for each form of that as well.
    """
    if "strategy" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("replicas")
        only = metafunc.config.getoption("replicas")
        rows = [
            (name, size)
            for name in _names(metafunc)
            for size in (marker.args if marker else [only] if only else _sizes(metafunc, name))
        ]
        if "run" in metafunc.fixturenames:
            both = [
                pytest.param(row, form, id=f"{row[0]}-{row[1]}-{form}", marks=_tier(metafunc, row[0], form))
                for row in rows
                for form in STRATEGIES[row[0]].forms
            ]
            metafunc.parametrize(("strategy", "run"), both, indirect=True)
        else:
            each = [pytest.param(row, id=f"{row[0]}-{row[1]}", marks=_tier(metafunc, row[0])) for row in rows]
            metafunc.parametrize("strategy", each, indirect=True)
    if "make_strategy" in metafunc.fixturenames:
        names = [pytest.param(name, marks=_tier(metafunc, name)) for name in _names(metafunc)]
        metafunc.parametrize("make_strategy", names, indirect=True)


def _tier(metafunc, name, form=None):
    module, quick = _module(metafunc), STRATEGIES[name].quick
    apart = (quick is None or module in quick) and (form != "function-in-run" or module in ABOUT_FUNCTIONS)
    return () if apart else (pytest.mark.full("shares the code of another row or form"),)


def _module(metafunc):
    return metafunc.module.__name__.rpartition(".")[2]


def _sizes(metafunc, name):
    row = STRATEGIES[name]
    return row.sizes if _module(metafunc) in OF_ANY_SIZE else (row.size,)


def _names(metafunc):
    only_threads, only_graphs = (metafunc.definition.get_closest_marker(mark) for mark in ("threads", "graphs"))
    module = _module(metafunc)
    return [
        name
        for name, row in STRATEGIES.items()
        if (row.threads or not only_threads)
        and (row.forms != ("eager",) or not only_graphs)
        and (not row.modules or module in row.modules)
    ]


@pytest.fixture(autouse=True, scope="module")
def _little_garbage():
    # The leak check collects garbage after most tests. What is there before a module's first one stays anyway,
    # so the collector need not look at it each time: 200 ms a test without.
    # TensorFlow's global graph must not be there: it lists each variable that is made, and once frozen it never goes.
    _reset_global_graph()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def _replica_threads_go(request, caplog):
    """Fails a test that leaves replica threads behind. Set up first, so it looks after all other fixtures."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_leaked_threads(grace=60.0))
        yield
        # Three things outlive the test and hold its strategies: pytest has the fixtures' values and the arguments of
        # log messages, and TensorFlow's global graph has the variables made inside a tf.function.
        (request.node.funcargs or {}).clear()  # None once Ctrl-C has ended the run
        caplog.get_records("call").clear()
        _reset_global_graph()
        if request.node.stash.get(_FAILED, False):
            stack.pop_all()  # the traceback holds on to everything; one failure is enough


@pytest.fixture(autouse=True)
def _programs_are_portable():
    """Fails a test that compiles a program that no TPU and no GPU takes."""
    yield
    if portable := sys.modules.get("helpers.portable"):
        refused, portable.refused = portable.refused, []
        assert not refused, "\n\n".join(refused)


@pytest.fixture(autouse=True)
def _nothing_stays_chosen():
    """Forgets what a test set for its process: the environment counts again, whatever the order of tests is."""
    yield
    for name in ("replica_engine.pjrt.rewrites", "replica_engine.xla.stages.saved_programs"):
        if module := sys.modules.get(name):
            module._chosen.clear()


@pytest.fixture(scope="session")
def programs():
    """Programs in processes of their own that have TensorFlow imported: for those that would import it first anyway."""
    made = fork_server.Programs(os.environ[fork_server.ADDRESS])
    made.run("")  # the first one waits until TensorFlow is imported, which must not count for the limits of a job
    return made


@pytest.fixture
def unused_ports():
    """Makes a list of ports that nobody listens at.

    They are held until the end of the test: nobody who asks for any port gets one of them, but a server that asks for
    it by its number does.
    """
    with contextlib.ExitStack() as stack:

        def ports(count: int) -> list[int]:
            held = [held_address("127.0.0.1:1") for _ in range(count)]
            for _, each in held:
                stack.enter_context(each)
            return [split_address(address)[1] for address, _ in held]

        yield ports


@pytest.fixture
def strategy(request):
    name, size = request.param
    return _make(name, size)


@pytest.fixture
def make_strategy(request):
    """`make_strategy(size)`, for tests that need several strategies."""
    return lambda size: _make(request.param, size)


@pytest.fixture
def traces(strategy, request):
    """How often a function is traced for one signature: once for each replica, or once for all."""
    name, size = request.node.callspec.params["strategy"]
    return size if STRATEGIES[name].threads else 1


def _make(name, size):
    from helpers.devices import DEVICES  # not above: it imports TensorFlow

    return STRATEGIES[name].make(DEVICES[:size])


def _reset_global_graph():
    """Empties TensorFlow's global graph. There is none before TensorFlow is imported."""
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].compat.v1.reset_default_graph()
