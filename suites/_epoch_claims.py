"""What measured epochs of `throughput_measured` say about the paper's claims: on as many GPUs as they speak of, and on
fewer, beside what decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repro.balance import assumptions
from repro.balance.campaign import Setting
from repro.balance.models import MODELS
from repro.measure.stats import Interval
from repro.suite import Evidence
from suites import _epochs
from suites._campaign import lookup
from suites._epochs import POLICIES, depth

if TYPE_CHECKING:
    import pandas as pd

REPLAY_BARS = {"replay_error": 5.0, "replay_total_error": 3.0}
"""% within which the simulator is taken to tell the truth; of whole epochs less, since errors of steps cancel."""

DECIDES: dict[str, Callable[[int], bool]] = {
    "T1": lambda ranks: ranks == 8,
    "T2": lambda ranks: ranks == 16,
    "T3": lambda ranks: ranks >= _epochs.CLAIMED_RANKS,
    "B3": lambda ranks: ranks >= _epochs.CLAIMED_RANKS,
    "B4": lambda ranks: ranks == 16,
}
"""Ranks on which measured epochs decide a claim. T1, T2 and B4 name their number of GPUs; the paper has none below
eight. Here B5 has too small a model, and B7 is the largest of many settings. B1, B2, T6 are decided on any number."""


def evidence(own: pd.DataFrame, samples: Callable[[Setting], int]) -> list[Evidence]:
    """Of one device's rows. samples: of an epoch of a setting."""
    ranks, layers = (int(own[name].max()) for name in ("ranks", "layers"))
    base = Setting(*assumptions.BASELINE, ranks, model=str(own["model"].iloc[-1]))

    def about(setting: Setting) -> str:
        return (
            f"{depth(base.model, layers)}, {setting.corpus}, one epoch of {samples(setting)} samples on {ranks} "
            f"GPU{'s' if ranks > 1 else ''}"
        )

    found = _correlations(own, base, about(base))
    fused = {p: epoch_gain(own, replace(base, policy=p), replace(base, policy=p, adaln="fused")) for p in POLICIES}
    if (gained := fused["equal_token"]) is not None:
        told = ", ".join(f"{p} {_percent(g)}" for p, g in fused.items() if g is not None)
        sides = replace(base, adaln="wan"), replace(base, adaln="fused")
        wan = _percent(epoch_gain(own, *sides)) + " (of another run)" * of_different_runs(own, *sides)
        note = (
            f"whole steps, update included, the same schedule on both sides: {about(base)}; over eager: {told}; over "
            f"Wan's own fp32 formula (equal_token): {wan}; blocks are {MODELS[base.model].dim:,} wide, and "
            "wider ones have less of it"
        )
        values = [lookup(own, replace(base, adaln=a), "tokens_per_s") for a in ("eager", "fused")]
        found.append(Evidence("T6", gained.value, gained.low, gained.high, "measured", *_values(values), note=note))
    return found + (_of_ranks(own, base, about) if ranks > 1 else [])


def simulator_error(own: pd.DataFrame, settings: Sequence[Setting]) -> str:
    """For a note: how far replayed epochs of these settings were from those taken, the worst of them."""
    told = []
    for metric, what in (("replay_error", "a step"), ("replay_total_error", "an epoch")):
        rows = [lookup(own, s, metric) for s in settings]
        errors = [abs(float(r["value"])) for r in rows if r is not None]
        if errors:
            kept = "kept" if max(errors) <= REPLAY_BARS[metric] else "missed"
            told.append(f"{max(errors):.1f}% {what} (at most {REPLAY_BARS[metric]:g}% was asked: {kept})")
    if not told:
        return "the simulator was not held against these epochs"
    return f"the simulator, from solo times of the same run, was off by {', '.join(told)}"


def _steps(own: pd.DataFrame, setting: Setting) -> _epochs.Steps | None:
    """Steps in their order, None where they were not measured, or some of their rows were lost."""
    found: dict[str, list[float]] = {"step": [], "work": []}
    for name, values in found.items():
        while (row := lookup(own, setting, f"{name}_at_{len(values)}")) is not None:
            values.append(float(row["value"]))
    if not found["step"] or len(found["step"]) != len(found["work"]):
        return None
    return _epochs.Steps(np.array(found["step"]), np.array(found["work"]))


def epoch_gain(own: pd.DataFrame, base: Setting, treated: Setting) -> Interval | None:
    """By how many % more tokens a second `treated` takes than `base`; None where either was not measured."""
    before, after = _steps(own, base), _steps(own, treated)
    if before is None or after is None:
        return None
    paired = replace(base, adaln=treated.adaln) == treated
    return _epochs.gain(before, after, paired, f"throughput_measured/{base}/{treated}")


def of_different_runs(own: pd.DataFrame, base: Setting, treated: Setting) -> bool:
    """Whether two epochs were taken in different runs, so that machines and kernels may differ beside the settings."""
    rows = [lookup(own, s, "tokens_per_s") for s in (base, treated)]
    return len({r["run_id"] for r in rows if r is not None}) > 1


