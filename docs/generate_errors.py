"""Writes docs/errors.md: `python docs/generate_errors.py`.

What it says of a class and a wording is their docstrings; the examples are the golden files of tests/errors.
"""

import ast
import importlib
import inspect
import pathlib
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from replica_engine import errors

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
GOLDEN = ROOT / "tests" / "errors" / "golden"

SECTIONS = (
    "threads",
    "scopes",
    "timeouts",
    "hosts",
    "inputs",
    "programs",
    "host_calls",
    "values",
    "devices",
    "models",
    "parity",
    "contrib",
    "versions",
)
OUTSIDE = {
    "BackendMissingError",
    "LostVariableError",
    "ReplicaTimeoutError",
    "StuckProgramError",
    "TensorFlowVersionError",
    "WorkerLostError",
    "WorkersMissingError",
}
WIDTH = 100

HEAD = """\
# Errors

<!-- Made by `python docs/generate_errors.py` from the docstrings of `replica_engine.errors` and the golden files of
tests/errors. Change those. -->

Every error and warning of the library, each with a program that comes to it and what that shows. All errors are in
`replica_engine.errors`, and all but `ReplicaUnwound` are a `ReplicaEngineError`. An exception of your own code is never
wrapped: it leaves `run` as the object that you raised, with notes on which replica raised it and where the others were.

`replica-engine explain ScopeError.variable` prints the part of this page about one message, and
`replica-engine explain "words of a message"` finds it; without a name it lists all. Each error names its part in a
note, `more: replica-engine explain ScopeError.variable`, and so does the last line of most warnings. Both are left out
below.

Warnings are logged once, by the logger `replica_engine`; [how to leave one out](in_your_process.md#what-it-logs).

Three families say whose turn it is:

- **misuse**: the program has to change;
- **outside world**: something did not come back, or is not there;
- **unwinding**: `ReplicaUnwound` is not an error: it ends a waiting replica when another replica has failed.

The programs begin with `import tensorflow as tf`, `from replica_engine import ...` and the like, and with
`replica_engine.logical_devices(8)` where they name CPU devices. Messages name the line
of the program, which is `program.py` here. Of tracebacks the user's frames are shown. (On Python 3.10, which does not
print an exception's notes, the last lines are in its `__notes__`.)
"""


def page() -> str:
    """The text of docs/errors.md."""
    modules = [importlib.import_module(f"replica_engine.errors.{name}") for name in SECTIONS]
    return "\n".join([HEAD, *_summary(modules), *(line for module in modules for line in _section(module))])


def _summary(modules: list[ModuleType]) -> Iterator[str]:
    yield "| error | family | also a | when |"
    yield "| --- | --- | --- | --- |"
    for module in modules:
        for error in _public(module):
            if isinstance(error, type):
                name = error.__name__
                yield f"| [{name}](#{name.lower()}) | {_family(name)} | {_also(error)} | {_brief(error)} |"
    yield ""


def _section(module: ModuleType) -> Iterator[str]:
    title, _, _ = (inspect.getdoc(module) or "").partition("\n")
    yield f"## {title.rstrip('.')}\n"
    public = _public(module)
    for error in public:
        if isinstance(error, type):
            yield f"### {error.__name__}\n"
            yield f"{_described(error)}\n"
            own = [what for name, what in vars(error).items() if isinstance(what, classmethod)]
            yield from _examples(error.__name__)
            for wording in own:
                yield f"#### {error.__name__}.{wording.__name__}\n"
                yield f"{_brief(wording)}\n"
                yield from _examples(f"{error.__name__}.{wording.__name__}")
    for function in public:
        if not isinstance(function, type):
            yield f"### {function.__name__}\n"
            yield f"{_brief(function)}\n"
            yield from _examples(function.__name__)


def _public(module: ModuleType) -> list[Any]:
    """The exceptions that a module defines, and its wordings of warnings and notes, in their order in the file."""
    tree = ast.parse(inspect.getsource(module))
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    found = [getattr(errors, name) for name in names if name in errors.__all__]
    return [each for each in found if not isinstance(each, type) or issubclass(each, BaseException)]


def _family(name: str) -> str:
    if name == "ReplicaUnwound":
        return "unwinding"
    return "outside world" if name in OUTSIDE else "misuse"


def _also(error: type) -> str:
    return ", ".join(base.__name__ for base in error.__bases__ if base is not errors.ReplicaEngineError)


def _brief(what: Any) -> str:
    return (inspect.getdoc(what) or "").partition("\n\n")[0].replace("\n", " ")


def _described(error: type) -> str:
    """The docstring without examples, and the family and bases."""
    text = re.sub(r"\n\nExample:\n.*?(?=\n\n\S|\Z)", "", inspect.getdoc(error) or "", flags=re.DOTALL)
    text, _, attributes = text.partition("\n\nAttributes:\n")
    rows = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    listed = [f"- `{name}`: {' '.join(meaning.split())}" for name, meaning in rows]
    also = _also(error)
    family = f"Family: {_family(error.__name__)}. Also {'an' if also[0] in 'AEIOU' else 'a'} {also}."
    return "\n\n".join([text, family, *(["Attributes:\n\n" + "\n".join(listed)] if listed else [])])


def _examples(name: str) -> Iterator[str]:
    for path in sorted(GOLDEN.glob(f"{name}.txt")) + sorted(GOLDEN.glob(f"{name}.*.txt")):
        if path.stem.partition(f"{name}.")[2] and getattr(getattr(errors, name, None), path.stem.split(".")[1], None):
            continue  # another wording of the class
        program, _, seen = re.split(r"\n\n(=+ what the user sees =+)\n", path.read_text())
        yield f"```python\n{program}\n```\n"
        yield f"```text\n{_wrapped(seen.rstrip())}\n```\n"


def _wrapped(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False) or [""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
