"""Golden files: a user's program that goes wrong, and what the user then sees.

The body of a test that is marked `@shows(SomeError)` is such a program. It must come to that error, and the program and
what it shows must be those of `golden/SomeError.txt`. A text that branches has a test of its own,
`@shows(SomeError, "wording")`. Line N of the file is line N of `program.py`, as the messages call it. `UPDATE_GOLDEN=1
pytest tests/errors` rewrites the files.

A file shows the printed output, the library's warnings, and the exception as Python prints it, with only the user's
frames in its traceback.

Some programs are slow on purpose, so that the watchdog warns. Their files must not depend on the speed of the machine.
So they show only the warning that the test is about, and `threading.Event().wait(seconds)` in such a program ends when
that warning has come.

A program that calls `strategy.run` is then run a second time, with each run in a `tf.function`: it must come to an
exception of the same type, and log nothing that its file does not have. `@eager_only` leaves a program out of that.
"""

import ast
import contextlib
import functools
import inspect
import io
import logging
import os
import pathlib
import re
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from replica_engine import errors

FOLDER = pathlib.Path(__file__).parents[1] / "errors" / "golden"
UPDATE = "UPDATE_GOLDEN" in os.environ
MORE = "more: errors/"  # this line ends each error and most warnings, and is left out
LINE = " what the user sees ".center(120, "=")

_EAGER_ONLY = "_eager_only"
_LOGGED = re.compile(r"(?:WARNING|ERROR|CRITICAL): ")
_PLACE = re.compile(r" at [\w.]+:\d+ in (?:a lambda|[\w<>.]+)")
_OTHERS = ("absl", "tensorflow", "jax")
_OF_TESTS = "triggered tf.function retracing"  # many tests make their functions at one line
_WARNING = re.compile(r"(note|many|slow|moved|untested|warn|unusable|broken|may)_")
_GENERATED = "__autograph_generated_file"
_CHAINED = {
    True: "The above exception was the direct cause of the following exception:",
    False: "During handling of the above exception, another exception occurred:",
}

_NORMAL = (
    (r'^( *)File "(?!program\.py|__autograph).*\n(?:\1  .*\n)*', ""),  # frames that are not the user's
    (r"(?:/[\w.+-]+)+/replica_engine-\d+-\d+\.json", "/tmp/runs/replica_engine-1234-0.json"),
    (r"(?:/[\w.+-]+)+/(replica_engine_\w+)-[0-9a-f]{64}", r"/tmp/programs/\1-0123abcd"),
    (r"(?:/[\w.+-]+)+/([\w-]+\.(?:py|so))", r"\1"),
    (r"(?:/[\w.+-]+)+/test_\w+\d/", "/home/me/"),  # pytest's tmp_path
    (r"\bfor [\d.]+(?:e-\d+)? s\b", "for N s"),
    (r"\bsync point in [\d.]+ s:", "sync point in N s:"),
    (r"\([\w.-]+, pid \d+\)", "(node-a, pid N)"),
    (r"(127\.0\.0\.1|0\.0\.0\.0):\d+", r"\1:N"),
    (r"heard of [\d.e-]+ s ago", "heard of N s ago"),
    (r"\bprocess \d+", "process N"),
    (r"\bProcess \d+", "Process N"),
    (r"\bThread-\d+", "Thread-N"),
    (r"0x[0-9a-f]{6,}", "0x..."),
    (  # of float(), on TensorFlow 2.22, whose symbolic tensors have an __index__
        r"'SymbolicTensor' object cannot be interpreted as an integer",
        "float() argument must be a string or a real number, not 'SymbolicTensor'",
    ),
    (r'ResourceHandle\(name="\d+"', 'ResourceHandle(name="N"'),
    (r"\b(replica_body_\w+)_\d+", r"\1_N"),
)