def _correlations(own: pd.DataFrame, base: Setting, about: str) -> list[Evidence]:
    found: list[Evidence] = []
    for claim, metric, what in (
        ("B1", "r_tokens", "tokens of all ranks"),
        ("B2", "r_squared", "square of the longest sample's S, which the step waits for"),
    ):
        row = lookup(own, base, metric)
        if row is None:
            continue
        others = [lookup(own, replace(base, adaln=adaln), metric) for adaln in ("fused", "wan")]
        told = ", ".join(f"{float(r['value']):.2f} with {r['adaln']} AdaLN" for r in others if r is not None)
        note = (
            f"Pearson R of step time and {what} over {int(row['n'])} measured equal-token steps without partial "
            f"micro-batches: {about}" + (f"; {told}" if told else "")
        )
        value, low, high = (float(row[c]) for c in ("value", "ci_low", "ci_high"))
        found.append(Evidence(claim, value, low, high, "measured", note=note))
    return found


def _of_ranks(own: pd.DataFrame, base: Setting, about: Callable[[Setting], str]) -> list[Evidence]:
    """T1 to T3, B3, B4, B5 and B7."""
    rule, worst = replace(base, policy="dual_constraint"), replace(base, corpus=assumptions.WORST_CORPUS)
    found = [
        *_throughput(own, base, ("T1", "T2"), about(base)),
        *map(_as_ratio, _throughput(own, worst, ("T3",), about(worst))),
    ]
    for claim, metric, falls in (
        ("B3", "load_cv", True),
        ("B4", "step_cv", True),
        ("B5", "peak_memory", False),
        ("B7", "rank_cv", True),
    ):
        pair = [lookup(own, s, metric) for s in (base, rule)]
        if pair[0] is None or pair[1] is None or not float(pair[0]["value"]) > 0:
            continue
        change = _change(pair[0], pair[1]).map(_fall if falls else _rise)
        factor = 1.0 if metric == "peak_memory" else 100.0
        before, after = (None if v is None else factor * v for v in _values(pair))
        note = (
            f"{metric} with one micro-batch a step, M_mem (a) {rule.m_mem:,} tokens: {about(base)}; "
            f"{simulator_error(own, (base, rule))}"
        )
        interval = (change.value, change.low, change.high)
        decides = claim in DECIDES and DECIDES[claim](base.ranks)
        found.append(Evidence(claim, *interval, "measured", before, after, note=note, decides=decides))
    return found


def _throughput(own: pd.DataFrame, base: Setting, claims: Sequence[str], about: str) -> list[Evidence]:
    """AdaptiveLoad's gain in tokens/s over the baseline, %, for each of `claims`."""
    whole = replace(base, policy="dual_constraint", adaln="fused")
    gained = epoch_gain(own, base, whole)
    if gained is None:
        return []
    parts = {
        "dual constraint alone": replace(whole, adaln=base.adaln),
        "fused AdaLN alone": replace(base, adaln=whole.adaln),
        "balanced, fused": replace(whole, policy="balanced"),
    }
    gains = {name: epoch_gain(own, base, setting) for name, setting in parts.items()}
    told = "".join(f"; {name} {_percent(gain)}" for name, gain in gains.items() if gain is not None)
    note = (
        f"one micro-batch a step and rank, M_mem (a) {whole.m_mem:,} tokens: {about}{told}; "
        f"{simulator_error(own, (base, whole))}"
    )
    values = _values([lookup(own, s, "tokens_per_s") for s in (base, whole)])
    interval = (gained.value, gained.low, gained.high)
    return [
        Evidence(claim, *interval, "measured", *values, note=note, decides=DECIDES[claim](base.ranks))
        for claim in claims
    ]


def _as_ratio(gain: Evidence) -> Evidence:
    """A gain in % as the ratio that it makes."""
    value, low, high = (1 + percent / 100 for percent in (gain.value, gain.ci_low, gain.ci_high))
    return replace(gain, value=value, ci_low=low, ci_high=high)


def _change(before: pd.Series, after: pd.Series) -> Interval:
    """after / before, errors of both added in quadrature on a logarithmic scale."""
    center = float(after["value"]) / float(before["value"])
    halves = [
        max(np.log(max(float(r["ci_high"]), 1e-9) / v), np.log(v / max(float(r["ci_low"]), 1e-9)))
        for r in (before, after)
        for v in [max(float(r["value"]), 1e-9)]
    ]
    half = float(np.hypot(*halves))
    return Interval(center, center * float(np.exp(-half)), center * float(np.exp(half)), int(after["n"]))


def _rise(ratio: float) -> float:
    return 100 * (ratio - 1)


def _fall(ratio: float) -> float:
    return 100 * (1 - ratio)


def _values(rows: list[pd.Series | None]) -> tuple[float | None, float | None]:
    before, after = (None if r is None else float(r["value"]) for r in rows)
    return before, after


def _percent(found: Interval | None) -> str:
    return "unknown" if found is None else f"{found.value:+.1f}% [{found.low:.1f}, {found.high:.1f}]"
