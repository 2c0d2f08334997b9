"""RELIABILITY.md counts the cases that there are, and every case has a test."""

from __future__ import annotations

from collections import Counter

from tests.faults import doors
from tests.faults.cases import KINDS
from tests.faults.recorded_rows import FILES
from tests.faults.table import RELIABILITY, counts, updated


def test_the_table_is_that_of_the_cases() -> None:
    text = RELIABILITY.read_text()
    assert updated(text) == text, "run python -m tests.faults.table"


def test_every_case_is_tested_once_and_every_door_knows_every_kind_but_a_few() -> None:
    assert {c.door for c in doors.CASES} == doors.COMMANDS.keys() | doors.FUNCTIONS.keys()
    names = Counter(c.id for c in doors.CASES)
    assert max(names.values()) <= 9, "names are for people; a few are alike, in words that are cut short"
    assert {f.kind for f in FILES} | {c.kind for c in doors.CASES} == set(KINDS)
    assert all(len(own) >= 4 for own in counts().values())
