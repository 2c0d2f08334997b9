"""What every batch policy gains in every simulated setting, packed for the page's policy explorer.

Rows come from all suites that simulate campaigns and compare tokens/s (`gain`). A cell is one setting without its
policy, AdaLN and M_comp; what differs in these only are the entries of the cell, which the page shows side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from repro.balance import assumptions, campaign
from repro.claims import BY_ID
from repro.corpus import mixes
from repro.report import style

GAIN = "gain"
SHOWN = ("tokens_per_s", "share_of_perfect", "mix_distance", "samples_per_step")
"""Metrics beside the gain, in the order in which entries hold them."""
PAPER_GAIN = {8: BY_ID["T1"].paper, 16: BY_ID["T2"].paper}
"""The paper's gain in tokens/s in % on so many ranks."""
_DIGITS = 5
_SYNCS = {"micro_batch": "in every micro-batch (full sharding)", "step": "once a step"}


@dataclass(frozen=True)
class Dimension:
    """One choice of the page. values: as rows hold them; labels: what the reader sees; notes: a line each, or empty."""

    name: str
    label: str
    values: tuple[Any, ...]
    labels: tuple[str, ...]
    notes: tuple[str, ...]


def payload(rows: pd.DataFrame) -> dict[str, Any] | None:
    """Everything the explorer shows, as plain JSON values; None where no simulated row compares tokens/s.

    rows: of any suites and devices; those without the columns `campaign.PARAMETERS` are left out.
    """
    table = _wide(rows)
    if table.empty:
        return None
    dimensions = _dimensions(table)
    policies, adalns = (style.ordered(list(table[c])) for c in ("policy", "adaln"))
    runs = sorted(set(table["run"]))
    cells: dict[tuple[int, ...], list[list[Any]]] = {}
    for entry in table.to_dict("records"):
        key = tuple(d.values.index(entry[d.name]) for d in dimensions)
        numbers = [_rounded(entry[c]) for c in ("m_comp", "value", "ci_low", "ci_high", *SHOWN, "n")]
        who = [policies.index(entry["policy"]), adalns.index(entry["adaln"])]
        cells.setdefault(key, []).append([*who, *numbers, runs.index(entry["run"])])
    start = max(sorted(cells), key=lambda k: (_assumed(k, dimensions), len(cells[k])))
    return {
        "dimensions": [{"name": d.name, "label": d.label, "options": d.labels, "notes": d.notes} for d in dimensions],
        "policies": [{"label": style.label(p), "color": style.color(p)} for p in policies],
        "adalns": [style.label(a) for a in adalns],
        "baseline": [_index(policies, assumptions.BASELINE[0]), _index(adalns, assumptions.BASELINE[1])],
        "adaln": _index(adalns, assumptions.ADAPTIVELOAD[1]),
        "mComp": assumptions.M_COMP,
        "runs": runs,
        "paper": [[list(key), gain] for key in sorted(cells) if (gain := _paper_gain(key, dimensions)) is not None],
        "start": list(start),
        "cells": [[list(key), sorted(cells[key], key=lambda e: (e[0], e[1], e[2] or 0))] for key in sorted(cells)],
    }


