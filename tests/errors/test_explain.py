"""`replica-engine explain` shows the page that an error names."""

import pickle

import pytest

from replica_engine.__main__ import main
from replica_engine.errors import ReplicateError, ScopeError, explain
from replica_engine.errors.base import in_words, warning
from replica_engine.errors.inputs import warn_dataset_for_each
from replica_engine.errors.versions import untested_version

MORE = "more: replica-engine explain "


def explained(capsys, *words):
    """The exit status, and what is printed."""
    status = main(["explain", *words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize("error", [ScopeError.variable("weight", "train.py:12 in step"), ReplicateError("a message")])
def test_an_error_names_its_page_and_keeps_doing_so(error):
    note = f"{MORE}{type(error).__name__}"
    assert error.__notes__ == [note]
    assert type(error)(str(error)).__notes__ == [note]
    assert pickle.loads(pickle.dumps(error)).__notes__ == [note]
    assert "more:" not in str(error)
    assert MORE not in in_words(error)  # in messages that quote the error


def test_the_last_line_of_a_warning_names_its_part(capsys):
    many = warning("many_traces", "`step` has been traced 8 times, and most traces are compiled.")
    for text in (warn_dataset_for_each("args[0]", 8, ""), many, untested_version("jax", "9", "1", "2")):
        last = text.splitlines()[-1]
        assert last.startswith(MORE)
        assert explained(capsys, last.removeprefix(MORE))[0] == 0
        assert explained(capsys, text)[0] == 0  # the whole message, as somebody copies it


@pytest.mark.parametrize(
    "name", ["ScopeError", "replica_engine.errors.ScopeError:", "scopeerror", "ScopeError.variable", "ScopeError.gone"]
)
def test_a_class_is_explained_with_a_program_and_its_messages(capsys, name):
    """Older versions named a message: `ScopeError.variable`."""
    status, text = explained(capsys, name)
    assert status == 0
    assert text.startswith("ScopeError\n===")
    assert "\nA program that comes to it:\n\n    strategy = " in text
    assert "\nwhich shows:\n\n    Traceback" in text
    assert "The optimizer ... was made outside `strategy.scope()`" in text


def test_words_of_a_message_that_stands_where_it_is_raised_find_its_class(capsys):
    said = "replica_engine.errors.ReplicateError: The model 'net' is replicated already. Replicate the original one."
    status, text = explained(capsys, said)
    assert (status, text.partition("\n")[0]) == (0, "ReplicateError")


def test_words_of_a_warning_find_it(capsys):
    status, text = explained(capsys, warn_dataset_for_each("args[0]", 8, "other.py:77 in mine").partition("\n")[0])
    assert (status, text.partition("\n")[0]) == (0, "warn_dataset_for_each")


def test_words_that_no_message_has_together_show_no_part_in_full(capsys):
    status, text = explained(capsys, "Unknown variable")
    assert status == 0
    assert text.startswith("No message reads so. The nearest pages")
    assert "A program that comes to it" not in text


def test_words_of_one_message_alone_show_its_page(capsys):
    _, text = explained(capsys, "in different", "operations:")
    assert text.startswith("MergeCallMismatchError\n===")


def test_paragraphs_are_wrapped_once(capsys):
    _, text = explained(capsys, "MergeCallMismatchError")
    lines = text.split("\n")
    first = lines.index("=" * len("MergeCallMismatchError")) + 1
    paragraphs = "\n".join(lines[first:]).split("\n\n")
    assert any(len(part.split("\n")) > 1 for part in paragraphs)
    for part in paragraphs[:2]:
        assert all(len(line) > 60 for line in part.strip().split("\n")[:-1])


def test_words_of_several_pages_list_them(capsys):
    status, text = explained(capsys, "one shape")
    assert status == 0
    assert text.startswith("Several pages have these words")
    assert "\n  BatchError: " in text
    assert "\n  LoweringError: " in text


def test_words_of_no_page_are_an_error(capsys):
    nothing = "explain: no page is about: zebra.\n`replica-engine explain` without a name lists all.\n"
    assert explained(capsys, "zebra") == (1, nothing)


@pytest.mark.parametrize(
    ("asked", "meant"), [("ScopeEror", "ScopeError"), ("many_trace", "many_traces"), ("zebra", None)]
)
def test_a_name_that_is_nearly_right_is_offered(capsys, asked, meant):
    status, text = explained(capsys, asked)
    assert status == 1
    assert (f"Did you mean {meant}" in text) if meant else ("Did you mean" not in text)


def test_without_a_name_all_are_listed(capsys):
    status, text = explained(capsys)
    names = [line.partition(":")[0] for line in text.splitlines()]
    assert status == 0
    assert {"ScopeError", "many_traces", "warn_dataset_for_each", "note_failure"} <= set(names)
    assert len(names) == len(explain._parts())


def test_the_pages_that_are_shown_are_those_of_the_documentation():
    assert explain.PAGES.resolve().parts[-2:] == ("docs", "errors")
