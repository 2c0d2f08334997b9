"""How much of the device's memory each batch policy fills: the peak of every rank and step, from fitted memory.

A rank's peak in a step is that of its largest micro-batch (`repro.balance.memory`, fitted to measured peaks) plus
parameters and optimizer state, sharded over the ranks.

Columns: `repro.balance.campaign.PARAMETERS`. Metrics: memory_use (tokens of a rank's largest micro-batch / M_mem), and
where memory was measured peak_memory (GB), device_use (fraction of the device) and device_use_rise (%, over
equal_token with eager AdaLN, seeds paired); pinned_share. Simulated under `repro.balance.assumptions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repro.balance import assumptions, policies, whole
from repro.balance.campaign import PARAMETERS as PARAMETERS
from repro.balance.campaign import Setting
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _campaign, sensitivity

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "memory_use"
CLAIMS = ("B5",)
NEEDS = (*whole.SUITES, "cost_model", "sensitivity")
SIMULATED = True

RANKS = (8, 16)
ADALNS = ("eager", "fused")

PAPER_RISE = 22.7
"""Rise of peak VRAM utilisation in % (AdaptiveLoad, arXiv 2605.17923)."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Every policy with both AdaLNs on the paper's two numbers of ranks."""
    if profile == "smoke":
        return _campaign.cases((Setting(p, "eager", 4, model="tiny") for p in ("equal_token", "dual_constraint")), 0.1)
    if not _campaign.can_simulate(profile, machine):
        return []
    return _campaign.cases(Setting(p, a, r) for r in RANKS for p in policies.NAMES for a in ADALNS)


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and the baseline on the same seeds."""
    found, setting, outcome = _campaign.simulated(case, inputs)
    rows = _campaign.rows(outcome, ("memory_use", "pinned_share", "peak_memory"))
    if "peak_memory" not in outcome.values:
        return rows
    if machine.has_gpu and machine.memory_bytes:
        share = 1e9 * outcome.values["peak_memory"] / machine.memory_bytes
        rows.append(_campaign.row("device_use", "fraction", share, outcome.source))
    baseline = setting.baseline()
    if setting != baseline:
        rows.append(_campaign.paired(found, setting, baseline, "peak_memory", "device_use_rise"))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B5 on 8 ranks from the batch policy alone; with the fused op and on 16 ranks in the note."""
    own = rows[rows["suite"] == NAME]
    treated = Setting("dual_constraint", "eager", 8)
    effect = _campaign.lookup(own, treated, "device_use_rise")
    if effect is None:
        return []

    def rise(setting: Setting) -> str:
        return _campaign.percent(_campaign.value(own, setting, "device_use_rise"))

    tokens = _campaign.ratio(_campaign.compare(own, treated, "memory_use"))
    note = (
        "mean over steps and ranks of peak memory / device memory, fitted to the peaks that came with "
        f"{whole.told(rows, treated.model, effect['source'])}; {assumptions.MODEL} on 8 ranks, full sharding: "
        f"{assumptions.CORPUS}, one micro-batch a step, M_mem (a) "
        f"{treated.m_mem:,} tokens, which is the paper's rise itself: buckets whose batch cannot grow keep the mean "
        f"below it; tokens held {_campaign.percent(None if tokens is None else 100 * (tokens - 1))}; 16 ranks "
        f"{rise(replace(treated, ranks=16))}; with the fused AdaLN {rise(replace(treated, adaln='fused'))}; equal_time "
        f"{rise(replace(treated, policy='equal_time'))}, balanced {rise(replace(treated, policy='balanced'))}; "
        f"with M_mem: {sensitivity.elsewhere(rows, treated, PAPER_RISE, 'peak_memory')}"
    )
    return [_campaign.evidence("B5", effect, _campaign.compare(own, treated, "device_use", 100), note)]


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device, the share of its memory that every policy fills on average; then the rise on all devices."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] == assumptions.MODEL)]
    use = own[own["metric"] == "device_use"]
    figures = [_draw_device(str(device), table) for device, table in use.groupby("device", sort=True)]
    return figures + _draw_devices(own)


def _draw_device(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    ranks = sorted(int(r) for r in table["ranks"].unique())
    names = style.ordered(list(table["policy"]))
    figure, axes = style.subplots(1, len(ranks), 0.28 * len(names) + 1.2, sharey=True, sharex=True)
    width = 0.8 / len(ADALNS)
    for ax, r in zip(axes[0], ranks, strict=True):
        of_ranks = table[table["ranks"] == r]
        for i, adaln in enumerate(ADALNS):
            own = of_ranks[of_ranks["adaln"] == adaln].set_index("policy").reindex(names)
            place = np.arange(len(names)) + (i - (len(ADALNS) - 1) / 2) * width
            ends = np.abs(own[["ci_low", "ci_high"]].to_numpy(float).T - own["value"].to_numpy(float))
            _campaign.bars(ax, place, 100 * own["value"], adaln, width, 100 * ends, across=True)
        ax.set_yticks(range(len(names)), [style.label(n) for n in names])
        ax.grid(axis="y", visible=False)
        ax.set_title(f"{r} ranks", pad=style.ABOVE)
        ax.set_xlabel("mean peak, % of the device")
        base = _campaign.value(table, Setting(*assumptions.BASELINE, r), "device_use")
        if base is not None:
            style.paper_value(ax, 100 * base * (1 + PAPER_RISE / 100), f"paper: +{PAPER_RISE}%", along="y")
    axes[0, 0].invert_yaxis()
    style.legend(figure, ["simulated"], bars=True)
    caption = (
        f"Peak memory from fits to peaks measured on {device}, parameters and optimizer state included: "
        f"{assumptions.CORPUS}, 14B, full sharding, one micro-batch a step, M_mem {assumptions.M_MEM:,} tokens (the "
        f"baseline fills {Setting(*assumptions.BASELINE, 8).token_budget:,}); mean over steps and ranks. Dashed: the "
        "paper's rise over the baseline (first bar)."
    )
    return Figure(f"memory_use-{device}", figure, caption, CLAIMS)


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """The rise that B5 is about, on all devices."""
    from repro.report import devices

    settings = {f"{r} ranks, {a} AdaLN": Setting("dual_constraint", a, r) for r in RANKS for a in ADALNS}
    name = "rise of mean peak memory over the baseline, %"
    panel = _campaign.by_device(table, settings, "device_use_rise")
    if not devices.several(panel):
        return []
    figure = devices.dots({name: panel}, {name: (f"paper: +{PAPER_RISE}%", PAPER_RISE)})
    caption = f"Dual constraint against equal-token batches with eager AdaLN, 14B, {assumptions.CORPUS}, simulated."
    return [Figure("memory_use-devices", figure, caption, CLAIMS)]
