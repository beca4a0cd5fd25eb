"""The pages of errors are what the errors and their golden files are, and errors and warnings name them."""

import importlib.util
import inspect
import pathlib
import pickle
import pydoc
import re

import pytest
from helpers.golden import FOLDER

from replica_engine.errors import ReplicateError, ScopeError
from replica_engine.errors.base import in_words, warning
from replica_engine.errors.device_errors import untested_version
from replica_engine.errors.run_errors import warn_dataset_for_each

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages():
    spec = importlib.util.spec_from_file_location("generate_errors", ROOT / "docs" / "generate_errors.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pages()


@pytest.mark.parametrize("error", [ScopeError.variable("weight", "train.py:12 in step"), ReplicateError("a message")])
def test_an_error_names_its_page_and_keeps_doing_so(pages, error):
    name = type(error).__name__
    note = f"more: errors/{name}.html in the site that `make docs` builds, or help(replica_engine.errors.{name})"
    assert f"{name}.md" in pages
    assert inspect.getdoc(type(error)).splitlines()[0] in pydoc.plain(pydoc.render_doc(f"replica_engine.errors.{name}"))
    assert error.__notes__ == [note]
    assert type(error)(str(error)).__notes__ == [note]
    assert pickle.loads(pickle.dumps(error)).__notes__ == [note]
    assert "more:" not in str(error)
    assert "more:" not in in_words(error)  # in messages that quote the error


def test_the_last_line_of_a_warning_names_its_part(pages):
    many = warning("many_traces", "`step` has been traced 8 times, and most traces are compiled.")
    for text in (warn_dataset_for_each("numbers", 8, ""), many, untested_version("jax", "9", "1", "2")):
        (name,) = re.findall(
            r"^more: errors/warnings\.html#(\w+) in the site that `make docs` builds$", text.splitlines()[-1]
        )
        assert f"\n## {name}\n" in pages["warnings.md"]


def test_programs_fit_the_column_of_the_site():
    programs = {path.name: path.read_text().partition("\n\n===")[0] for path in FOLDER.glob("*.txt")}
    assert not [name for name, program in programs.items() if max(map(len, program.splitlines())) > 96]


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
