"""Share of the GPU's peak that whole steps of the trainer reach, and of what plain blocks reach in the same run.

A step of the trainer is one micro-batch of one clip of 480x832 and 81 frames (S = 32,760) on one GPU: the sample made,
embeddings, all blocks, head and loss, backward, clipping and AdamW, under FSDP with fp32 master weights and full
checkpointing; from an idle device to an idle device. The stack (`repro.measure.block_stack`) is as many bare blocks of
the same widths with bf16 weights, forward and backward alone, never compiled. So a share of 100% means that everything
around the blocks, update included, is free; compiled blocks may exceed it.

Columns: model, layers, adaln, blocks (eager; compiled: by Inductor), batch, tokens.
Metrics: step_time, stack_time (ms), share_of_block_stack (%, stack_time / step_time), hfu and mfu (% of the peak of
dense bf16 products, on GPUs whose peak is known: FLOPs of the blocks' linears and attention, 4 times the forward pass's
as executed with full checkpointing for hfu, 3 times, the model's own, for mfu), peak_memory (GB of 10^9 bytes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from repro.balance.models import MODELS
from repro.corpus.shapes import Shape, Tokenizer
from repro.measure.stats import exact, measured, median_interval, ratio_interval, seed_text
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _ranks

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "trainer_mfu"
CLAIMS: tuple[str, ...] = ()
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "adaln", "blocks", "batch", "tokens")

CLIP, SMOKE = Shape(81, 480, 832), Shape(9, 64, 96)
SUBJECTS = (("wan-1.3b", 30), ("wan-14b", 4))
"""Models and depths: all of the small one, and of the large one what fits beside its optimizer state."""
VARIANTS = (("fused", "eager"), ("fused", "compiled"), ("eager", "eager"))
REPEATS = 5


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Both models with each AdaLN and form of the blocks, on one GPU; on a CPU only the tiny model."""
    if profile == "smoke":
        grid = [("tiny", 2, "fused", "eager", SMOKE)]
    else:
        grid = [(m, n, a, b, CLIP) for a, b in VARIANTS for m, n in SUBJECTS] if machine.gpu_count == 1 else []
    return [
        Case(
            dict(zip(PARAMETERS, (model, layers, adaln, blocks, 1, Tokenizer().tokens(clip)), strict=True)),
            (80.0 if blocks == "compiled" else 40.0) if machine.has_gpu else 5.0,
        )
        for model, layers, adaln, blocks, clip in grid
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """The stack, then steps of the trainer, then their ratio and shares of the peak."""
    from repro.wan.peaks import peak_flops

    key = case.key
    size, layers, tokens = MODELS[str(key["model"])], int(key["layers"]), int(key["tokens"])
    clip = SMOKE if key["model"] == "tiny" else CLIP
    common = {name: key[name] for name in ("model", "layers", "adaln", "batch")} | {"repeats": REPEATS}
    what = f"{key['model']}, {layers} layers, {key['blocks']} blocks"
    stack = _ranks.ask(1, "repro.wan.probing:stack", {**common, "tokens": tokens}, case, machine, what)["seconds"]
    own = {"frames_height_width": [clip.frames, clip.height, clip.width], "compiled": key["blocks"] == "compiled"}
    found = _ranks.ask(1, "repro.wan.probing:steps", {**common, **own}, case, machine, what)
    step, seed = np.array(found["seconds"]), seed_text(NAME, key)
    interval = median_interval(step, seed)
    rows = [
        measured("step_time", "ms", interval.map(lambda s: 1e3 * s), 1e3 * step),
        measured("stack_time", "ms", median_interval(stack, seed).map(lambda s: 1e3 * s), 1e3 * np.array(stack)),
        measured("share_of_block_stack", "%", ratio_interval(stack, step, seed).map(lambda r: 100 * r)),
    ]
    peak = peak_flops(machine.name) if machine.has_gpu else None
    if peak is not None:
        flops = layers * float(size.forward_flops(int(key["batch"]), tokens))
        for metric, passes in (("hfu", 4), ("mfu", 3)):
            share = 100 * passes * flops / peak
            rows.append(measured(metric, "%", interval.map(share.__truediv__)))
    if found["peak_bytes"] >= 0:
        rows.append(exact("peak_memory", "GB", found["peak_bytes"] / 1e9))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """It answers no claim of the paper's."""
    return []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """Share of peak with recomputation counted, for each device, model and form of the blocks."""
    from repro.report import devices

    table = rows[rows["suite"] == NAME]
    known = table[table["metric"] == "hfu"][
        "device"
    ]  # of a CPU no peak is known, and a tiny model's share says nothing
    table = table[table["device"].isin(known)]
    if table.empty:
        return []
    table = table.assign(row=table["model"] + "\n" + table["adaln"] + ", " + table["blocks"])
    panels = {"hfu": "HFU, % of the GPU's peak", "share_of_block_stack": "% of the speed of the plain block stack"}
    figures = []
    for device, own in table.groupby("device", sort=True):
        shown = {name: own[own["metric"] == metric] for metric, name in panels.items()}
        caption = (
            f"Whole training steps (update included) on {device}, S = 32,760, full checkpointing: share of the peak "
            "with recomputation counted, and of the speed of bare blocks measured in the same run. Bars are 95% "
            "intervals."
        )
        figure = devices.dots({name: cells for name, cells in shown.items() if len(cells)})
        figures.append(Figure(f"trainer_mfu-{device}", figure, caption))
    if devices.several(table):
        shown = {name: table[table["metric"] == metric] for metric, name in panels.items()}
        figure = devices.dots({name: cells for name, cells in shown.items() if len(cells)})
        figures.append(Figure("trainer_mfu-devices", figure, "Whole training steps on each device, S = 32,760."))
    return figures
