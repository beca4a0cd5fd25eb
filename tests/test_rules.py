"""The rules of the project that a machine can check."""

import ast
import importlib
import pathlib
import pkgutil
import subprocess
import sys
import textwrap

import pytest
from helpers import private_keras_names, private_names
from helpers.versions import HAS_XLA

import replica_engine
import replica_engine.upstream
from replica_engine.upstream.hook import hooks
from replica_engine.upstream.keras import keras_variables as keras_state

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "replica_engine"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


PRIVATE_IMPORTS = sorted(
    {
        (module, name)
        for path in (PACKAGE / "upstream").rglob("*.py")
        for module, name in imports(path)
        if module.startswith(("tensorflow.python", "tensorflow.compiler", "keras.src"))
    }
)


def test_each_private_import_exists():
    def exists(module, name):
        try:
            return hasattr(importlib.import_module(module), name) or importlib.import_module(f"{module}.{name}")
        except ImportError:
            return False

    gone = [f"{module}.{name}" for module, name in PRIVATE_IMPORTS if not exists(module, name)]
    assert not gone, "TensorFlow or Keras no longer has them; see replica_engine/upstream"


def test_each_private_attribute_exists():
    gone = [
        f"{private.owner}.{private.name}, needed for: {private.why}"
        for private in private_names.PRIVATE + private_keras_names.PRIVATE
        if not hasattr(private.owner, private.name)
    ]
    assert not gone, "TensorFlow or Keras no longer has them"


def test_the_private_name_of_keras_exists():
    module = importlib.import_module(keras_state.MODULE)
    assert hasattr(module, keras_state.STATE), (
        "Keras no longer has it; see replica_engine/upstream/keras/keras_variables.py"
    )


SINCE_KERAS_3_16 = {
    "keras.src.backend.tensorflow.trainer.Trainer": "keras.src.backend.tensorflow.trainer.TensorFlowTrainer",
    "keras.src.trainers.trainer.BaseTrainer": "keras.src.trainers.trainer.Trainer",
    "keras.src.backend.tensorflow.ops": "keras.src.backend.tensorflow",
}
"""Names, and those that the page for users has."""


ADDED = {"_losses", "distribute_tensor"}
"""Hooks of names that the owner itself lacks, though each layer has the first."""


def declared():
    """All hooks, those of features that no test has used too."""
    for module in pkgutil.walk_packages(replica_engine.upstream.__path__, "replica_engine.upstream."):
        importlib.import_module(module.name)
    return hooks()


def test_each_hook_exists_and_is_listed_for_users_and_nothing_else_is():
    page = (ROOT / "docs" / "in_your_process.md").read_text()
    gone, rows = [], []
    for hook in declared():
        owner = pkgutil.resolve_name(hook.owner)
        if not hasattr(owner, hook.name) and hook.name not in ADDED:
            gone.append(f"{hook.owner}.{hook.name}")
        row = f"| `{hook.owner}.{hook.name}` | {hook.why} | {hook.since} | {hook.until} |"
        for new, old in SINCE_KERAS_3_16.items():
            row = row.replace(new, old)
        rows.append(row)
    assert not gone, "TensorFlow or Keras no longer has them; see replica_engine/upstream"
    listed = [line for line in page.splitlines() if line.startswith(("| `tensorflow.", "| `keras."))]
    assert sorted(listed) == sorted(rows), "docs/in_your_process.md has other rows"


def test_hooks_are_few():
    """Each is a dependence on what TensorFlow and Keras do inside. A new one needs another to go."""
    assert len({(hook.owner, hook.name) for hook in declared()}) <= MOST_HOOKS


MOST_HOOKS = 60


def test_private_names_are_imported_in_upstream_only():
    elsewhere = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in MODULES
        if "upstream" not in path.parts
        for module, _ in imports(path)
        if module.startswith(("tensorflow.python", "tensorflow.compiler", "tensorflow.core"))
    }
    assert elsewhere == set()


def test_imports_run_one_way():
    lint_imports = pathlib.Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint_imports], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout


def test_public_names_are_there():
    for name in replica_engine.__all__:
        if name in ("TPUStrategy", "xla") and not HAS_XLA:
            with pytest.raises(ImportError, match=r"replica-engine\[xla\]"):
                getattr(replica_engine, name)
        else:
            assert getattr(replica_engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        replica_engine.no_such_name  # noqa: B018


def test_importing_the_package_does_not_import_tensorflow():
    code = "import sys, replica_engine; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=500, check=False).returncode == 0


def test_the_engine_is_tested_without_tensorflow():
    """Neither the engine nor what runs its tests imports TensorFlow, NumPy or Keras."""
    code = """
        import sys, pytest
        failed = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", "tests/engine", "-k", "test_returns_each"])
        print(int(failed), [name for name in ("tensorflow", "numpy", "keras") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout


def test_every_public_error_has_a_docstring_and_the_base():
    errors = replica_engine.errors
    for name, value in vars(errors).items():
        if (
            isinstance(value, type)
            and issubclass(value, BaseException)
            and value.__module__.startswith(errors.__name__)
        ):
            assert value.__doc__, name
            assert issubclass(value, errors.ReplicaEngineError) or name == "ReplicaUnwound"
