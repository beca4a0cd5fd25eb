"""Which cases `make test` runs, and which are left for `make test-full`.

`make test` runs every test function but those that `expensive.txt` lists. Of one with several parameters it runs as
many cases as give each value of each parameter once; in the contract suite once on threads and once compiled. A row of
values that are written together counts as one value. Combinations are left for the full tier. So are the forms of
`run` and the rows of the table of strategies that share the code of others, in modules that are not about them, what
is marked `full`, with the reason, and cases that `expensive.txt` lists.

What somebody asks for by name is run in full: a file, `file::test`, `-k`, `-m`, and what failed last (`--lf`).
"""

import pathlib
from collections import defaultdict
from collections.abc import Iterable

import pytest

QUICK, REST, ALL = "quick", "rest", "all"
EXPENSIVE = pathlib.Path(__file__).with_name("expensive.txt")
STALE = pytest.StashKey[set[str]]()
LEFT_OUT = "cases left out"


def expensive() -> set[str]:
    """The test functions and cases that `expensive.txt` names: what they run is run by cheaper ones too."""
    return {line for line in EXPENSIVE.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")}


def tier(config: pytest.Config) -> str:
    """The tier that was asked for."""
    option = config.option
    by_name = option.keyword or option.markexpr or getattr(option, "lf", False) or getattr(option, "failedfirst", False)
    by_name = by_name or any("::" in argument or argument.endswith(".py") for argument in config.args)
    return config.getoption("--tier") or (ALL if by_name else QUICK)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves in the list what the tier has.

    It also notes the lines of `expensive.txt` that name nothing in the files that were collected, which are whole here.
    With `--replicas` the cases have other names.
    """
    if (asked := tier(config)) == ALL:
        return
    functions, costly = defaultdict(list), expensive()
    if config.getoption("--replicas") is None:
        files = {item.nodeid.partition("::")[0] for item in items}
        known = {item.nodeid for item in items} | {item.nodeid.partition("[")[0] for item in items}
        config.stash[STALE] = {name for name in costly - known if name.partition("::")[0] in files}
    for item in items:
        if (function := item.nodeid.partition("[")[0]) not in costly:
            functions[function].append(item)
    # A case that is left out leaves no other in its place, which would take as long.
    quick = {item.nodeid for cases in functions.values() for item in _each_value_once(cases)} - costly
    chosen = [item for item in items if (item.nodeid in quick) == (asked == QUICK)]
    left_out = [item for item in items if (item.nodeid in quick) != (asked == QUICK)]
    config.hook.pytest_deselected(items=left_out)
    if (output := getattr(config, "workeroutput", None)) is not None:  # in a process of xdist
        output[LEFT_OUT] = len(left_out)
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


def _values(item: pytest.Item) -> set[tuple[str, tuple[int, ...], bool]]:
    if (spec := getattr(item, "callspec", None)) is None:
        return set()
    row = spec.params.get("strategy")
    backend = isinstance(row, tuple) and row[0].startswith("tpu")
    written = [_split(mark.args[0]) for mark in item.iter_markers("parametrize")]
    rows = [next((names for names in written if name in names), [name]) for name in spec.params]
    return {("-".join(names), tuple(id(spec.params[each]) for each in names), backend) for names in rows}


def _split(names: str | Iterable[str]) -> list[str]:
    """The names of the parameters of one `parametrize`."""
    return [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
