"""Where AdaptiveLoad's gain holds: gain of each policy over equal_token against what the paper leaves open.

A lattice around the base point of `repro.balance.assumptions` (wan-uniform, 14B, M_mem 1.227 x the baseline's budget,
16 ranks, one micro-batch a step): M_mem / budget from 1 to 3, ranks from 1 to 1,024, every named corpus, 1.3B and 14B;
for AdaptiveLoad as a whole (dual_constraint, fused AdaLN) also M_mem with ranks, and M_mem with M_comp. M_mem on the
paper's numbers of ranks and on the worst mix too: what the notes of T3, B3, B4, B5 and B7 say beyond the base point. A
second lattice compares policies with samples a step matched: every corpus on 2 to 1,024 ranks, four micro-batches a
step, M_mem = budget.

Columns: `repro.balance.campaign.PARAMETERS`. Metrics: gain (%, tokens/s over equal_token with eager AdaLN, seeds
paired), those of METRICS, for the paper's rule and its baseline with eager AdaLN those of EVEN, and in the second
lattice balanced_lead (%, samples/s of balanced over this policy's, seeds paired). Simulated from the device's
`block_time` rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions, policies
from repro.balance.campaign import PARAMETERS as PARAMETERS
from repro.balance.campaign import WIDE, Setting
from repro.corpus import mixes
from repro.corpus.mixes import TOKEN_BUDGET
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _campaign

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.machine import Machine

NAME = "sensitivity"
CLAIMS: tuple[str, ...] = ()
NEEDS = ("block_time",)
SIMULATED = True

RATIOS = (1.0, 1.1, assumptions.MEMORY_RISE, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""M_mem / the baseline's token budget."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
M_COMPS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""M_comp in units of B * S^p of the longest bucket's baseline batch."""
M_COMP_RATIOS = (assumptions.MEMORY_RISE, 1.5, 2.0)
MODELS = (assumptions.MODEL, "wan-1.3b")
MATCHED_RANKS = (2, 8, 16, 64, 1024)
MATCHED_MICRO_BATCHES = 4
BASE_RANKS = 16

METRICS = (
    "tokens_per_s",
    "samples_per_s",
    "samples_per_step",
    "share_of_perfect",
    "mix_distance",
    "rank_cv",
    "step_cv",
    "pinned_share",
)
EVEN = ("load_cv", "peak_memory")
PLAIN = (assumptions.BASELINE, (assumptions.ADAPTIVELOAD[0], assumptions.BASELINE[1]))
"""Policy and AdaLN of what the imbalance and memory claims compare."""

PAPER_GAIN = {8: 25.6, 16: 27.18}
"""Gain in tokens/s in % on so many GPUs (AdaptiveLoad, arXiv 2605.17923)."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """The two lattices, each setting once."""
    if profile == "smoke":
        base = Setting("equal_token", "eager", 2, model="tiny")
        tiny = [replace(base, policy=p, m_mem=m) for m in (TOKEN_BUDGET, 2 * TOKEN_BUDGET) for p in policies.NAMES[:3]]
        matched = [_matched(replace(base, policy=p)) for p in ("equal_token", "balanced")]
        return _campaign.cases([*tiny, *matched], 0.1)
    if not _campaign.can_simulate(profile, machine):
        return []
    return _campaign.cases(_settings(), 0.15)


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and what it is compared with on the same seeds."""
    found, setting, outcome = _campaign.simulated(case, inputs, WIDE)
    rows = _campaign.rows(outcome, METRICS)
    if setting.protocol == "as_published" and (setting.policy, setting.adaln) in PLAIN:
        rows += _campaign.rows(outcome, EVEN)
    if setting != setting.baseline():
        rows.append(_campaign.paired(found, setting, setting.baseline(), "tokens_per_s", "gain"))
    if setting.protocol == "matched" and setting.policy != "balanced":
        ours = replace(setting, policy="balanced")
        rows.append(_campaign.paired(found, ours, setting, "samples_per_s", "balanced_lead"))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """None of its own: the notes of claims in other suites quote these rows."""
    return []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device one figure: where the paper's gain holds, and balanced against policies of no larger distance."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] != "tiny")]
    return [_draw_device(str(device), table) for device, table in own.groupby("device", sort=True)]


def along_m_mem(table: pd.DataFrame, setting: Setting, effect: str = "gain") -> tuple[list[float], list[float]]:
    """M_mem in tokens and an effect in %, as far as they were simulated, whatever the setting's own M_mem.

    effect: `gain`, or a metric whose change from the baseline's mean is meant: the fall of a CV, the rise of any other.
    """
    points = [(float(m), _effect(table, replace(setting, m_mem=m), effect)) for m in _m_mems()]
    known = [(m, e) for m, e in points if e is not None]
    return [m for m, _ in known], [e for _, e in known]


