"""What the documents quote from recorded rows, between markers that name it: written anew whenever rows are judged.

    <!-- replay: generated from results -->
    ...
    <!-- replay: end -->

Suites tell the text (`repro.suite.tell`); `remaining` counts the campaign's cases that are still to be measured.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repro import suite as registry
from repro.measure.machine import Machine
from repro.measure.stats import Interval
from repro.records import Store, files
from repro.runner import plan
from repro.suite import Suite

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "Nothing is recorded yet."
CAMPAIGN = ("links", "throughput_measured", "kernel_share", "max_sequence", "loss_parity", "shape_sweep")
_PLACE = re.compile(r"(<!-- ([\w-]+): generated from results -->\n).*?(<!-- \2: end -->)", re.DOTALL)


def documents(root: Path) -> list[Path]:
    """The documents of a checkout that may have such places."""
    return [p for p in (root / "README.md", root / "CAMPAIGN.md", *sorted(root.glob("docs/*.md"))) if p.is_file()]


def sections(
    store: Store, suites: Mapping[str, Suite], machines: Sequence[Machine]
) -> tuple[dict[str, str], list[str]]:
    """Texts by name, and a line for each suite that failed. machines: those whose missing cases are counted."""
    found = {"remaining": remaining(store, suites, machines)}
    errors = []
    for name, suite in suites.items():
        try:
            found |= registry.tell(suite, functools.partial(store.rows, name, None, "full"))
        except Exception as e:
            errors.append(f"{name}: not told in the documents: {type(e).__name__}: {e}")
    return found, errors


def written(text: str, texts: Mapping[str, str]) -> str:
    """A document's text with what is told at the places that it has; those of unknown names stay."""
    return _PLACE.sub(lambda m: f"{m[1]}{texts[m[2]]}\n{m[3]}" if m[2] in texts else m[0], text)


def update(root: Path, texts: Mapping[str, str]) -> None:
    """Write the texts into the documents of a checkout, those that change."""
    for path in documents(root):
        text = path.read_text()
        if (updated := written(text, texts)) != text:
            files.replace(path, updated.encode())


def remaining(store: Store, suites: Mapping[str, Suite], machines: Sequence[Machine]) -> str:
    """How many of the campaign's cases are recorded, of suites and machines that lack some."""
    cells = []
    for name in (n for n in CAMPAIGN if n in suites):
        for machine in machines:
            planned, _ = plan(store, {name: suites[name]}, machine, "full")
            for p in planned:
                if p.todo:
                    done = f"{len(p.cases) - len(p.todo)} of {len(p.cases)}"
                    cells.append([f"`{name}`", machine.slug, done])
    return table(["suite", "device", "cases recorded"], cells) if cells else "Nothing remains."


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells))


def by_adaln(rows: pd.DataFrame) -> dict[tuple[str, str], Interval]:
    """Values of one cell's rows by metric and AdaLN."""
    columns = (rows[c].tolist() for c in ("metric", "adaln", "value", "ci_low", "ci_high", "n"))
    return {(m, a): Interval(v, low, high, n) for m, a, v, low, high, n in zip(*columns, strict=True)}


def kept(yes: bool, no: bool, word: str = "kept", against: str = "missed") -> str:
    """A bar's outcome: `yes` or `no` where the interval lies on one side of it, else undecided."""
    return word if yes else against if no else "undecided"
