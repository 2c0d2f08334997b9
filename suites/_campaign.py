"""What the suites that simulate campaigns share: settings to cases, outcomes to rows, rows back to numbers.

A row's interval is that of the mean over seeds (Student's t); of a ratio or difference, over seeds that both sides
share. It covers which samples meet in a step, not the errors of the measured times or of the assumptions
(`repro.balance.assumptions`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from repro.balance.campaign import FULL, SMOKE, UNITS, Campaign, Effort, Outcome, Setting, campaign
from repro.balance.memory import fit_memory, state_bytes
from repro.balance.models import MODELS
from repro.measure.stats import Interval
from repro.suite import Case, CaseSkipped, Evidence, Measurement, Profile
from suites import block_time, cost_model

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.machine import Machine

CONFIDENCE = 0.95
COVERED = "the interval covers the drawing of samples only, not the fits of cost and memory"

Pair = tuple[float | None, float | None]


def cases(settings: Iterable[Setting], seconds: float = 0.3) -> list[Case]:
    """One case for each distinct setting, in order."""
    return [Case(s.key, seconds * max(1.0, s.ranks * s.micro_batches / 256)) for s in dict.fromkeys(settings)]


def can_simulate(profile: Profile, machine: Machine) -> bool:
    """Whether `block_time` measures what this profile needs on this machine: 14B-wide blocks take a GPU."""
    return profile == "smoke" or machine.has_gpu


def simulated(case: Case, inputs: pd.DataFrame, effort: Effort = FULL) -> tuple[Campaign, Setting, Outcome]:
    """The campaign of these rows, and the outcome of a case. Raises CaseSkipped where there are too few rows.

    effort: of the full profile.
    """
    setting = Setting.of(case.key)
    smoke = (inputs["profile"] == "smoke").all()
    try:
        found = campaign(inputs, SMOKE if smoke else effort)
        found.cost(setting.model, setting.adaln, setting.m_mem)
        found.policy(setting)
    except ValueError as e:
        raise CaseSkipped(f"there are too few rows yet: {e}") from e
    return found, setting, found.run(setting)


def interval(samples: npt.ArrayLike) -> Interval:
    """Mean of samples [n] and its 95% interval by Student's t; the value itself where all are equal.

    Raises ValueError for fewer than two samples.
    """
    from scipy import stats

    values = np.asarray(samples, np.float64)
    if values.size < 2:
        raise ValueError(f"an interval over seeds needs at least two of them, got {values.size}")
    mean, error = float(values.mean()), float(values.std(ddof=1)) / np.sqrt(values.size)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, values.size - 1)) * error
    return Interval(mean, mean - half, mean + half, values.size)


def rows(outcome: Outcome, names: Iterable[str]) -> list[Measurement]:
    """Rows of the outcome's metrics of these names, those that it has."""
    return [row(name, UNITS[name], outcome.values[name], outcome.source) for name in names if name in outcome.values]


def row(metric: str, unit: str, samples: npt.NDArray[np.float64], source: str, keep: bool = False) -> Measurement:
    """One simulated row from samples [n], a value a seed. keep: store the samples too."""
    i = interval(samples)
    raw = tuple(samples.tolist()) if keep else ()
    return Measurement(metric, unit, i.value, i.low, i.high, i.n, "simulated", source, raw)


def paired(
    found: Campaign, setting: Setting, other: Setting, metric: str, name: str, falls: bool = False
) -> Measurement:
    """Row `name`: by how many % `metric` is above that of `other` (below, where it `falls`), seeds paired."""
    percent = 100 * (found.paired(setting, other, metric) - 1)
    sources = {*found.run(setting).source.split(), *found.run(other).source.split()}
    return row(name, "%", -percent if falls else percent, " ".join(sorted(sources)), keep=True)


def lookup(table: pd.DataFrame, setting: Setting, metric: str) -> pd.Series | None:
    """The row of a setting and metric, None where it is missing."""
    wanted = {"metric": metric, **{name: v for name, v in setting.key.items() if v != ""}}
    at = _places(table, tuple(wanted)).get(tuple(wanted.values()))
    return None if at is None else table.iloc[at]


_indexed: dict[int, tuple[weakref.ref[Any], dict[tuple[str, ...], dict[tuple[Any, ...], int]]]] = {}
"""Of tables that live: `_places` by columns. Figures and notes look the same table up many hundred times."""