def m_mem_for(table: pd.DataFrame, setting: Setting, wanted: float, effect: str = "gain") -> float | None:
    """The least M_mem in tokens at which an effect is `wanted` %, interpolated; None where it is that nowhere."""
    m_mem, found = along_m_mem(table, setting, effect)
    for (m0, e0), (m1, e1) in zip(zip(m_mem, found, strict=True), zip(m_mem[1:], found[1:], strict=True), strict=False):
        if e0 >= wanted:
            return m0
        if e1 >= wanted:
            return m0 + (wanted - e0) / (e1 - e0) * (m1 - m0)
    return None


def elsewhere(rows: pd.DataFrame, setting: Setting, wanted: float, effect: str = "gain", what: str = "") -> str:
    """For a note: an effect at M_mem (a) and (b), what fits the device, and from which M_mem on it is `wanted` %.

    what: names the wanted effect, where that is not the paper's. rows: of this suite, `cost_model` and `block_time`.
    """
    what = what or f"the paper's {wanted:g}%"
    own = rows[rows["suite"] == NAME]
    m_mem, found = along_m_mem(own, setting, effect)
    if not m_mem:
        return "M_mem was not varied here"
    text = f"{np.interp(setting.m_mem, m_mem, found):+.1f}% at (a), "
    fits = _campaign.m_mem_of_device(rows, setting.model, setting.adaln, setting.ranks)
    if fits is not None:
        beyond = "" if fits <= m_mem[-1] else f", taken at {m_mem[-1]:,.0f}"
        where = f"{fits:,.0f} tokens, what fits the device on {setting.ranks} ranks{beyond}"
        text += f"{np.interp(fits, m_mem, found):+.1f}% at (b) ({where}), "
    needed = m_mem_for(own, setting, wanted, effect)
    if needed is None:
        return f"{text}{what} is reached nowhere up to {m_mem[-1]:,.0f} tokens"
    if needed == m_mem[0]:
        return f"{text}{what} holds at {needed:,.0f} tokens already, the least that was simulated"
    return f"{text}{what} needs M_mem {needed:,.0f} tokens"


def _effect(table: pd.DataFrame, setting: Setting, effect: str) -> float | None:
    if effect == "gain":
        return _campaign.value(table, setting, effect)
    ratio = _campaign.ratio(_campaign.compare(table, setting, effect))
    if ratio is None:
        return None
    return 100 * (1 - ratio if effect.endswith("_cv") else ratio - 1)


def rivals(table: pd.DataFrame) -> pd.DataFrame:
    """Of the second lattice, each corpus and number of ranks: the policies of no larger mix distance than balanced.

    Columns: corpus, ranks, policy, and value, ci_low, ci_high of balanced's lead over it in %.
    """
    import pandas as pd

    matched = table[(table["suite"] == NAME) & (table["protocol"] == "matched") & (table["model"] != "tiny")]
    found = []
    for corpus, ranks in matched[["corpus", "ranks"]].drop_duplicates().itertuples(index=False):
        cell = matched[(matched["corpus"] == corpus) & (matched["ranks"] == ranks)]
        distance = cell[cell["metric"] == "mix_distance"].set_index("policy")["value"]
        if "balanced" not in distance:
            continue
        near = distance.index[distance <= distance["balanced"] + 1e-9]
        leads = cell[(cell["metric"] == "balanced_lead") & cell["policy"].isin(near)]
        found.append(leads[["corpus", "ranks", "policy", "value", "ci_low", "ci_high"]])
    return pd.concat(found, ignore_index=True) if found else matched.iloc[:0]


def _m_mem(ratio: float) -> int:
    return round(ratio * TOKEN_BUDGET)


def _m_mems() -> list[int]:
    return [_m_mem(r) for r in RATIOS]


def _matched(setting: Setting) -> Setting:
    return replace(setting, protocol="matched", micro_batches=MATCHED_MICRO_BATCHES, m_mem=TOKEN_BUDGET)


