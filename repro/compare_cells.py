"""What sources share, cell by cell, with a verdict where two of them are of one device; and what they do not share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repro.compare_judge import THRESHOLD, WORDS, Judgement, direction, judge, moved
from repro.compare_read import Cell, Source, same_device
from repro.measure.stats import seed_text
from repro.measure.throttle import METRIC

DERIVED = frozenset({"bandwidth", "ceiling", "ceiling_same_size", "speedup", "over_best_peer", "over_unfused", METRIC})
"""Metrics that follow from others of their case; shown where they are asked for."""
CONTROL = "stream"
"""Implementation that no change of code here touches: what it moved by, the machine moved by."""
CEILING = "ceiling"
"""Beside a time, what it is in % of the device's own ceiling."""


@dataclass(frozen=True)
class Value:
    """One source's row of a cell. ceiling: % of its device's ceiling, where the suite knows one."""

    value: float
    low: float
    high: float
    n: int
    kind: str
    run_id: str
    ceiling: float | None = None
    throttled: bool = False


@dataclass(frozen=True)
class Shared:
    """A cell that at least two sources have. values and judgements: by label; a judgement is over `baseline_of` it."""

    suite: str
    profile: str
    metric: str
    unit: str
    case: Mapping[str, str]
    values: Mapping[str, Value]
    judgements: Mapping[str, Judgement]

    @property
    def kind(self) -> str:
        """Measured only where every source's value is."""
        kinds = {v.kind for v in self.values.values()}
        return "measured" if kinds == {"measured"} else "simulated"

    @property
    def urgency(self) -> tuple[int, float]:
        """Sorts what a reader wants to see first: slower, faster, ambiguous, same; the largest change first in each."""
        words = [WORDS.index(j.word) for j in self.judgements.values()]
        ratios = [abs(j.ratio - 1) for j in self.judgements.values() if j.ratio == j.ratio]
        return min(words, default=len(WORDS)), -max(ratios, default=0.0)


@dataclass(frozen=True)
class Comparison:
    """sources: columns. cells: what at least two of them have. baselines: label -> label of what it is judged against.

    alone: lines about what only one source has. drift: (label, suite, profile, metric) -> how far the streams moved
    since the label's baseline, as a fraction.
    """

    sources: tuple[Source, ...]
    cells: tuple[Shared, ...]
    baselines: Mapping[str, str]
    alone: tuple[str, ...]
    drift: Mapping[tuple[str, str, str, str], float]

    @property
    def judged(self) -> Counter[str]:
        """How many verdicts of each word there are."""
        return Counter(j.word for cell in self.cells for j in cell.judgements.values())


def compare(
    sources: Sequence[Source], suites: Collection[str] = (), metrics: Collection[str] = (), threshold: float = THRESHOLD
) -> Comparison:
    """Find the cells that sources share. suites, metrics: only these; none chooses all, but for DERIVED metrics.

    A verdict is given where a source is of the same device as an earlier one, for times and rates that both measured.
    """
    baselines = {
        new.label: next(old.label for old in sources[:i] if same_device(old, new))
        for i, new in enumerate(sources)
        if any(same_device(old, new) for old in sources[:i])
    }
    rows = {s.label: s.cells() for s in sources}
    every: dict[Cell, None] = {}
    for label in rows:
        every.update(dict.fromkeys(rows[label]))
    chosen = [c for c in every if _wanted(c, suites, metrics)]
    by_label = {s.label: s for s in sources}
    drift = _drift(rows, baselines)
    cells = []
    for cell in chosen:
        there = {label: own[cell] for label, own in rows.items() if cell in own}
        if len(there) < min(2, len(sources)) or len({row["unit"] for row in there.values()}) > 1:
            continue
        values = {label: _value(rows[label], cell, row) for label, row in there.items()}
        judgements = {}
        for new, old in baselines.items():
            if new in values and old in values and _can_be_judged(values[old], values[new], there[new]["unit"]):
                limits = (threshold, drift.get((new, *cell[:3]), 0.0))
                judgement = _judge(by_label[old], by_label[new], cell, values, there[new]["unit"], limits)
                if judgement is not None:
                    judgements[new] = judgement
        suite, profile, metric, key = cell
        unit = str(next(iter(there.values()))["unit"])
        order = list(dict.fromkeys(p for s in sources for p in s.parameters.get(suite, ())))
        case = dict(sorted(key, key=lambda item: order.index(item[0])))
        cells.append(Shared(suite, profile, metric, unit, case, values, judgements))
    return Comparison(tuple(sources), tuple(cells), baselines, tuple(_alone(rows, suites)), drift)


