"""Summaries of measured epochs, recomputed from the steps and samples beside them: recorded ones, and made-up ones.

Their intervals are over an epoch's steps, of rates and shares that no single sample has, so the rule of
`test_recorded_numbers` covers their raw samples only. Not recomputed is what needs the schedule: mix distance, CV of
load, memory, correlations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from repro.measure.stats import generator
from repro.records import Store
from repro.suite import Case
from suites import throughput_measured
from tests.faults import test_recorded_numbers as recorded
from tests.suites import test_throughput_measured as made_up

NAME = throughput_measured.NAME
DRAWS = 2_000
"""Of the bootstrap, as everywhere in results."""

Cell = tuple[str, dict[str, pd.Series], dict[str, np.ndarray]]


def epochs(path: Path) -> Iterator[Cell]:
    """Of a suite's CSV: seed of each epoch, its rows by metric, its raw samples by metric."""
    table = recorded.rows(path)
    key = list(throughput_measured.PARAMETERS)
    for (run, *values), own in table[table["policy"] != "calibration"].groupby(["run_id", *key], sort=False):
        seed = recorded.seed_of(NAME, dict(zip(key, values, strict=True)))
        raw = recorded.samples(path.parent / "samples" / NAME / f"{run}.csv.gz")
        raw = raw[(raw[key] == pd.Series(dict(zip(key, values, strict=True)))).all(axis=1)]
        samples = {m: g["value"].to_numpy() for m, g in raw.groupby("metric")}
        yield seed, {r["metric"]: r for _, r in own.iterrows()}, samples


def over_steps(value: Callable[[np.ndarray], float], steps: int, seed: str) -> tuple[float, float, float]:
    """Value over all steps, and 2.5th and 97.5th percentile of its values over steps drawn with replacement."""
    picks = generator(seed).integers(0, steps, (DRAWS, steps))
    drawn = np.sort([value(p) for p in picks])
    ends = [float(np.interp(q * (DRAWS - 1), np.arange(DRAWS), drawn)) for q in (0.025, 0.975)]
    return value(np.arange(steps)), *ends


def wanted(cell: Cell) -> dict[str, tuple[float, float, float]]:
    """Metric -> value and interval, from the times of steps and ranks alone."""
    seed, own, samples = cell

    def series(name: str) -> np.ndarray:
        count = sum(m.startswith(f"{name}_at_") for m in own)
        return np.array([float(own[f"{name}_at_{t}"]["value"]) for t in range(count)])

    wall, work, replay = series("step"), series("work"), series("replay")
    steps, total = len(wall), float(wall.sum()) / 1e3
    time, wait = (samples[m].reshape(steps, -1) for m in ("rank_time", "rank_wait"))
    alone = time - wait
    spread = alone.std(axis=1) / alone.mean(axis=1)
    error = np.abs(replay / wall - 1)
    # Whole numbers that the epoch holds; `test_whole_numbers` holds them to being whole.
    amounts = {m: float(own[m]["value"]) * total for m in ("samples_per_s", "tokens_per_s")}

    def seconds(i: np.ndarray) -> float:
        return float(wall[i].sum() / work[i].sum() * work.sum()) / 1e3

    rules: dict[str, Callable[[np.ndarray], float]] = {
        "samples_per_s": lambda i: round(amounts["samples_per_s"]) / seconds(i),
        "tokens_per_s": lambda i: round(amounts["tokens_per_s"]) / seconds(i),
        "share_of_perfect": lambda i: float(work.sum()) / 1e3 / seconds(i),
        # one step drawn throughout: rounding must not take the root of less than nothing
        "step_cv": lambda i: float(np.sqrt(max(0.0, np.mean(wall[i] ** 2) / np.mean(wall[i]) ** 2 - 1))),
        "rank_cv": lambda i: float(spread[i].mean()),
        "wait_share": lambda i: float(wait[i].sum() / time[i].sum()),
        "replay_error": lambda i: 100 * float(error[i].mean()),
        "replay_total_error": lambda i: 100 * float(replay[i].sum() / wall[i].sum() - 1),
    }
    return {m: over_steps(rule, steps, f"{seed}/{m}") for m, rule in rules.items()}