def _settings() -> Iterator[Setting]:
    rules = [Setting(p, "eager", BASE_RANKS) for p in policies.NAMES]
    whole = [Setting(p, "fused", BASE_RANKS) for p in (assumptions.ADAPTIVELOAD[0], "balanced")]
    for m_mem in _m_mems():
        yield from (replace(s, m_mem=m_mem) for s in (*rules, *whole))
    for ranks in RANKS:
        yield from (replace(s, ranks=ranks) for s in (*rules, *whole))
    for corpus in mixes.names():
        yield from (replace(s, corpus=corpus) for s in (*rules, *whole))
    loose = replace(whole[0], m_comp=assumptions.M_COMP_LOOSE)
    for model in MODELS:
        yield from (replace(s, model=model) for s in (*rules, *whole))
        for ranks in PAPER_GAIN:
            yield from (replace(s, model=model, ranks=ranks, m_mem=m) for s in (whole[0], loose) for m in _m_mems())
    for ranks in RANKS:
        yield from (replace(s, ranks=ranks, m_mem=m) for s in (whole[0], loose) for m in _m_mems())
    plain = [Setting(p, a, r) for p, a in PLAIN for r in PAPER_GAIN]
    worst = [replace(s, corpus=assumptions.WORST_CORPUS) for s in (*plain, replace(whole[0], ranks=16))]
    for m_mem in _m_mems():
        yield from (replace(s, m_mem=m_mem) for s in (*plain, *worst))
    for ratio in M_COMP_RATIOS:
        yield from (replace(whole[0], m_mem=_m_mem(ratio), m_comp=c) for c in M_COMPS)
    for corpus in mixes.names():
        for ranks in MATCHED_RANKS:
            yield from (_matched(replace(s, corpus=corpus, ranks=ranks)) for s in rules)


