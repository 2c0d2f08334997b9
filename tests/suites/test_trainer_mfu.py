"""The cases, the shares that come out of times, a smoke run, the figure."""

from types import SimpleNamespace

import pandas as pd
import pytest

from repro.measure.machine import read_machine
from repro.suite import CaseSkipped, load
from suites import trainer_mfu

GPU = SimpleNamespace(has_gpu=True, gpu_count=1, name="NVIDIA H200")
CPU = SimpleNamespace(has_gpu=False, gpu_count=0, name="cpu")


@pytest.fixture
def times(monkeypatch):
    """Stands in for the rank: these times of stack and trainer."""
    pytest.importorskip("torch")
    from repro.wan import launch

    def prepare(stack, steps, error=None):
        def ask(call, arguments, seconds):
            if error is not None:
                raise error
            own = steps if call.endswith(":steps") else stack
            return {"seconds": own, "peak_bytes": 30_000_000_000}

        monkeypatch.setattr(launch, "ranks", lambda count, device: SimpleNamespace(ask=ask))

    return prepare


def test_contract():
    assert load("trainer_mfu") is trainer_mfu
    for profile, machine in (("full", GPU), ("smoke", CPU)):
        found = trainer_mfu.cases(profile, machine)
        assert found and all(tuple(c.key) == trainer_mfu.PARAMETERS for c in found)
    assert {c.key["tokens"] for c in trainer_mfu.cases("full", GPU)} == {32_760}
    assert trainer_mfu.cases("full", CPU) == []
    assert trainer_mfu.cases("full", SimpleNamespace(has_gpu=True, gpu_count=2)) == [], "one GPU's own figures"


def test_shares_follow_from_times(times):
    """Wan 1.3B, 30 blocks: 9.43 TFLOP forward each, so 4 times as many in 2.5 s are 452 TFLOP/s of 989.4."""
    times([2.4] * 5, [2.5] * 5)
    rows = {r.metric: r for r in trainer_mfu.measure(trainer_mfu.cases("full", GPU)[0], GPU, pd.DataFrame())}
    assert rows["share_of_block_stack"].value == pytest.approx(96.0)
    assert rows["step_time"].value == pytest.approx(2500.0) and rows["stack_time"].value == pytest.approx(2400.0)
    assert rows["hfu"].value == pytest.approx(100 * 452.6 / 989.4, rel=1e-3)
    assert rows["mfu"].value == pytest.approx(0.75 * rows["hfu"].value)
    assert rows["peak_memory"].value == 30.0
    unknown = SimpleNamespace(has_gpu=True, gpu_count=1, name="NVIDIA H200 MIG 1g.18gb")
    metrics = {r.metric for r in trainer_mfu.measure(trainer_mfu.cases("full", unknown)[0], unknown, pd.DataFrame())}
    assert not metrics & {"hfu", "mfu"}, "no peak is borrowed"


def test_what_does_not_fit_is_skipped(times):
    from repro.wan.launch import RanksError

    times([], [], RanksError("rank 0: OutOfMemoryError: 20 GiB", "OutOfMemoryError"))
    with pytest.raises(CaseSkipped, match="30 layers"):
        trainer_mfu.measure(trainer_mfu.cases("full", GPU)[0], GPU, pd.DataFrame())


def test_a_smoke_case_takes_whole_steps():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    (case,) = trainer_mfu.cases("smoke", machine)
    rows = {r.metric: r for r in trainer_mfu.measure(case, machine, pd.DataFrame())}
    assert set(rows) == {"step_time", "stack_time", "share_of_block_stack"}
    assert rows["step_time"].n == trainer_mfu.REPEATS and rows["step_time"].value > rows["stack_time"].value


def test_a_figure_for_each_device_and_one_for_several():
    base = {"suite": "trainer_mfu", "profile": "full", "kind": "measured", "ci_low": 49.0, "ci_high": 51.0}
    rows = pd.DataFrame(
        [
            {**base, **dict(case.key), "device": device, "metric": metric, "value": 50.0}
            for case in trainer_mfu.cases("full", GPU)
            for device in ("nvidia-b", "nvidia-a")
            for metric in ("hfu", "share_of_block_stack")
        ]
    )
    names = [f.name for f in trainer_mfu.draw(rows)]
    assert names == ["trainer_mfu-nvidia-a", "trainer_mfu-nvidia-b", "trainer_mfu-devices"]
    assert len(trainer_mfu.draw(rows[rows["device"] == "nvidia-a"])) == 1
    assert trainer_mfu.draw(rows[rows["metric"] != "hfu"]) == []
