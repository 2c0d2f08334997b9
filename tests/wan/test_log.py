"""What a run writes down, without a run."""

from __future__ import annotations

import csv
import io
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from repro.balance.models import ModelSize
from repro.wan import peaks
from repro.wan.engine import RankStep, StepResult
from repro.wan.epochs import DealtStep
from repro.wan.log import COLUMNS, LoggedStep, RunLog, StepCsv, StepFlops, require_tensorboard
from repro.wan.trainer import step_flops

RANKS = (RankStep(3, 300, 2, 1.5, 0.5, 7_000), RankStep(1, 100, 2, 1.25, 0.25, -1))


def logged(step, skipped=False):
    return LoggedStep(step, 0, 2.0, StepFlops(4e12, 5e12), StepResult(0.1 + step, 2.0, 1e-4, skipped, RANKS))


def rows(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_row_a_step_and_rank(tmp_path):
    StepCsv(tmp_path / "steps.csv", 0).append(logged(0), peak=10e12)
    first, second = rows(tmp_path / "steps.csv")
    assert tuple(first) == COLUMNS
    assert float(first["loss"]) == 0.1 and first["tokens"] == "300" and second["tokens"] == "100"
    assert (first["compute_seconds"], first["wait_seconds"], first["step_seconds"]) == ("1", "0.5", "2")
    assert (first["peak_memory_bytes"], second["peak_memory_bytes"]) == ("7000", ""), "unknown is empty"
    assert first["mfu"] == "0.1000", "4 TFLOP in 2 s on two ranks of 10 TFLOP/s"
    assert first["hfu"] == "0.1250", "5 TFLOP with what was recomputed"


def test_after_a_resume_steps_that_were_lost_are_written_once(tmp_path):
    path = tmp_path / "steps.csv"
    before = StepCsv(path, 0)
    for step in range(4):
        before.append(logged(step), None)
    with path.open("a") as file:
        file.write("4,0,0,0.3")  # killed while writing
    after = StepCsv(path, 2)
    after.append(logged(2), None)
    assert [(r["step"], r["rank"]) for r in rows(path)] == [(str(s), str(k)) for s in range(3) for k in range(2)]


def test_another_file_is_left_alone(tmp_path):
    (tmp_path / "steps.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="move it away"):
        StepCsv(tmp_path / "steps.csv", 0)
    assert (tmp_path / "steps.csv").read_text() == "a,b\n1,2\n"


def test_lines_tell_loss_speed_share_of_peak_and_time_left(tmp_path):
    screen = io.StringIO()
    log = RunLog(tmp_path, 0, 3, 10e12, Console(file=screen, width=200), every=2)
    for step in range(3):
        log.step(logged(step, skipped=step == 1))
    log.close()
    first, last = screen.getvalue().splitlines()
    assert first.startswith("step 0  loss 0.1000  200 tokens/s  MFU 10.0%  HFU 12.5%  2.00 s/step  left 0:00:0")
    assert last.startswith("step 2  loss 2.1000") and "1 skipped" in last and last.endswith("left 0:00:00")


def test_a_terminal_gets_a_bar(tmp_path):
    screen = io.StringIO()
    log = RunLog(tmp_path, 1, 3, None, Console(file=screen, width=160, force_terminal=True))
    log.step(logged(1))
    log.step(logged(2))
    log.close()
    assert "3/3" in screen.getvalue() and "MFU unknown" in screen.getvalue()


def test_peaks_are_known_or_unknown_never_near():
    assert peaks.peak_flops("NVIDIA H200") == 989.4e12
    assert peaks.peak_flops("NVIDIA H200 MIG 1g.18gb") is None and peaks.peak_flops("CPU") is None
    assert all(p.source and p.flops > 1e14 for p in peaks.PEAKS.values())


def test_flops_count_what_checkpointing_runs_again():
    """One block of d = f = 8 over 2 samples of 16 tokens, counted by hand."""
    size = ModelSize("small", dim=8, ffn=8, heads=1, layers=1)
    dealt = DealtStep(0, (), np.array([[2]]), np.array([[16]]))
    linears = 2 * (16 * 16 * 8 * 8 + 4 * 8 * 8 * 512)
    attention = 2 * (4 * 16 * 16 * 8 + 4 * 16 * 512 * 8)
    for checkpointing, again in (("none", 0), ("selective", linears), ("full", linears + attention)):
        flops = step_flops(size, dealt, checkpointing)
        assert flops == StepFlops(3 * (linears + attention), 3 * (linears + attention) + again)


def test_the_end_is_told_in_one_line_with_what_there_was_to_do(tmp_path):
    log = RunLog(tmp_path, 1, 3, None, Console(file=io.StringIO()))
    assert log.summary() == "nothing left to do: 3 steps are done; a larger --steps goes on"
    log.step(logged(1))
    log.step(logged(2))
    told = "2 steps in 0:00:04: 8 samples, 2 samples/s, 200 tokens/s; a row a step and rank in "
    assert log.summary() == f"{told}{tmp_path / 'steps.csv'}"


def test_tensorboard_gets_the_numbers_of_every_step_from_where_the_run_goes_on(tmp_path, monkeypatch):
    told = []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    log = RunLog(tmp_path, 1, 3, 10e12, Console(file=io.StringIO()), tensorboard=True)
    log.step(logged(1))
    log.close()
    assert told[0] == (str(tmp_path / "tensorboard"), 1) and told[-1] == "closed"
    values = {name: value for name, value, step in told[1:-1] if step == 1}
    assert values == {
        "loss": 1.1,
        "lr": 1e-4,
        "grad_norm": 2.0,
        "tokens_per_s": 200.0,
        "step_seconds": 2.0,
        "max_wait_seconds": 0.5,
        "mfu": 0.1,
        "hfu": 0.125,
    }


def test_tensorboard_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--tensorboard needs the package tensorboard"):
        require_tensorboard()
