"""Golden files: a user's program that goes wrong, and what the user then sees.

The body of a test that is marked `@shows(SomeError.wording)` is such a program. It must produce that wording, and the
program and what it shows must be those of `golden/SomeError.wording.txt`. Line N of the file is line N of
`program.py`, as the messages call it. `UPDATE_GOLDEN=1 pytest tests/errors` rewrites the files.

A file shows the printed output, the library's warnings, and the exception as Python prints it, with only the user's
frames in its traceback.

Some programs are slow on purpose, so that the watchdog warns. Their files must not depend on the speed of the machine.
So they show only the warning that the test is about, and `threading.Event().wait(seconds)` in such a program ends when
that warning has come.
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
import sys
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
MORE = "more: replica-engine explain "  # this line ends each error and most warnings, and is left out
LINE = " what the user sees ".center(120, "=")

_GENERATED = "__autograph_generated_file"
_CHAINED = {
    True: "The above exception was the direct cause of the following exception:",
    False: "During handling of the above exception, another exception occurred:",
}

_NORMAL = (
    (rf"^{MORE}.*\n", ""),
    (r'^( *)File "(?!program\.py|__autograph).*\n(?:\1  .*\n)*', ""),  # frames that are not the user's
    (r"(?:/[\w.+-]+)+/replica_engine-\d+-\d+\.json", "/tmp/runs/replica_engine-1234-0.json"),
    (r"(?:/[\w.+-]+)+/(replica_engine_\w+)-[0-9a-f]{64}", r"/tmp/programs/\1-0123abcd"),
    (r"(?:/[\w.+-]+)+/([\w-]+\.(?:py|so))", r"\1"),
    (r"\bfor [\d.]+(?:e-\d+)? s\b", "for N s"),
    (r"\bsync point in [\d.]+ s:", "sync point in N s:"),
    (r"\([\w.-]+, pid \d+\)", "(node-a, pid N)"),
    (r"(127\.0\.0\.1|0\.0\.0\.0):\d+", r"\1:N"),
    (r"heard of [\d.e-]+ s ago", "heard of N s ago"),
    (r"\bprocess \d+", "process N"),
    (r"\bProcess \d+", "Process N"),
    (r"\bThread-\d+", "Thread-N"),
    (r"0x[0-9a-f]{6,}", "0x..."),
    (r'ResourceHandle\(name="\d+"', 'ResourceHandle(name="N"'),
    (r"\b(replica_body_\w+)_\d+", r"\1_N"),
)


def shows(wording: Callable[..., Any], variant: str = "") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a program a test of what it shows.

    Args:
        wording: what the program must produce: a class method of an exception class, a class that has one wording,
            or a function that words a warning or a note.
        variant: tells golden files of the same wording apart.
    """

    def decorate(program: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**fixtures: Any) -> None:
            with _calls_of(wording) as calls:
                if name_of(wording).startswith("slow_"):
                    text = _shown_when_warned(program, name_of(wording), **fixtures)
                else:
                    text = shown_by(program, **fixtures)
            seen = calls or _only_of_class(wording) in text.split()
            assert seen, f"The program has not come to {name_of(wording)}, but to this:\n{text}"
            compare(name_of(wording) + (f".{variant}" if variant else ""), text)

        return test

    return decorate


def name_of(wording: Callable[..., Any]) -> str:
    """The name of a wording's golden file: "SomeError.wording", "SomeError" or "some_warning"."""
    owner = getattr(wording, "__self__", None)
    return f"{owner.__name__}.{wording.__name__}" if isinstance(owner, type) else wording.__name__


def _only_of_class(wording: Callable[..., Any]) -> str:
    """How a traceback names the class whose only wording it is, which need not have been called in this process."""
    owner = getattr(wording, "__self__", wording)
    if not isinstance(owner, type) or sum(isinstance(each, classmethod) for each in vars(owner).values()) > 1:
        return ""
    return f"{owner.__module__}.{owner.__name__}:"


def wordings() -> set[str]:
    """The names of all wordings of the package."""
    found = set()
    for name in errors.__all__:
        value = getattr(errors, name)
        if isinstance(value, type) and issubclass(value, BaseException):
            made = {each for each, what in vars(value).items() if isinstance(what, classmethod)}
            found |= {f"{name}.{each}" for each in made - {"__init_subclass__"}}
            if "__init__" in vars(value):  # it has a message of its own
                found.add(name)
        elif re.match(r"(note|many|slow|moved|untested|warn)_", name):
            found.add(name)
    return found


def shown_by(program: Callable[..., None], **fixtures: Any) -> str:
    """A program, and what it shows when it is run."""
    source = _Source(program)
    seen = io.StringIO()
    with _warnings_to(seen), contextlib.redirect_stdout(seen):
        try:
            program(**fixtures)
        except BaseException as error:
            seen.write(source.traceback(error))
    return f"{source.text}\n\n{LINE}\n{source.normal(seen.getvalue())}"


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
        deadline = time.monotonic() + 30.0
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
        notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()) if not note.startswith(MORE))
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
    logger, handler = logging.getLogger("replica_engine"), logging.StreamHandler(stream)
    level = logger.level  # a program may change it
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def _calls_of(wording: Callable[..., Any]) -> Iterator[list[str]]:
    """Notes the calls of a wording, wherever it has been imported to."""
    calls: list[str] = []
    owner = getattr(wording, "__self__", None)
    original = vars(owner)[wording.__name__].__func__ if isinstance(owner, type) else wording

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name_of(wording))
        return original(*args, **kwargs)

    if isinstance(owner, type):
        places, new, old = [(owner, wording.__name__)], classmethod(noting), vars(owner)[wording.__name__]
    elif isinstance(wording, type):
        original = wording.__init__
        places, new, old = [(wording, "__init__")], noting, original
        functools.update_wrapper(noting, original)
    else:
        modules = [module for name, module in sys.modules.items() if name.startswith("replica_engine")]
        found = [(module, name) for module in modules for name, what in vars(module).items() if what is wording]
        places, new, old = found, noting, wording
    for place, name in places:
        setattr(place, name, new)
    try:
        yield calls
    finally:
        for place, name in places:
            setattr(place, name, old)
