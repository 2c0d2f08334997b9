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


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: bars of nodes and launches by implementation, the paper's 5 and 1 nodes marked."""
    from repro.report import style

    figures = []
    for device, own in rows[rows["suite"] == NAME].groupby("device", sort=True):
        full = own[own["profile"] == "full"]
        shown = own if full.empty else full
        metrics = [m for m in ("nodes", "launches_forward", "launches_backward") if (shown["metric"] == m).any()]
        figure, axes = style.subplots(1, len(metrics), size=(3.4, 3.0))
        for ax, metric in zip(axes[0], metrics, strict=True):
            counts = shown[shown["metric"] == metric].set_index("impl")["value"]
            impls = style.ordered(list(counts.index))
            bars = ax.bar(range(len(impls)), [counts[i] for i in impls], 0.7, color=[style.color(i) for i in impls])
            ax.bar_label(bars, fmt="%.0f")
            ax.set_xticks(range(len(impls)), impls)
            ax.grid(axis="x", visible=False)
            ax.set_title(metric.replace("nodes", "autograd nodes").replace("_", ", "))
            if metric == "nodes":
                style.paper_value(ax, 5, "paper: 5 to 8, fused 1")
                ax.set_ylim(0, max(6.0, 1.15 * counts.max()))
        caption = f"Autograd nodes and launches of one modulated norm on {device}, bf16 x with fp32 modulation."
        figures.append(Figure(f"graph_nodes-{device}", figure, caption, CLAIMS))
    return figures
