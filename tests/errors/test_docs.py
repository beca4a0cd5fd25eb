"""docs/errors is what the errors and their golden files are."""

import importlib.util
import pathlib

import pytest
from helpers.golden import FOLDER

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_errors", ROOT / "docs" / "generate_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(generator):
    return generator.pages()


def test_the_pages_of_errors_are_up_to_date(generator, pages):
    written = {path.name: path.read_text() for path in generator.PAGES.glob("*.md")}
    assert pages == written, "python docs/generate_errors.py writes them."


def test_each_golden_file_is_in_them_once(pages):
    text = "".join(pages.values())
    for path in FOLDER.glob("*.txt"):
        program = path.read_text().partition("\n\n===")[0]
        assert text.count(f"```python\n{program}\n```") == 1, path.name


def test_a_message_that_stands_where_it_is_raised_is_on_the_page_of_its_class(pages):
    text = " ".join(pages["ReplicateError.md"].split())
    assert "The model ... is replicated already. Replicate the original one, with other replicas." in text


def test_each_page_is_in_the_navigation(pages):
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in pages if f"errors/{name}\n" not in navigation] == []
