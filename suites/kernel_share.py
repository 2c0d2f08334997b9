"""Where the time of a training step goes, with every AdaLN: what the fused op is worth to a whole step.

Whole steps of the trainer on one GPU (sample made, forward, backward, clipping, AdamW), one micro-batch each. AdaLN's
time is taken by marks around every call, in the forward pass, the recomputation and the backward pass; kernels are told
apart by name, under the profiler. LAYERS of the models' blocks: AdaLN's share hardly depends on how many there are.

Columns: model, layers, adaln, checkpointing (of `repro.wan.parallel.Parallelism`), batch, tokens (of one sample).
Metrics: step_time (ms), norm_modulate_time (ms, in a step with marks), norm_modulate_share (% of that step); on GPUs
peak_memory (GB) and, where the profiler sees kernels, attention_time, matmul_time, communication_time, copy_time and
other_time (ms, of kernels on any stream; other holds AdaLN's, whatever is elementwise, and the update).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance.models import MODELS
from repro.corpus.shapes import Shape, Tokenizer
from repro.measure.stats import Interval, exact, measured, median_interval, ratio_interval, seed_text
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _ranks

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "kernel_share"
CLAIMS = ("T6",)
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "adaln", "checkpointing", "batch", "tokens")

ADALNS = ("fused", "eager", "wan")
LAYERS = {"wan-1.3b": 6, "wan-14b": 2, "tiny": 1}
BUDGET = 48_000
LENGTHS = {1560: Shape(1, 480, 832), 7800: Shape(17, 480, 832), 14040: Shape(33, 480, 832), 46800: Shape(49, 720, 1280)}
FULL = (1560, 14040, 46800)
"""Lengths measured in micro-batches that fill the baseline's token budget: those of equal-token steps."""
SMOKE = Shape(5, 64, 64)
REPEATS = 4

Cell = tuple[str, str, int, Shape]
"""Model, checkpointing, batch, shape."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Each AdaLN with its engine kept from shape to shape; the small model first. On one GPU."""
    if profile == "smoke":
        found = [(a, ("tiny", "full", 2, SMOKE)) for a in ("fused", "eager")]
    elif machine.gpu_count == 1:
        found = [(a, c) for model in ("wan-1.3b", "wan-14b") for a in ADALNS for c in _grid(model, a)]
        found.sort(key=lambda cell: (cell[1][0] != "wan-1.3b", cell[1][1] != "full"))
    else:
        return []
    result = []
    engines: set[tuple[str, str, str]] = set()
    for adaln, (model, checkpointing, batch, shape) in found:
        tokens = Tokenizer().tokens(shape)
        key = (model, LAYERS[model], adaln, checkpointing, batch, tokens)
        begins = 0.0 if (adaln, model, checkpointing) in engines else 3.0 if engines else 15.0  # at first a rank too
        engines.add((adaln, model, checkpointing))
        once = 4 * LAYERS[model] * float(MODELS[model].forward_flops(batch, tokens)) / 430e12
        seconds = (
            round(begins + 1.0 + 9 * (once + 0.05), 1) if machine.has_gpu else 4.0
        )  # 9 steps, marked ones included
        result.append(Case(dict(zip(PARAMETERS, key, strict=True)), seconds))
    return result


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Steps of one shape, without marks and with them."""
    key = case.key
    shape = SMOKE if key["model"] == "tiny" else LENGTHS[int(key["tokens"])]
    asked: dict[str, Any] = {name: key[name] for name in ("model", "layers", "adaln", "checkpointing", "batch")}
    asked |= {"frames_height_width": [shape.frames, shape.height, shape.width], "repeats": REPEATS}
    what = f"{key['model']}, {key['layers']} layers, {key['tokens']} tokens"
    found = _ranks.ask(1, "repro.wan.probing_parts:parts", asked, case, machine, what)
    step, inside, marked = (1e3 * np.array(found[n]) for n in ("seconds", "norm_modulate", "marked"))
    seed = seed_text(NAME, key)
    rows = [
        measured("step_time", "ms", median_interval(step, seed), step),
        measured("norm_modulate_time", "ms", median_interval(inside, seed), inside),
        measured("norm_modulate_share", "%", ratio_interval(inside, marked, seed).map(lambda r: 100 * r)),
    ]
    rows += [exact(f"{name}_time", "ms", 1e3 * value) for name, value in sorted(found["kernels"].items())]
    if found["peak_bytes"] >= 0:
        rows.append(exact("peak_memory", "GB", found["peak_bytes"] / 1e9))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T6 from the steps of an equal-token mix: as many of each length, at the baseline's token budget."""
    own = rows[(rows["suite"] == NAME) & (rows["checkpointing"] == "full")]
    found = {(m, other): gain(own, m, other) for m in ("wan-1.3b", "wan-14b") for other in ("eager", "wan")}
    decides = found["wan-1.3b", "eager"]
    if decides is None:
        return []
    told = "; ".join(f"{m} over {a}: {_percent(g)}" for (m, a), g in found.items() if g is not None)
    each = ", ".join(f"S = {s:,}: {_percent(gain(own, 'wan-1.3b', 'eager', (s,)))}" for s in FULL)
    note = (
        f"whole steps of {LAYERS['wan-1.3b']} blocks on one GPU, update included, {BUDGET:,} tokens a micro-batch, as "
        f"many steps of each length ({', '.join(f'{s:,}' for s in FULL)} tokens). {told}. {each}. {_share(own)}"
    )
    return [Evidence("T6", decides.value, decides.low, decides.high, "measured", note=note)]


