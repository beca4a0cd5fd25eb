"""A hook of mkdocs for the reference: its index has a line for each object, and private bases are not shown.

In the place of a private base stand those of its own bases that belong to TensorFlow.
"""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import griffe
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parents[2]
INDEX = "reference/index.md"
DOCUMENTED = re.compile(r"^::: (replica_engine[\w.]+)$", re.MULTILINE)
BASES = re.compile(r'\s*<p class="doc doc-class-bases">\s*Bases: (.*?)</p>', re.DOTALL)
BASE = re.compile(r"<code>.*?</code>", re.DOTALL)
NAMED = re.compile(r'(?:title|identifier)="([\w.]+)"')


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Adds the objects of each page of the reference to its index, with the first sentences of their docstrings."""
    if page.file.src_uri != INDEX:
        return markdown
    parts = [markdown]
    for name in re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", markdown, re.MULTILINE):
        text = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        rows = [f"| [`{_short(each)}`]({name}#{each}) | {_summary(each)} |" for each in DOCUMENTED.findall(text)]
        title = text.partition("\n")[0].removeprefix("# ")
        parts.append("\n".join([f"## {title}\n", "| | |", "| --- | --- |", *rows, ""]))
    return "\n".join(parts)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Leaves out bases that the reference does not have, and names those of TensorFlow and Keras in full."""
    return BASES.sub(_public, html) if page.file.src_uri.startswith("reference/") else html


def _public(paragraph: re.Match[str]) -> str:
    shown = []
    for base in BASE.findall(paragraph[1]):
        found = NAMED.search(base)
        name = found[1] if found else ""
        if not name.startswith("replica_engine.") and "." in name:
            shown.append(_in_full(name))
        elif name in _documented():
            shown.append(base)
        elif name and isinstance(ours := _package()[name.partition(".")[2]], griffe.Class):  # no import of another's
            own = [each.canonical_path for each in ours.bases if isinstance(each, griffe.Expr)]
            shown += [_in_full(each) for each in own if each.startswith("tensorflow.") and _in_full(each) not in shown]
    return f'\n<p class="doc doc-class-bases">Bases: {", ".join(shown)}</p>' if shown else ""


def _in_full(name: str) -> str:
    return f"<code>{re.sub(r'^tensorflow[.]', 'tf.', name)}</code>"


@functools.cache
def _documented() -> frozenset[str]:
    """The names of all objects of the reference."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return frozenset(name for page in pages for name in DOCUMENTED.findall(page.read_text(encoding="utf-8")))


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("replica_engine", search_paths=[ROOT])


def _summary(name: str) -> str:
    """The first sentence of a docstring."""
    documented = _package()[name.removeprefix("replica_engine.")]
    assert documented.docstring is not None, name
    return " ".join(documented.docstring.value.partition("\n\n")[0].split())


def _short(name: str) -> str:
    """A name as people write it, with `import replica_engine` and `from replica_engine import xla`."""
    return re.sub(r"^replica_engine\.(?=(xla|keras|hosts|testing|compat)\.)", "", name).removeprefix("replica_engine.")
