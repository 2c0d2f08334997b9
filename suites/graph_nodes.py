"""What the op chain costs the framework: nodes in the autograd graph, launches on the device.

Columns: impl, form, dtype, batch, tokens, dim as in every kernel suite. Inputs arrive as in a Wan block: x in `dtype`,
shift and scale float32, strided [B, 1, D].

Metrics: nodes (autograd nodes between y and the leaves, gradient accumulators left out), launches_forward and
launches_backward (kernels, copies and fills of one call; CUDA only: a CPU launches nothing). All are exact counts.
Two of `compile`'s nodes are the views that `repro.adaln.get_impl` takes of shift and scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.measure.stats import exact
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "graph_nodes"
CLAIMS = ("K5",)
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("impl", "form", "dtype", "batch", "tokens", "dim")

BASELINE = "wan"
"""The chain that K5 is judged on; the textbook chain stands in the note."""
PAPER_NODES = (5, 8)
"""AdaptiveLoad (arXiv 2605.17923): the chain's 5 to 8 nodes become 1."""
IMPLS = ("wan", "eager", "compile", "fused", "dtile")


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Every implementation at one shape: counts do not depend on it."""
    tokens, dim = (4_096, 5_120) if profile == "full" and machine.has_gpu else (64, 96)
    return [
        Case(
            dict(zip(PARAMETERS, (impl, "per_sample", "bf16", 1, tokens, dim), strict=True)),
            5.0 if impl == "compile" else 0.3,
        )
        for impl in IMPLS
        # Inductor on a CPU needs a C++ compiler, and longer than a smoke run should take; dtile differs on CUDA only.
        if impl not in ("compile", "dtile") or (machine.has_gpu and (profile == "full" or impl == "dtile"))
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Count nodes, and on CUDA launches. Raises CaseSkipped where the compiled kernels are missing."""
    import torch

    from repro.adaln import build
    from repro.measure import activations, autograd_graph, norm_modulate, timing

    impl, batch, tokens, dim = (case.key[k] for k in ("impl", "batch", "tokens", "dim"))
    if impl in norm_modulate.OWN and machine.has_gpu and not build.ensure_loaded():
        raise CaseSkipped(f"the CUDA kernels are not there: {build.failure()}")
    device = torch.device("cuda" if machine.has_gpu else "cpu")
    with timing.work_stream(device), norm_modulate.retained_graphs():
        chain = activations.make_chain("op", str(impl), int(batch), int(tokens), int(dim), torch.bfloat16, device)
        y = chain.forward()
        rows = [exact("nodes", "nodes", len(autograd_graph.nodes(y)))]
        if device.type == "cuda":
            dy = [torch.randn_like(out) for out in y]
            rows += [
                exact("launches_forward", "launches", autograd_graph.launches(chain.forward, device)),
                exact(
                    "launches_backward",
                    "launches",
                    autograd_graph.launches(
                        lambda: torch.autograd.grad(y, chain.leaves, dy, retain_graph=True), device
                    ),
                ),
            ]
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """K5: nodes of Wan's chain over those of the fused op."""
    rows = rows[rows["suite"] == NAME]
    table = {
        m: cell.drop_duplicates("impl", keep="last").set_index("impl")["value"] for m, cell in rows.groupby("metric")
    }
    nodes = table.get("nodes")
    if nodes is None or not {BASELINE, "fused"} <= set(nodes.index):
        return []
    chain, fused = float(nodes[BASELINE]), float(nodes["fused"])
    told = [f"{impl} {nodes[impl]:.0f}" for impl in IMPLS if impl in nodes and impl not in (BASELINE, "fused")]
    note = "Wan's formula on bf16 x with fp32 modulation, gradient accumulators not counted; others: " + ", ".join(told)
    for metric, name in (("launches_forward", "launches forward"), ("launches_backward", "backward")):
        if metric in table:
            counts = [f"{impl} {table[metric][impl]:.0f}" for impl in IMPLS if impl in table[metric]]
            note += f"; {name}: {', '.join(counts)}"
    ratio = chain / fused
    return [Evidence("K5", ratio, ratio, ratio, "measured", chain, fused, note)]


_COUNTED = {
    "nodes": "autograd nodes",
    "launches_forward": "launches, forward",
    "launches_backward": "launches, backward",
}


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: bars of nodes and launches by implementation, the paper's 5 to 8 nodes marked; then all."""
    rows = rows[rows["suite"] == NAME]
    figures = [_draw_device(str(device), own) for device, own in rows.groupby("device", sort=True)]
    return figures + _draw_devices(rows)


def _draw_device(device: str, rows: pd.DataFrame) -> Figure:
    from repro.report import style

    metrics = [m for m in _COUNTED if (rows["metric"] == m).any()]
    impls = style.ordered(list(rows["impl"]))
    figure, axes = style.subplots(1, len(metrics), 0.24 * len(impls) + 1.1, sharey=True)
    for ax, metric in zip(axes[0], metrics, strict=True):
        counts = rows[rows["metric"] == metric].set_index("impl")["value"].reindex(impls)
        bars = ax.barh(range(len(impls)), counts, 0.75, color=[style.color(i) for i in impls])
        style.bar_values(ax, bars, "%.0f")
        ax.set_yticks(range(len(impls)), [style.label(i) for i in impls])
        ax.margins(x=0.15)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(_COUNTED[metric])
        ax.xaxis.get_major_locator().set_params(integer=True)
        if metric == "nodes":
            ax.axvspan(*PAPER_NODES, color="#E6E6E6", zorder=0.5)
            style.paper_value(ax, PAPER_NODES[0], "paper: 5 to 8, then 1", along="y")
    axes[0, 0].invert_yaxis()
    style.legend(figure, ["measured"], axes=[], bars=True)
    caption = (
        f"Autograd nodes and launches of one modulated norm on {device}, bf16 x with fp32 modulation; exact counts."
    )
    return Figure(f"graph_nodes-{device}", figure, caption, CLAIMS)


def _draw_devices(rows: pd.DataFrame) -> list[Figure]:
    """Nodes on all devices; they depend on the framework, not on the device, and this shows it."""
    from repro.report import devices, style

    rows = rows[rows["metric"] == "nodes"]
    if not devices.several(rows):
        return []
    order = style.ordered(list(rows["impl"]))
    rows = rows.assign(row=rows["impl"].map(style.label)).sort_values("impl", key=lambda i: i.map(order.index))
    figure = devices.dots({"autograd nodes": rows}, {"autograd nodes": ("paper: 5 to 8, then 1", PAPER_NODES[0])})
    return [Figure("graph_nodes-devices", figure, "Autograd nodes of one modulated norm on each device.", CLAIMS)]
