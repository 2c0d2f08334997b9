"""How many metrics each case of a run has, by which a case that lacks rows is known, wherever they were cut.

One JSON Lines file a suite and run, one line a case, written ahead of its rows:

    {"metrics": 2, "case": {"impl": "fused", "tokens": "1024"}}

A case without a count, as runs of older checkouts have them, is taken for whole.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from pathlib import Path

from repro.records import files
from repro.records.schema import Key, Record, cell, row_key
from repro.suite import Case

At = tuple[str, Key]
"""One case of one run: run_id, case."""


def append(path: Path, case: Case, metrics: int) -> None:
    """Say that a case is about to get so many metrics. The caller holds the lock."""
    key = {name: text for name, value in case.key.items() if (text := cell(value))}
    files.append(path, (json.dumps({"metrics": metrics, "case": key}) + "\n").encode())


def read(folder: Path) -> dict[At, int]:
    """Metrics of every case of every run that counted them; of a case counted twice the last. Warns of other lines."""
    found: dict[At, int] = {}
    for path in sorted(folder.glob("*.jsonl")):
        bad = []
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            try:
                entry = json.loads(line)
                found[path.stem, frozenset((str(p), str(text)) for p, text in entry["case"].items())] = int(
                    entry["metrics"]
                )
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError):
                bad.append(number)
        if bad:
            numbers = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
            warnings.warn(f"{path}: line {numbers} is no count of a case and is left out", stacklevel=1)
    return found


def compare(counted: dict[At, int], rows: Iterable[Record]) -> dict[At, bool]:
    """Of each case of a run that was counted and has rows: whether they are all there."""
    runs = {run_id for run_id, _ in counted}
    found: dict[At, set[str]] = {}
    for row in rows:
        if row["run_id"] in runs:
            found.setdefault((row["run_id"], row_key(row)), set()).add(row["metric"])
    return {at: len(metrics) >= counted[at] for at, metrics in found.items() if at in counted}