def _places(table: pd.DataFrame, columns: tuple[str, ...]) -> dict[tuple[Any, ...], int]:
    """Values of these columns -> position of the last row that has them. Tables are not changed once they are made."""
    at = id(table)
    if at not in _indexed:
        _indexed[at] = (weakref.ref(table, lambda _: _indexed.pop(at, None)), {})
    indexes = _indexed[at][1]
    if columns not in indexes:
        values = zip(*(table[c].tolist() for c in columns), strict=True)
        indexes[columns] = {key: position for position, key in enumerate(values)}
    return indexes[columns]


def value(table: pd.DataFrame, setting: Setting, metric: str) -> float | None:
    """The value of a setting's metric, None where it is missing."""
    found = lookup(table, setting, metric)
    return None if found is None else float(found["value"])


def compare(table: pd.DataFrame, treated: Setting, metric: str, factor: float = 1.0) -> Pair:
    """The metric of the baseline in the same setting, and of `treated`, times `factor`."""
    found = [value(table, s, metric) for s in (treated.baseline(), treated)]
    before, after = (None if v is None else factor * v for v in found)
    return before, after


def ratio(compared: Pair) -> float | None:
    """After over before, None where either is missing."""
    before, after = compared
    return None if before is None or after is None else after / before


def bars(
    ax: Axes,
    place: npt.ArrayLike,
    length: npt.ArrayLike,
    name: str,
    width: float,
    errors: npt.ArrayLike | None = None,
    across: bool = False,
) -> None:
    """Bars in the look of a policy or AdaLN, hatched and hollow as they are simulated.

    errors: [2, n], down and up. across: the bars lie.
    """
    from repro.report import style

    look: Any = {"facecolor": style.face(name, "simulated"), "edgecolor": style.color(name), "hatch": style.HATCH}
    look |= {"label": style.label(name), "error_kw": {"elinewidth": 1.2, "ecolor": style.BLACK}}
    if across:
        ax.barh(place, length, 0.92 * width, xerr=errors, **look)
    else:
        ax.bar(place, length, 0.92 * width, yerr=errors, **look)


def by_device(rows: pd.DataFrame, settings: Mapping[str, Setting], metric: str, factor: float = 1.0) -> pd.DataFrame:
    """A panel for `repro.report.devices.dots`: a metric of labelled settings on every device that has it."""
    import pandas as pd

    found = [
        {"row": label, "device": device, "kind": row["kind"]}
        | {c: factor * float(row[c]) for c in ("value", "ci_low", "ci_high")}
        for label, setting in settings.items()
        for device, table in rows.groupby("device", sort=True)
        if (row := lookup(table, setting, metric)) is not None
    ]
    return pd.DataFrame(found, columns=["row", "device", "kind", "value", "ci_low", "ci_high"])


def more_samples(table: pd.DataFrame, setting: Setting) -> str:
    """For a note: by how much a setting's optimizer steps are larger than the baseline's, which tokens/s hides."""
    found = ratio(compare(table, setting, "samples_per_step"))
    if found is None:
        return "samples an optimizer step unknown"
    return f"{abs(100 * (found - 1)):.1f}% {'more' if found >= 1 else 'fewer'} samples an optimizer step"


def m_mem_of_device(table: pd.DataFrame, model: str, adaln: str, ranks: int) -> float | None:
    """M_mem in tokens that fits the device beside the model's state on `ranks` ranks, fully sharded.

    From the limit that `cost_model` states for its own number of ranks, and the state that more ranks take away. None
    where `cost_model` states none.
    """
    at = (table["suite"] == cost_model.NAME) & (table["metric"] == "m_mem")
    found = table[at & (table["model"] == model) & (table["adaln"] == adaln)]
    if found.empty:
        return None
    size, memory = MODELS[model], fit_memory(table, model, adaln).model
    freed = state_bytes(size, cost_model.RANKS, "micro_batch") - state_bytes(size, ranks, "micro_batch")
    a_token = size.layers * memory.checkpoint + memory.token + memory.sample / min(block_time.BUCKETS)
    return float(found["value"].iloc[-1]) + freed / a_token


def percent(number: float | None) -> str:
    """A percentage for a note: "+12.3%", or "unknown"."""
    return "unknown" if number is None else f"{number:+.1f}%"


def evidence(claim: str, effect: pd.Series, compared: Pair, note: str) -> Evidence:
    """Evidence from the row of an effect. compared: the two values behind it, as from `compare`."""
    center, low, high = (float(effect[c]) for c in ("value", "ci_low", "ci_high"))
    same = high - low <= 1e-9 * abs(center)  # but for rounding
    width = ", and has no width since every seed deals the same micro-batches" if same else ""
    note = f"{note}; {COVERED}{width}"
    return Evidence(claim, center, low, high, "simulated", baseline=compared[0], treated=compared[1], note=note)