def _wide(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a setting: what `_dimensions` tells apart, policy, AdaLN, m_comp, gain with interval, the SHOWN metrics."""
    rows = rows[rows["kind"] == "simulated"]
    comparing = set(rows.loc[rows["metric"] == GAIN, "suite"])
    rows = rows[rows["suite"].isin(comparing) & rows["metric"].isin((GAIN, *SHOWN))].copy()
    for column in ("ranks", "micro_batches", "token_budget", "m_mem", "m_comp"):
        rows[column] = pd.to_numeric(rows[column], errors="coerce") if column in rows else math.nan
    rows = rows.dropna(subset=["ranks", "micro_batches", "token_budget", "m_mem"])
    if rows.empty:
        return rows
    rows = rows.fillna({"m_comp": 0})  # none: the policy has no such bound
    keys = ["device", "profile", "suite", "run_id", *campaign.PARAMETERS]
    wide = rows.pivot_table("value", keys, "metric", "last").reset_index()
    gains = rows.loc[rows["metric"] == GAIN, [*keys, "value", "ci_low", "ci_high"]]
    wide = wide.merge(gains, "left", keys).merge(rows.groupby(keys, as_index=False)["n"].max(), "left", keys)
    # of two suites that simulated the same, the one with more seeds
    same = ["device", *campaign.PARAMETERS]
    wide = wide.sort_values(["n", "run_id"]).drop_duplicates(same, keep="last")
    wide["memory"] = list(zip(wide["m_mem"].astype(int), wide["token_budget"].astype(int), strict=True))
    wide["steps"] = list(zip(wide["protocol"], wide["micro_batches"].astype(int), strict=True))
    wide["ranks"] = wide["ranks"].astype(int)
    wide["run"] = wide["suite"] + ", run " + wide["run_id"]
    return wide.reindex(columns=list(dict.fromkeys([*wide.columns, *SHOWN]))).sort_values(same, ignore_index=True)


def _dimensions(table: pd.DataFrame) -> list[Dimension]:
    """The choices of the page, and for each what rows hold."""
    summaries = {name: mixes.mix(name).summary for name in mixes.names()}
    profiles = dict(zip(table["device"], table["profile"], strict=True))

    def dimension(
        name: str, label: str, told: Callable[[Any], str], note: Callable[[Any], str], order: Sequence[Any] = ()
    ) -> Dimension:
        first = {value: i for i, value in enumerate(order)}
        values = sorted(set(table[name]), key=lambda v: (first.get(v, len(first)), v))
        return Dimension(name, label, tuple(values), tuple(map(told, values)), tuple(map(note, values)))

    def silent(value: Any) -> str:
        return ""

    return [
        dimension("corpus", "corpus", str, lambda c: summaries.get(c, ""), list(summaries)),
        dimension("ranks", "ranks", "{:,}".format, silent),
        dimension("memory", "M_mem / token budget", _memory, silent),
        dimension("model", "model", str, silent, [assumptions.MODEL]),
        dimension("steps", "micro-batches a step", _steps, _steps_note, [(assumptions.PROTOCOL, 1)]),
        dimension("sync", "ranks meet", lambda s: _SYNCS.get(s, s), silent, list(_SYNCS)),
        dimension(
            "device", "device", str, lambda d: f"{profiles[d]} rows", [d for d, p in profiles.items() if p == "full"]
        ),
    ]


def _memory(value: tuple[int, int]) -> str:
    m_mem, budget = value
    return f"{m_mem / budget:.4g} x ({m_mem:,} tokens)"


def _steps(value: tuple[str, int]) -> str:
    protocol, number = value
    return f"{number}, {'as published' if protocol == 'as_published' else f'samples a step {protocol}'}"


def _steps_note(value: tuple[str, int]) -> str:
    if value[0] == "as_published":
        return "Every policy takes its own batches, so that larger ones also mean more samples an optimizer step"
    return "Every policy takes as many samples an optimizer step, within 1%"


def _assumed(key: Sequence[int], dimensions: Sequence[Dimension], ranks: int = 16) -> int:
    """In how many choices a cell is the setting that verdicts assume."""
    wanted = {
        "corpus": assumptions.CORPUS,
        "ranks": ranks,
        "memory": (assumptions.M_MEM, mixes.TOKEN_BUDGET),
        "model": assumptions.MODEL,
        "steps": (assumptions.PROTOCOL, 1),
        "sync": assumptions.SYNC,
    }
    return sum(d.values[i] == wanted.get(d.name) for i, d in zip(key, dimensions, strict=True))


def _paper_gain(key: Sequence[int], dimensions: Sequence[Dimension]) -> float | None:
    """What the paper reports for a cell: it states numbers of ranks, and of the corpus that there is one."""
    at = {d.name: d.values[i] for i, d in zip(key, dimensions, strict=True)}
    asked = at["corpus"] == assumptions.CORPUS and at["steps"] == (assumptions.PROTOCOL, 1)
    return PAPER_GAIN.get(at["ranks"]) if asked else None


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else -1


def _rounded(value: float) -> float | None:
    """To the digits that the page shows; whole numbers stay whole, and nothing stands for unknown."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() else short
