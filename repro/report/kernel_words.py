"""What the README says of the kernels, counted from recorded rows: where `fused` takes the least device time.

Cells whose newest row of `fused` is of older kernels than another cell's are left out: they say nothing of today's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from repro.records import Store

if TYPE_CHECKING:
    import pandas as pd

START, END = "<!-- kernels: generated from results -->", "<!-- kernels: end -->"
SUITES = ("kernel_speed", "peers")
FORMS = {"per_sample": "per sample", "per_token": "per token"}
CELL = ["dtype", "batch", "tokens", "dim"]


def section(store: Store, device: str) -> str:
    """What stands between the README's markers; `device` is the one that decides the claims about kernels."""
    recorded = [store.rows(suite, device, "full") for suite in SUITES] if device else []
    tables = newest(recorded, store.runs(device) if device else [])
    told = [f"with modulation {name} {at}" for form, name in FORMS.items() if (at := _form(tables, form))]
    text = "nothing is recorded yet" if not told else "; ".join(told)
    beside, ever = _rivals(tables), _rivals(recorded)
    others = f" ({_names(beside)})" if told else ""
    older = f" Measured beside older kernels only: {_names(ever - beside)}." if ever - beside else ""
    return (
        f"{START}\nOf sizes and dtypes measured on {device or 'a GPU'} with the newest kernels recorded there, `fused` "
        f"takes the least device time of all implementations{others} {text}.{older}\n{END}"
    )


def newest(tables: Sequence[pd.DataFrame], runs: Sequence[Mapping[str, Any]]) -> list[pd.DataFrame]:
    """The tables, of `fused` those rows only whose kernels (`extension_hash` of the run) are the newest among them."""
    of_run = {str(run["run_id"]): run.get("extension_hash") for run in runs}
    ours = {str(r) for t in tables if len(t) for r in t.loc[t["impl"] == "fused", "run_id"]}
    kernels = of_run.get(max(ours)) if ours else None  # run ids begin with the time
    same = {run for run in ours if of_run.get(run) == kernels}
    return [t[(t["impl"] != "fused") | t["run_id"].astype(str).isin(same)] if len(t) else t for t in tables]


def beaten(rows: pd.DataFrame, form: str, direction: str) -> pd.Series:
    """Of each cell that has `fused` in one suite's rows, the implementation that takes less device time, or "fused"."""
    return _times(rows, form, direction).idxmin(axis=1)


def _times(rows: pd.DataFrame, form: str, direction: str) -> pd.DataFrame:
    """Device times of the cells that have `fused`; a column an implementation."""
    at = rows[(rows["metric"] == "time") & (rows["form"] == form) & (rows["pass"] == direction)]
    wide = at.pivot_table(index=CELL, columns="impl", values="value").drop(columns="stream", errors="ignore")
    return wide[wide["fused"].notna()] if "fused" in wide else wide.iloc[:0]


def _names(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(found))


def _rivals(tables: Sequence[pd.DataFrame]) -> set[str]:
    """What of others' `fused` was measured beside, in any cell."""
    found = (
        _times(rows, form, direction).dropna(axis=1, how="all").columns
        for rows, form, direction in product((t for t in tables if len(t)), FORMS, ("forward", "backward"))
    )
    return {str(name) for names in found for name in names} - {"fused", "dtile"}


def _form(tables: Sequence[pd.DataFrame], form: str) -> str:
    parts = [_direction(tables, form, direction) for direction in ("forward", "backward")]
    return " and ".join(p for p in parts if p)


def _direction(tables: Sequence[pd.DataFrame], form: str, direction: str) -> str:
    """`at 66 of 72 forward (elsewhere `compile`)`; empty where nothing was measured."""
    winners: dict[object, set[str]] = {}
    for rows in tables:
        for cell, winner in beaten(rows, form, direction).items() if len(rows) else ():
            winners.setdefault(cell, set()).add(str(winner))
    others = Counter(w for found in winners.values() for w in found - {"fused"})
    if not winners:
        return ""
    best = sum(found == {"fused"} for found in winners.values())
    elsewhere = ", ".join(f"`{name}`" for name, _ in others.most_common())
    return f"at {best} of {len(winners)} {direction}" + (f" (elsewhere {elsewhere})" if others else "")