def gain(own: pd.DataFrame, model: str, other: str, lengths: tuple[int, ...] = FULL) -> Interval | None:
    """By how many % more tokens a second `fused` takes than `other` over these lengths; None where one is missing.

    Ends are those of the worst case: the steps of one side at their longest, of the other at their shortest.
    """
    wanted = [s for s in lengths if model == "wan-1.3b" or s != FULL[1]]
    sums = []
    for adaln in (other, "fused"):
        at = own[(own["model"] == model) & (own["adaln"] == adaln) & (own["metric"] == "step_time")]
        at = at[at["tokens"].isin(wanted) & (at["batch"] == np.maximum(1, BUDGET // at["tokens"].astype(int)))]
        if len(at) != len(wanted):
            return None
        sums.append([float(at[c].sum()) for c in ("value", "ci_low", "ci_high")])
    (before, before_low, before_high), (after, after_low, after_high) = sums
    ends = before_low / after_high, before_high / after_low
    return Interval(100 * (before / after - 1), 100 * (ends[0] - 1), 100 * (ends[1] - 1), len(wanted))


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device AdaLN's share of a step and the fused op's gain against length; then the gain on all devices."""
    from suites import _share_figures

    return _share_figures.draw(rows[(rows["suite"] == NAME) & (rows["model"] != "tiny")], gain, FULL, BUDGET)


def tell(rows: pd.DataFrame) -> dict[str, str]:
    """Section `fused-steps`: steps and peak memory under fused and eager, cell by cell."""
    from suites import _share_figures

    return {"fused-steps": _share_figures.steps_table(rows)}


def _grid(model: str, adaln: str) -> list[Cell]:
    """Wan's own formula has the three lengths of the small model alone."""
    if model == "wan-14b":
        return [(model, "full", BUDGET // s, LENGTHS[s]) for s in (FULL[0], FULL[-1]) if adaln != "wan"]
    full = [(model, "full", BUDGET // s, LENGTHS[s]) for s in FULL]
    # Without recomputation activations of every block are kept, AdaLN's too.
    rest = [(model, "full", 1, LENGTHS[7800]), (model, "none", 2, LENGTHS[7800])]
    return full if adaln == "wan" else full + rest


def _percent(found: Interval | None) -> str:
    return "unknown" if found is None else f"{found.value:+.1f}%"


def _share(own: pd.DataFrame) -> str:
    at = own[(own["model"] == "wan-1.3b") & (own["metric"] == "norm_modulate_share")]
    told = []
    for adaln in ADALNS:
        values = [at[(at["adaln"] == adaln) & (at["tokens"] == s)]["value"] for s in (FULL[0], FULL[-1])]
        if all(len(v) for v in values):
            told.append(f"{adaln} {float(values[0].iloc[-1]):.1f}% and {float(values[1].iloc[-1]):.1f}%")
    ends = f"{FULL[0]:,} and {FULL[-1]:,}"
    return f"AdaLN's share of a step at S = {ends}: " + ("; ".join(told) or "unknown")
