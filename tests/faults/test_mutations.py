"""tests/mutations.csv is of the code as it stands: every mutation still applies, and at most one was missed."""

from __future__ import annotations

import csv

import pytest

from tests.faults.mutate import ALLOWED_MISSED, COLUMNS, MUTATIONS, ROOT, TABLE, Mutation


def test_the_table_lists_every_mutation_and_what_caught_it() -> None:
    with TABLE.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS
    assert [(file, change) for file, change, _ in rows] == [(m.file, " ".join(m.change.split())) for m in MUTATIONS]
    assert len(rows) >= 30 and sum(not caught for *_, caught in rows) <= ALLOWED_MISSED
    for *_, caught in rows:
        path, _, name = caught.partition("::")
        assert not caught or f"def {name.split('::')[-1]}(" in (ROOT / path).read_text(), (
            f"{caught} is gone: run it again"
        )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}: {m.old[:30]!r}")
def test_every_mutation_applies(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
