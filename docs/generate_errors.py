"""A hook of mkdocs that makes the pages of errors, which are in the site and in no folder.

A page of a class has its docstring, the golden files of tests/errors with its name, and all its messages, which are
read in the source: a message stands where it is raised. Warnings and notes share a page each.
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
GOLDEN = ROOT / "tests" / "errors" / "golden"
CODE = ROOT / "replica_engine"

SECTIONS = (
    "run_errors",
    "timeouts",
    "worker_errors",
    "program_errors",
    "value_errors",
    "device_errors",
)
OUTSIDE = {
    "BackendMissingError",
    "CheckpointError",
    "LostVariableError",
    "ReplicaTimeoutError",
    "StuckProgramError",
    "TensorFlowVersionError",
    "WorkerLostError",
    "WorkersMissingError",
}
WIDTH = 80

SHORTEST = 24
"""Characters of the shortest string that is taken for a message; shorter ones are parts of one."""

HEAD = """\
# Errors

Every error of the library has a page, with a program that comes to it, what that shows, and all its messages. So have
the [warnings](warnings.md), and the [notes](notes.md) that the library adds to exceptions. All errors are in
`replica_engine.errors`, and all but `ReplicaUnwound` are a `ReplicaEngineError`. An exception of your own code is never
wrapped: it leaves `run` as the object that you raised, with notes on which replica raised it and where the others were.

Each error names its page in a note, `more: errors/ScopeError.html in the site ...`, and so does the last line of most
warnings. Both are left out of examples. Without the pages, `help(replica_engine.errors.ScopeError)` says what an error
means.

Warnings are logged by the logger `replica_engine`, once for each cause; only those of a wait come again while it lasts.
[How to leave one out](../in_your_process.md#what-it-logs).

Three families say whose turn it is:

- **misuse**: the program has to change;
- **outside world**: something did not come back, or is not there;
- **unwinding**: `ReplicaUnwound` is not an error: it ends a waiting replica when another replica has failed.

The programs begin with `import tensorflow as tf`, `from replica_engine import ...` and the like, and with
`replica_engine.logical_devices(8)` where they name CPU devices. Messages name the line of the program, which is
`program.py` here. Of tracebacks the user's frames are shown.
"""

INTRODUCED = {
    "warnings": "The program goes on after a warning. [What is logged, and how to leave one "
    "out](../in_your_process.md#what-it-logs).\n",
    "notes": "Notes stand below the message of an exception: which replica raised it, where its run was, what to do.\n",
}


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages to the files of the site."""
    from mkdocs.structure.files import File  # tests read the pages without mkdocs

    for name, text in pages().items():
        files.append(File.generated(config, f"errors/{name}", content=text))
    return files


def pages() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    modules = [importlib.import_module(f"replica_engine.errors.{name}") for name in SECTIONS]
    classes = [error for module in modules for error in _classes(module)]
    messages = _messages()
    every = {"index.md": "\n".join([HEAD, *_summary(modules)])}
    for error in classes:
        every[f"{error.__name__}.md"] = "\n".join(_page(error, messages.get(error.__name__, [])))
    found = {path.name.split(".")[0] for path in GOLDEN.glob("*.txt")} - {error.__name__ for error in classes}
    functions = {name: what for module in modules for name, what in vars(module).items() if name in found}
    notes = {name for name in found if name.startswith("note_")}
    for title, names in (("warnings", found - notes), ("notes", notes)):
        lines = [f"# {title.capitalize()} of the library\n", INTRODUCED[title]]
        for name in sorted(names):
            brief = [f"{_brief(functions[name])}\n"] if name in functions else []  # else the message says it all
            lines += [f"## {name}\n", *brief, *_examples(name)]
        every[f"{title}.md"] = "\n".join(lines)
    return every


def _summary(modules: list[ModuleType]) -> Iterator[str]:
    for module in modules:
        title, _, _ = (inspect.getdoc(module) or "").partition("\n")
        yield f"## {title.rstrip('.')}\n"
        yield "| error | family | also a | when |"
        yield "| --- | --- | --- | --- |"
        for error in _classes(module):
            name = error.__name__
            yield f"| [{name}]({name}.md) | {_family(name)} | {_also(error)} | {_brief(error)} |"
        yield ""


def _page(error: type, messages: list[str]) -> Iterator[str]:
    yield f"# {error.__name__}\n"
    yield f"{_described(error)}\n"
    yield from _examples(error.__name__)
    if messages:
        yield 'All its messages; "..." stands for what differs:\n'
        texts = "\n\n".join(_wrapped(text.rstrip()) for text in messages)
        yield f"```text\n{texts}\n```\n"


def _classes(module: ModuleType) -> list[type]:
    """The exceptions that a module defines, in their order in the file."""
    tree = ast.parse(inspect.getsource(module))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name in errors.__all__]
    return [error for name in names if issubclass(error := getattr(errors, name), BaseException)]


def _messages() -> dict[str, list[str]]:
    """By the name of a class, its messages: long strings in calls of the class, and in calls inside the class."""
    found: dict[str, list[str]] = {}
    sources = [text for path in sorted(CODE.rglob("*.py")) if "Error" in (text := path.read_text())]
    for text in sources:
        for node in ast.parse(text).body:
            own = isinstance(node, ast.ClassDef) and node.name in errors.__all__
            strings = [each for each in ast.walk(node) if isinstance(each, ast.JoinedStr)]
            parts = {part for each in strings for part in ast.walk(each)}
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and call not in parts:  # what a part of a message is made of is none
                    called = ast.unparse(call.func).removesuffix(".about").rpartition(".")[2]
                    name = node.name if own else called if called in errors.__all__ else ""
                    said = [_text(each) for each in call.args if name]
                    new = [each for each in said if len(each) >= SHORTEST and " " in each]
                    found.setdefault(name, []).extend(each for each in new if each not in found[name])
    return found


def _text(node: ast.expr) -> str:
    """The string that an expression is, with "..." for what is put in; "" for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        marked = "".join(each.value if isinstance(each, ast.Constant) else "\0" for each in node.values)
        return re.sub("\0+", "...", marked)
    return ""


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
        program, _, seen = re.split(r"\n\n(=+ what the user sees =+)\n", path.read_text())
        yield f"```python\n{program}\n```\n"
        yield f"```text\n{_wrapped(seen.rstrip())}\n```\n"


def _wrapped(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False) or [""]
    return "\n".join(lines)
