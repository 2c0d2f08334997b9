"""The committed numbers say what the committed samples say: recomputed here, with formulas of the tests' own."""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from repro.claims import BY_ID, judge
from repro.measure.stats import median_interval
from repro.records import Store
from repro.suite import Evidence

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
STORE = Store(RESULTS)
CELLS = 60
"""Cells that are recomputed of each suite and run, drawn by seed: all of them would take minutes."""
FILES = sorted(RESULTS.glob("*/samples/*/*.csv.gz"))


@functools.cache
def samples(path: Path) -> pd.DataFrame:
    """Raw samples of a run, all as text but their values."""
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    return frame.assign(value=frame["value"].astype(float))


@functools.cache
def rows(path: Path) -> pd.DataFrame:
    """A suite's rows as text, newest last."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def student(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t (Gosset 1908), written out."""
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    half = stats.t(df=n - 1).ppf(0.975) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def cells(path: Path) -> list[tuple[dict[str, str], np.ndarray, dict[str, str]]]:
    """Case and metric, samples and row of some cells of a file of samples."""
    suite, run = path.parent.name, path.name.removesuffix(".csv.gz")
    raw, table = samples(path), rows(path.parents[2] / f"{suite}.csv")
    own = table[table["run_id"] == run]
    key = [c for c in raw.columns if c not in ("unit", "index", "value")]
    by_key = {tuple(r[c] for c in key): r for r in own.to_dict("records")}
    groups = ((case, g) for case, g in raw.groupby(key, sort=False) if case in by_key)  # a kill leaves samples alone
    found = [(dict(zip(key, case, strict=True)), g["value"].to_numpy()) for case, g in groups]
    picks = np.random.default_rng(0).permutation(len(found))[:CELLS]
    return [(*found[i], by_key[tuple(found[i][0].values())]) for i in sorted(picks)]


def seed_of(suite: str, case: dict[str, str]) -> str:
    """Text that a case's generator is seeded with. m_comp is a fraction, and 1.0 is written as 1."""
    texts = {c: str(float(v)) if c == "m_comp" and v else v for c, v in case.items()}
    return "/".join([suite, *(f"{c}={texts[c]}" for c in sorted(texts))])


@pytest.mark.parametrize("path", FILES, ids=lambda p: "/".join(p.parts[-4:]).removesuffix(".csv.gz"))
def test_every_summary_follows_from_its_samples(path: Path) -> None:
    suite, checked = path.parent.name, 0
    for cell, values, row in cells(path):
        told = [float(row[c]) for c in ("value", "ci_low", "ci_high")]
        if row["kind"] == "simulated":
            wanted = student(values)
        else:
            case = {c: v for c, v in cell.items() if c != "metric"}
            found = median_interval(values, seed_of(suite, case))
            wanted = (float(np.median(values)), found.low, found.high)
        # 1e-9: units are changed before some summaries and after others
        assert told == pytest.approx(wanted, rel=1e-9, abs=1e-12), cell
        assert int(row["n"]) == len(values), cell
        checked += 1
    assert checked


def kernel_rows(device: str, run: str) -> pd.DataFrame:
    table = rows(RESULTS / device / "kernel_speed.csv")
    return table[table["run_id"] == run].assign(value=lambda t: t["value"].astype(float))


KERNEL_RUNS = [(p.parts[-4], p.name.removesuffix(".csv.gz")) for p in FILES if p.parent.name == "kernel_speed"]


@pytest.mark.parametrize(("device", "run"), KERNEL_RUNS)
def test_speedups_and_bandwidths_follow_from_times(device: str, run: str) -> None:
    key = ["form", "pass", "dtype", "batch", "tokens", "dim"]
    table = kernel_rows(device, run).pivot_table(index=[*key, "impl"], columns="metric", values="value")
    bytes_of = {"bf16": 2, "fp16": 2, "fp32": 4}
    checked = 0
    for (form, direction, dtype, batch, tokens, dim, impl), row in table.iterrows():
        cell = (form, direction, dtype, batch, tokens, dim)
        if (
            impl != "eager"
            and "speedup" in row
            and row["speedup"] == row["speedup"]
            and (*cell, "eager") in table.index
        ):
            eager = table.loc[(*cell, "eager"), "time"]
            assert row["speedup"] == pytest.approx(eager / row["time"], rel=1e-9), (cell, impl)
            checked += 1
        if form == "per_sample":
            tensors = int(batch) * int(tokens) * int(dim) * bytes_of[dtype] * (2 if direction == "forward" else 3)
            moved = row["bandwidth"] * 1e9 * row["time"] * 1e-6
            # shift, scale and what is saved of a row come on top: little, but not for a handful of rows
            assert tensors <= moved * (1 + 1e-9) and moved <= tensors * 1.1 + 64 * int(batch) * int(dim), (cell, impl)
            checked += 1
    assert checked