def _draw_device(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    figure, axes = style.subplots(2, 4, size=(3.9, 3.4))
    whole = Setting(*assumptions.ADAPTIVELOAD, BASE_RANKS)
    _draw_map(axes[0, 0], table, whole)
    _draw_map(axes[0, 1], table, replace(whole, m_comp=assumptions.M_COMP_LOOSE))
    _draw_m_comp(axes[0, 2], table, whole)
    _draw_models(axes[0, 3], table, whole)
    _draw_m_mem(axes[1, 0], table)
    _draw_ranks(axes[1, 1], table)
    _draw_corpora(axes[1, 2], table)
    _draw_lead(axes[1, 3], table)
    _campaign.figure_legend(figure, axes[1, :3], columns=5)
    caption = (
        f"Gain in tokens/s over equal-token batches with eager AdaLN, simulated from block_time on {device}; around "
        f"{assumptions.CORPUS}, 14B, {BASE_RANKS} ranks, M_mem {assumptions.MEMORY_RISE} x the baseline's "
        f"{TOKEN_BUDGET:,} tokens, one micro-batch a step. AdaptiveLoad: dual constraint with fused AdaLN; other "
        "lines have eager AdaLN. Maps: contours at the paper's gains (25.6% dashed, 27.18% solid), crosses where it "
        "reports them if memory is what its VRAM rise says; M_comp in "
        "units of the longest bucket's baseline batch. Last panel: samples/s of balanced over the fastest policy of no "
        "larger mix distance, four micro-batches a step, samples a "
        "step matched; bars are 95% intervals."
    )
    return Figure(f"sensitivity-{device}", figure, caption, ("T1", "T2"))


def _draw_map(ax: Axes, table: pd.DataFrame, whole: Setting) -> None:
    from repro.report import style

    gains = np.array(
        [[_campaign.value(table, replace(whole, ranks=r, m_mem=m), "gain") or 0.0 for m in _m_mems()] for r in RANKS]
    )
    x, y = np.array(_m_mems()) / TOKEN_BUDGET, np.log2(np.array(RANKS))
    mesh = ax.pcolormesh(x, y, gains, cmap="viridis", shading="gouraud", vmin=0)
    ax.figure.colorbar(mesh, ax=ax, label="gain, %")
    for gain, line in zip(PAPER_GAIN.values(), ("--", "-"), strict=True):
        if gains.min() < gain < gains.max():
            ax.contour(x, y, gains, [gain], colors="white", linestyles=line, linewidths=1.3)
    ax.plot(2 * [assumptions.MEMORY_RISE], np.log2(list(PAPER_GAIN)), "x", color=style.RED, markersize=8, mew=2)
    ax.set_yticks(y, [f"{r:,}" for r in RANKS])
    ax.set(xlabel="M_mem / token budget", ylabel="ranks", title=f"AdaptiveLoad, M_comp x {whole.m_comp:g}")
    ax.grid(visible=False)


def _draw_m_mem(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    for policy in policies.NAMES[1:]:
        m_mem, gains = along_m_mem(table, Setting(policy, "eager", BASE_RANKS))
        style.series(ax, np.array(m_mem) / TOKEN_BUDGET, gains, policy, kind="simulated")
    m_mem, gains = along_m_mem(table, Setting(*assumptions.ADAPTIVELOAD, BASE_RANKS))
    look: Any = {"label": "dual constraint, fused AdaLN (paper)", "linestyle": "--"}
    style.series(ax, np.array(m_mem) / TOKEN_BUDGET, gains, "dual_constraint", kind="simulated", **look)
    style.paper_value(ax, PAPER_GAIN[BASE_RANKS], f"paper: +{PAPER_GAIN[BASE_RANKS]}%")
    ax.set(xlabel="M_mem / token budget", ylabel="gain, %", title=f"memory, {BASE_RANKS} ranks")


def _draw_ranks(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    for policy in policies.NAMES[1:]:
        rows = [(r, _campaign.lookup(table, Setting(policy, "eager", r), "gain")) for r in RANKS]
        known = [(r, row) for r, row in rows if row is not None]
        ends: Any = {k: [float(row[c]) for _, row in known] for k, c in (("low", "ci_low"), ("high", "ci_high"))}
        style.series(ax, [r for r, _ in known], [row["value"] for _, row in known], policy, kind="simulated", **ends)
    style.paper_value(ax, PAPER_GAIN[BASE_RANKS], f"paper: +{PAPER_GAIN[BASE_RANKS]}%")
    ax.set_xscale("log", base=2)
    ax.set_xticks(RANKS[::2], [f"{r:,}" for r in RANKS[::2]])
    ax.set(xlabel="ranks", ylabel="gain, %", title=f"ranks, M_mem {assumptions.MEMORY_RISE} x the budget")


def _draw_m_comp(ax: Axes, table: pd.DataFrame, whole: Setting) -> None:
    from repro.report import style

    for ratio, color in zip(M_COMP_RATIOS, (style.SKY, style.BLUE, style.BLACK), strict=True):
        gains = [_campaign.value(table, replace(whole, m_mem=_m_mem(ratio), m_comp=c), "gain") for c in M_COMPS]
        values = [np.nan if g is None else g for g in gains]
        ax.plot(M_COMPS, values, "-o", mfc="white", color=color, label=f"M_mem {ratio:g} x budget")
    style.paper_value(ax, PAPER_GAIN[BASE_RANKS], f"paper: +{PAPER_GAIN[BASE_RANKS]}%")
    ax.set(xlabel="M_comp / B S^p of the longest bucket", ylabel="gain, %", title=f"compute bound, {BASE_RANKS} ranks")
    ax.legend(loc="lower right")


def _draw_models(ax: Axes, table: pd.DataFrame, whole: Setting) -> None:
    from repro.report import style

    for model, color in zip(MODELS, (style.ORANGE, style.BLUE), strict=True):
        for m_comp, line in ((assumptions.M_COMP, "-"), (assumptions.M_COMP_LOOSE, ":")):
            m_mem, gains = along_m_mem(table, replace(whole, model=model, m_comp=m_comp))
            look: Any = {"marker": "o", "mfc": "white", "color": color, "label": f"{model}, M_comp x {m_comp:g}"}
            ax.plot(np.array(m_mem) / TOKEN_BUDGET, gains, line, **look)
    style.paper_value(ax, PAPER_GAIN[BASE_RANKS], f"paper: +{PAPER_GAIN[BASE_RANKS]}%")
    ax.set(xlabel="M_mem / token budget", ylabel="gain, %", title=f"model size, {BASE_RANKS} ranks")
    _legend_above(ax, columns=1)


def _draw_corpora(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    names = mixes.names()
    for policy in policies.NAMES[1:]:
        gains = [_campaign.value(table, Setting(policy, "eager", BASE_RANKS, corpus=c), "gain") for c in names]
        ax.plot(
            [np.nan if g is None else g for g in gains], np.arange(len(names)), style.marker(policy),
            color=style.color(policy), mfc="white", label=style.label(policy), ls="none",
        )  # fmt: skip
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -1.2)  # room for the paper's value above the first corpus
    style.paper_value(ax, PAPER_GAIN[BASE_RANKS], f"paper: +{PAPER_GAIN[BASE_RANKS]}%", along="y")
    ax.set(xlabel="gain, %", title=f"corpus, {BASE_RANKS} ranks")


def _draw_lead(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    found = rivals(table).sort_values("value").drop_duplicates(["corpus", "ranks"])
    for i, corpus in enumerate(mixes.names()):
        own = found[found["corpus"] == corpus].sort_values("ranks")
        if own.empty:
            continue
        ends = np.abs(own[["ci_low", "ci_high"]].to_numpy(float).T - own["value"].to_numpy(float))
        color = (style.BLUE, style.SKY, style.GREEN, style.ORANGE, style.PINK, style.BLACK, style.GREY, style.RED)[
            i % 8
        ]
        ax.errorbar(own["ranks"], own["value"], ends, marker="o", mfc="white", color=color, capsize=2, label=corpus)
    ax.axhline(0, color=style.BLACK, linewidth=0.8)
    ax.set_xscale("log", base=2)
    ax.set_xticks(MATCHED_RANKS, [f"{r:,}" for r in MATCHED_RANKS])
    ax.set(xlabel="ranks", ylabel="lead, %", title="balanced over the next best")
    _legend_above(ax, columns=2)


def _legend_above(ax: Axes, columns: int) -> None:
    """A legend inside the axes, above their series."""
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.4 * (high - low))
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7, ncols=columns, loc="upper left")
