"""Tables for notebooks: what the `_repr_html_` of a result returns. Standard library only."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as HTML; all texts are escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<table class="replica-engine"><caption style="text-align: left">{html.escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def plain(text: str) -> str:
    """A text of aligned columns as HTML."""
    return f'<pre style="line-height: 1.3">{html.escape(text)}</pre>'