def compare(cell: Cell) -> None:
    """Hold the rows of an epoch to what follows from its steps."""
    for metric, numbers in wanted(cell).items():
        row = cell[1][metric]
        told = [float(row[c]) for c in ("value", "ci_low", "ci_high")]
        value, low, high = numbers
        # 1e-9: seconds and milliseconds; 1e-7 where a difference of squares has half the digits
        assert told == pytest.approx([value, min(low, value), max(high, value)], rel=1e-9, abs=1e-7), (metric, cell[0])
    for metric in ("samples_per_s", "tokens_per_s"):
        amount = float(cell[1][metric]["value"]) * sum(
            float(r["value"]) / 1e3 for m, r in cell[1].items() if m.startswith("step_at_")
        )
        assert amount == pytest.approx(round(amount), rel=1e-9), f"{metric}: an epoch holds whole samples and tokens"
    mean = float(cell[1]["samples_per_step"]["value"])
    steps = sum(m.startswith("step_at_") for m in cell[1])
    seconds = sum(float(r["value"]) / 1e3 for m, r in cell[1].items() if m.startswith("step_at_"))
    assert mean * steps == pytest.approx(float(cell[1]["samples_per_s"]["value"]) * seconds, rel=1e-9)


@pytest.mark.parametrize("device", sorted(p.parent.name for p in recorded.RESULTS.glob(f"*/{NAME}.csv")))
def test_every_recorded_epoch_follows_from_its_steps(device: str) -> None:
    found = list(epochs(recorded.RESULTS / device / f"{NAME}.csv"))
    assert found
    picks = np.random.default_rng(0).permutation(len(found))[: recorded.CELLS]
    for i in sorted(picks):
        compare(found[i])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three epochs of two pretended GPUs, slower than simulated by a step of its own, as a run writes them down."""
    pytest.importorskip("torch")
    from repro.measure.machine import read_machine
    from repro.wan import launch

    store = Store(tmp_path_factory.mktemp("results"))
    machine, inputs = made_up.gpus(2), pd.DataFrame({"suite": []})
    run = store.start(read_machine(gpus=0), ["test"], 0, "full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "ranks", lambda count, kind: made_up.Ranks(slower=1.1))
        for case in throughput_measured.cases("full", machine)[:4]:
            store.append(run, NAME, Case(case.key, case.seconds), throughput_measured.measure(case, machine, inputs))
            inputs = store.rows(NAME, run.device, "full")
    return store.root / run.device / f"{NAME}.csv"


def test_made_up_epochs_follow_from_their_steps(written: Path) -> None:
    found = list(epochs(written))
    assert len(found) == 3
    for cell in found:
        compare(cell)
        for metric, row in cell[1].items():
            if metric in ("samples_per_s", "rank_cv", "replay_error"):
                changed = {**cell[1], metric: row.where(row.index != "ci_high", repr(1.001 * float(row["ci_high"])))}
                with pytest.raises(AssertionError):
                    compare((cell[0], changed, cell[2]))


def test_their_raw_samples_follow_the_common_rule(written: Path) -> None:
    (raw,) = (written.parent / "samples" / NAME).glob("*.csv.gz")
    recorded.test_every_summary_follows_from_its_samples(raw)


def test_t6_follows_from_measured_steps() -> None:
    """Where it is decided: seconds of the same schedule's steps, eager against fused."""
    row = recorded.claims()["T6"]
    table = recorded.STORE.rows(NAME, row["device"], "full") if row["device"] else pd.DataFrame()
    if table.empty or "the same schedule on both sides" not in row["note"]:
        pytest.skip("not decided by measured epochs")
    at = table[(table["policy"] == "equal_token") & (table["protocol"] == "as_published")]
    at = at[(at["sync"] == "micro_batch") & (at["corpus"] == "wan-uniform") & at["metric"].str.startswith("step_at_")]
    totals = at.groupby("adaln")["value"].sum()
    assert float(row["value"]) == pytest.approx(100 * (totals["eager"] / totals["fused"] - 1), rel=1e-5)
