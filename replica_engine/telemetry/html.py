"""Tables for notebooks: what the `_repr_html_` of a result returns. Standard library only."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML; all texts are escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    title = f'<caption style="text-align: left">{html.escape(caption)}</caption>'
    inside = f"{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<table class="replica-engine" style="font-family: monospace">{inside}</table>'


def plain(text: str) -> str:
    """A text as HTML, whose long lines break at words."""
    return f'<pre style="line-height: 1.3; white-space: pre-wrap; word-break: normal">{html.escape(text)}</pre>'