def shows(shown: Any, variant: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a program a test of what it shows.

    Args:
        shown: what the program must come to: an exception class, a class method that words its text, a function that
            words a warning or a note, or the name of a warning.
        variant: tells golden files of the same class or text apart.
    """
    name = golden_name(shown)

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**fixtures: Any) -> None:
            if name.startswith("slow_"):
                text, ended = _shown_when_warned(program, name, **fixtures), ""
            else:
                text, ended = _shown_by(program, **fixtures)
            topic = name.partition(".")[0]
            page = topic if topic[0].isupper() else f"warnings.html#{topic}"
            seen = f"{MORE}{page}" in text or not _has_more(topic)
            assert seen, f"The program has not come to {name}, but to this:\n{text}"
            compare(name + (f".{variant}" if variant else ""), _without_more(text))
            if runs_in_functions(program, name):
                _check_in_functions(program, text, ended, **fixtures)

        return test

    return decorate


def eager_only(why: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a program, below `@shows`, whose runs cannot be in a `tf.function`."""
    assert why

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        setattr(program, _EAGER_ONLY, why)
        return program

    return decorate


def runs_in_functions(program: Callable[..., None], name: str) -> bool:
    """Whether a program is run with its runs in functions too: not what is slow or starts processes."""
    return ".run(" in inspect.getsource(program) and not (name.startswith("slow_") or hasattr(program, _EAGER_ONLY))


def _check_in_functions(program: Callable[..., None], text: str, ended: str, **fixtures: Any) -> None:
    """Runs a program with each run of a strategy in a `tf.function`.

    Args:
        program: the program.
        text: what it shows by itself.
        ended: the type of the exception to which it comes by itself.
        fixtures: its arguments.
    """
    import tensorflow as tf

    from replica_engine.strategies.on_backend import OnBackend

    original = OnBackend.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tf.executing_eagerly():
            return original(self, *args, **kwargs)
        return tf.function(lambda: original(self, *args, **kwargs))()

    with mock.patch.object(OnBackend, "run", run):
        again, ended_again = _shown_by(program, **fixtures)
    assert ended_again == ended, f"In a tf.function the program comes to this:\n{again}"
    shown = [_PLACE.sub("", each) for each in (text, again)]  # the lines of the runs are above
    logged = [line for line in shown[1].split("\n") if _LOGGED.match(line)]
    assert [line for line in logged if line not in shown[0]] == [], f"In a tf.function the program logs more:\n{again}"


def golden_name(shown: Any) -> str:
    """The name of a golden file: "SomeError", "SomeError.wording" or "some_warning"."""
    owner = getattr(shown, "__self__", None)
    return f"{owner.__name__}.{shown.__name__}" if isinstance(owner, type) else getattr(shown, "__name__", shown)


def branching() -> set[str]:
    """The names of the texts of `replica_engine.errors` that branch: each has a golden file.

    A text with parts that are there only sometimes, or that are chosen, has more than one form to look at.
    """
    found = set()
    for path in pathlib.Path(errors.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and hasattr(errors, node.name):
                found |= {f"{node.name}.{each.name}" for each in node.body if _is_branching_wording(each)}
            elif isinstance(node, ast.FunctionDef) and _WARNING.match(node.name):
                found.add(node.name)
    return found


def _is_branching_wording(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef) or [ast.unparse(each) for each in node.decorator_list] != ["classmethod"]:
        return False
    return any(isinstance(each, (ast.If, ast.IfExp, ast.BoolOp)) for each in ast.walk(node))


def shown_by(program: Callable[..., None], **fixtures: Any) -> str:
    """A program, and what it shows when it is run."""
    return _without_more(_shown_by(program, **fixtures)[0])


def _has_more(topic: str) -> bool:
    """Whether an error or a warning names its page. `ReplicaUnwound` never leaves a run."""
    return topic.startswith("warn_") or (hasattr(errors, topic) and topic != "ReplicaUnwound")


def _without_more(text: str) -> str:
    return re.sub(rf"^{MORE}.*\n", "", text, flags=re.MULTILINE)


def _shown_by(program: Callable[..., None], **fixtures: Any) -> tuple[str, str]:
    """A program and what it shows when it is run, and the type of the exception that ends it; "" if there is none."""
    source, ended = _Source(program), ""
    seen = io.StringIO()
    with _warnings_to(seen), contextlib.redirect_stdout(seen):
        try:
            program(**fixtures)
        except BaseException as error:
            ended = type(error).__name__
            seen.write(source.traceback(error))
    return f"{source.text}\n\n{LINE}\n{source.normal(seen.getvalue())}", ended


class _Warnings(logging.Handler):
    """The library's warnings, each as it is shown.

    Args:
        source: the source of the program.
        wanted: the expected warning; None for any.
    """

    def __init__(self, source: "_Source", wanted: str | None):
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s: %(message)s\n"))
        self._source = source
        self._wanted = wanted
        self._has_come = threading.Event()
        self.shown = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = self._source.normal(self.format(record))
        if self.shown != self._wanted or self._wanted is None:
            self.shown = text
            self._has_come.set()

    def sleep(self, seconds: float) -> None:
        """Waits until the wanted warning has come, or a warning about something that the program does first."""
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline:
            self._has_come.clear()
            self._has_come.wait(deadline - time.monotonic())
            if self._wanted is None or _about(self.shown) != _about(self._wanted) or self.shown == self._wanted:
                return


class _Threading:
    """Takes the place of `threading` in a slow program."""

    def __init__(self, wait: Callable[[float], None]):
        self.Event = lambda: types.SimpleNamespace(wait=wait)


def _about(warning: str) -> str:
    """The subject of a warning: its first line."""
    return warning.partition("\n")[0]


def _shown_when_warned(program: Callable[..., None], name: str, **fixtures: Any) -> str:
    """A program that is too slow, and the warning about that."""
    source, path = _Source(program), FOLDER / f"{name}.txt"
    wanted = path.read_text().partition(f"{LINE}\n")[2] if path.exists() and not UPDATE else None
    warnings = _Warnings(source, wanted)
    logger = logging.getLogger("replica_engine")
    logger.addHandler(warnings)
    try:
        with mock.patch.dict(program.__globals__, threading=_Threading(warnings.sleep)):
            program(**fixtures)
    finally:
        logger.removeHandler(warnings)
    return f"{source.text}\n\n{LINE}\n{warnings.shown}"


def compare(name: str, text: str, folder: pathlib.Path = FOLDER, update: bool = UPDATE) -> None:
    """Compares with a golden file, or writes it."""
    path = folder / f"{name}.txt"
    if update:
        path.write_text(text)
        return
    assert path.exists(), f"There is no golden/{path.name}. UPDATE_GOLDEN=1 pytest tests/errors writes it."
    assert text == path.read_text(), f"golden/{path.name} is another. UPDATE_GOLDEN=1 pytest tests/errors writes it."


class _Source:
    """The source of a program, and where it is.

    Attributes:
        text: the body of the function, with its docstring as a comment above it.
    """

    def __init__(self, program: Callable[..., None]):
        lines, first = inspect.getsourcelines(program)
        (function,) = ast.parse(textwrap.dedent("".join(lines))).body
        assert isinstance(function, ast.FunctionDef)
        doc = ast.get_docstring(function)
        body = function.body[1 if doc else 0 :]
        code = textwrap.dedent("".join(lines[body[0].lineno - 1 :])).rstrip().split("\n")
        text = textwrap.wrap(doc, 118, initial_indent="# ", subsequent_indent="# ") if doc else []
        self._lines: dict[int, int] = {}  # by line of the test's file, the line of the program
        offset = first + body[0].lineno - 1
        for number, line in enumerate(code):
            text += [""] * _blank_lines_before(code, number)
            text.append(line)
            self._lines[offset + number] = len(text)
        self.text = "\n".join(text)
        self._name = program.__name__
        self._file = inspect.getsourcefile(program) or ""

    def traceback(self, error: BaseException) -> str:
        """An exception as Python prints it, with the user's frames only."""
        text = ""
        if error.__cause__ is not None:
            text = f"{self.traceback(error.__cause__)}\n{_CHAINED[True]}\n\n"
        elif error.__context__ is not None and not error.__suppress_context__:
            text = f"{self.traceback(error.__context__)}\n{_CHAINED[False]}\n\n"
        frames, step = [], error.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            if code.co_filename == self._file and step.tb_lineno in self._lines:
                frames.append(f'  File "{self._file}", line {step.tb_lineno}, in {code.co_name}\n')
            elif _GENERATED in code.co_filename:
                frames.append(f'  File "{_GENERATED}.py", in {code.co_name}\n')
            step = step.tb_next
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        message = f": {error}" if str(error) else ""
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))
        return f"{text}Traceback (most recent call last):\n{''.join(frames)}{name}{message}\n{notes}"

    def normal(self, text: str) -> str:
        """A text without what differs from run to run and from machine to machine."""
        text = re.sub(rf"{re.escape(self._file)}(:|\", line )(\d+)", self._placed, text)
        text = re.sub(rf"(?<=in ){self._name}\b", "<module>", text)
        text = re.sub(rf"\b{self._name}\.(?:<locals>\.)?", "", text)
        for pattern, replacement in _NORMAL:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        return text

    def _placed(self, found: re.Match[str]) -> str:
        return f"program.py{found[1]}{self._lines[int(found[2])]}"


def _blank_lines_before(code: list[str], number: int) -> int:
    """The number of blank lines to add: two surround a function or class at the top level."""
    before, line = code[max(number - 2, 0) : number], code[number]
    if len(before) < 2 or before[1] or line.startswith(" "):
        return 0
    return int(before[0].startswith(" ") or line.startswith(("def ", "class ", "@")))


@contextlib.contextmanager
def _warnings_to(stream: io.StringIO) -> Iterator[None]:
    """Writes what is logged to a stream: the library's messages, and warnings and errors of TensorFlow and others."""
    logger, handler = logging.getLogger("replica_engine"), logging.StreamHandler(stream)
    level = logger.level  # a program may change it
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(lambda record: record.name == logger.name or record.levelno >= logging.WARNING)
    handler.addFilter(lambda record: _OF_TESTS not in record.getMessage())
    every = [logging.getLogger(), *(each for each in map(logging.getLogger, _OTHERS) if not each.propagate)]
    for each in every:
        each.addHandler(handler)
    try:
        yield
    finally:
        for each in every:
            each.removeHandler(handler)
        logger.setLevel(level)
