"""`replica-engine explain` shows the part of the Errors page that an error names."""

import pickle

import pytest

from replica_engine.__main__ import main
from replica_engine.errors import ScopeError, explain, many_traces, untested_version, warn_whole_batch
from replica_engine.errors.base import in_words

MORE = "more: replica-engine explain "


def explained(capsys, *words):
    """The exit status, and what is printed."""
    status = main(["explain", *words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_an_error_names_its_part_of_the_page_and_keeps_doing_so():
    error = ScopeError.variable("weight", "train.py:12 in step")
    (note,) = error.__notes__
    assert note == f"{MORE}ScopeError.variable"
    assert "more:" not in str(error)
    assert pickle.loads(pickle.dumps(error)).__notes__ == [note]
    assert MORE not in in_words(error)  # in messages that quote the error


def test_the_last_line_of_a_warning_names_its_part(capsys):
    for text in (warn_whole_batch(512, 8, ""), many_traces("step", 8), untested_version("jax", "9", "1", "2")):
        last = text.splitlines()[-1]
        assert last.startswith(MORE)
        assert explained(capsys, last.removeprefix(MORE))[0] == 0
        assert explained(capsys, text)[0] == 0  # the whole message, as somebody copies it


@pytest.mark.parametrize(
    "name", ["ScopeError.variable", "replica_engine.errors.ScopeError.variable:", "scopeerror.variable"]
)
def test_a_wording_is_explained_with_its_program(capsys, name):
    status, text = explained(capsys, name)
    assert status == 0
    assert text.startswith("ScopeError.variable\n===")
    assert "\n    with strategy.scope():\n" in text
    assert "ScopeError.optimizer" not in text


def test_a_class_is_explained_with_the_names_of_its_messages(capsys):
    status, text = explained(capsys, "ScopeError")
    assert status == 0
    assert "\n  ScopeError.optimizer: Replicas use an optimizer" in text


def test_a_class_of_one_message_shows_it(capsys):
    _, text = explained(capsys, "NoMethodError")
    assert "has no device loop" in text
    assert "\nwhich shows:\n" in text


def test_words_of_a_warning_find_it(capsys):
    status, text = explained(capsys, warn_whole_batch(512, 8, "other.py:77 in mine").partition("\n")[0])
    assert (status, text.partition("\n")[0]) == (0, "warn_whole_batch")


def test_words_that_no_message_has_together_show_no_part_in_full(capsys):
    status, text = explained(capsys, "Unknown variable")
    assert status == 0
    assert text.startswith("No message reads so. The nearest parts")
    assert "A program that comes to it" not in text


def test_words_of_one_message_alone_show_it(capsys):
    _, text = explained(capsys, "in different", "operations:")
    assert text.startswith("MergeCallMismatchError.different_operations\n===")


def test_paragraphs_are_wrapped_once(capsys):
    _, text = explained(capsys, "MergeCallMismatchError")
    lines = text.split("\n")
    first = lines.index("=" * len("MergeCallMismatchError")) + 1
    paragraphs = "\n".join(lines[first:]).split("\n\n")
    assert any(len(part.split("\n")) > 1 for part in paragraphs)
    for part in paragraphs[:2]:
        assert all(len(line) > 60 for line in part.strip().split("\n")[:-1])


def test_words_of_several_parts_list_them(capsys):
    status, text = explained(capsys, "made", "outside", "scope")
    assert status == 0
    assert "ScopeError.variable:" in text
    assert "ScopeError.optimizer:" in text


def test_words_of_no_part_are_an_error(capsys):
    nothing = "explain: the Errors page has nothing about: zebra.\n`replica-engine explain` without a name lists all.\n"
    assert explained(capsys, "zebra") == (1, nothing)


@pytest.mark.parametrize(
    ("asked", "meant"), [("ScopeEror", "ScopeError"), ("warn_whole_bach", "warn_whole_batch"), ("zebra", None)]
)
def test_a_name_that_is_nearly_right_is_offered(capsys, asked, meant):
    status, text = explained(capsys, asked)
    assert status == 1
    assert (f"Did you mean {meant}" in text) if meant else ("Did you mean" not in text)


def test_without_a_name_all_are_listed(capsys):
    status, text = explained(capsys)
    names = [line.partition(":")[0] for line in text.splitlines()]
    assert status == 0
    assert {"ScopeError", "ScopeError.variable", "warn_whole_batch"} <= set(names)
    assert len(names) == len(explain._parts())


def test_the_page_that_is_shown_is_the_one_of_the_documentation():
    assert explain.PAGE.resolve().parts[-2:] == ("docs", "errors.md")
