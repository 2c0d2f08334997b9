"""Figures of `sensitivity`: where the paper's gain holds, how policies compare elsewhere, and balanced's lead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions, policies
from repro.balance.campaign import Setting
from repro.corpus import mixes
from repro.corpus.mixes import TOKEN_BUDGET
from repro.suite import Figure
from suites import _campaign, sensitivity

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

WHOLE = Setting(*assumptions.ADAPTIVELOAD, sensitivity.BASE_RANKS)
LOOSE = replace(WHOLE, m_comp=assumptions.M_COMP_LOOSE)
GAIN = sensitivity.PAPER_GAIN[sensitivity.BASE_RANKS]
PAPER = f"paper: +{GAIN}%"
AROUND = (
    f"around {assumptions.CORPUS}, 14B, {sensitivity.BASE_RANKS} ranks, M_mem {assumptions.MEMORY_RISE} x the "
    f"baseline's {TOKEN_BUDGET:,} tokens, one micro-batch a step"
)


def draw(table: pd.DataFrame) -> list[Figure]:
    """Figures of every device, then of all devices together. table: rows of `sensitivity` of real models."""
    figures = []
    for device, own in table.groupby("device", sort=True):
        figures += [_draw_paper(str(device), own), _draw_policies(str(device), own)]
        leads = sensitivity.rivals(own)
        if len(leads):
            figures.append(_draw_lead(str(device), leads))
    return figures + _draw_devices(table)


def _draw_paper(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    figure, axes = style.subplots(2, 2, 2.3)
    maps = [_gains(table, setting) for setting in (WHOLE, LOOSE)]
    top = max(float(m.max()) for m in maps)
    for ax, gains, setting in zip(axes[0], maps, (WHOLE, LOOSE), strict=True):
        mesh = _draw_map(ax, gains, top)
        ax.set_title(f"M_comp x {setting.m_comp:g}")
    axes[0, 0].set_ylabel("ranks")
    axes[0, 1].set_yticklabels([])
    figure.colorbar(mesh, ax=axes[0], label="gain, %", pad=0.02)
    _draw_m_comp(axes[1, 0], table)
    _draw_models(axes[1, 1], table)
    style.legend(figure, ["simulated"], axes=[axes[0, 0]], paper=PAPER)
    caption = (
        f"Gain of AdaptiveLoad (dual constraint, fused AdaLN) in tokens/s over equal-token batches with eager AdaLN, "
        f"simulated from step times measured on {device}; {AROUND}. M_comp in units of B S^p of the longest bucket's "
        "baseline batch. Maps: white lines at the paper's gains (25.6% dashed, 27.18% solid), crosses "
        "where it reports them if memory is what its VRAM rise says."
    )
    return Figure(f"sensitivity-{device}", figure, caption, ("T1", "T2"))


def _gains(table: pd.DataFrame, whole: Setting) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Gain in % by ranks and M_mem, NaN where it was not simulated."""
    found = [
        [_campaign.value(table, replace(whole, ranks=r, m_mem=m), "gain") for m in sensitivity.m_mems()]
        for r in sensitivity.RANKS
    ]
    return np.array(found, np.float64)


def _draw_map(ax: Axes, gains: np.ndarray[Any, np.dtype[np.float64]], top: float) -> QuadMesh:
    from repro.report import style

    x, y = np.array(sensitivity.m_mems()) / TOKEN_BUDGET, np.log2(np.array(sensitivity.RANKS))
    mesh = ax.pcolormesh(x, y, gains, cmap="viridis", shading="gouraud", vmin=0, vmax=top)
    for gain, line in zip(sensitivity.PAPER_GAIN.values(), ("--", "-"), strict=True):
        if np.nanmin(gains) < gain < np.nanmax(gains):
            ax.contour(x, y, gains, [gain], colors="white", linestyles=line, linewidths=1.3)
    at = np.log2(list(sensitivity.PAPER_GAIN))
    ax.plot(
        2 * [assumptions.MEMORY_RISE], at, "x", color=style.ORANGE, markersize=7, mew=2, label="the paper's setting"
    )
    ax.set_yticks(y, [f"{r:,}" for r in sensitivity.RANKS])
    ax.set_xlabel("M_mem / token budget")
    ax.grid(visible=False)
    return mesh


