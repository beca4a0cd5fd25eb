"""Lets examples in docstrings be shown as code: griffe takes "Examples:" as a section, and "Example:" as a remark."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the sections."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that is documented."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
