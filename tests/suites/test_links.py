"""Links: the grid, bandwidth from known times, wrong results, facts, figures, two real ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pandas as pd
import pytest

from repro.measure.machine import read_machine
from repro.report import style
from repro.suite import CaseSkipped, load
from suites import links

CPU = SimpleNamespace(has_gpu=False, gpu_count=0)
US = 1e-6


def gpus(count):
    return SimpleNamespace(has_gpu=True, gpu_count=count)


def answer(call, asked, ranks, right=True):
    """A fabric on which everything takes 100 us, and rank 1 is twice as slow to send."""
    if call.endswith(":facts"):
        gpu = {"nvlinks": 18.0, "nvlink_speed": 26.562}
        return {"gpus": [gpu] * ranks, "nvlink": [[0, 1, 1.0]]}
    if call.endswith(":pairs"):
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        return {"right": right, "seconds": [[a, b, [100 * US * (2 if a == 1 else 1)] * 10] for a, b in pairs]}
    return {"right": right, "seconds": [100 * US] * asked["repeats"]}


@pytest.fixture
def fabric(monkeypatch):
    """Ranks that answer as above; `fabric.right = False` for ones that compute wrong."""
    pytest.importorskip("torch")
    from repro.wan import launch

    made = SimpleNamespace(right=True, asked=[])

    def ranks(count, kind):
        def ask(call, asked, limit):
            made.asked.append((call, asked))
            return answer(call, asked, count, made.right)

        return SimpleNamespace(ask=ask)

    monkeypatch.setattr(launch, "ranks", ranks)
    return made


def table(machine, device="nvidia-test-x8"):
    return pd.DataFrame([
        {"suite": "links", "profile": "full", "device": device, "run_id": "r1", **case.key, "metric": m.metric,
         "unit": m.unit, "value": m.value, "ci_low": m.ci_low, "ci_high": m.ci_high, "kind": m.kind}
        for case in links.cases("full", machine) for m in links.measure(case, machine, pd.DataFrame())
    ])  # fmt: skip


def test_contract():
    assert load("links") is links
    for profile, machine in (("full", gpus(8)), ("full", gpus(2)), ("smoke", CPU), ("smoke", gpus(4))):
        found = links.cases(profile, machine)
        assert found and all(tuple(c.key) == links.PARAMETERS for c in found)
        assert len({tuple(c.key.values()) for c in found}) == len(found)
        assert {c.key["ranks"] for c in found} == {max(2, machine.gpu_count)}
        assert {c.key["backend"] for c in found} == {"nccl" if machine.has_gpu else "gloo"}
    assert links.cases("full", gpus(1)) == links.cases("smoke", gpus(1)) == links.cases("full", CPU) == []
    assert sum(c.seconds for c in links.cases("full", gpus(8))) < 60


def test_bus_bandwidth_is_that_of_nccl_tests(fabric):
    rows = table(gpus(8))
    at = rows[(rows["metric"] == "bus_bandwidth") & (rows["bytes"] == 1 << 29)].set_index("operation")["value"]
    whole = (1 << 29) / 100e-6 / 1e9
    assert at["all_reduce"] == pytest.approx(2 * 7 / 8 * whole)
    assert at["all_gather"] == at["reduce_scatter"] == pytest.approx(7 / 8 * whole)
    pairs = rows[rows["metric"].str.startswith("bandwidth_")].set_index("metric")["value"]
    assert len(pairs) == 56
    assert pairs["bandwidth_0_1"] == pytest.approx(2 * pairs["bandwidth_1_0"]) == pytest.approx((1 << 26) / 1e-4 / 1e9)
    facts = rows[rows["operation"] == "facts"].set_index("metric")["value"]
    assert (facts["nvlinks_of_7"], facts["nvlink_between_0_1"]) == (18, 1)
    assert (rows["kind"] == "measured").all()


def test_what_is_wrong_is_not_timed(fabric):
    fabric.right = False
    _, pairs, first, *_ = links.cases("full", gpus(8))
    for case in (pairs, first):
        with pytest.raises(RuntimeError, match=f"{case.key['operation']} of .* on 8 ranks gave a wrong result"):
            links.measure(case, gpus(8), pd.DataFrame())


def test_without_nvml_there_are_no_facts(fabric, monkeypatch):
    from repro.wan import launch

    nothing = SimpleNamespace(ask=lambda *_: {"gpus": [{}, {}], "nvlink": []})
    monkeypatch.setattr(launch, "ranks", lambda *_: nothing)
    with pytest.raises(CaseSkipped, match="NVML"):
        links.measure(links.cases("full", gpus(2))[0], gpus(2), pd.DataFrame())


def test_figures(fabric):
    rows = table(gpus(8))
    with style.context():
        assert [f.name for f in links.draw(rows)] == ["links-nvidia-test-x8"]
        both = pd.concat([rows, table(gpus(16), "nvidia-test-x16")])
        assert [f.name for f in links.draw(both)] == ["links-nvidia-test-x16", "links-nvidia-test-x8", "links-devices"]
        assert links.draw(rows[rows["operation"] == "facts"]) == []
    assert links.evidence(rows) == []


def test_two_ranks_get_it_right():
    """On this machine's own processes; every operation once."""
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    found = {}
    for case in links.cases("smoke", machine):
        if case.key["bytes"] != 1 << 20:
            for m in links.measure(case, machine, pd.DataFrame()):
                found[case.key["operation"], m.metric] = m
    assert {o for o, _ in found} == {"send_recv", *links.COLLECTIVES}
    assert all(m.value > 0 for m in found.values())
    assert len(found["all_reduce", "time"].samples) == links.SMOKE_REPEATS


def test_a_rank_s_own_look_tells_wrong_from_right():
    """The check that the ranks make, on one rank whose operation forgets its last element."""
    torch = pytest.importorskip("torch")
    from repro.wan import probing_links
    from repro.wan.parallel import join, leave

    world = join("cpu")
    try:
        for name, make in probing_links._OPERATIONS.items():
            work = make(world, 64)
            assert probing_links._is_right(work), name
            lazy = probing_links._Work(lambda: None, work.right, work.reset)
            assert probing_links._is_right(lazy) == (name == "all_reduce"), "alone, a sum is what it was before"
        numbers = probing_links._numbers(world, 8)
        assert torch.equal(probing_links._sum(world, 8), numbers)
    finally:
        leave()
