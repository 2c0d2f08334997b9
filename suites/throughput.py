"""Tokens/s of every batch policy with every AdaLN: the paper's gains on 8 and 16 GPUs, and what goes past them.

Under protocol `as_published` (one micro-batch a step and rank; decides T1, T2 and T3): policy x AdaLN on the assumed
corpus, which tells the gain of batching from that of the fused op, and the worst sequence mix. Under `matched` (samples
a step within 1%): 1, 4 and 8 micro-batches a step on 8, 16 and 64 ranks, M_mem = the baseline's budget, for judging
policies against each other. Either with ranks meeting in every micro-batch or once a step.

Columns: `repro.balance.campaign.PARAMETERS`. Metrics: `repro.balance.metrics.UNITS`; tokens_per_s_p5 (of the slowest
steps); gain (%, tokens/s over equal_token with eager AdaLN in the same setting, seeds paired); cost_raised (%, see
`repro.balance.campaign.Amortised`). Simulated from the device's step times (`repro.balance.whole`) under
`repro.balance.assumptions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions, metrics, policies, whole
from repro.balance.campaign import PARAMETERS as PARAMETERS
from repro.balance.campaign import Setting
from repro.balance.types import Sync
from repro.corpus.mixes import TOKEN_BUDGET
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _campaign, sensitivity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.machine import Machine

NAME = "throughput"
CLAIMS = ("T1", "T2", "T3")
NEEDS = (*whole.SUITES, "cost_model", "sensitivity")
SIMULATED = True

RANKS = (8, 16)
ADALNS = ("eager", "wan", "fused")
SMALLER = "wan-1.3b"
SYNCS: tuple[Sync, ...] = ("micro_batch", "step")
MATCHED_RANKS = (8, 16, 64)
MATCHED_MICRO_BATCHES = (1, 4, 8)
FRONTIER_RANKS = 16

METRICS = (*metrics.UNITS, "tokens_per_s_p5", "cost_raised")


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """What decides T1 to T3 first."""
    if profile == "smoke":
        pairs = product(("equal_token", "dual_constraint"), ("eager", "fused"))
        return _campaign.cases((Setting(p, a, 4, model="tiny") for p, a in pairs), 0.1)
    if not _campaign.can_simulate(profile, machine):
        return []
    return _campaign.cases(_settings())


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and the baseline on the same seeds."""
    found, setting, outcome = _campaign.simulated(case, inputs)
    rows = _campaign.rows(outcome, METRICS)
    if setting != setting.baseline():
        rows.append(_campaign.paired(found, setting, setting.baseline(), "tokens_per_s", "gain"))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T1 and T2: AdaptiveLoad against the baseline on 8 and 16 ranks; T3: the same on the worst mix, on 16."""
    own = rows[rows["suite"] == NAME]
    result = []
    for claim, ranks in (("T1", 8), ("T2", 16)):
        setting = Setting(*assumptions.ADAPTIVELOAD, ranks)
        effect = _campaign.lookup(own, setting, "gain")
        if effect is not None:
            told = (
                _assumed(rows, setting, effect),
                _factorial(own, setting),
                _elsewhere(rows, setting),
                _beyond(own, setting),
                *_smaller(rows, setting),
            )
            compared = _campaign.compare(own, setting, "tokens_per_s")
            result.append(_campaign.evidence(claim, effect, compared, "; ".join(told)))
    worst = Setting(*assumptions.ADAPTIVELOAD, 16, corpus=assumptions.WORST_CORPUS)
    effect = _campaign.lookup(own, worst, "gain")
    if effect is not None:
        ratio = effect.copy()
        ratio[["value", "ci_low", "ci_high"]] = 1 + effect[["value", "ci_low", "ci_high"]].astype(float) / 100
        note = (
            f"tokens/s of an epoch; {_assumed(rows, worst, effect)}; {_factorial(own, worst)}; "
            f"{_slow_steps(own, worst)}; gain "
            f"{sensitivity.elsewhere(rows, worst, 0.0, what='a floor as high')}; {_ours(own, worst)}"
        )
        result.append(_campaign.evidence("T3", ratio, _campaign.compare(own, worst, "tokens_per_s"), note))
    return result


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device gains by policy and AdaLN, and the frontier of balance against mix; then gains on all devices."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] == assumptions.MODEL)]
    figures = []
    for device, table in own.groupby("device", sort=True):
        figures += [_draw_gains(str(device), table), _draw_frontier(str(device), table)]
    return [f for f in (*figures, _draw_devices(own), _draw_frontiers(own)) if f is not None]


def _settings() -> Iterator[Setting]:
    for ranks, policy, adaln in product(RANKS, policies.NAMES, ADALNS):
        yield Setting(policy, adaln, ranks)
    for ranks, policy, adaln in product(RANKS, policies.NAMES, ADALNS):
        yield Setting(policy, adaln, ranks, corpus=assumptions.WORST_CORPUS)
    for ranks, policy in product(RANKS, policies.NAMES):
        yield Setting(policy, "eager", ranks, sync="step")
    for ranks, number, sync, policy in product(MATCHED_RANKS, MATCHED_MICRO_BATCHES, SYNCS, policies.NAMES):
        yield Setting(policy, "eager", ranks, sync=sync, micro_batches=number, protocol="matched", m_mem=TOKEN_BUDGET)


def _gain(table: pd.DataFrame, setting: Setting) -> str:
    return _campaign.percent(_campaign.value(table, setting, "gain"))


def _assumed(rows: pd.DataFrame, setting: Setting, effect: pd.Series) -> str:
    times = whole.told(rows, setting.model, effect["source"])
    return (
        f"simulated from {times}: {setting.corpus}, {setting.model}, M_mem (a) {setting.m_mem:,} tokens, one "
        "micro-batch a step and rank, ranks draw independently"
    )


def _smaller(rows: pd.DataFrame, setting: Setting) -> list[str]:
    """The gain with the smaller model, where it was simulated."""
    small = replace(setting, model=SMALLER)
    found = _campaign.lookup(rows[rows["suite"] == sensitivity.NAME], small, "gain")
    if found is None:
        return []
    return [f"{SMALLER} {_campaign.percent(float(found['value']))}, from {whole.told(rows, SMALLER, found['source'])}"]


def _factorial(table: pd.DataFrame, setting: Setting) -> str:
    """Batching and the fused op apart."""
    policy, adaln = assumptions.BASELINE
    return (
        f"{_campaign.more_samples(table, setting)}; of {_gain(table, setting)}: dual constraint alone "
        f"{_gain(table, replace(setting, adaln=adaln))}, fused AdaLN alone "
        f"{_gain(table, replace(setting, policy=policy))}"
    )


def _elsewhere(rows: pd.DataFrame, setting: Setting) -> str:
    """The gain at M_mem (b), what measured memory says fits on the device, and the M_mem of the paper's gain."""
    paper = sensitivity.PAPER_GAIN[setting.ranks]
    return "; ".join(
        f"M_comp x {m:g}: {sensitivity.elsewhere(rows, replace(setting, m_comp=m), paper)}"
        for m in (assumptions.M_COMP, assumptions.M_COMP_LOOSE)
    )


