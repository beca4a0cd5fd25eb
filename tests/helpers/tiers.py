"""Which cases `make test` runs, and which are left for `make test-full`.

`make test` runs every test function but those that `expensive.txt` lists. Of one with several parameters it runs as
many cases as give each value of each parameter once; in the contract suite once on threads and once compiled.
Combinations of values are left for the full tier. So are the forms of `run` and the rows of the table of strategies
that share the code of others, in modules that are not about them, what is marked `full`, with the reason, and cases
that `expensive.txt` lists.

What somebody asks for by name, with `-k` or `file::test`, is run in full.
"""

import pathlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

QUICK, REST, ALL = "quick", "rest", "all"
EXPENSIVE = pathlib.Path(__file__).with_name("expensive.txt")


def expensive() -> set[str]:
    """The test functions and cases that `expensive.txt` names: what they run is run by cheaper ones too."""
    return {line for line in EXPENSIVE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def tier(config: pytest.Config) -> str:
    """The tier that was asked for."""
    by_name = bool(config.option.keyword) or any("::" in argument for argument in config.args)
    return config.getoption("--tier") or (ALL if by_name else QUICK)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in the list what the tier has."""
    if (asked := tier(config)) == ALL:
        return
    functions, left_out = defaultdict(list), expensive()
    for item in items:
        if (function := item.nodeid.partition("[")[0]) not in left_out:
            functions[function].append(item)
    # A case that is left out leaves no other in its place, which would take as long.
    quick = {item.nodeid for cases in functions.values() for item in _each_value_once(cases)} - left_out
    chosen = [item for item in items if (item.nodeid in quick) == (asked == QUICK)]
    config.hook.pytest_deselected(items=[item for item in items if (item.nodeid in quick) != (asked == QUICK)])
    items[:] = chosen


def _each_value_once(cases: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The cases of a test function with a value that no case before them has; those with most come first."""
    left = [(item, _values(item)) for item in cases if item.get_closest_marker("full") is None]
    chosen, seen = [], set()
    while left:
        item, values = max(left, key=lambda one: len(one[1] - seen))
        if not values - seen and chosen:
            break
        chosen.append(item)
        seen |= values
        left = [one for one in left if one[0] is not item]
    return chosen


def _values(item: pytest.Item) -> set[tuple[str, int, bool]]:
    if (spec := getattr(item, "callspec", None)) is None:
        return set()
    row = spec.params.get("strategy")
    backend = isinstance(row, tuple) and row[0].startswith("tpu")
    return {(name, id(value), backend) for name, value in spec.params.items()}