@functools.cache
def claims() -> dict[str, dict[str, str]]:
    with (RESULTS / "claims.csv").open(newline="") as file:
        return {r["id"]: r for r in csv.DictReader(file)}


def test_every_verdict_follows_from_its_own_row() -> None:
    for id_, row in claims().items():
        if row["verdict"] == "not run":
            assert row["value"] == "" and row["note"]
            continue
        numbers = [float(row[c]) for c in ("value", "ci_low", "ci_high")]
        ends = [float(row[c]) if row[c] else None for c in ("baseline", "treated")]
        assert row["verdict"] == judge(BY_ID[id_], Evidence(id_, *numbers, row["kind"], *ends))[0], id_  # type: ignore[arg-type]


@pytest.mark.parametrize(("id_", "direction", "impl"), [("K1", "forward", "fused"), ("K2", "backward", "dtile")])
def test_kernel_claims_follow_from_raw_samples(id_: str, direction: str, impl: str) -> None:
    row = claims()[id_]
    table = STORE.rows("kernel_speed", row["device"], "full")
    cell: dict[str, Any] = {
        "form": "per_sample",
        "pass": direction,
        "dtype": "bf16",
        "batch": 1,
        "tokens": 64_000,
        "dim": 5120,
    }
    medians = {}
    for name in ("eager", impl):
        at = (table[[*cell]] == pd.Series(cell)).all(axis=1) & (table["impl"] == name) & (table["metric"] == "time")
        (run,) = table[at]["run_id"]
        raw = samples(RESULTS / row["device"] / "samples" / "kernel_speed" / f"{run}.csv.gz")
        wanted = {**{c: str(v) for c, v in cell.items()}, "impl": name, "metric": "time"}
        medians[name] = float(np.median(raw[(raw[[*wanted]] == pd.Series(wanted)).all(axis=1)]["value"]))
    assert float(row["value"]) == pytest.approx(medians["eager"] / medians[impl], rel=1e-5)  # six digits are written
    assert float(row["baseline"]) == pytest.approx(medians["eager"], rel=1e-5)
    assert float(row["treated"]) == pytest.approx(medians[impl], rel=1e-5)


@pytest.mark.parametrize(("id_", "ranks"), [("T1", 8), ("T2", 16)])
def test_throughput_claims_follow_from_raw_samples(id_: str, ranks: int) -> None:
    """Where they are simulated: the mean over seeds of the gain of the paper's rule with the fused op."""
    row = claims()[id_]
    if row["kind"] != "simulated":
        pytest.skip("decided by a measurement")
    setting: dict[str, Any] = {
        "policy": "dual_constraint", "adaln": "fused", "ranks": ranks, "corpus": "wan-uniform", "model": "wan-14b",
        "sync": "micro_batch", "micro_batches": 1, "protocol": "as_published", "token_budget": 48_000, "m_mem": 58_896,
        "metric": "gain",
    }  # fmt: skip
    means = set()
    for path in (RESULTS / row["device"] / "samples" / "throughput").glob("*.csv.gz"):
        raw = samples(path)
        wanted = {c: str(v) for c, v in setting.items()}
        found = raw[(raw[[*wanted]] == pd.Series(wanted)).all(axis=1)]
        for _, group in found.groupby("m_comp"):
            means.add(round(student(group["value"].to_numpy())[0], 3))
    assert any(float(row["value"]) == pytest.approx(m, rel=1e-3, abs=1e-3) for m in means), (row["value"], means)


def test_intervals_hold_their_values_in_every_committed_row() -> None:
    for device in STORE.devices():
        for suite in STORE.suites(device):
            table = STORE.rows(suite, device)
            known = table.dropna(subset=["value", "ci_low", "ci_high"])
            slack = 1e-9 * known["value"].abs()
            assert (known["ci_low"] <= known["value"] + slack).all(), (device, suite)
            assert (known["ci_high"] >= known["value"] - slack).all(), (device, suite)
            assert (table["n"] >= 1).all() and np.isfinite(known["value"]).all(), (device, suite)
            assert (table[table["kind"] == "simulated"]["source"] != "").all(), (device, suite)
