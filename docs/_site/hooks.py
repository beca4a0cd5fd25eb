"""Hooks of mkdocs: what the site takes from elsewhere, so that it works from disk and without a network.

- Mermaid, which draws the diagrams, comes from the package mermaidx on PyPI.
- CHANGELOG.md and CONTRIBUTING.md, which are at the root of the repository, become pages.
- Long words of code in tables, such as names with points, may break after a point.
- The search cuts typed words to their stem (`search_stems.js`), and ranks errors, rows of benchmarks and the changelog
  last.
"""

from __future__ import annotations

import importlib.resources
import pathlib
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

MERMAID = "assets/mermaid.js"
ROOT = pathlib.Path(__file__).parents[2]
CELL = re.compile(r"<td.*?</td>", re.DOTALL)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
BREAK = re.compile(r"([.,(/](?=\w))")
RANKS = (
    ("errors/", 0.1),
    ("benchmarks", 0.1),
    ("changelog", 0.05),
    ("reference/", 0.5),
    ("reliability", 0.5),
    ("versions", 0.5),
    ("questions", 2.0),
    ("howto/", 2.0),
    ("tutorials/", 2.0),
    ("start/", 2.0),
)
"""How much the search weighs pages that begin so; 1 is the weight of all others."""
INCLUDED = re.compile(r'--8<-- "([\w.]+)"')


def on_files(files: Files, config: Any) -> Files:
    """Adds mermaid to the files of the site."""
    try:
        source = importlib.resources.files("mermaidx") / "assets" / "mermaid.js"
        text = source.read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise PluginError('diagrams need mermaid: pip install "replica-engine[docs]"') from None
    files.append(File.generated(config, MERMAID, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Puts a file of the repository in the place of the name of one, with its links as seen from docs/."""
    for beginning, boost in RANKS:
        if page.file.src_uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    if included := INCLUDED.fullmatch(markdown.strip()):
        text = (ROOT / included[1]).read_text(encoding="utf-8")
        return text.replace("](docs/", "](").replace("](CONTRIBUTING.md", "](contributing.md")
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Lets a long word of code in the cell of a table break after a point, a bracket, a comma or a slash."""
    return CELL.sub(lambda cell: CODE.sub(lambda code: BREAK.sub(r"\1<wbr>", code[0]), cell[0]), html)


def on_post_build(config: Any) -> None:
    """Adds the stems to the search worker."""
    stems = (ROOT / "docs" / "_site" / "search_stems.js").read_text(encoding="utf-8")
    workers = list((pathlib.Path(config["site_dir"]) / "assets" / "javascripts" / "workers").glob("search.*.min.js"))
    if len(workers) != 1:
        raise PluginError("the theme has no search worker, or several: search_stems.js has to be added elsewhere")
    worker = workers[0]
    worker.write_text(f"{worker.read_text(encoding='utf-8')}\n{stems}", encoding="utf-8")
