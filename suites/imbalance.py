"""How uneven the work is under each batch policy: across buckets, across ranks within a step, and across steps.

Three imbalances that must not be mixed up. Across buckets: CV of one micro-batch's predicted time (`bucket_cv`). Across
ranks that wait for each other: CV of predicted time (`rank_cv`) and of B * S^2 (`load_cv`), mean over steps. Across
steps: CV of step time (`step_cv`), which also falls when every step waits for the slowest bucket.

Columns: `repro.balance.campaign.PARAMETERS`. Metrics: `repro.balance.metrics.UNITS`, load_cv, and for each CV
<name>_fall (%), its relative fall from equal_token's, seeds paired. Simulated from the device's step times
(`repro.balance.whole`) under `repro.balance.assumptions`; AdaLN is eager throughout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from repro.balance import assumptions, metrics, policies, whole
from repro.balance.campaign import PARAMETERS as PARAMETERS
from repro.balance.campaign import Setting, campaign
from repro.corpus import mixes
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _campaign, sensitivity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.machine import Machine

NAME = "imbalance"
CLAIMS = ("B3", "B4", "B7")
NEEDS = (*whole.SUITES, "cost_model", "sensitivity")
SIMULATED = True

RANKS = (8, 16)
"""The paper's two settings."""
CVS = ("load_cv", "rank_cv", "step_cv", "bucket_cv")
SHOWN = ("equal_token", "dual_constraint", "balanced")

_TREATED = Setting("dual_constraint", "eager", 16)
"""What B3 and B4 judge against the baseline."""

PAPER = {"load_cv": (39.0, 18.9), "step_cv": (18.7, 10.4)}
"""CV in % before and after (AdaptiveLoad, arXiv 2605.17923); step time on 16 GPUs."""


PAPER_FALLS = {"load_cv": 51.5, "step_cv": 44.4, "rank_cv": 50.0}
"""Relative falls in %: of the two above, and "up to" (the same paper), taken as that of predicted time."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Every policy on the assumed corpus, the three that are compared on all the others."""
    if profile == "smoke":
        return _campaign.cases((Setting(p, "eager", 4, model="tiny") for p in SHOWN), 0.1)
    if not _campaign.can_simulate(profile, machine):
        return []
    settings = [Setting(p, "eager", r) for r in RANKS for p in policies.NAMES]
    settings += [replace(_TREATED, ranks=r, m_comp=assumptions.M_COMP_LOOSE) for r in RANKS]
    settings += [Setting(p, "eager", r, corpus=c) for c in mixes.names() for r in RANKS for p in SHOWN]
    return _campaign.cases(settings)


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and the baseline on the same seeds."""
    found, setting, outcome = _campaign.simulated(case, inputs)
    rows = _campaign.rows(outcome, (*metrics.UNITS, "load_cv"))
    baseline = setting.baseline()
    if setting != baseline:
        known = found.run(baseline).values
        rows += [
            _campaign.paired(found, setting, baseline, cv, f"{cv}_fall", falls=True) for cv in CVS if known[cv].all()
        ]
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B3 and B4 on 16 ranks, B7 where the fall is largest."""
    own = rows[rows["suite"] == NAME]
    treated = _TREATED
    result = []
    for claim, cv, what in (
        ("B3", "load_cv", "CV of B*S^2 over 16 ranks, mean over steps"),
        ("B4", "step_cv", "CV of step time on 16 ranks"),
    ):
        effect = _campaign.lookup(own, treated, f"{cv}_fall")
        if effect is None:
            continue
        times = whole.told(rows, treated.model, effect["source"])
        note = (
            f"{what}, simulated from {times}: {assumptions.CORPUS}, {assumptions.MODEL}, M_mem {treated.m_mem:,} "
            f"tokens, one micro-batch a step; {_binding(rows, treated)}; {_others(own, treated, cv)}; "
            f"{_elsewhere(rows, treated, cv)}"
        )
        result.append(_campaign.evidence(claim, effect, _campaign.compare(own, treated, cv, 100), note))
    falls = own[(own["metric"] == "rank_cv_fall") & (own["policy"] == "dual_constraint")]
    falls = falls[falls["m_comp"] == assumptions.M_COMP]
    if len(falls):
        largest = falls.iloc[int(falls["value"].to_numpy().argmax())]
        at = Setting.of({name: largest[name] for name in PARAMETERS})
        assumed = _campaign.value(own, treated, "rank_cv_fall")
        note = (
            f"CV of predicted time over the ranks of a step; largest over {falls['corpus'].nunique()} corpora and "
            f"{' and '.join(map(str, RANKS))} ranks, at {at.corpus} on {at.ranks} ranks; {assumptions.CORPUS} on 16: "
            f"{_campaign.percent(assumed)}; M_mem {at.m_mem:,} tokens, one micro-batch a step; "
            f"{_elsewhere(rows, at, 'rank_cv')}"
        )
        result.append(_campaign.evidence("B7", largest, _campaign.compare(own, at, "rank_cv", 100), note))
    return result


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device, the imbalances of the baseline, the paper's rule and ours; then the falls on all devices."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] == assumptions.MODEL)]
    own = own[(own["corpus"] == assumptions.CORPUS) & own["policy"].isin(SHOWN)]
    own = own[own["m_comp"] != assumptions.M_COMP_LOOSE]
    figures = [_draw_device(str(device), table) for device, table in own.groupby("device", sort=True)]
    return figures + _draw_devices(own)


