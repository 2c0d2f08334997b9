"""How many tokens a micro-batch may hold: memory fitted to measured peaks, and what training keeps beside it.

With full activation checkpointing each of the L blocks leaves its input behind, and one block at a time has a working
set. Both are linear in tokens:

    bytes = fixed + B * S * (L * checkpoint + token) + B * sample

M_mem is that solved for B * S, in what parameters and optimizer state (`state_bytes`) leave of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from repro.balance import whole
from repro.balance.cost import Floats
from repro.balance.models import MODELS, ModelSize
from repro.balance.types import Sync

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 0.10
"""Share of the device left alone: CUDA context, NCCL's buffers, fragmentation of the allocator."""
_FEWEST = 4
"""Shapes below which nothing is fitted."""


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of activations of a micro-batch.

    checkpoint: a token and block, held until that block's backward. token: a token, for inputs, outputs and the working
    set of one block. sample: a sample, for its text. fixed: gradients of the measured blocks, workspaces.
    """

    checkpoint: float
    token: float
    sample: float
    fixed: float

    def bytes(self, batch: npt.ArrayLike, tokens: npt.ArrayLike, layers: int) -> Floats:
        """Peak bytes of activations of `batch` samples of `tokens` tokens (broadcast) in a model of `layers` blocks."""
        b, s = np.asarray(batch, np.float64), np.asarray(tokens, np.float64)
        return self.fixed + b * s * (layers * self.checkpoint + self.token) + b * self.sample

    def token_limit(self, available: float, layers: int, shortest: int) -> int:
        """M_mem: most tokens B * S that fit into `available` bytes, whatever the sample's length from `shortest` up.

        Short samples bring more text to the same tokens, so the shortest one decides. Raises ValueError where not even
        one sample of the shortest length fits.
        """
        per_token = layers * self.checkpoint + self.token + self.sample / shortest
        limit = int((available - self.fixed) / per_token)
        if limit < shortest:
            raise ValueError(
                f"{available / 1e9:.1f} GB hold {max(limit, 0):,} tokens in {layers} blocks, less than one sample of "
                f"{shortest:,}: use more ranks, a smaller model or a device with more memory"
            )
        return limit


@dataclass(frozen=True)
class MemoryFit:
    """A fitted memory model; residuals: float64 [M], fitted / measured - 1 of the peak without weights."""

    model: MemoryModel
    residuals: Floats
    source: str

    @property
    def mape(self) -> float:
        """Mean absolute percentage error."""
        return 100 * float(np.mean(np.abs(self.residuals)))


def fit_memory(rows: pd.DataFrame, model: str, adaln: str) -> MemoryFit:
    """Fit the memory of `model` with `adaln` to peaks of the whole model (`repro.balance.whole`), else of blocks.

    Raises ValueError as `whole.require`, `_of_whole_model` and `_of_blocks`.
    """
    whole.require(rows, model)
    found = whole.find(rows, model)
    fitted = None if found is None else _of_whole_model(rows, model, adaln, found)
    return _of_blocks(rows, model, adaln) if fitted is None else fitted


def _of_whole_model(rows: pd.DataFrame, model: str, adaln: str, found: whole.WholeModel) -> MemoryFit | None:
    """Fit to rows of suite `shape_sweep`, least squares on relative error; None where too few peaks are of activations.

    A sweep's peak is where the backward pass begins: parameters are there, gradients and moments not yet. Of short
    samples it is where that pass ends, with all gradients, and says nothing of them. Another AdaLN's working set is
    larger or smaller by what it is in blocks. Raises ValueError for fewer than three blocks measured with both.
    """
    size, cells = MODELS[model], found.cells.dropna(subset=["peak_memory"])
    sharded = 4 * size.parameters / found.ranks
    peak = 1e9 * cells["peak_memory"].to_numpy(float) - sharded - _gathered(size)
    long = peak > 1.15 * sharded
    if long.sum() < _FEWEST:
        return None
    batch, tokens, peak = (x[long] for x in (cells["batch"].to_numpy(float), cells["tokens"].to_numpy(float), peak))
    token, sample = _nnls([batch * tokens, batch], peak, scale=peak)
    residuals = (batch * tokens * token + batch * sample) / peak - 1
    more, runs = (0.0, set()) if adaln == found.adaln else _difference(rows, model, found.adaln, adaln)
    checkpoint = 2.0 * size.dim  # a block's input in bf16
    of_rest = max(0.0, token + more - size.layers * checkpoint)
    source = " ".join(sorted({*found.source.split(), *runs}))
    return MemoryFit(MemoryModel(checkpoint, of_rest, sample, 0.0), residuals, source)


def _difference(rows: pd.DataFrame, model: str, base: str, other: str) -> tuple[float, set[str]]:
    """Bytes a token that a block's peak is higher with another AdaLN, and the runs that say so."""
    table = _wide(rows, model)
    one, two = (table[table["adaln"] == adaln] for adaln in (base, other))
    both = one.merge(two, on=["layers", "batch", "tokens"], suffixes=("_base", "_other"))
    if len(both) < whole.FEWEST_COMMON:
        raise ValueError(f"memory of {model} needs three shapes measured with {base} and with {other}, got {len(both)}")
    n = (both["batch"] * both["tokens"]).to_numpy(float)
    more = (both["peak_other"] - both["peak_base"]).to_numpy(float)
    return float(n @ more / (n @ n)), {*both["run_id_base"], *both["run_id_other"]}