def _beyond(table: pd.DataFrame, setting: Setting) -> str:
    same = replace(setting, policy="dual_constraint_same_bucket")
    drawn = f"{_gain(table, same)} with {_campaign.more_samples(table, same)}"
    return f"were all ranks to draw the same bucket {drawn}; {_ours(table, setting)}"


def _ours(table: pd.DataFrame, whole: Setting) -> str:
    ours = replace(whole, policy="balanced")
    return f"balanced, fused {_gain(table, ours)} with {_campaign.more_samples(table, ours)}"


def _slow_steps(table: pd.DataFrame, worst: Setting) -> str:
    ratio = _campaign.ratio(_campaign.compare(table, worst, "tokens_per_s_p5"))
    told = "unknown" if ratio is None else f"{ratio:.2f}x"
    return f"slowest 5% of steps {told}; 8 ranks {_gain(table, replace(worst, ranks=8))}"


def _draw_gains(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    corpora = (assumptions.CORPUS, assumptions.WORST_CORPUS)
    figure, axes = style.subplots(len(corpora), len(RANKS), 2.7, sharex="row", sharey=True)
    for (i, corpus), (j, ranks) in product(enumerate(corpora), enumerate(RANKS)):
        ax = axes[i, j]
        _draw_policies(ax, table, Setting(*assumptions.BASELINE, ranks, corpus=corpus))
        ax.set_title(f"{corpus}, {ranks} ranks", pad=style.ABOVE if i == 0 else None)
        if corpus == assumptions.CORPUS:
            paper = sensitivity.PAPER_GAIN[ranks]
            style.paper_value(ax, paper, f"paper: +{paper}%", along="y")
        ax.set_xlabel("gain in tokens/s, %" if i == len(corpora) - 1 else "")
    axes[0, 0].invert_yaxis()
    style.legend(figure, ["simulated"])
    caption = (
        f"Tokens/s over equal-token batches with eager AdaLN, simulated from step times measured on {device}: 14B, "
        f"M_mem {assumptions.M_MEM:,} tokens, one micro-batch a step, so that larger batches also mean more "
        "samples a step. The paper's AdaptiveLoad is the dual constraint with the fused AdaLN. Bars are 95% "
        "intervals over seeds."
    )
    return Figure(f"throughput-{device}", figure, caption, CLAIMS)


def _draw_devices(table: pd.DataFrame) -> Figure | None:
    """What T1 to T3 are about, on all devices."""
    from repro.report import devices

    panels, paper = {}, {}
    for ranks in RANKS:
        name = f"gain in tokens/s, {ranks} ranks, %"
        settings = {
            "AdaptiveLoad": Setting(*assumptions.ADAPTIVELOAD, ranks),
            "its batches alone": Setting("dual_constraint", "eager", ranks),
            "balanced, fused": Setting("balanced", "fused", ranks),
            "AdaptiveLoad, worst mix": Setting(*assumptions.ADAPTIVELOAD, ranks, corpus=assumptions.WORST_CORPUS),
        }
        panels[name] = _campaign.by_device(table, settings, "gain")
        paper[name] = (f"paper: +{sensitivity.PAPER_GAIN[ranks]}%", sensitivity.PAPER_GAIN[ranks])
    panels = {name: panel for name, panel in panels.items() if devices.several(panel)}
    if not panels:
        return None
    caption = (
        "Tokens/s over equal-token batches with eager AdaLN, simulated from each device's step times: 14B, M_mem "
        f"{assumptions.M_MEM:,} tokens, one micro-batch a step. Bars are 95% intervals over seeds."
    )
    return Figure("throughput-devices", devices.dots(panels, paper), caption, CLAIMS)


def _draw_frontiers(table: pd.DataFrame) -> Figure | None:
    """Balance and mix of every policy on all devices, where ranks meet in each of four micro-batches."""
    from repro.report import devices, style

    at = Setting("equal_token", "eager", FRONTIER_RANKS, micro_batches=4, protocol="matched", m_mem=TOKEN_BUDGET)
    settings = {style.label(p): replace(at, policy=p) for p in style.ordered(policies.NAMES)}
    panels = {
        "share of perfect balance": _campaign.by_device(table, settings, "share_of_perfect"),
        "mix distance": _campaign.by_device(table, settings, "mix_distance"),
    }
    panels = {name: panel for name, panel in panels.items() if devices.several(panel)}
    if not panels:
        return None
    caption = (
        f"Simulated from each device's step times: {assumptions.CORPUS}, 14B, {FRONTIER_RANKS} ranks that meet in each "
        f"of 4 micro-batches a step, M_mem {TOKEN_BUDGET:,} tokens, samples a step matched. Bars are 95% intervals."
    )
    return Figure("frontier-devices", devices.dots(panels), caption, ("T1", "T2"))


def _draw_policies(ax: Axes, table: pd.DataFrame, base: Setting) -> None:
    from repro.report import style

    names = style.ordered(policies.NAMES)
    for k, adaln in enumerate(ADALNS):
        rows = [_campaign.lookup(table, replace(base, policy=n, adaln=adaln), "gain") for n in names]
        known = [(place, row) for place, row in enumerate(rows) if row is not None]
        place = np.array([p for p, _ in known]) + 0.22 * (k - (len(ADALNS) - 1) / 2)
        value, low, high = (np.array([float(r[c]) for _, r in known]) for c in ("value", "ci_low", "ci_high"))
        look: Any = {"marker": style.marker(adaln), "color": style.color(adaln), "mfc": style.face(adaln, "simulated")}
        ax.errorbar(
            value,
            place,
            xerr=[value - low, high - value],
            ls="none",
            elinewidth=1.2,
            label=f"{style.label(adaln)} AdaLN",
            **look,
        )
    ax.axvline(0, color=style.BLACK, linewidth=0.8)
    ax.set_yticks(range(len(names)), [style.label(n) for n in names])


def _draw_frontier(device: str, table: pd.DataFrame) -> Figure | None:
    from repro.report import style

    matched = table[(table["protocol"] == "matched") & (table["ranks"] == FRONTIER_RANKS)]
    if matched.empty:
        return None
    figure, axes = style.subplots(len(MATCHED_MICRO_BATCHES), len(SYNCS), 1.9, sharex=True, sharey=True)
    for (i, number), (j, sync) in product(enumerate(MATCHED_MICRO_BATCHES), enumerate(SYNCS)):
        ax = axes[i, j]
        cell = matched[(matched["sync"] == sync) & (matched["micro_batches"] == number)]
        for policy in style.ordered(list(cell["policy"])):
            own = cell[cell["policy"] == policy].set_index("metric")
            x, y = own.loc["mix_distance"], own.loc["share_of_perfect"]
            ends = {"low": [y["ci_low"]], "high": [y["ci_high"]]}
            style.series(ax, [x["value"]], [y["value"]], policy, kind="simulated", line=False, **ends)
        if i == 0:
            ax.set_title("meet in each micro-batch" if sync == "micro_batch" else "meet once a step")
        ax.axhline(1, color=style.GREY, linewidth=0.8)
        ax.set_xlim(0, 1)
        ax.set_xlabel("mix distance" if i == len(MATCHED_MICRO_BATCHES) - 1 else "")
        ax.set_ylabel(f"{number} micro-batch{'es' if number > 1 else ''}:\nof perfect balance" if j == 0 else "")
    style.legend(figure, ["simulated"])
    caption = (
        f"Frontier of balance against mix, simulated from step times measured on {device}: {assumptions.CORPUS}, 14B, "
        f"{FRONTIER_RANKS} ranks, M_mem {TOKEN_BUDGET:,} tokens, samples a step matched, whole epochs. Columns: where "
        "ranks meet; rows: micro-batches a step. Up is faster, left keeps a step's samples nearer to the corpus' mix; "
        "upper left is best. With M_mem at the baseline's "
        "budget equal-token, dual constraint and equal time coincide."
    )
    return Figure(f"frontier-{device}", figure, caption, ("T1", "T2"))
