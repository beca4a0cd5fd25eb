"""The `explain` command: a page about an error or a warning, on the terminal and without a network.

Errors name their page in a note: `more: replica-engine explain ScopeError`. Most warnings do so in their last line. The
command also takes words of a message, and looks for them in the messages and examples of all pages.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

PAGES = pathlib.Path(__file__).with_name("pages")
FAILED = 1
_MOST_FOUND = 12
_WIDTH = 100
_SURE = 4  # so many words may be of another form of a message, with other numbers and names in it
_HEADING = re.compile(r"^##? (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n", re.DOTALL)
_CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """What the pages say about one class of errors, warning or note."""

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
        epilog="examples:\n  replica-engine explain ScopeError\n"
        '  replica-engine explain "gives the whole batch to each of 2 replicas"\n'
        "  replica-engine explain      (lists all names)",
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
        print(f"explain: no page is about: {asked}.{meant}", file=sys.stderr)
        print("`replica-engine explain` without a name lists all.", file=sys.stderr)
        return FAILED
    if len(found) > 1 or not (exactly or len(asked.split()) >= _SURE):
        what = "Several pages have" if exactly else "No message reads so. The nearest pages have"
        print(f"{what} these words; name one of them, or more words:")
        print("\n".join(f"  {part.brief()}" for part in found[:_MOST_FOUND]))
        return 0
    print(_shown(found[0]))
    return 0


def _parts() -> list[Section]:
    parts = []
    for path in sorted(PAGES.glob("[!i]*.md")):  # not the index
        _, *pieces = _HEADING.split(_COMMENT.sub("", path.read_text(encoding="utf-8")))
        parts += [Section(*each) for each in zip(pieces[::2], pieces[1::2], strict=True)]
    return parts


def _named(parts: list[Section], asked: str) -> list[Section]:
    """The part of this name, in upper or lower case. Older versions named a message too: `ScopeError.variable`."""
    name = asked.removeprefix("replica_engine.errors.").rstrip(":").partition(".")[0].lower()
    return [part for part in parts if part.name.lower() == name]


def _near(parts: list[Section], asked: str) -> list[str]:
    """Names that are written like this one, the nearest first."""
    names = {part.name.lower(): part.name for part in parts}
    return [names[each] for each in difflib.get_close_matches(asked.lower(), names)]


def _with_phrase(parts: list[Section], asked: str) -> list[Section]:
    """The parts that have exactly these words, one after the other, if they are more than one."""
    phrase = " ".join(asked.lower().split())
    if " " not in phrase:
        return []
    return [part for part in parts if phrase in " ".join(part.text.lower().split())]


def _with_words(parts: list[Section], asked: str) -> list[Section]:
    """The parts with a message that has most of the words, at least half of them."""
    words = set(re.findall(r"\w+", asked.lower()))
    counts = [max(len(words & set(re.findall(r"\w+", each))) for each in _messages(part)) for part in parts]
    most = max(counts)
    return [part for part, count in zip(parts, counts, strict=True) if count == most and 2 * most >= len(words) > 0]


def _messages(part: Section) -> list[str]:
    return f"{part.name} {part.text}".lower().split("\n\n")


def _shown(part: Section) -> str:
    """A part as text for a terminal: code is indented, and each piece of it has a heading."""
    words, *pieces = _CODE.split(part.text)
    shown = [f"{part.name}\n{'=' * len(part.name)}", *map(_wrapped, _paragraphs(words.replace("*", "")))]
    headings = ["", *(piece.strip() for piece in pieces[2::3])]  # such as "All its messages: "
    for heading, language, code in zip(headings, pieces[::3], pieces[1::3], strict=False):
        heading = heading or ("A program that comes to it:" if language == "python" else "which shows:")
        shown.append(f"\n{heading}\n\n{textwrap.indent(code.rstrip(), '    ')}")
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
