"""The faults of `python -m tests.mutants` in a few lines of source, and what a copy of them says of its calls."""

import ast
import importlib
import pathlib
import sys

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants import reach
from tests.mutants.faults import faults, instrument

SOURCE = """
def key(a, b: "x == 1", axis=0):
    'A text.'
    if not (a or b) and a - 1 > 2:
        lock.wait()
    raise ValueError(a + 1)
class C:
    def of(self): return tuple(x for x in self.rows), f(axis=1), "a" + "b"
    def get(self):
        key = self.a, self.b
        return self.known.setdefault((key, 1), [*key])
"""

CHANGES = """
m.key:condition:0   not (a or b) and a - 1 > 2 -> not (a or b) or a - 1 > 2
m.key:condition:1   not (a or b) -> a or b
m.key:condition:2   a or b -> a and b
m.key:comparison:0   a - 1 > 2 -> a - 1 >= 2
m.key:sign:0   a - 1 -> a + 1
m.key:wait:0   lock.wait() -> pass
m.C.of:copy:0   tuple(x for x in self.rows) -> (x for x in self.rows)
m.C.of:axis:0   axis=1 -> axis=2
m.C.get:key:0   key = self.a, self.b -> key = (self.a,)
m.C.get:key:1   self.known.setdefault((key, 1), [*key]) -> self.known.setdefault((key,), [*key])
"""


@pytest.fixture
def package(tmp_path):
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "m.py").write_text(SOURCE)
    return tmp_path / "some_package"


def test_each_kind_of_fault_is_found_and_none_in_what_is_raised_said_or_annotated(package):
    found = [*faults(package, package / "m.py")]
    assert "\n".join(f"{each.name}   {each.change}" for each in found) == CHANGES.strip()
    texts = {each.name: each.text for each in found}
    assert len({*texts.values(), SOURCE}) == len(found) + 1
    assert "if (a or b) and a - 1 > 2:" in texts["m.key:condition:1"]


def test_what_is_no_python_is_no_fault(package, monkeypatch):
    def passing(node, function):
        return [("pass", ast.Pass())] if isinstance(node, (ast.Expr, ast.Constant)) else []

    monkeypatch.setattr("tests.mutants.faults._changes", passing)
    (package / "m.py").write_text("def f():\n    y = 1\n    g()\n")
    (found,) = faults(package, package / "m.py")
    assert (found.name, found.text) == ("m.f:pass:1", "def f():\n    y = 1\n    pass\n")


def test_a_copy_says_which_functions_a_test_runs(package, monkeypatch, tmp_path):
    (package / "__init__.py").touch()
    (package / "m.py").write_text("def f(): return 1\n\ndef g():\n    'A text.'\n    def h():\n        pass\n    h()\n")
    instrument(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("REACH", str(tmp_path / "answers"))
    (tmp_path / "answers").mkdir()
    made = importlib.import_module("some_package.m")
    try:
        assert made.f() == made.f() == 1
        made.g()
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "some_package"]:
            del sys.modules[name]
    assert made.g.__doc__ == "A text."
    (answer,) = (tmp_path / "answers").iterdir()
    test = "tests/test_mutants.py::test_a_copy_says_which_functions_a_test_runs"
    assert answer.read_text() == "".join(f"{test}\t{name}\n" for name in ("m.f", "m.g", "m.g.h"))


def test_a_line_of_what_nobody_could_see_names_a_fault(package, monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "PACKAGE", package)
    monkeypatch.setattr(mutants, "EQUIVALENT", tmp_path / "equivalent.txt")
    lines = CHANGES.strip().splitlines()
    mutants.EQUIVALENT.write_text(f"# A reason.\n{lines[0]}\n")
    assert [each.name for each in mutants._all()] == [line.partition("   ")[0] for line in lines[1:]]
    mutants.EQUIVALENT.write_text(lines[0].replace("or", "and"))
    with pytest.raises(SystemExit, match="names what is no fault"):
        mutants._all()


TESTS = """
import pytest
from replica_engine.m import f, g

def test_that_fails_anyway():
    assert f(1) == 3

@pytest.mark.parametrize("x", [1, 2])
def test_of_f(x):
    assert f(x) == x + 1

def test_of_g():
    assert g(2) == 3
"""


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A checkout with two functions and their tests."""
    files = {
        "replica_engine/__init__.py": "",
        "replica_engine/m.py": "def f(x):\n    return x + 1\n\ndef g(x):\n    print(x)\n    return f(x)\n",
        "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--tier')\n",
        "tests/test_m.py": TESTS,
        "tests/mutants/reach.py": pathlib.Path(reach.__file__).read_text(),
        "setup.cfg": "[tool:pytest]\npythonpath = .\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path / "replica_engine")
    return tmp_path


@pytest.mark.full("starts pytest ten times")
def test_a_fault_is_found_by_a_test_that_passes_without_it(checkout, capsys):
    reached = mutants._reached("quick")
    capsys.readouterr()
    name = "tests/test_m.py::test_"
    assert {test.removeprefix(name): functions for test, functions in reached.items()} == {
        "that_fails_anyway": {"m.f"},
        "of_f[1]": {"m.f"},
        "of_f[2]": {"m.f"},
        "of_g": {"m.f", "m.g"},
    }
    (sign, call) = faults(mutants.PACKAGE, mutants.PACKAGE / "m.py")

    def finder(fault):
        return mutants._finder(fault, "quick", mutants._tests(fault, reached))

    assert finder(sign) == f"{name}of_f[1]"
    assert finder(call) is None
    assert mutants._missed("quick", [sign, call]) == [call]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "no quick  m.g:call:0   print(x) -> pass   ",
        f"quick  m.f:sign:0   x + 1 -> x - 1   {name}of_f[1]",
    ]
    dies = sign._replace(text=sign.text.replace("(x - 1)", "x + 1 if x == 1 else __import__('os')._exit(3)"))
    assert finder(dies) == f"{name}of_f[2]"
    cannot_be_imported = sign._replace(text="raise OSError")
    assert finder(cannot_be_imported) == "before a test began"


@pytest.mark.full("starts pytest twice")
def test_what_tests_run_is_recorded_when_they_change_and_kept_if_all_of_them_ran(checkout, capsys):
    reached = mutants._reached("quick")
    assert "finding out" in capsys.readouterr().out
    assert mutants._reached("quick") == reached
    assert not capsys.readouterr().out
    (checkout / "tests" / "conftest.py").write_text("there is no such option")
    with pytest.raises(SystemExit, match="before all tests had run"):
        mutants._reached("quick")
    with pytest.raises(SystemExit, match="before all tests had run"):
        mutants._reached("quick")