def _draw_m_comp(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    lines = []
    for ratio, color in zip(sensitivity.M_COMP_RATIOS, (style.SKY, style.BLUE, style.BLACK), strict=True):
        settings = {c: replace(WHOLE, m_mem=round(ratio * TOKEN_BUDGET), m_comp=c) for c in sensitivity.M_COMPS}
        lines += _line(ax, table, settings, color, f"M_mem\nx {ratio:g}")
    style.paper_value(ax, GAIN, "")
    style.end_labels(ax, lines, 2)
    ax.set(xlabel="M_comp, x the longest bucket's", ylabel="gain, %")


def _draw_models(ax: Axes, table: pd.DataFrame) -> None:
    from repro.report import style

    lines = []
    for model, color in zip(sensitivity.MODELS, (style.ORANGE, style.BLUE), strict=True):
        for whole, line in ((WHOLE, "-"), (LOOSE, ":")):
            settings = {m / TOKEN_BUDGET: replace(whole, model=model, m_mem=m) for m in sensitivity.m_mems()}
            told = f"{model.removeprefix('wan-').upper()},\nM_comp x {whole.m_comp:g}"
            lines += _line(ax, table, settings, color, told, line)
    style.paper_value(ax, GAIN, "")
    style.end_labels(ax, lines, 2)
    ax.set(xlabel="M_mem / token budget")


def _line(
    ax: Axes, table: pd.DataFrame, settings: Mapping[float, Setting], color: str, told: str, line: str = "-"
) -> list[tuple[float, float, str, str]]:
    """Gains of settings by x with their intervals; what is told of them at the right end, if there are any."""
    rows = {x: _campaign.lookup(table, s, "gain") for x, s in settings.items()}
    known = {x: row for x, row in rows.items() if row is not None}
    if not known:
        return []
    value, low, high = (np.array([float(r[c]) for r in known.values()]) for c in ("value", "ci_low", "ci_high"))
    ends = [value - low, high - value]
    ax.errorbar(list(known), value, ends, fmt="o", ls=line, mfc="white", color=color, elinewidth=1.2)
    return [(max(known), float(value[-1]), told, color)]


def _draw_policies(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    names = list(policies.NAMES[1:])
    figure, axes = style.subplots(2, 2, 2.3)
    base = Setting("equal_token", "eager", sensitivity.BASE_RANKS)
    memory, ranks = axes[0]
    for policy in names:
        of_memory = [replace(base, policy=policy, m_mem=m) for m in sensitivity.m_mems()]
        _series(memory, table, [m / TOKEN_BUDGET for m in sensitivity.m_mems()], of_memory, policy)
        _series(
            ranks, table, list(sensitivity.RANKS), [replace(base, policy=policy, ranks=r) for r in sensitivity.RANKS],
            policy,
        )  # fmt: skip
    memory.set(xlabel="M_mem / token budget", ylabel="gain, %", title=f"memory, {sensitivity.BASE_RANKS} ranks")
    ranks.set_xscale("log", base=2)
    ranks.set_xticks(sensitivity.RANKS[::2], [f"{r:,}" for r in sensitivity.RANKS[::2]])
    ranks.set(xlabel="ranks", title=f"ranks, M_mem x {assumptions.MEMORY_RISE}")
    for ax in (memory, ranks):
        style.paper_value(ax, GAIN, "")
    grid = axes[1, 0].get_gridspec()
    for ax in axes[1]:
        ax.remove()
    _draw_corpora(figure.add_subplot(grid[1, :]), table, base)
    style.legend(figure, ["simulated"], axes=[ranks], paper=PAPER)
    caption = (
        "Gain of every policy in tokens/s over equal-token batches, eager AdaLN throughout, simulated from step times "
        f"measured on {device}; {AROUND}. Bars are 95% intervals over seeds."
    )
    return Figure(f"sensitivity_policies-{device}", figure, caption, ("T1", "T2"))


def _series(ax: Axes, table: pd.DataFrame, x: list[float], settings: list[Setting], policy: str) -> None:
    from repro.report import style

    rows = [_campaign.lookup(table, s, "gain") for s in settings]
    known = [(at, row) for at, row in zip(x, rows, strict=True) if row is not None]
    ends: Any = {k: [float(row[c]) for _, row in known] for k, c in (("low", "ci_low"), ("high", "ci_high"))}
    style.series(ax, [at for at, _ in known], [float(r["value"]) for _, r in known], policy, kind="simulated", **ends)


def _draw_corpora(ax: Axes, table: pd.DataFrame, base: Setting) -> None:
    from repro.report import style

    names, shown = mixes.names(), list(policies.NAMES[1:])
    for k, policy in enumerate(shown):
        rows = [_campaign.lookup(table, replace(base, policy=policy, corpus=c), "gain") for c in names]
        known = [(place, row) for place, row in enumerate(rows) if row is not None]
        value, low, high = (np.array([float(r[c]) for _, r in known]) for c in ("value", "ci_low", "ci_high"))
        place = np.array([p for p, _ in known]) + 0.7 * ((k + 0.5) / len(shown) - 0.5)
        look: Any = {"color": style.color(policy), "mfc": "white", "markersize": 4, "elinewidth": 1.2}
        ax.errorbar(value, place, xerr=[value - low, high - value], fmt=style.marker(policy), **look)
    style.paper_value(ax, GAIN, "", along="y")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    for line in range(1, len(names)):
        ax.axhline(line - 0.5, color="#E6E6E6", linewidth=0.7, zorder=0.5)
    ax.set_xlabel(f"gain, %, by corpus; {base.ranks} ranks, M_mem x {assumptions.MEMORY_RISE}")


def _draw_lead(device: str, leads: pd.DataFrame) -> Figure:
    from repro.report import style

    leads = leads.sort_values("value").drop_duplicates(["corpus", "ranks"])
    names = [n for n in mixes.names() if (leads["corpus"] == n).any()]
    ranks = sorted(int(r) for r in leads["ranks"].unique())
    figure, axes = style.subplots(1, 1, 0.3 * len(names) + 0.9)
    ax = axes[0, 0]
    looks = style.device_looks(str(r) for r in ranks)
    for k, r in enumerate(ranks):
        own = leads[leads["ranks"] == r]
        place = np.array([names.index(c) for c in own["corpus"]]) + 0.7 * ((k + 0.5) / len(ranks) - 0.5)
        value = own["value"].to_numpy(float)
        ends = np.abs(own[["ci_low", "ci_high"]].to_numpy(float).T - value)
        color, marker = looks[str(r)]
        ax.errorbar(value, place, xerr=ends, fmt=marker, color=color, mfc="white", elinewidth=1.2, label=f"{r:,} ranks")
    ax.axvline(0, color=style.BLACK, linewidth=0.8)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("lead of balanced in samples/s, %")
    style.legend(figure, ["simulated"])
    caption = (
        "Samples/s of balanced over the fastest policy whose steps are no further from the corpus' mix, simulated "
        f"from step times measured on {device}: four micro-batches a step, samples a step matched, M_mem "
        f"{TOKEN_BUDGET:,} tokens. Bars are 95% intervals over seeds; no mark where no policy's steps are as near "
        "the mix."
    )
    return Figure(f"balanced_lead-{device}", figure, caption)


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """AdaptiveLoad's gain along M_mem on all devices."""
    from repro.report import devices, style

    if not devices.several(table):
        return []
    looks = style.device_looks(table["device"])
    figure, axes = style.subplots(1, 2, 2.5, sharey=True)
    x = [m / TOKEN_BUDGET for m in sensitivity.m_mems()]
    for ax, whole in zip(axes[0], (WHOLE, LOOSE), strict=True):
        for device, own in table.groupby("device", sort=True):
            rows = [_campaign.lookup(own, replace(whole, m_mem=m), "gain") for m in sensitivity.m_mems()]
            known = [(at, row) for at, row in zip(x, rows, strict=True) if row is not None]
            ends: Any = {k: [float(r[c]) for _, r in known] for k, c in (("low", "ci_low"), ("high", "ci_high"))}
            color, marker = looks[str(device)]
            look: Any = {"color": color, "marker": marker, "markerfacecolor": "white", "label": str(device)}
            style.series(ax, [at for at, _ in known], [float(r["value"]) for _, r in known], "", **ends, **look)
        style.paper_value(ax, GAIN, "")
        ax.set(xlabel="M_mem / token budget", title=f"M_comp x {whole.m_comp:g}")
    axes[0, 0].set_ylabel("gain, %")
    style.legend(figure, ["simulated"], paper=PAPER)
    caption = (
        "Gain of AdaptiveLoad (dual constraint, fused AdaLN) in tokens/s over equal-token batches with eager AdaLN, "
        f"simulated from each device's step times; {AROUND}."
    )
    return [
        Figure("sensitivity-devices", figure, caption, ("T1", "T2")),
        *_draw_policies_of(table),
        *_draw_leads(table),
    ]


def _draw_policies_of(table: pd.DataFrame) -> list[Figure]:
    """Every policy's gain at the base point on all devices."""
    from repro.report import devices, style

    base = Setting("equal_token", "eager", sensitivity.BASE_RANKS)
    settings = {style.label(p): replace(base, policy=p) for p in style.ordered(policies.NAMES[1:])}
    name = f"gain in tokens/s, {sensitivity.BASE_RANKS} ranks, %"
    panel = _campaign.by_device(table, settings, "gain")
    if not devices.several(panel):
        return []
    figure = devices.dots({name: panel}, {name: (PAPER, GAIN)})
    caption = f"Gain of every policy over equal-token batches on each device, eager AdaLN, simulated; {AROUND}."
    return [Figure("sensitivity_policies-devices", figure, caption, ("T1", "T2"))]


def _draw_leads(table: pd.DataFrame) -> list[Figure]:
    """Balanced's lead at the base number of ranks on all devices."""
    import pandas as pd

    from repro.report import devices

    found = [
        leads[leads["ranks"] == sensitivity.BASE_RANKS]
        .sort_values("value")
        .drop_duplicates("corpus")
        .assign(device=device)
        for device, own in table.groupby("device", sort=True)
        if len(leads := sensitivity.rivals(own))
    ]
    if len(found) < 2:
        return []
    rows = pd.concat(found, ignore_index=True)
    rows = rows.assign(row=rows["corpus"], kind="simulated").sort_values(
        "corpus", key=lambda c: c.map(mixes.names().index), kind="stable"
    )
    figure = devices.dots({f"lead of balanced in samples/s, {sensitivity.BASE_RANKS} ranks, %": rows})
    caption = (
        "Samples/s of balanced over the fastest policy whose steps are no further from the corpus' mix, simulated."
    )
    return [Figure("balanced_lead-devices", figure, caption)]
