"""The page of versions is what the matrix wrote, and all places name the same bounds."""

import importlib.metadata
import importlib.util
import json
import pathlib
import re

import keras
import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

from replica_engine.upstream import versions

ROOT = pathlib.Path(__file__).parents[1]


def generator():
    spec = importlib.util.spec_from_file_location("generate_versions", ROOT / "docs" / "generate_versions.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_results():
    made = generator()
    text = made.PAGE.read_text()
    assert made.page(text, json.loads(made.RESULTS.read_text())) == text, "python docs/generate_versions.py writes it."


def test_the_table_says_what_passed_and_what_failed():
    cell = {"python": "3.12.1", "tensorflow-cpu": "2.19.0", "keras": "3.9.2", "numpy": "2.1.3"}
    cell |= {"passed": 9, "skipped": 1, "failed": ["tests.a.test_b"], "seconds": 90, "date": "2026-01-31"}
    made = generator()
    row = "| one | 3.12.1 | `tensorflow-cpu` 2.19.0 | 3.9.2 | 2.1.3 | none | 9 | 1 | 1 | 1.5 | 2026-01-31 |"
    assert made.table({"one": cell}).splitlines()[2] == row
    assert made.failures({"one": cell}) == "What failed in `one`:\n\n- `tests.a.test_b`\n\n"
    assert made.failures({"one": {**cell, "failed": []}}) == ""


def test_the_bounds_of_pip_are_those_of_the_import():
    text = (ROOT / "pyproject.toml").read_text()
    for package in ("tensorflow", "tensorflow-cpu", "keras"):
        oldest, (major, number) = versions.KERAS if package == "keras" else versions.TENSORFLOW
        found = re.search(rf'"{package}>=([\d.]+),<([\d.]+)"', text)
        assert versions.minor(found[1]) == oldest
        assert versions.minor(found[2]) == (major, number + 1)


def test_the_version_of_keras_is_that_of_its_files(monkeypatch):
    """keras-nightly may lie over keras, or be there alone; then pip names another version, or none."""
    assert versions.keras() == keras.__version__
    versions.keras.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "3.0.0")
    assert versions.list_worker_versions()["keras"] == keras.__version__


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_the_bounds_of_jax_too():
    from replica_engine.pjrt.jaxlib import OLDEST, TESTED

    text = (ROOT / "pyproject.toml").read_text()
    ((oldest, beyond),) = set(re.findall(r'"jax(?:\[\w+\])?>=([\d.]+),<([\d.]+)"', text))
    assert versions.minor(oldest) == OLDEST[:2]
    assert versions.minor(beyond) == (TESTED[0], TESTED[1] + 1)
