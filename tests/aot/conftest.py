"""`make test-aot`: needs libtpu and jax-cuda12-pjrt, and no accelerator."""

import os

from aot import table


def pytest_configure(config):
    if os.environ.get("UPDATE_DOCS") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.aot_notes = config.rootpath / "build" / "aot_notes.jsonl"
        config.aot_notes.parent.mkdir(exist_ok=True)
        config.aot_notes.write_text("")
        table.begin(config.aot_notes)


def pytest_unconfigure(config):
    if (notes := getattr(config, "aot_notes", None)) is not None:
        table.update(notes)
