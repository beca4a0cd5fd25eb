"""docs/errors.md is what the errors and their golden files are."""

import importlib.util
import pathlib

from helpers.golden import FOLDER

ROOT = pathlib.Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("generate_errors", ROOT / "docs" / "generate_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_errors_is_up_to_date():
    made = generator()
    assert made.page() == made.PAGE.read_text(), "python docs/generate_errors.py writes it."


def test_each_golden_file_is_in_it_once():
    page = generator().page()
    for path in FOLDER.glob("*.txt"):
        program = path.read_text().partition("\n\n===")[0]
        assert page.count(f"```python\n{program}\n```") == 1, path.name