def _wanted(cell: Cell, suites: Collection[str], metrics: Collection[str]) -> bool:
    suite, _, metric, _ = cell
    if suites and suite not in suites:
        return False
    return metric in metrics if metrics else metric not in DERIVED


def _drift(
    rows: Mapping[str, Mapping[Cell, Mapping[str, Any]]], baselines: Mapping[str, str]
) -> dict[tuple[str, str, str, str], float]:
    """How far the streams that two measurements of one device share moved, by label, suite, profile and metric."""
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    for new, old in baselines.items():
        for cell, row in rows[new].items():
            if ("impl", CONTROL) in cell[3] and cell in rows[old] and direction(str(row["unit"])):
                pair = (float(rows[old][cell]["value"]), float(row["value"]))
                found.setdefault((new, *cell[:3]), []).append(pair)
    return {key: moved(*zip(*pairs, strict=True)) for key, pairs in found.items()}


def _value(rows: Mapping[Cell, Mapping[str, Any]], cell: Cell, row: Mapping[str, Any]) -> Value:
    suite, profile, metric, key = cell
    beside = rows.get((suite, profile, CEILING, key)) if metric == "time" else None
    ceiling = float(beside["value"]) if beside is not None else None
    throttled = (suite, profile, METRIC, key) in rows
    numbers = (float(row["value"]), float(row["ci_low"]), float(row["ci_high"]))
    return Value(*numbers, int(row["n"]), str(row["kind"]), str(row["run_id"]), ceiling, throttled)


def _can_be_judged(old: Value, new: Value, unit: str) -> bool:
    """Times and rates that were measured, twice: a row that both sources hold is not compared with itself."""
    measured = old.kind == new.kind == "measured"
    return measured and direction(unit) != 0 and (old.run_id, old.value) != (new.run_id, new.value)


def _judge(
    old: Source, new: Source, cell: Cell, values: Mapping[str, Value], unit: str, limits: tuple[float, float]
) -> Judgement | None:
    """None where neither side kept samples: fitted coefficients, for example, have none."""
    suite, _, metric, key = cell
    before, after = (source.samples(cell, values[source.label].run_id) for source in (old, new))
    if not before.size and not after.size:
        return None
    return judge(before, after, unit, seed_text(f"{suite}/{metric}", dict(key)), *limits)


def _alone(rows: Mapping[str, Mapping[Cell, object]], suites: Collection[str]) -> list[str]:
    """For each source the suites that no other has, and of shared suites how many cases no other has."""
    cases = {label: {(s, p, k) for s, p, _, k in cells if not suites or s in suites} for label, cells in rows.items()}
    lines = []
    for label, own in cases.items():
        others = set().union(*(c for other, c in cases.items() if other != label))
        if len(cases) < 2 or own <= others:
            continue
        counts = Counter(s for s, _, _ in own - others)
        known = {s for s, _, _ in others}
        whole = [f"{s} ({n} cases)" for s, n in sorted(counts.items()) if s not in known]
        part = [f"{n} cases of {s}" for s, n in sorted(counts.items()) if s in known]
        lines.append(f"only in {label}: {', '.join([*whole, *part])}")
    return lines
