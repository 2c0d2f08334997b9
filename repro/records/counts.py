"""How many metrics each case of a run has, by which a case that lost rows is known, wherever they were cut.

One JSON Lines file a suite and run, one line a case, written ahead of its rows:

    {"metrics": 2, "profile": "full", "case": {"impl": "fused", "tokens": "1024"}}

A line without a profile, as older checkouts wrote them, is one of a full run. A case without a count, as runs of still
older ones have them, is taken for whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from repro.records import files
from repro.records.schema import Key, Record, case_key, row_key
from repro.suite import PROFILES, Case

At = tuple[str, Key]
"""One case of one run: run_id, case."""

CaseOf = tuple[str, Key]
"""One case whatever its run: profile, case."""


class Count(NamedTuple):
    """What a line says. last: it ends its file, so that a kill may have come before the rows of its case."""

    metrics: int
    profile: str
    last: bool


def append(path: Path, profile: str, case: Case, metrics: int) -> None:
    """Say that a case is about to get so many metrics. The caller holds the lock."""
    line = {"metrics": metrics, "profile": profile, "case": dict(sorted(case_key(case.key)))}
    files.append(path, (json.dumps(line) + "\n").encode())


def read(folder: Path) -> dict[At, Count]:
    """Counts of every case of every run that has them; of a case counted twice the last. Warns of other lines."""
    found: dict[At, Count] = {}
    for path in sorted(folder.glob("*.jsonl")):
        bad = []
        lines = path.read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                key, count = _parse(line, number == len(lines))
                found[path.stem, key] = count
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
                bad.append(number)
        if bad:
            numbers = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            warnings.warn(f"{path}: line {numbers} is no count of a case and is left out", stacklevel=1)
    return found


def _parse(line: str, last: bool) -> tuple[Key, Count]:
    entry = json.loads(line)
    key = frozenset((str(p), str(text)) for p, text in entry["case"].items())
    profile = entry.get("profile", "full")
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {PROFILES}, got {profile!r}")
    return key, Count(int(entry["metrics"]), profile, last)


def compare(counted: Mapping[At, Count], rows: Iterable[Record], finished: Collection[str]) -> dict[At, bool]:
    """Of each case of a run that was counted: whether its rows are all there.

    Left out: a case that has none where its run may have been stopped between count and rows.

    finished: run_ids of the runs that were not.
    """
    runs = {run_id for run_id, _ in counted}
    found: dict[At, set[str]] = {}
    for row in rows:
        if row["run_id"] in runs:
            found.setdefault((row["run_id"], row_key(row)), set()).add(row["metric"])
    return {
        at: len(found.get(at, ())) >= count.metrics
        for at, count in counted.items()
        if at in found or not count.last or at[0] in finished
    }


def lost(counted: Mapping[At, Count], rows: Iterable[Record], whole: Mapping[At, bool]) -> list[CaseOf]:
    """The cases whose newest run, going by rows and counts, lost some of its rows or all of them.

    whole: what `compare` says of the same counts and rows.
    """
    lacking = [at for at, all_there in whole.items() if not all_there]
    if not lacking:
        return []
    kept: set[At] = set()
    newest: dict[CaseOf, str] = {}
    for row in rows:
        case, run_id = (row["profile"], row_key(row)), row["run_id"]
        kept.add((run_id, case[1]))
        newest[case] = max(newest.get(case, run_id), run_id)
    for run_id, key in lacking:
        if (run_id, key) not in kept:
            case = counted[run_id, key].profile, key
            newest[case] = max(newest.get(case, run_id), run_id)
    return [(profile, key) for (profile, key), run_id in newest.items() if not whole.get((run_id, key), True)]
