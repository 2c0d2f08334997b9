"""How a plan looks: the batch table, the gains, the picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from repro.plan_gains import BASELINE
from repro.planner import Plan
from repro.records import files


def batch_table(plan: Plan) -> Table:
    """A line a bucket: tokens, clips, and "B  seconds" of a full micro-batch; rules of equal B share a column."""
    corpus = plan.corpus
    table = Table(title="Samples a micro-batch (B) and its predicted seconds", title_justify="left", box=None)
    for header in ("bucket", "tokens", "clips"):
        table.add_column(header, justify="left" if header == "bucket" else "right", no_wrap=True, vertical="bottom")
    columns = _columns(plan)
    for names in columns:
        table.add_column("\n".join(names), justify="right", vertical="bottom")
    table.add_column("pinned\nat 1 by", vertical="bottom")
    pinned = plan.pinned
    for k, shape in enumerate(corpus.shapes):
        cells = []
        for names in columns:
            b = plan.buckets[names[0]]
            cells.append(f"{b.batch[k]:,} {b.seconds[k]:7.2f}")
        table.add_row(str(shape), f"{corpus.tokens[k]:,}", f"{corpus.counts[k]:,}", *cells, pinned[k])
    return table


def _columns(plan: Plan) -> list[list[str]]:
    """Policies grouped by identical batch sizes, in their order."""
    groups: dict[bytes, list[str]] = {}
    for name, b in plan.buckets.items():
        groups.setdefault(b.batch.tobytes(), []).append(name)
    return list(groups.values())


def gain_table(plan: Plan) -> Table:
    """A line a policy: throughput, gain with its interval and a bar, balance, mix, memory."""
    table = Table(title="Expected throughput (simulated)", title_justify="left", box=None)
    for header in (
        "policy",
        "samples/s",
        "gain",
        "95% interval",
        "",
        "of perfect",
        "rank CV",
        "mix distance",
        "memory",
    ):
        table.add_column(header, justify="left" if header in ("policy", "") else "right", no_wrap=True)
    low = min(0.0, *(g.gain for g in plan.gains))
    size = max(0.01, *(g.gain for g in plan.gains)) - low
    for g in plan.gains:
        first, last = sorted((-low, g.gain - low))
        baseline = g.policy == BASELINE
        table.add_row(
            g.policy,
            f"{g.samples_per_s:.3g}",
            "baseline" if baseline else f"{g.gain:+.1%}",
            "" if baseline else f"{g.low:+.1%} to {g.high:+.1%}",
            Bar(size, first, last, width=16, color="green" if g.gain >= 0 else "red"),
            f"{g.share_of_perfect:.1%}",
            f"{g.rank_cv:.1%}",
            f"{g.mix_distance:.2f}",
            f"{g.memory_use:.0%}",
        )
    return table


def facts(plan: Plan) -> list[str]:
    """What the figures rest on, and what was assumed."""
    setup, costs = plan.setup, plan.costs
    hidden = "hidden under compute" if setup.bandwidth is None else f"at {setup.bandwidth / 1e9:g} GB/s"
    where = "in every micro-batch (full sharding)" if setup.sync == "micro_batch" else "once a step"
    return [
        f"{setup.model.name}, {setup.adaln} AdaLN, {setup.ranks} ranks of {setup.device} with "
        f"{setup.memory_bytes / 1e9:.0f} GB; M_mem {plan.limits.m_mem:,} tokens, p {plan.limits.p:.2f}, "
        f"longest micro-batch {plan.target_seconds:.2f} s.",
        f"Ranks meet {where}. Every policy has the samples a step that {setup.micro_batches} micro-batch(es) of M_mem "
        f"tokens a rank give; {BASELINE} fills {setup.token_budget or plan.limits.m_mem:,} tokens; communication "
        f"{hidden}.",
        f"Measured on {setup.device}: {costs.told}; the fit is {costs.held_out_mape:.1f}% off at lengths held out. "
        f"Intervals: that error, and which samples an epoch draws ({plan.simulated_samples:,} simulated).",
        "Mix distance: 0 where every step has the corpus' mix, 1 where it has none of it; a step of a same-bucket "
        "policy (quadratic_budget is one) trains on one bucket, which is the price of its balance.",
    ]


def show(plan: Plan, console: Console, lines: Iterable[str], warnings: Iterable[str]) -> None:
    """Print everything: report of the clips, tables, facts, warnings."""
    for line in lines:
        console.print(Text(line))
    console.print(batch_table(plan))
    console.print()
    console.print(gain_table(plan))
    console.print()
    for line in facts(plan):
        console.print(Text(line, style="dim"))
    for line in warnings:
        console.print(Text(f"warning: {line}", style="yellow"))


def draw(plan: Plan, path: Path) -> None:
    """Save the picture: time of full micro-batches against tokens, and the gains. The suffix decides the format."""
    from repro.report import style
    from repro.report.draw import picture

    with style.context():
        figure, axes = style.subplots(2, 1, 2.7)
        left, right = axes[:, 0]
        tokens = plan.corpus.tokens
        for names in _columns(plan):
            style.series(left, tokens, plan.buckets[names[0]].seconds, names[0], kind="simulated", label=_joined(names))
        left.axhline(plan.target_seconds, color=style.GREY, linewidth=0.8)
        left.set(
            ylabel="seconds of a full micro-batch",
            title=f"{plan.corpus.name}: {plan.setup.model.name} on {plan.setup.ranks} x {plan.setup.device}",
            ylim=(0, None),
        )
        style.token_axis(left, tokens, "tokens of one sample, S")

        gains = [g for g in plan.gains if g.policy != BASELINE][::-1]
        at = np.arange(len(gains))
        value = np.array([100 * g.gain for g in gains])
        error = np.array([[100 * (g.gain - g.low), 100 * (g.high - g.gain)] for g in gains]).T
        colors = [style.color(g.policy) for g in gains]
        right.barh(at, value, xerr=error, color="white", edgecolor=colors, hatch=style.HATCH, ecolor=style.GREY)
        right.axvline(0, color=style.BLACK, linewidth=0.8)
        right.set_yticks(at, [style.label(g.policy) for g in gains])
        right.set(xlabel=f"samples/s over {style.label(BASELINE)}, %", title="What each policy gains")
        style.legend(figure, ["simulated"])
        content = picture(figure, path.suffix.lower().lstrip("."))
    files.replace(path, content)


def _joined(names: list[str]) -> str:
    return ", ".join(n.replace("_", " ") for n in names[:2]) + (f" +{len(names) - 2}" if len(names) > 2 else "")