def _others(table: pd.DataFrame, treated: Setting, cv: str) -> str:
    def fall(setting: Setting) -> str:
        return _campaign.percent(_campaign.value(table, setting, f"{cv}_fall"))

    loose = replace(treated, m_comp=assumptions.M_COMP_LOOSE)
    return (
        f"falls by: 8 ranks {fall(replace(treated, ranks=8))}, M_comp x {assumptions.M_COMP_LOOSE} {fall(loose)}, "
        f"balanced {fall(replace(treated, policy='balanced'))}"
    )


def _elsewhere(rows: pd.DataFrame, treated: Setting, cv: str) -> str:
    told = sensitivity.elsewhere(rows, treated, PAPER_FALLS[cv], cv)
    return f"with M_mem (means over the seeds of sensitivity): {told}"


def _binding(rows: pd.DataFrame, treated: Setting) -> str:
    """Which of the rule's two bounds decides."""
    rule = cast(policies.DualConstraint, campaign(rows).policy(treated))
    tokens = mixes.named(treated.corpus, 1).tokens
    bound = rule.batch_sizes(tokens) < replace(rule, m_comp=1e12 * rule.m_comp).batch_sizes(tokens)
    return f"p = {rule.p:.2f}; M_comp binds in {int(bound.sum())} of {tokens.size} buckets, M_mem in the others"


_TITLES = {
    "bucket_cv": "across buckets: time",
    "load_cv": "across ranks: B S²",
    "rank_cv": "across ranks: time",
    "step_cv": "across steps: step time",
}


def _draw_device(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    figure, axes = style.subplots(2, 2, 2.0)
    for ax, (cv, title) in zip(axes.flat, _TITLES.items(), strict=True):
        _draw_panel(ax, table[table["metric"] == cv])
        ax.set_title(title)
        for value, when in zip(PAPER.get(cv, ()), ("before", "after"), strict=False):
            style.paper_value(ax, value, f"{when}: {value}%")
    for ax in axes[:, 0]:
        ax.set_ylabel("CV, %")
    style.legend(figure, ["simulated"], bars=True, paper="paper")
    caption = (
        f"Simulated from step times measured on {device}: {assumptions.CORPUS}, 14B, one micro-batch a step, M_mem "
        f"{assumptions.M_MEM:,} tokens. Coefficients of variation (CV) of three imbalances: one batch's time over the "
        "epoch; what ranks that wait for each other differ by within a step; step time. Bars are 95% intervals "
        "over seeds."
    )
    return Figure(f"imbalance-{device}", figure, caption, CLAIMS)


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """Falls that B3, B4 and B7 are about, on all devices."""
    from repro.report import devices

    settings = {f"{r} ranks": Setting("dual_constraint", "eager", r) for r in RANKS}
    panels, paper = {}, {}
    for cv, wanted in PAPER_FALLS.items():
        name = f"fall of the CV {_TITLES[cv]}, %"
        panels[name] = _campaign.by_device(table, settings, f"{cv}_fall")
        paper[name] = (f"paper: {wanted}%", wanted)
    panels = {name: panel for name, panel in panels.items() if devices.several(panel)}
    if not panels:
        return []
    caption = (
        "What the paper's rule takes off each imbalance, relative to equal-token batches, simulated from each device's "
        f"step times: {assumptions.CORPUS}, 14B, M_mem {assumptions.M_MEM:,} tokens. Bars are 95% intervals over seeds."
    )
    return [Figure("imbalance-devices", devices.dots(panels, paper), caption, CLAIMS)]


def _draw_panel(ax: Axes, table: pd.DataFrame) -> None:
    width = 0.8 / len(SHOWN)
    for i, policy in enumerate(SHOWN):
        own = table[table["policy"] == policy].sort_values("ranks")
        place = np.arange(len(own)) + (i - (len(SHOWN) - 1) / 2) * width
        ends = np.abs(own[["ci_low", "ci_high"]].to_numpy().T - own["value"].to_numpy())
        _campaign.bars(ax, place, 100 * own["value"], policy, width, 100 * ends)
    ranks = sorted(table["ranks"].unique())
    ax.set_xticks(range(len(ranks)), [f"{int(r)} ranks" for r in ranks])
    ax.grid(axis="x", visible=False)