def _of_blocks(rows: pd.DataFrame, model: str, adaln: str) -> MemoryFit:
    """Fit to rows of suite `block_time`, least squares on relative error.

    The part that grows with depth comes from what is held between forward and backward, at every measured depth and
    AdaLN (checkpoints do not depend on it); the rest from this AdaLN's peaks.

    Raises ValueError where rows, or a second depth, are missing.
    """
    table = _wide(rows, model)
    if table["layers"].nunique() < 2:
        raise ValueError(f"memory of {model} must be measured at two depths, got {sorted(table['layers'].unique())}")
    n, batch = (table["batch"] * table["tokens"]).to_numpy(float), table["batch"].to_numpy(float)
    held = table["held"].to_numpy(float)
    checkpoint, inputs, text = _nnls([n * table["layers"].to_numpy(float), n, batch], held, scale=held)

    # Deeper stacks keep the gradients of more blocks; a sharded engine has given those away by then.
    own = (table["adaln"] == adaln).to_numpy() & (table["layers"] == table["layers"].min()).to_numpy()
    if own.sum() < _FEWEST:
        raise ValueError(f"memory of {model} needs at least four shapes with adaln {adaln!r}, got {own.sum()}")
    peak, held, n, batch = table["peak"].to_numpy(float)[own], held[own], n[own], batch[own]
    fixed, token, sample = _nnls([np.ones_like(n), n, batch], peak - held, scale=peak)
    fitted = MemoryModel(checkpoint, inputs + token, text + sample, fixed)
    estimate = fitted.bytes(batch, n / batch, int(table["layers"].min()))
    return MemoryFit(fitted, estimate / peak - 1, " ".join(sorted(set(table["run_id"].astype(str)))))


def state_bytes(model: ModelSize, ranks: int, sync: Sync) -> float:
    """Bytes a rank keeps beside activations: parameters, gradients and AdamW's state of `model` on `ranks` ranks.

    fp32 parameters and AdamW moments are sharded (12 bytes a parameter over all ranks). `micro_batch` (full sharding):
    fp32 gradients are sharded too, and two blocks are gathered in bf16 at a time, one computing, one prefetched.
    `step`: all parameters stay gathered in bf16 and gradients accumulate unsharded in fp32, since adding up bf16
    over micro-batches loses bits. Gradients of the block at work are part of `MemoryModel.fixed`.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    sharded = 12 * model.parameters / ranks
    if sync == "step":
        return sharded + (2 + 4) * model.parameters
    return sharded + 4 * model.parameters / ranks + _gathered(model)


def _gathered(model: ModelSize) -> float:
    """Bytes of two blocks in bf16."""
    return 2 * 2 * model.block_parameters


def memory_limit(
    fit: MemoryFit,
    model: ModelSize,
    device_bytes: float,
    ranks: int,
    sync: Sync,
    shortest: int,
    margin: float = MARGIN,
) -> int:
    """M_mem in tokens of `model` on devices of `device_bytes`, `margin` of which is left alone.

    Raises ValueError where the state alone does not fit, or not one sample of `shortest` tokens beside it.
    """
    state = state_bytes(model, ranks, sync)
    available = device_bytes * (1 - margin) - state
    if available <= 0:
        raise ValueError(
            f"{model.name} on {ranks} ranks keeps {state / 1e9:.1f} GB of parameters and optimizer state a rank "
            f"(sync={sync!r}), more than {1 - margin:.0%} of {device_bytes / 1e9:.1f} GB: use more ranks"
        )
    return fit.model.token_limit(available, model.layers, shortest)


def _nnls(columns: list[Floats], target: Floats, scale: Floats) -> list[float]:
    """Non-negative coefficients that minimise the squares of (columns @ x - target) / scale."""
    from scipy.optimize import nnls

    design = np.stack(columns, axis=1) / scale[:, None]
    size = np.abs(design).max(axis=0)  # columns of like size: bytes per token and bytes per block are far apart
    x, _ = nnls(design / size, target / scale)
    return [float(v) for v in x / size]


def _wide(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """One line a measured shape: layers, adaln, batch, tokens, run_id; held and peak in bytes, weights left out."""
    metrics = {"static_memory": "static", "held_memory": "held", "peak_memory": "peak"}
    table = rows[(rows["suite"] == "block_time") & (rows["model"] == model) & rows["metric"].isin(metrics)]
    if table.empty:
        raise ValueError(f"no memory rows of model {model!r}: they are measured on a GPU, by suite block_time")
    table = table.assign(**{c: table[c].astype(int) for c in ("layers", "batch", "tokens")})
    keys = ["layers", "adaln", "batch", "tokens", "run_id"]
    wide = table.pivot(index=keys, columns="metric", values="value").rename(columns=metrics).dropna().reset_index()
    return wide.assign(held=wide["held"] * 1e9, peak=(wide["peak"] - wide["static"]) * 1e9)
