"""Hooks of mkdocs: files that the site brings along, so that it works from disk and without a network.

- Mermaid, which draws the diagrams, comes from the package mermaidx on PyPI.
- Figures that benchmarks drew are copied as they are.
- Code blocks without a language are plain text, and links to files of the repository become links to their source.
"""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

MERMAID = "assets/mermaid.js"
REPOSITORY_FILE = re.compile(r"\]\((?:\.\./)+((?:replica_engine|examples|tests|benchmarks)/[\w./]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds mermaid to the files of the site."""
    try:
        source = importlib.resources.files("mermaidx") / "assets" / "mermaid.js"
        text = source.read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        raise PluginError('diagrams need mermaid: pip install "replica-engine[docs]"') from None
    files.append(File.generated(config, MERMAID, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes links off files that are in the repository and not in the site."""
    return REPOSITORY_FILE.sub("]", markdown) if REPOSITORY_FILE.search(markdown) else markdown
