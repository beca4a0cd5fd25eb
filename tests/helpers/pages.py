"""The code blocks of README and docs: what they are, and whether they print what the page says.

A page is one program. Its blocks run in order, in one namespace and one empty folder:

- ```python runs. With title="train.py" it is saved under that name. A worker of a job runs in a process of its own.
- ```pycon is a session with prompts, checked as a docstring is.
- ```text title="Output" is what the block before it prints, or the exception that ends it. "..." stands for anything,
  and numbers with a point may differ by 2 %, since machines add in different orders.
- ```sh are commands. Those of this library and of make must exist; `timeline` runs.
- ```text without a title, and other languages, are not programs.

`UPDATE_DOCS=1 pytest tests/docs` writes outputs that differ into the pages. Put back the "..." that the old text had.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import math
import os
import pathlib
import re
import shlex
import traceback
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]
# Made from the golden files of tests/errors, which run there; and the changelog.
MADE_ELSEWHERE = ("docs/errors/", "docs/changelog.md", "docs/contributing.md")

# What joins a job, and cannot leave it again before the process ends.
WORKER = re.compile(r"MultiWorkerMirroredStrategy\(\)$|workers\.join\(", re.MULTILINE)

_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e[-+]?\d+)?(?![\w])")
_MAKE = re.compile(r"^([\w-]+):", re.MULTILINE)
_TOLERANCE = 0.02


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: "python", "pycon", "sh", "text", ...
        title: the title of the block, such as "train.py" or "Output"; "" without one.
        text: what is between the fences.
        line: the line of the page at which the text begins.
    """

    language: str
    title: str
    text: str
    line: int


