"""What the README says of the kernels, counted from recorded rows: where `fused` takes the least device time.

Rows of runs with older kernels than the newest are left out: of `fused` they say nothing of today's, and others' times
of another day, on another machine, are not to be compared with it.
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
DIRECTIONS = ("forward", "backward")


def section(store: Store, device: str) -> str:
    """What stands between the README's markers; `device` is the one that decides the claims about kernels."""
    recorded = [store.rows(suite, device, "full") for suite in SUITES] if device else []
    tables = newest(recorded, store.runs(device) if device else [])
    told = [at for form in FORMS if (at := _form(tables, form))]
    text = "; ".join(told) or "nothing is recorded yet"
    beside, ever = ({name for form in FORMS for name in _rivals(found, form)} for found in (tables, recorded))
    older = f" Measured beside older kernels only: {_names(ever - beside)}." if ever - beside else ""
    return (
        f"{START}\nOf sizes and dtypes measured on {device or 'a GPU'} with the newest kernels recorded there, `fused` "
        f"takes the least device time of the implementations measured beside it: {text}.{older}\n{END}"
    )


def newest(tables: Sequence[pd.DataFrame], runs: Sequence[Mapping[str, Any]]) -> list[pd.DataFrame]:
    """The tables, those rows only of whose runs the kernels (`extension_hash`) are the newest that `fused` has."""
    of_run = {str(run["run_id"]): run.get("extension_hash") for run in runs}
    ours = {str(r) for t in tables if len(t) for r in t.loc[t["impl"] == "fused", "run_id"]}
    kernels = of_run.get(max(ours)) if ours else None  # run ids begin with the time
    same = {run for run, found in of_run.items() if found == kernels} | ({max(ours)} if ours else set())
    return [t[t["run_id"].astype(str).isin(same)] if len(t) else t for t in tables]


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


def _rivals(tables: Sequence[pd.DataFrame], form: str) -> Counter[str]:
    """What of others' `fused` was measured beside, and in how many cells and passes."""
    beside: dict[object, set[str]] = {}
    for rows, direction in product((t for t in tables if len(t)), DIRECTIONS):
        for cell, times in _times(rows, form, direction).iterrows():
            beside.setdefault((cell, direction), set()).update(str(name) for name in times.dropna().index)
    return Counter(name for names in beside.values() for name in names - {"fused", "dtile"})


def _form(tables: Sequence[pd.DataFrame], form: str) -> str:
    """`with modulation per sample at 66 of 72 forward and ..., beside `eager` at 144, ...`; empty where nothing was."""
    parts = [p for direction in DIRECTIONS if (p := _direction(tables, form, direction))]
    found = _rivals(tables, form)
    beside = ", ".join(f"`{name}` at {count}" for name, count in sorted(found.items(), key=lambda at: (-at[1], at[0])))
    return f"with modulation {FORMS[form]} {' and '.join(parts)}, beside {beside}" if parts else ""


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
