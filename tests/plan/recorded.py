"""A results folder as a sweep would leave it, filled from a reference formula: tests plan on it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from repro.records import files
from repro.records.schema import records
from repro.suite import Case, Measurement

RUN = "20260101T000000.000000Z-0000"
SWEEP_PARAMETERS = ("model", "layers", "adaln", "ranks", "sync", "shape", "batch", "tokens")
MEMORY_BYTES = 141_000_000_000
SHAPES = [
    (batch, tokens)
    for tokens in (256, 512, 1_024, 1_560, 3_600, 7_800, 14_040, 20_280, 32_760, 46_800, 65_536, 75_600)
    for batch in sorted({1, 2, max(1, 48_000 // tokens), max(1, 72_000 // tokens)})
]


def milliseconds(batch: int, tokens: int, layers: int) -> float:
    """14B-wide blocks on one H200 (measured there): 5.7 + 127.6 B S / 1e4 + 47.75 B S^2 / 1e8 for three blocks."""
    return layers / 3 * (5.7 + 127.6 * batch * tokens / 1e4 + 47.75 * batch * tokens**2 / 1e8)


def write(results: Path, device: str = "nvidia-h200", noise: float = 0.03, memory: bool = True) -> Path:
    """Rows of suite block_time: noisy reference times; memory linear in tokens, 45 kB a token and block."""
    rng = np.random.default_rng(0)
    rows = []
    for layers, shapes in ((2, SHAPES), (6, SHAPES[:6])):
        for batch, tokens in shapes:
            key = {"model": "wan-14b", "layers": layers, "adaln": "eager", "batch": batch, "tokens": tokens}
            time = milliseconds(batch, tokens, layers) * float(np.exp(noise * rng.standard_normal()))
            metrics = {"forward_backward": ("ms", time)}
            if memory:
                held = batch * tokens * (layers * 10_240 + 20_000) / 1e9
                static = layers * 2.8
                metrics |= {
                    "static_memory": ("GB", static),
                    "held_memory": ("GB", held),
                    "peak_memory": ("GB", static + held + 0.5 + batch * tokens * 300_000 / 1e9),
                }
            measured = [Measurement(m, unit, v, v, v, 5) for m, (unit, v) in metrics.items()]
            rows += records(RUN, "block_time", "full", Case(key), measured)
    folder = results / device
    folder.mkdir(parents=True)
    files.append_rows(folder / "block_time.csv", ("model", "layers", "adaln", "batch", "tokens"), rows)
    record = {"schema": 1, "run_id": RUN, "device": device, "machine": {"memory_bytes": MEMORY_BYTES}}
    (folder / "runs.jsonl").write_text(json.dumps(record) + "\n")
    return results


def sweep(results: Path, slower: float, device: str = "nvidia-h200") -> Path:
    """Adds rows of suite shape_sweep: the whole 14B model, `slower` times what its blocks take."""
    rows = []
    for batch, tokens in SHAPES:
        key = {"model": "wan-14b", "layers": 40, "adaln": "eager", "ranks": 1, "sync": "micro_batch", "shape": "1x1x1"}
        time = slower * milliseconds(batch, tokens, 40)
        measured = [Measurement("forward_backward", "ms", time, time, time, 5)]
        rows += records(RUN, "shape_sweep", "full", Case({**key, "batch": batch, "tokens": tokens}), measured)
    files.append_rows(results / device / "shape_sweep.csv", SWEEP_PARAMETERS, rows)
    return results
