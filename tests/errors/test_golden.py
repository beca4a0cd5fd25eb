"""Every error has a golden file, and a golden file that is wrong is noticed."""

import pathlib
import pickle
import re

import pytest
from helpers.golden import FOLDER, branching, compare, shown_by, shows

from replica_engine import errors
from replica_engine.errors import ContribError, DeviceError

SHOWN = re.compile(r'^@shows\("?([\w.]+)"?(?:, "([\w.]+)")?\)$', re.MULTILINE)


def shown():
    """The golden files that tests of this folder make, and the text that each shows."""
    found = {}
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        if path != pathlib.Path(__file__):
            for text, variant in SHOWN.findall(path.read_text()):
                name = f"{text}.{variant}" if variant else text
                assert name not in found, f"{name} is shown twice"
                found[name] = text
    return found


def test_every_text_that_branches_is_shown():
    assert branching() - set(shown().values()) == set()


def test_every_class_is_shown():
    classes = {name for name in errors.__all__ if issubclass(getattr(errors, name), BaseException)}
    assert classes - {text.partition(".")[0] for text in shown().values()} == {"ReplicaEngineError"}  # their base


@pytest.mark.parametrize("kind", [each for each in vars(errors).values() if isinstance(each, type)])
def test_every_exception_can_be_made_of_its_message(kind):
    """Keras and others replace an exception from a layer by `type(error)(message)`."""
    if issubclass(kind, BaseException):
        error = kind("a message")
        assert str(error) == "a message"
        assert str(pickle.loads(pickle.dumps(error))) == "a message"


def test_what_an_exception_knows_besides_has_a_default():
    remade = errors.MergeCallMismatchError("a message"), errors.StructureMismatchError("a message")
    assert (remade[0].rows, remade[1].path, remade[1].replicas) == ((), "", ())
    late = errors.ReplicaTimeoutError("a message")
    assert (late.rows, late.coordinator, late.table) == ((), None, "")


def test_no_golden_file_is_left_over():
    assert {path.stem for path in FOLDER.glob("*")} == set(shown())


def test_golden_files_begin_with_the_program_and_name_its_lines():
    for path in FOLDER.glob("*.txt"):
        program, _, seen = path.read_text().partition("\n\n=")
        lines = program.split("\n")
        assert "/work/" not in seen, path.name
        assert "site-packages" not in seen, path.name
        for number in re.findall(r'program\.py(?:", line |:)(-?\d+)', seen):
            assert 1 <= int(number) <= len(lines), path.name


@shows(ContribError)
def comes_to_nothing():
    print("nothing")


@shows(ContribError)
def comes_to_another_error():
    raise DeviceError.bad_count(0)


@pytest.mark.parametrize("test", [comes_to_nothing, comes_to_another_error])
def test_a_program_must_come_to_what_it_shows(test):
    with pytest.raises(AssertionError, match=r"has not come to ContribError, but to this"):
        test()


def fails():
    raise ContribError("There is no host 1; hosts are numbered from 0 to 0.")


def test_a_golden_file_that_is_wrong_or_missing_is_noticed(tmp_path):
    text = shown_by(fails)
    with pytest.raises(AssertionError, match="There is no golden/ContribError"):
        compare("ContribError", text, tmp_path, update=False)
    compare("ContribError", text, tmp_path, update=True)
    compare("ContribError", text, tmp_path, update=False)
    assert (tmp_path / "ContribError.txt").read_text() == text
    with pytest.raises(AssertionError, match="UPDATE_GOLDEN=1"):
        compare("ContribError", text.replace("hosts are", "hosts were"), tmp_path, update=False)


def test_what_is_shown_is_the_program_and_the_exception_with_its_lines():
    program, _, seen = shown_by(fails).partition("\n\n")
    assert program == 'raise ContribError("There is no host 1; hosts are numbered from 0 to 0.")'
    assert seen.split("\n")[1:] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 1, in <module>',
        "replica_engine.errors.ContribError: There is no host 1; hosts are numbered from 0 to 0.",
        "",
    ]
