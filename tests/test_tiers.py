"""What `make test` leaves out is left for the full tier, and each value of a parameter is in both."""

import itertools
import pathlib
import types

import pytest
from helpers import tiers


def config(tier=None, keyword="", args=(), **options):
    chosen = types.SimpleNamespace(
        option=types.SimpleNamespace(**{"keyword": keyword, "markexpr": "", **options}),
        args=list(args),
        getoption={"--tier": tier, "--replicas": None}.get,
        stash={},
        deselected=[],
    )
    chosen.hook = types.SimpleNamespace(pytest_deselected=lambda items: chosen.deselected.extend(items))
    return chosen


def cases(name, full=(), rows=(), **values):
    """The cases of a test function; `rows` has the names of parameters whose values are written together."""
    for number, combination in enumerate(itertools.product(*values.values())):
        yield types.SimpleNamespace(
            iter_markers=lambda mark: [pytest.mark.parametrize(names, []).mark for names in rows],
            nodeid=f"{name}[{'-'.join(map(str, combination))}]",
            callspec=types.SimpleNamespace(params=dict(zip(values, combination, strict=True))),
            get_closest_marker=lambda mark, number=number: mark if number in full else None,
        )


def chosen(tier, *functions):
    items = [item for function in functions for item in function]
    of_tier = config(tier)
    tiers.select(of_tier, items)
    return [item.nodeid for item in items], [item.nodeid for item in of_tier.deselected]


def test_each_value_once_on_threads_and_compiled():
    rows = ("mirrored", 2), ("tpu", 4)
    found, left = chosen("quick", cases("a", strategy=rows, dtype=["int32", "bool"], size=[1, 2]))
    assert found == [
        "a[('mirrored', 2)-int32-1]",
        "a[('mirrored', 2)-bool-2]",
        "a[('tpu', 4)-int32-1]",
        "a[('tpu', 4)-bool-2]",
    ]
    assert len(left) == 4


def test_the_rest_is_the_others_and_all_is_both():
    functions = [("a", {"x": [1, 2], "y": [3, 4]}), ("b", {"z": [5]}), ("c", {"full": [0], "z": [5, 6]})]
    of = {
        tier: chosen(tier, *(cases(name, **values) for name, values in functions))[0]
        for tier in ("quick", "rest", "all")
    }
    assert of == {
        "quick": ["a[1-3]", "a[2-4]", "b[5]", "c[6]"],
        "rest": ["a[1-4]", "a[2-3]", "c[5]"],
        "all": ["a[1-3]", "a[1-4]", "a[2-3]", "a[2-4]", "b[5]", "c[5]", "c[6]"],
    }


def test_what_is_asked_for_by_name_is_run_in_full():
    assert tiers.tier(config()) == "quick"
    assert tiers.tier(config(keyword="gather")) == tiers.tier(config(args=["tests/a.py::test_b"])) == "all"
    for asked in ({"args": ["tests/a.py"]}, {"markexpr": "full"}, {"lf": True}, {"failedfirst": True}):
        assert tiers.tier(config(**asked)) == "all", asked
    assert tiers.tier(config(args=["tests/contract"])) == "quick"
    assert tiers.tier(config("rest", keyword="gather")) == "rest"


def test_what_is_written_as_a_row_is_one_value():
    rows = cases("a", rows=["x, y", ("z",)], x=[1, 2], y=[3, 4], z=[5])
    assert chosen("quick", rows)[0] == ["a[1-3-5]", "a[1-4-5]", "a[2-3-5]", "a[2-4-5]"]


def test_each_expensive_test_is_there_and_left_for_the_full_tier(request):
    root = pathlib.Path(__file__).parents[1]
    assert not request.config.stash.get(tiers.STALE, None), "no such test, or case"
    for name in tiers.expensive():
        name, _, case = name.partition("[")
        file, *_, function = name.split("::")
        assert f"def {function}(" in (root / file).read_text(encoding="utf-8"), name
        if not case:
            of = {tier: chosen(tier, cases(name, x=[1, 2]))[0] for tier in ("quick", "rest")}
            assert of == {"quick": [], "rest": [f"{name}[1]", f"{name}[2]"]}


def test_an_expensive_case_that_is_not_there_is_noted(monkeypatch):
    monkeypatch.setattr(tiers, "expensive", lambda: {"tests/a.py::b[1]", "tests/a.py::b[3]", "tests/c.py::d"})
    of_tier = config("quick")
    tiers.select(of_tier, list(cases("tests/a.py::b", x=[1, 2])))
    assert of_tier.stash[tiers.STALE] == {"tests/a.py::b[3]"}


def test_an_expensive_case_is_left_without_another_in_its_place(monkeypatch):
    assert chosen("quick", cases("a", x=[1, 2], y=[3, 4]))[0] == ["a[1-3]", "a[2-4]"]
    monkeypatch.setattr(tiers, "expensive", lambda: {"a[2-4]"})
    assert chosen("quick", cases("a", x=[1, 2], y=[3, 4]))[0] == ["a[1-3]"]