def pages() -> list[str]:
    """The pages whose blocks run, as paths from the root of the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [name for path in found if not (name := path.relative_to(ROOT).as_posix()).startswith(MADE_ELSEWHERE)]


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]*)"', match[3])
        inside = re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE)
        found.append(Block(match[2], title[1] if title else "", inside, text.count("\n", 0, match.start(4)) + 1))
    return found


def check(page: str, folder: pathlib.Path, programs: Any = None) -> None:
    """Runs the blocks of a page.

    Args:
        page: its path from the root of the repository.
        folder: an empty folder, which must be the current one.
        programs: starts processes, as `fork_server.Programs`; only pages with workers of a job need it.

    Raises:
        AssertionError: a block fails, or does not print what the page says.
    """
    every = blocks(page)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    newer: list[tuple[int, str, str]] = []
    try:
        _check(page, every, namespace, newer, folder, programs)
    finally:
        namespace.clear()  # strategies go with their variables, and their threads with them
    for line, old, new in reversed(newer):
        lines = (ROOT / page).read_text(encoding="utf-8").split("\n")
        lines[line - 1 : line - 1 + old.count("\n")] = new.rstrip().split("\n")
        (ROOT / page).write_text("\n".join(lines), encoding="utf-8")


def difference(expected: str, seen: str) -> str | None:
    """What is wrong with an output; None if it is what the page says."""
    parts, numbers, at = [], [], 0
    expected = expected.strip()
    for match in re.finditer(rf"\.\.\.|{_NUMBER.pattern}", expected):
        parts.append(_literally(expected[at : match.start()]))
        if match[0] == "...":
            parts.append(r"[\s\S]*?")
        elif re.fullmatch(r"-?[\d,]+", match[0]):
            parts.append(rf"{re.escape(match[0])}(?![\d.]*\d)")
        else:
            parts.append(f"({_NUMBER.pattern})")
            numbers.append(match[0])
        at = match.end()
    parts.append(_literally(expected[at:]))
    found = re.fullmatch("".join(parts), seen.strip())
    if found is None:
        return "the text differs"
    for want, have in zip(numbers, found.groups(), strict=True):
        want_, have_ = (float(number.replace(",", "")) for number in (want, have))
        if not math.isclose(want_, have_, rel_tol=_TOLERANCE, abs_tol=1e-6):
            return f"{have} instead of {want}"
    return None


def _check(
    page: str,
    every: list[Block],
    namespace: dict[str, Any],
    newer: list[tuple[int, str, str]],
    folder: pathlib.Path,
    programs: Any,
) -> None:
    for number, block in enumerate(every):
        after = every[number + 1] if number + 1 < len(every) else None
        expected = after.text if after is not None and after.title == "Output" else None
        where = f"{page}:{block.line}"
        if block.language == "python" and WORKER.search(block.text):
            done = programs.run(block.text, env={**os.environ, "REPLICA_ENGINE_TOKEN": "the secret of the job"})
            seen = done.stdout
            assert done.returncode == 0, f"{where} fails:\n{done.stderr[-2000:]}"
        elif block.language == "python":
            seen, failed = _run(block, namespace, folder / (block.title or "program.py"))
            assert not failed or failed in (expected or ""), f"{where} fails:\n{seen}"
        elif block.language == "pycon":
            _check_session(block, namespace, where)
            continue
        elif block.language in ("sh", "bash"):
            seen = _commands(block, where)
        else:
            continue
        if expected is not None:
            assert after is not None
            wrong = difference(expected, seen)
            if wrong and "UPDATE_DOCS" in os.environ:
                newer.append((after.line, expected, seen))
                continue
            assert wrong is None, f"{page}:{after.line}: {wrong}\n--- the page\n{expected}\n--- the program\n{seen}"


def _literally(text: str) -> str:
    return re.sub(r"(?:\\\s|\s)+", r"\\s+", re.escape(text))


def _run(block: Block, namespace: dict[str, Any], path: pathlib.Path) -> tuple[str, str]:
    """What a block prints, with the exception that it ends with, and the name of that; "" if it does not end with one.

    It runs from a file: AutoGraph and the library's messages look at the lines of a function. The file has all blocks
    of the page so far, so that a line has the number that it has if the page is copied into one program.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(before + block.text, encoding="utf-8")
    linecache.checkcache(str(path))
    padded = "\n" * before.count("\n") + block.text
    seen, failed = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(seen):
            exec(compile(padded, str(path), "exec"), namespace)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        seen.write(re.sub(r"^[\w.]+\.(\w+(?::|$))", r"\1", text))
        failed = type(error).__name__
    return seen.getvalue().replace(f"{path.parent}/", ""), failed


def _check_session(block: Block, namespace: dict[str, Any], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, namespace, where, where, block.line)
    report = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        test, out=report.write, clear_globs=False
    )
    namespace.update(test.globs)
    assert not report.getvalue(), report.getvalue()


def _commands(block: Block, where: str) -> str:
    """Checks commands, and runs `timeline`, whose output it returns."""
    from replica_engine.__main__ import main

    seen = io.StringIO()
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        if words[:1] == ["make"]:
            targets = [word for word in words[1:] if "=" not in word]
            known = _MAKE.findall((ROOT / "Makefile").read_text())
            assert set(targets) <= set(known), f"{where}: make has no target of {targets}"
        ours = words[1:] if words[:1] == ["replica-engine"] else words[3:]
        if words[:1] == ["replica-engine"] or words[1:3] == ["-m", "replica_engine"]:
            with contextlib.redirect_stdout(seen):
                if ours[0] == "timeline":
                    assert main(ours) == 0, f"{where}: {line}"
                else:
                    _parse(ours, where, line)
    return seen.getvalue()


def _parse(arguments: list[str], where: str, line: str) -> None:
    """Lets the command's own parser read a line."""
    import argparse

    from replica_engine import __main__ as command
    from replica_engine.workers import launch_command as launch

    parser = command.OneLineParser(prog="replica-engine")
    commands = parser.add_subparsers(parser_class=argparse.ArgumentParser)
    launch.add_parser(commands)
    try:
        parser.parse_args(arguments)
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{where}: {line}") from end
