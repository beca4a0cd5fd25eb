"""The `explain` command: a part of the Errors page of the documentation, on the terminal and without a network.

Errors name their part of the page in a note: `more: replica-engine explain ScopeError.variable`. Most warnings do so in
their last line. The command also takes words of a message.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

PAGE = pathlib.Path(__file__).with_name("errors.md")
FAILED = 1
_MOST_FOUND = 12
_WIDTH = 100
_SURE = 4  # so many words may be of another form of a message, with other numbers and names in it
_HEADING = re.compile(r"^####? (\S+)\n", re.MULTILINE)
_CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Part(NamedTuple):
    """What the page says about one error, wording or warning, without the parts below it."""

    name: str
    text: str

    def brief(self) -> str:
        """The name, and the first sentence of the text."""
        return f"{self.name}: {self.text.strip().partition(chr(10))[0]}"


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the `explain` command to those of `python -m replica_engine`.

    Args:
        subparsers: the object that `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "explain",
        help="say what an error or a warning means, with a program that shows it",
        description="Says what an error or a warning means, with a program that shows it. Works without a network.",
        epilog="examples:\n  replica-engine explain ScopeError\n  replica-engine explain ScopeError.variable\n"
        '  replica-engine explain "gives the whole batch to each of 2 replicas"\n'
        "  replica-engine explain      (lists all names)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "message", nargs="*", help="the name of an error, as a traceback shows it, or words of a message"
    )
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Runs the command, and returns the exit status: 0, or 1 if nothing was found."""
    asked = " ".join(flags.message)
    parts = _parts()
    if not asked:
        print("\n".join(part.brief() for part in parts))
        return 0
    exactly = _named(parts, asked) or _with_phrase(parts, asked)
    found = exactly or _with_words(parts, asked)
    if not found:
        near = _near(parts, asked)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        print(f"explain: the Errors page has nothing about: {asked}.{meant}", file=sys.stderr)
        print("`replica-engine explain` without a name lists all.", file=sys.stderr)
        return FAILED
    if len(found) > 1 or not (exactly or len(asked.split()) >= _SURE):
        what = "Several parts of the Errors page have" if exactly else "No message reads so. The nearest parts have"
        print(f"{what} these words; name one of them, or more words:")
        print("\n".join(f"  {part.brief()}" for part in found[:_MOST_FOUND]))
        return 0
    below = [part for part in parts if part.name.startswith(f"{found[0].name}.")]
    print(_shown(found[0]))
    if len(below) == 1:
        print(f"\n{_shown(below[0])}")
    elif below:
        print(f"\nIts messages; name one to see a program that comes to it, such as `explain {below[0].name}`:")
        print("\n".join(f"  {part.brief()}" for part in below))
    return 0


def _parts() -> list[Part]:
    _, *pieces = _HEADING.split(PAGE.read_text(encoding="utf-8"))
    texts = (re.split(r"^## ", text, maxsplit=1, flags=re.MULTILINE)[0] for text in pieces[1::2])
    return [Part(name, text) for name, text in zip(pieces[::2], texts, strict=True)]


def _named(parts: list[Part], asked: str) -> list[Part]:
    """The part of this name; its letters may be lower case, as in the address of its place on the page."""
    name = asked.removeprefix("replica_engine.errors.").rstrip(":").lower()
    return [part for part in parts if part.name.lower() in (name, name.replace("-", "_"))]


def _near(parts: list[Part], asked: str) -> list[str]:
    """Names that are written like this one, the nearest first; a name without its class counts too."""
    names = {form.lower(): part.name for part in parts for form in (part.name, part.name.rpartition(".")[2])}
    return list(dict.fromkeys(names[each] for each in difflib.get_close_matches(asked.lower(), names)))


def _with_phrase(parts: list[Part], asked: str) -> list[Part]:
    """The parts that have exactly these words, one after the other, if they are more than one."""
    phrase = " ".join(asked.lower().split())
    if " " not in phrase:
        return []
    return [part for part in parts if phrase in " ".join(part.text.lower().split())]


def _with_words(parts: list[Part], asked: str) -> list[Part]:
    """The parts that have most of the words, at least half of them."""
    words = set(re.findall(r"\w+", asked.lower()))
    counts = [len(words & set(re.findall(r"\w+", f"{part.name} {part.text}".lower()))) for part in parts]
    most = max(counts)
    return [part for part, count in zip(parts, counts, strict=True) if count == most and 2 * most >= len(words) > 0]


def _shown(part: Part) -> str:
    """A part as text for a terminal: code is indented, and each piece of it has a heading."""
    words, *pieces = _CODE.split(part.text)
    shown = [f"{part.name}\n{'=' * len(part.name)}", *map(_wrapped, _paragraphs(words.replace("*", "")))]
    for language, code in zip(pieces[::3], pieces[1::3], strict=True):
        heading = "which shows" if language == "text" else "A program that comes to it"
        shown.append(f"\n{heading}:\n\n{textwrap.indent(code.rstrip(), '    ')}")
    return "\n".join(shown)


def _paragraphs(text: str) -> list[str]:
    """The paragraphs and the items of lists as one line each, and the empty lines between them."""
    lines = [""]
    for line in text.strip().split("\n"):
        if line and lines[-1] and not line.startswith("- "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return lines[1:]


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="  " if line.startswith("- ") else "")
