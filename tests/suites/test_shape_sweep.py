"""The grid, the path from ranks to rows, memory that runs out, B6, the figures."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.measure.machine import read_machine
from repro.suite import CaseSkipped, load
from suites import shape_sweep

CPU = SimpleNamespace(has_gpu=False, gpu_count=0)


def gpus(count):
    return SimpleNamespace(has_gpu=True, gpu_count=count)


def rows_of(seconds, machine=None, device="nvidia-test", models=("wan-1.3b", "wan-14b")):
    """Full-profile rows of the grid with times from seconds(batch, tokens)."""
    base = {"schema": 1, "run_id": "r1", "suite": "shape_sweep", "profile": "full", "unit": "", "n": 3,
            "kind": "measured", "source": "", "device": device}  # fmt: skip
    table = []
    for case in shape_sweep.cases("full", machine or gpus(1)):
        key = dict(case.key)
        if key["model"] in models:
            value = float(key["layers"] * 1e3 * seconds(key["batch"], key["tokens"]))
            for metric, v in (("fits", 1.0), ("forward_backward", value), ("peak_memory", 5.0)):
                table.append({**base, **key, "metric": metric, "value": v, "ci_low": v, "ci_high": v})
    return pd.DataFrame(table)


def test_contract():
    assert load("shape_sweep") is shape_sweep
    for profile, machine in (("full", gpus(1)), ("full", gpus(2)), ("smoke", gpus(2)), ("smoke", CPU)):
        found = shape_sweep.cases(profile, machine)
        assert found
        assert all(tuple(c.key) == shape_sweep.PARAMETERS for c in found)
        assert len({tuple(c.key.values()) for c in found}) == len(found)
        assert {c.key["ranks"] for c in found} == {max(1, machine.gpu_count)}


def test_full_needs_a_gpu_and_all_of_14b_several():
    assert shape_sweep.cases("full", CPU) == []
    depths = {n: {(c.key["model"], c.key["layers"]) for c in shape_sweep.cases("full", gpus(n))} for n in (1, 2)}
    assert depths[1] == {("wan-1.3b", 30), ("wan-14b", 4), ("wan-14b", 8)}
    assert depths[2] == depths[1] | {("wan-14b", 40)}


def test_the_grid_takes_less_than_four_minutes_on_one_gpu():
    assert sum(c.seconds for c in shape_sweep.cases("full", gpus(1))) < 240
    found = [c for c in shape_sweep.cases("full", gpus(1)) if c.key["model"] == "wan-1.3b"]
    cells = {(c.key["tokens"], c.key["batch"]) for c in found}
    assert {(s, 48_000 // s) for s in (1560, 3600, 7800, 32_760, 46_800)} <= cells
    assert {(s, 1) for s in (1560, 3600, 7800, 32_760, 46_800)} <= cells


def test_a_smoke_case_runs_on_a_rank_of_its_own():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    fits, time = shape_sweep.measure(shape_sweep.cases("smoke", machine)[0], machine, pd.DataFrame())
    assert (fits.metric, fits.value) == ("fits", 1.0)
    assert (time.metric, time.unit, time.n) == ("forward_backward", "ms", 3)
    assert 0 < time.ci_low <= time.value <= time.ci_high


@pytest.fixture
def answer(monkeypatch):
    """Stands in for the ranks: answers with a value, or raises it; notes what it was asked."""
    pytest.importorskip("torch")
    from repro.wan import launch

    asked = []

    def prepare(value):
        def ask(call, arguments, seconds):
            asked.append(arguments)
            if isinstance(value, Exception):
                raise value
            return value

        monkeypatch.setattr(launch, "ranks", lambda count, device: SimpleNamespace(ask=ask))
        return asked

    return prepare


def test_memory_that_ran_out_is_a_result(answer):
    case = shape_sweep.cases("full", gpus(1))[0]
    asked = answer({"passes": [], "peak_bytes": 140e9, "fits": False})
    (row,) = shape_sweep.measure(case, gpus(1), pd.DataFrame())
    assert (row.metric, row.value) == ("fits", 0.0)
    assert asked[0]["frames_height_width"] == [1, 480, 832] and asked[0]["batch"] == 30


def test_peaks_come_with_the_times(answer):
    answer({"passes": [0.2, 0.1, 0.3], "peak_bytes": 7_500_000_000, "fits": True})
    rows = shape_sweep.measure(shape_sweep.cases("full", gpus(1))[0], gpus(1), pd.DataFrame())
    assert {r.metric: r.value for r in rows} == {"fits": 1.0, "forward_backward": 200.0, "peak_memory": 7.5}


def test_a_model_that_does_not_fit_is_skipped_and_a_failure_is_not(answer):
    from repro.wan.launch import RanksError

    case = shape_sweep.cases("full", gpus(1))[0]
    for raised in ("OutOfMemoryError", "Stranded"):  # on this rank, or on another that this one waits for
        answer(RanksError(f"rank 0: {raised}: 20 GiB", raised))
        with pytest.raises(CaseSkipped, match=rf"30 layers of wan-1\.3b on 1 ranks: rank 0: {raised}"):
            shape_sweep.measure(case, gpus(1), pd.DataFrame())
    answer(RanksError("rank 0: ValueError: no", "ValueError"))
    with pytest.raises(RanksError):
        shape_sweep.measure(case, gpus(1), pd.DataFrame())


def test_b6_is_the_held_out_error_of_the_power_law():
    def by_power(b, s):
        return 1e-3 + 1e-6 * b * np.float64(s) ** 1.3

    (exact,) = shape_sweep.evidence(rows_of(by_power))
    assert exact.claim == "B6" and exact.kind == "measured"
    assert exact.ci_low <= exact.value <= exact.ci_high < 1.0, "a power law predicts a power law"
    assert exact.note.index("wan-14b, 4 layers: p = 1.3,") < exact.note.index("wan-1.3b, 30 layers: p = 1.3,")
    (bent,) = shape_sweep.evidence(rows_of(lambda b, s: 1e-6 * b * s + 3e-11 * b * np.float64(s) ** 2))
    assert bent.value > 2.0
    (small,) = shape_sweep.evidence(rows_of(by_power, models=("wan-1.3b",)))
    assert "wan-14b" not in small.note and (small.decides, exact.decides) == (False, True)
    assert shape_sweep.evidence(rows_of(by_power)[:9]) == []


def test_one_batch_a_length_does_not_decide():
    """The model that decides, whole and fitted exactly: but what a batch costs cannot be seen."""
    rows = rows_of(lambda b, s: 1e-6 * b * np.float64(s) ** 1.3, gpus(4))
    (found,) = shape_sweep.evidence(rows)
    assert found.decides and "batch costs" not in found.note and "shapes of 1,560 to 46,800 tokens" in found.note
    assert "runs" not in found.note
    (apart,) = shape_sweep.evidence(rows.assign(run_id=["r1", "r2"] * (len(rows) // 2) + ["r1"] * (len(rows) % 2)))
    assert apart.note.endswith("Shapes are of 2 runs, none in two: machines and kernels may differ between them")
    (short,) = shape_sweep.evidence(rows[rows["tokens"] <= 33_000])
    assert not short.decides and short.note.startswith("without the longest bucket (46,800 tokens)")
    whole = rows[rows["layers"] == 40]
    largest = whole.groupby("tokens")["batch"].transform("max") == whole["batch"]
    for part in (whole[whole["batch"] == 1], whole[largest]):
        (told,) = shape_sweep.evidence(part)
        assert not told.decides and told.note.startswith("no length in two batch sizes")


def test_shapes_without_memory_take_no_part():
    rows = rows_of(lambda b, s: 1e-6 * b * np.float64(s) ** 1.3, models=("wan-1.3b",))
    whole, _ = shape_sweep.fitted(rows, "wan-1.3b", 30)
    first = (rows["shape"] == rows["shape"][0]) & (rows["batch"] == rows["batch"][0])
    rows.loc[first & (rows["metric"] == "fits"), "value"] = 0.0
    left, _ = shape_sweep.fitted(rows[~first | (rows["metric"] == "fits")], "wan-1.3b", 30)
    assert left.observations.batch.size == whole.observations.batch.size - 1


def test_a_figure_for_each_device_and_one_for_all():
    rows = pd.concat([rows_of(lambda b, s: 1e-6 * b * s, device=d) for d in ("nvidia-b", "nvidia-a")])
    names = ["shape_sweep-nvidia-a", "shape_sweep-nvidia-b", "shape_sweep-devices"]
    assert [f.name for f in shape_sweep.draw(rows)] == names
    assert shape_sweep.draw(rows.assign(model="tiny")) == []
