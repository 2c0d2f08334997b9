"""What the README says of the kernels, counted from recorded rows: where `fused` takes the least device time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from repro.records import Store

if TYPE_CHECKING:
    import pandas as pd

START, END = "<!-- kernels: generated from results -->", "<!-- kernels: end -->"
SUITES = ("kernel_speed", "peers")
FORMS = {"per_sample": "per sample", "per_token": "per token"}
CELL = ["dtype", "batch", "tokens", "dim"]


def section(store: Store, device: str) -> str:
    """What stands between the README's markers; `device` is the one that decides the claims about kernels."""
    told = [f"with modulation {name} {at}" for form, name in FORMS.items() if (at := _form(store, device, form))]
    text = "nothing is recorded yet" if not told else "; ".join(told)
    return (
        f"{START}\nOf sizes and dtypes measured on {device or 'a GPU'}, `fused` takes the least device time of all "
        f"implementations {text}.\n{END}"
    )


def beaten(rows: pd.DataFrame, form: str, direction: str) -> pd.Series:
    """Of each cell that has `fused` in one suite's rows, the implementation that takes less device time, or "fused"."""
    at = rows[(rows["metric"] == "time") & (rows["form"] == form) & (rows["pass"] == direction)]
    wide = at.pivot_table(index=CELL, columns="impl", values="value").drop(columns="stream", errors="ignore")
    wide = wide[wide["fused"].notna()] if "fused" in wide else wide.iloc[:0]
    return wide.idxmin(axis=1)


def _form(store: Store, device: str, form: str) -> str:
    parts = [_direction(store, device, form, direction) for direction in ("forward", "backward")]
    return " and ".join(p for p in parts if p)


def _direction(store: Store, device: str, form: str, direction: str) -> str:
    """`at 66 of 72 forward (elsewhere `compile`)`; empty where nothing was measured."""
    winners: dict[object, set[str]] = {}
    for suite in SUITES if device else ():
        rows = store.rows(suite, device, "full")
        for cell, winner in beaten(rows, form, direction).items() if len(rows) else ():
            winners.setdefault(cell, set()).add(str(winner))
    others = Counter(w for found in winners.values() for w in found - {"fused"})
    if not winners:
        return ""
    best = sum(found == {"fused"} for found in winners.values())
    elsewhere = ", ".join(f"`{name}`" for name, _ in others.most_common())
    return f"at {best} of {len(winners)} {direction}" + (f" (elsewhere {elsewhere})" if others else "")
