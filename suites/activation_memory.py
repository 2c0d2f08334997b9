"""How much activation memory the fused op saves: bytes that autograd keeps, counted exactly, and peaks.

Columns: impl and form as in every kernel suite; chain (op: the op alone; qkv: with the three linears behind it;
official: the same as Wan's own code runs it; block: a whole Wan block; see `repro.measure.activations`), dtype, batch,
tokens, dim. Inputs arrive as in a Wan block: modulation in float32.

Metrics: saved_bytes (GB of 10^9 bytes kept from the forward for the backward, weights left out), reduction (% less than
with Wan's formula in the same chain), peak (GB, forward and backward, above inputs and weights; CUDA only). All are
exact: intervals are the values themselves.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

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
    """For each device: bars of saved bytes and of peaks by chain and implementation, with the paper's values."""
    figures = []
    for device, own in rows[rows["suite"] == NAME].groupby("device", sort=True):
        full = own[own["profile"] == "full"]
        shown = own if full.empty else full
        shown = shown[shown["dim"] == shown["dim"].max()]
        figures.append(_draw_device(str(device), shown, smoke=full.empty))
    return figures


def _seconds(chain: str, machine: Machine) -> float:
    if not machine.has_gpu:
        return 0.5
    return 6.0 if chain == "block" else 1.0


def _list(parts: list[str]) -> str:
    return ", ".join(parts) or "none measured"


def _draw_device(device: str, rows: pd.DataFrame, smoke: bool) -> Figure:
    from repro.report import style

    saved = rows[rows["metric"] == "saved_bytes"]
    baseline = saved[saved["impl"] == BASELINE].set_index("chain")["value"]
    less = saved.assign(value=saved["chain"].map(baseline) - saved["value"])
    panels = {
        "kept for the backward": saved,
        "kept less than with Wan's formula": less,
        "kept less, %": rows[rows["metric"] == "reduction"],
        "peak, forward and backward": rows[rows["metric"] == "peak"],
    }
    panels = {title: cell for title, cell in panels.items() if len(cell)}
    unit, factor = ("MB", 1e3) if smoke else ("GB", 1.0)
    figure, axes = style.subplots(2, (len(panels) + 1) // 2, size=(4.8, 2.9))
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (title, cell) in zip(axes.flat, panels.items(), strict=False):
        percent = title.endswith("%")
        if cell is not saved and "peak" not in title:
            cell = cell[cell["impl"] != BASELINE]
        _bars(ax, cell.assign(value=cell["value"] * (1.0 if percent else factor)), "%.0f" if percent else "%.2f")
        ax.set(title=title, ylabel="%" if percent else unit)
        if percent:
            style.paper_value(ax, PAPER_REDUCTION, f"paper: {PAPER_REDUCTION}%")
            ax.set_ylim(0, 100)
        elif cell is not saved and "less" in title and not smoke:
            style.paper_value(ax, PAPER_GB, f"paper: {PAPER_GB} GB")
    handles = {t: h for ax in figure.axes for h, t in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=len(handles))
    shape = rows.iloc[0]
    caption = (
        f"Activation memory around the modulated norm on {device}: bf16, B={shape['batch']}, N={shape['tokens']:,}, "
        f"D={shape['dim']:,}. op: alone; qkv: with the three linears behind it; official: the same with Wan's own "
        "float32 residual stream and autocast; block: a whole Wan block, two modulated norms in it. No weights counted."
    )
    return Figure(f"activation_memory-{device}", figure, caption + (" Smoke profile." if smoke else ""), CLAIMS)


def _bars(ax: Axes, cell: pd.DataFrame, form: str) -> None:
    """Groups of bars: one a chain, one bar an implementation."""
    from repro.report import style

    chains = [c for c in _IMPLS if (cell["chain"] == c).any()]
    impls = style.ordered(list(cell["impl"]))
    width = 0.8 / max(len(impls), 1)
    for (i, impl), (j, chain) in product(enumerate(impls), enumerate(chains)):
        value = cell[(cell["impl"] == impl) & (cell["chain"] == chain)]["value"]
        if len(value):
            position = j + (i - (len(impls) - 1) / 2) * width
            bar = ax.bar(position, value.iloc[0], 0.92 * width, color=style.color(impl), label=style.label(impl))
            ax.bar_label(bar, fmt=form, fontsize=6)
    ax.set_xticks(range(len(chains)), chains)
    ax.grid(axis="x", visible=False)
