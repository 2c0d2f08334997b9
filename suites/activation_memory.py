"""How much activation memory the fused op saves: bytes that autograd keeps, counted exactly, and peaks.

Columns: impl and form as in every kernel suite; chain (op: the op alone; qkv: with the three linears behind it;
official: the same as Wan's own code runs it; block: a whole Wan block; see `repro.measure.activations`), dtype, batch,
tokens, dim. Inputs arrive as in a Wan block: modulation in float32.

Metrics: saved_bytes (GB of 10^9 bytes kept from the forward for the backward, weights left out), reduction (% less than
with Wan's formula in the same chain), peak (GB, forward and backward, above inputs and weights; CUDA only). All are
exact: intervals are the values themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repro.measure.stats import exact
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.machine import Machine

NAME = "activation_memory"
CLAIMS = ("K3", "K4")
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("impl", "form", "chain", "dtype", "batch", "tokens", "dim")

BASELINE = "wan"
CLAIMED = {"chain": "op", "dtype": "bf16", "batch": 1, "tokens": 64_000, "dim": 5_120}
"""The cell that K3 and K4 are judged on."""
PAPER_REDUCTION, PAPER_GB = 61.9, 4.8
"""AdaptiveLoad (arXiv 2605.17923): activation memory reduced by about 61.9%, 4.8 GB saved at 64,000 tokens. It does
not say which tensors it counts, nor over how many layers."""

_IMPLS = {
    "op": ("wan", "eager", "compile", "fused"),
    "qkv": ("wan", "eager", "fused"),
    "official": ("wan", "fused"),
    "block": ("wan", "eager", "fused"),
}


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Every chain at the claimed shape; the op alone at 1.3B's width too. Small shapes without a GPU."""
    if profile == "smoke":
        shapes = [(chain, 1, 256, 96) for chain in _IMPLS]
    elif machine.has_gpu:
        shapes = [(chain, 1, 64_000, 5_120) for chain in _IMPLS] + [("op", 1, 64_000, 1_536)]
    else:
        shapes = [(chain, 1, 4_096, 1_536) for chain in ("op", "qkv", "official")]
    grid: list[tuple[str | int, ...]] = [
        (impl, "per_sample", chain, "bf16", *shape) for chain, *shape in shapes for impl in _IMPLS[chain]
    ]
    return [
        Case(dict(zip(PARAMETERS, values, strict=True)), _seconds(str(values[2]), machine))
        for values in grid
        # Inductor on a CPU needs a C++ compiler, and longer than a smoke run should take.
        if values[0] != "compile" or (profile == "full" and machine.has_gpu)
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Count what autograd keeps in one chain. Raises CaseSkipped where it does not fit or the kernels are missing."""
    import torch

    from repro.adaln import build
    from repro.measure import activations

    if case.key["impl"] == "fused" and machine.has_gpu and not build.ensure_loaded():
        raise CaseSkipped(f"the CUDA kernels are not there: {build.failure()}")
    device = torch.device("cuda" if machine.has_gpu else "cpu")
    name, batch, tokens, dim = (case.key[k] for k in ("chain", "batch", "tokens", "dim"))

    def chain(impl: str) -> activations.Chain:
        torch.manual_seed(0)
        return activations.make_chain(str(name), impl, int(batch), int(tokens), int(dim), torch.bfloat16, device)

    try:
        baseline = chain(BASELINE).saved().bytes
        own = chain(str(case.key["impl"]))
        saved = own.saved().bytes
        rows = [
            exact("saved_bytes", "GB", saved / 1e9),
            exact("reduction", "%", 100 * (1 - saved / baseline)),
        ]
        if device.type == "cuda":
            rows.append(exact("peak", "GB", own.peak(device) / 1e9))
        return rows
    except torch.OutOfMemoryError as e:
        reason = f"{dict(case.key)} does not fit into memory: {str(e).splitlines()[0]}"
    # Outside the handler: the exception's traceback holds the tensors that are to be freed.
    torch.cuda.empty_cache()
    raise CaseSkipped(reason)


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """K3 and K4: Wan's formula against the fused op, the op alone; other formulas and chains stand in the notes."""
    rows = rows[rows["suite"] == NAME]
    shape = {k: v for k, v in CLAIMED.items() if k != "chain"}
    for column, value in shape.items():
        rows = rows[rows[column] == value]
    table = rows.set_index(["metric", "chain", "impl"])["value"].to_dict()
    chain = CLAIMED["chain"]
    if not {("saved_bytes", chain, BASELINE), ("saved_bytes", chain, "fused")} <= set(table):
        return []
    wan, fused = (float(table["saved_bytes", chain, impl]) for impl in (BASELINE, "fused"))
    pairs = [(c, impl) for c, impls in _IMPLS.items() for impl in impls if impl != "fused"]
    reductions, differences = [], []
    for c, impl in pairs:
        if (c, impl) != (chain, BASELINE) and {("saved_bytes", c, impl), ("saved_bytes", c, "fused")} <= set(table):
            before, after = table["saved_bytes", c, impl], table["saved_bytes", c, "fused"]
            reductions.append(f"{impl} {c} {100 * (1 - after / before):.1f}%")
            differences.append(f"{impl} {c} {before - after:.2f} GB")
    peaks = [
        f"{c} {table['peak', c, BASELINE]:.2f} to {table['peak', c, 'fused']:.2f} GB"
        for c in _IMPLS
        if {("peak", c, BASELINE), ("peak", c, "fused")} <= set(table)
    ]
    reduction, difference = 100 * (1 - fused / wan), wan - fused
    what = "saved by autograd in one modulated norm, Wan's formula against fused, bf16, B=1, N=64,000, D=5120"
    return [
        Evidence(
            "K3", reduction, reduction, reduction, "measured", wan, fused, f"{what}; fused against {_list(reductions)}"
        ),
        Evidence(
            "K4",
            difference,
            difference,
            difference,
            "measured",
            wan,
            fused,
            f"{what}; a block has two of them, and the paper's {PAPER_GB} GB are "
            f"{PAPER_GB / difference:.1f} of them; fused against {_list(differences)}; "
            f"peaks, wan to fused: {_list(peaks)}",
        ),
    ]


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: saved bytes and peaks by chain and implementation, with the paper's values; then all devices."""
    shown = {}
    for device, own in rows[rows["suite"] == NAME].groupby("device", sort=True):
        shown[str(device)] = own[own["dim"] == own["dim"].max()]
    return [*(_draw_device(device, own) for device, own in shown.items()), *_draw_devices(shown)]


def _seconds(chain: str, machine: Machine) -> float:
    if not machine.has_gpu:
        return 0.5
    return 6.0 if chain == "block" else 1.0


def _list(parts: list[str]) -> str:
    return ", ".join(parts) or "none measured"


def _draw_device(device: str, rows: pd.DataFrame) -> Figure:
    from repro.report import style

    smoke = bool((rows["profile"] == "smoke").all())
    saved = rows[rows["metric"] == "saved_bytes"]
    baseline = saved[saved["impl"] == BASELINE].set_index("chain")["value"]
    less = saved.assign(value=saved["chain"].map(baseline) - saved["value"])[saved["impl"] != BASELINE]
    unit, factor = ("MB", 1e3) if saved["value"].max() < 0.5 else ("GB", 1.0)
    claimed = all((rows[c] == CLAIMED[c]).all() for c in ("batch", "tokens", "dim"))
    reduction = rows[(rows["metric"] == "reduction") & (rows["impl"] != BASELINE)]
    peak = rows[rows["metric"] == "peak"]
    panels = [
        ("saved less, % of Wan's formula", reduction, ("paper: 61.9%", PAPER_REDUCTION)),
        (
            f"saved less than by Wan's formula, {unit}",
            less,
            ("paper: 4.8 GB", PAPER_GB) if claimed and not smoke else None,
        ),
        (f"saved for the backward, {unit}", saved, None),
    ]
    panels += [(f"peak of forward and backward, {unit}", peak, None)] if len(peak) else []
    lines = (len(_bars_of(less)), len(_bars_of(saved)))
    figure, axes = style.subplots(2, 2, 0.09 * sum(lines) + 0.75, sharey="row", height_ratios=lines)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (quantity, cell, paper) in zip(axes.flat, panels, strict=False):
        percent = "%" in quantity
        _bars(ax, cell.assign(value=cell["value"] * (1.0 if percent else factor)), "%.0f" if percent else "%.2f")
        ax.set_xlabel(quantity)
        if paper is not None:
            style.paper_value(ax, paper[1], paper[0], along="y")
    style.legend(figure, ["measured"], axes=axes[1], bars=True)
    shape = rows.iloc[0]
    caption = (
        f"Activation memory around the modulated norm on {device}: bf16, B={shape['batch']}, N={shape['tokens']:,}, "
        f"D={shape['dim']:,}, exact counts. op: alone; qkv: with the three linears behind it; official: the same with "
        "Wan's own float32 residual stream and autocast; block: a whole Wan block, two modulated norms in it. No "
        "weights counted."
    )
    return Figure(f"activation_memory-{device}", figure, caption + (" Smoke profile." if smoke else ""), CLAIMS)


def _draw_devices(shown: dict[str, pd.DataFrame]) -> list[Figure]:
    """The fused op's reduction on all devices."""
    import pandas as pd

    from repro.report import devices

    if len(shown) < 2:
        return []
    rows = pd.concat(shown.values(), ignore_index=True)
    rows = rows[(rows["metric"] == "reduction") & (rows["impl"] == "fused")]
    rows = rows.assign(row=rows["chain"]).sort_values("chain", key=lambda c: c.map(list(_IMPLS).index), kind="stable")
    quantity = "saved less by the fused op, % of Wan's formula"
    figure = devices.dots({quantity: rows}, {quantity: ("paper: 61.9%", PAPER_REDUCTION)})
    caption = "Activation memory that the fused op saves on each device: exact counts, the widest model measured there."
    return [Figure("activation_memory-devices", figure, caption, CLAIMS)]


def _bars_of(cell: pd.DataFrame) -> list[tuple[str, str]]:
    """(chain, impl) of each bar, from top to bottom."""
    from repro.report import style

    there = set(zip(cell["chain"], cell["impl"], strict=True))
    return [(c, i) for c in _IMPLS for i in style.ordered(list(cell["impl"])) if (c, i) in there]


def _bars(ax: Axes, cell: pd.DataFrame, form: str) -> None:
    """Horizontal bars in groups: one a chain, one bar an implementation."""
    from repro.report import style

    names = _bars_of(cell)
    values = cell.set_index(["chain", "impl"])["value"]
    gap, chains = 0.6, list(dict.fromkeys(c for c, _ in names))
    place = {name: i + gap * chains.index(name[0]) for i, name in enumerate(names)}
    for impl in style.ordered([i for _, i in names]):
        own = [n for n in names if n[1] == impl]
        bar = ax.barh([place[n] for n in own], values[own], 0.92, color=style.color(impl), label=style.label(impl))
        style.bar_values(ax, bar, form)
    middle = [np.mean([place[n] for n in names if n[0] == chain]) for chain in chains]
    ax.set_yticks(middle, chains)
    ax.set_ylim(max(place.values()) + 0.8, -0.8)
    ax.margins(x=0.22)
    ax.grid(axis="y", visible=False)
