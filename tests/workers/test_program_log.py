"""The logs of what workers launched, against a plain model of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.workers.program_log import (
    ENTRY,
    LAUNCH,
    MOST_ENTRIES,
    LaunchLog,
    backwards,
    entry,
    packed,
    unpacked,
)

CODES = [entry(LAUNCH, name) for name in "abc"]
SIZE = 3


@settings(deadline=None)
@given(st.lists(st.sampled_from(CODES), min_size=1, max_size=200))
def test_entries_go_over_the_wire_as_they_are(entries):
    assert unpacked(packed(entries)) == b"".join(entries)
    assert list(backwards(b"".join(entries))) == entries[::-1]


def test_equal_launches_in_a_row_are_short():
    assert len(packed(CODES[:1] * 10_000)) < 30


@pytest.mark.parametrize(
    "text",
    ["", "xx", "ab", "ab*2", f"{CODES[0].hex()}*0", f"{CODES[0].hex()}*-1", f"{CODES[0].hex()}*{MOST_ENTRIES + 1}"],
)
def test_what_is_no_list_of_entries(text):
    with pytest.raises(ValueError, match=r"not a list of entries|non-hexadecimal"):
        unpacked(text)


BATCHES = st.lists(
    st.tuples(
        st.integers(0, SIZE - 1),
        # Mostly the same, so that logs stay equal for a while.
        st.lists(st.sampled_from([CODES[0]] * 6 + CODES), min_size=1, max_size=4),
        st.booleans(),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(BATCHES)
def test_a_difference_is_found_when_the_second_of_two_workers_brings_it(batches):
    log, plain, waits, released = LaunchLog(SIZE), [[] for _ in range(SIZE)], {}, set()
    for number, (worker, batch, waiting) in enumerate(batches):
        found = log.extend(worker, b"".join(batch))
        plain[worker] += batch
        longest = max((each for other, each in enumerate(plain) if other != worker), key=len)
        differing = [
            at for at, (ours, theirs) in enumerate(zip(plain[worker], longest, strict=False)) if ours != theirs
        ]
        if differing:
            assert found.position == differing[0]
            assert found.entries[plain[worker][differing[0]]] == (worker,)
            others = found.entries[longest[differing[0]]]
            assert others == tuple(w for w in range(SIZE) if w != worker and len(plain[w]) > differing[0])
            return
        assert found is None
        if waiting:
            waits[worker, number] = log.wait(worker, (worker, number))
            assert waits[worker, number] == len(plain[worker]) - 1
        released |= set(log.released())
        assert released == {ticket for ticket, at in waits.items() if all(len(each) > at for each in plain)}
        if number % 3 == 0:
            log.prune()
            lengths = sorted(map(len, plain))
            kept = lengths[-1] - lengths[0] + min(1, lengths[0])
            assert len(log._entries) == ENTRY * kept, "as far apart as the workers are, and one"


def test_who_gives_up_learns_who_is_missing():
    log = LaunchLog(SIZE)
    log.extend(1, CODES[0])
    position = log.wait(1, (1, 7))
    log.extend(2, CODES[0] * 2)
    assert log.give_up(position, (1, 7)) == (0,)
    log.extend(0, CODES[0])
    assert log.released() == [], "nobody waits any more"


def test_entries_have_one_length():
    assert {len(code) for code in CODES} == {ENTRY}


@pytest.mark.parametrize("others", [[], CODES[:1], CODES[:2]])
def test_an_entry_that_is_taken_back_is_compared_with_nothing(others):
    log = LaunchLog(2)
    log.extend(0, b"".join(CODES[:2]))
    log.extend(1, b"".join(others))
    log.prune()
    log.withdraw(0)
    assert log.position(0) == 1
    found = log.extend(0, CODES[2])
    if len(others) < 2:
        assert found is None
        assert log.extend(1, b"".join([*CODES[:1], *CODES[2:]][len(others) :])) is None
    else:
        assert found.position == 1
        assert found.entries == {CODES[1]: (1,), CODES[2]: (0,)}


def test_nothing_can_be_taken_back_from_an_empty_log():
    with pytest.raises(ValueError, match="no entry"):
        LaunchLog(2).withdraw(0)
