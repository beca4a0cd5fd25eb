"""Every error has a golden file, and a golden file that is wrong is noticed."""

import pathlib
import pickle
import re

import pytest
from helpers.golden import FOLDER, compare, shown_by, shows, wordings

from replica_engine import errors
from replica_engine.errors import ContribError, DeviceError

SHOWN = re.compile(r'^@shows\(([\w.]+)(?:, "(\w+)")?\)$', re.MULTILINE)


def shown():
    """The golden files that tests of this folder make, and the wording that each shows."""
    found = {}
    for path in pathlib.Path(__file__).parent.glob("test_*.py"):
        if path != pathlib.Path(__file__):
            for wording, variant in SHOWN.findall(path.read_text()):
                name = f"{wording}.{variant}" if variant else wording
                assert name not in found, f"{name} is shown twice"
                found[name] = wording
    return found


def test_every_wording_is_shown():
    assert wordings() - set(shown().values()) == set()


def test_every_class_has_a_wording():
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    without = {"CoordinatorRow", "ReplicaRow", "WorkerRow", "ReplicaEngineError"}  # no exceptions, and their base
    assert classes - without == classes & {wording.split(".")[0] for wording in wordings()}


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


@shows(ContribError.no_host)
def comes_to_nothing():
    print("nothing")


@shows(ContribError.no_host)
def comes_to_another_error():
    raise DeviceError.bad_count(0)


@pytest.mark.parametrize("test", [comes_to_nothing, comes_to_another_error])
def test_a_program_must_come_to_what_it_shows(test):
    with pytest.raises(AssertionError, match=r"has not come to ContribError\.no_host, but to this"):
        test()


def fails():
    raise ContribError.no_host(1, 1)


def test_a_golden_file_that_is_wrong_or_missing_is_noticed(tmp_path):
    text = shown_by(fails)
    with pytest.raises(AssertionError, match="There is no golden/ContribError"):
        compare("ContribError.no_host", text, tmp_path, update=False)
    compare("ContribError.no_host", text, tmp_path, update=True)
    compare("ContribError.no_host", text, tmp_path, update=False)
    assert (tmp_path / "ContribError.no_host.txt").read_text() == text
    with pytest.raises(AssertionError, match="UPDATE_GOLDEN=1"):
        compare("ContribError.no_host", text.replace("hosts are", "hosts were"), tmp_path, update=False)


def test_what_is_shown_is_the_program_and_the_exception_with_its_lines():
    program, _, seen = shown_by(fails).partition("\n\n")
    assert program == "raise ContribError.no_host(1, 1)"
    assert seen.split("\n")[1:] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 1, in <module>',
        "replica_engine.errors.ContribError: There is no host 1; hosts are numbered from 0 to 0.",
        "",
    ]
