"""Step times and memory of whole models as the trainer runs them (suite `shape_sweep`), where enough was measured.

One place decides what simulations stand on: the whole model where `find` finds it, else a few plain blocks
(`block_time`) scaled to the model's depth. The sweep has one AdaLN. What another one costs beside it comes from blocks
that were measured with both, so every AdaLN of a model stands on the same times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.balance.models import MODELS
from repro.names import unknown

if TYPE_CHECKING:
    import pandas as pd

SWEEP, BLOCKS = "shape_sweep", "block_time"
SUITES = (BLOCKS, SWEEP)
"""Suites whose rows costs and memory are fitted to."""
FEWEST_LENGTHS, FEWEST_SHAPES, FEWEST_COMMON = 5, 8, 3
"""Lengths and shapes below which no table is made; shapes measured as blocks with both of two AdaLNs."""


@dataclass(frozen=True)
class WholeModel:
    """A whole model's sweep.

    adaln: that it was measured with. ranks: GPUs that shared it. cells: a row a shape, sorted, columns batch, tokens
    (int), forward_backward (ms), peak_memory (GB, NaN where nothing counts it) and run_id.
    """

    adaln: str
    ranks: int
    cells: pd.DataFrame

    @property
    def source(self) -> str:
        """run_ids, separated by spaces."""
        return " ".join(sorted(set(self.cells["run_id"].astype(str))))

    @property
    def gpus(self) -> str:
        """How many shared it, in words."""
        return f"{self.ranks} GPU{'s' if self.ranks > 1 else ''}"


def require(rows: pd.DataFrame, model: str) -> None:
    """Raise ValueError for a model that is not in `repro.balance.models`, and where no rows are of SUITES."""
    if model not in MODELS:
        raise ValueError(unknown("model", model, MODELS))
    if "model" not in rows or not rows["suite"].isin(SUITES).any():  # an empty table has the fixed columns alone
        raise ValueError(
            f"no rows of {' or '.join(SUITES)}: check the folder of results and the device, or measure them "
            "(python -m repro.all --profile full --only block_time)"
        )


def find(rows: pd.DataFrame, model: str) -> WholeModel | None:
    """The sweep of `model` at its full depth, on the most ranks that it was measured on.

    None where it has too few shapes, or none that tell what eager AdaLN adds to the one that it was measured with.
    """
    own = rows[rows["suite"] == SWEEP]
    own = own[own["model"] == model]
    if own.empty:
        return None
    own = own[own["layers"].astype(int) == MODELS[model].layers]
    own = own[own["metric"].isin(["forward_backward", "peak_memory"])]
    if own.empty:
        return None
    own = own.astype({"batch": int, "tokens": int, "ranks": int})
    own = own[own["ranks"] == own["ranks"].max()]
    adaln = str(own["adaln"].iloc[-1])
    own = own[own["adaln"] == adaln]
    cells = own.pivot_table(index=["batch", "tokens", "run_id"], columns="metric", values="value").reset_index()
    cells = cells.reindex(columns=["batch", "tokens", "run_id", "forward_backward", "peak_memory"])
    cells = cells[cells["forward_backward"].notna()].drop_duplicates(["batch", "tokens"], keep="last")
    enough = (
        cells["tokens"].nunique() >= FEWEST_LENGTHS and len(cells) >= FEWEST_SHAPES and cells["batch"].nunique() > 1
    )
    if not enough or len(_shapes(rows, model, adaln) & _shapes(rows, model, "eager")) < FEWEST_COMMON:
        return None
    return WholeModel(adaln, int(own["ranks"].iloc[0]), cells.sort_values(["tokens", "batch"]))


def behind(rows: pd.DataFrame, model: str, source: str) -> WholeModel | None:
    """The whole model's sweep if a row stands on it, whose `source` this is; a row may be older than the sweep."""
    found = find(rows, model)
    return found if found is not None and set(found.source.split()) & set(source.split()) else None


def told(rows: pd.DataFrame, model: str, source: str) -> str:
    """For notes: on which step times of `model` a row stands, at full depth. source: the row's."""
    layers = MODELS[model].layers
    found = behind(rows, model, source)
    if found is None:
        return f"step times of measured blocks, scaled to {layers}"
    return f"step times of all {layers} blocks, measured under the trainer on {found.gpus} with {found.adaln} AdaLN"


def _shapes(rows: pd.DataFrame, model: str, adaln: str) -> set[tuple[int, int]]:
    """(batch, tokens) measured as blocks."""
    own = rows[(rows["suite"] == BLOCKS) & (rows["metric"] == "forward_backward")]
    own = own[(own["model"] == model) & (own["adaln"] == adaln)]
    return set(zip(own["batch"].astype(int).tolist(), own["tokens"].astype(int).tolist(), strict=True))
