"""kernel_speed, activation_memory, graph_nodes: grids, rows of a smoke run, evidence and figures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from repro import claims
from repro.measure.machine import Machine
from repro.report import style
from repro.suite import Case, CaseSkipped, load
from suites import activation_memory, graph_nodes, kernel_speed

CPU = Machine("cpu-x86-64-2c", "cpu x86_64 2c", 0, None, None, 24 << 30, 2, {})
H200 = Machine("nvidia-h200", "NVIDIA H200", 1, (9, 0), 132, 150 << 30, 16, {})
SUITES = (kernel_speed, activation_memory, graph_nodes)


def table(suite: ModuleType, profile: str, values: Iterable[tuple[Case, dict[str, float]]], slug: str) -> pd.DataFrame:
    """Rows as the store gives them: metrics of cases, with an interval of +-1%."""
    rows = [
        {
            "device": slug, "schema": 1, "run_id": "r", "suite": suite.NAME, "profile": profile, **case.key,
            "metric": metric, "unit": "", "value": v, "ci_low": 0.99 * v, "ci_high": 1.01 * v, "n": 30,
            "kind": "measured", "source": "",
        }
        for case, metrics in values
        for metric, v in metrics.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
@pytest.mark.parametrize("profile", ["smoke", "full"])
@pytest.mark.parametrize("machine", [CPU, H200], ids=lambda m: m.slug)
def test_cases_keep_the_contract(suite: Any, profile: Any, machine: Machine) -> None:
    load(suite.NAME)
    cases = suite.cases(profile, machine)
    keys = [tuple(c.key.items()) for c in cases]
    assert cases and len(set(keys)) == len(keys)
    assert all(tuple(c.key) == suite.PARAMETERS and c.seconds > 0 for c in cases)
    assert set(suite.CLAIMS) <= set(claims.BY_ID)


def test_full_grid_is_the_whole_grid() -> None:
    cells = {tuple(c.key[p] for p in ("impl", "pass", "dtype", "batch", "tokens", "dim")) for c in full()}
    for dim in (1_536, 5_120):
        for dtype in ("bf16", "fp32"):
            for batch, tokens in [*((1, n) for n in kernel_speed.TOKENS), (8, 512)]:
                for impl in kernel_speed.IMPLS:
                    for direction in ("forward", "backward"):
                        wanted = (impl, direction, dtype, batch, tokens, dim)
                        # the D-tile forward is the fused one
                        assert (wanted in cells) == ((impl, direction) != ("dtile", "forward"))
    assert set(kernel_speed.TOKENS) == {1024, 2048, 4096, 8192, 16384, 32768, 64000, 65536}


def test_what_others_are_compared_with_is_measured_first() -> None:
    seen: set[tuple[Any, ...]] = set()
    for case in full():
        shape = tuple(case.key[p] for p in ("pass", "dtype", "batch", "tokens", "dim"))
        assert case.key["impl"] == "stream" or ("stream", *shape) in seen
        assert case.key["impl"] in ("stream", "eager") or ("eager", *shape) in seen
        seen.add((case.key["impl"], *shape))


def test_small_memory_leaves_large_shapes_out() -> None:
    small = Machine("nvidia-t4", "Tesla T4", 1, (7, 5), 40, 16 << 30, 4, {})
    assert 0 < len(kernel_speed.cases("full", small)) < len(full())


def test_imports_without_pytorch() -> None:
    code = (
        "import sys; from suites import kernel_speed, activation_memory, graph_nodes; import repro.report.style;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def full() -> list[Case]:
    return kernel_speed.cases("full", H200)


def case(suite: Any, **key: Any) -> Case:
    found = [c for c in suite.cases("smoke", CPU) if all(c.key[k] == v for k, v in key.items())]
    return found[-1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernel_speed_rows(direction: str) -> None:
    pytest.importorskip("torch")
    from repro.measure import kernel_rows

    kernel_rows.bench.cache_clear()
    # Starts with fused: a resumed run has to measure what the ratios refer to.
    fused, eager, stream = (
        {
            m.metric: m
            for m in kernel_speed.measure(case(kernel_speed, impl=i, **{"pass": direction}), CPU, pd.DataFrame())
        }
        for i in ("fused", "eager", "stream")
    )
    assert set(stream) == {"time", "time_called", "bandwidth", "ceiling"}
    assert set(eager) == {*stream, "ceiling_same_size"} and set(fused) == {*eager, "speedup"}
    assert fused["time"].n >= 30 and len(fused["time"].samples) == fused["time"].n
    assert fused["speedup"].value == pytest.approx(eager["time"].value / fused["time"].value)
    assert fused["ceiling_same_size"].value == pytest.approx(100 * stream["time"].value / fused["time"].value)
    necessary = {"forward": 2, "backward": 3}[direction] * 256 * 256 * 4
    assert eager["bandwidth"].value == pytest.approx(necessary / eager["time"].value / 1e3)
    for row in (*fused.values(), *eager.values(), *stream.values()):
        assert row.ci_low <= row.value <= row.ci_high


def test_no_time_of_calls_is_taken_beside_a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own times do not wait for the host; a CPU is always its own host."""
    torch = pytest.importorskip("torch")
    from repro.measure import kernel_rows, machine, stream

    known: dict[Any, Any] = {}
    monkeypatch.setattr(stream, "_best", known)

    def metrics() -> set[str]:
        return {m.metric for m in bench.rows("stream", "forward", problem, "seed")}

    bench = kernel_rows.Bench(torch.device("cpu"), 0.001)
    problem = kernel_rows.Problem(1, 16, 16, torch.float32, "per_sample", None)
    monkeypatch.setattr(machine, "load_average", lambda: 1e9)
    assert "time_called" in metrics()
    bench.device = torch.device("cuda")  # what was timed is kept: nothing is launched
    monkeypatch.setattr(stream, "_best", {(dtype, mix, bench.device): best for (dtype, mix, _), best in known.items()})
    assert metrics() == {"time", "bandwidth", "ceiling"}
    monkeypatch.setattr(machine, "load_average", lambda: float(machine.host_cores()))
    assert "time_called" in metrics()
    monkeypatch.setattr(machine, "load_average", lambda: machine.host_cores() + 0.1)
    assert "time_called" not in metrics()


def test_kernel_speed_refuses_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from repro.measure import kernel_rows, norm_modulate, verify

    kernel_rows.bench.cache_clear()
    monkeypatch.setattr(norm_modulate, "get_impl", lambda name: lambda x, shift, scale, eps: torch.relu(x) + shift)
    with pytest.raises(verify.WrongResultError):
        kernel_speed.measure(case(kernel_speed, impl="eager", **{"pass": "forward"}), CPU, pd.DataFrame())


@pytest.mark.parametrize("suite", [kernel_speed, activation_memory, graph_nodes], ids=lambda s: s.NAME)
def test_without_kernels_the_fused_op_is_skipped_on_a_gpu(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from repro.adaln import build

    monkeypatch.setattr(build, "ensure_loaded", lambda: False)
    monkeypatch.setattr(build, "failure", lambda: "nvcc is missing")
    with pytest.raises(CaseSkipped, match="nvcc is missing"):
        suite.measure(case(suite, impl="fused"), H200, pd.DataFrame())


@pytest.mark.parametrize("again", [1.0, 0.99, 1.02])
def test_a_bandwidth_far_above_the_best_large_stream_is_an_error(again: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """again: speed of the stream, over its first, when it is measured once more because a call was above it.

    The streams are the fastest that were found: what is a little above them counts, and says so by its ceiling.
    """
    torch = pytest.importorskip("torch")
    from repro.measure import kernel_rows, norm_modulate, stream, timing

    def times(us: float) -> norm_modulate.Times:
        t = timing.Timing((us,) * 30, "graph", 2)
        return norm_modulate.Times(t, t)

    problem = norm_modulate.Problem(1, 10, 10, torch.float32)
    size = problem.traffic("forward")

    def best(*_: Any, again: bool = False, speed: float = again) -> stream.Traffic:
        return stream.Traffic(times(100 / speed if again and speed > 1 else 100).device, size)

    monkeypatch.setattr(stream, "best", best)
    for faster in (1.0, 1.01, 1.04, 1.06):
        own = 100 / faster
        # A stream of the same size, which caches and launches may slow, is no limit.
        monkeypatch.setattr(norm_modulate, "measure", lambda i, *_, own=own: times(200 if i == "stream" else own))
        bench = kernel_rows.Bench(torch.device("cuda", 0), 0.1)
        if faster > 1.03 * max(1.0, again):
            with pytest.raises(kernel_rows.HarnessError, match="cannot have moved all its bytes"):
                bench.rows("fused", "forward", problem, "seed")
        else:
            found = {row.metric: row.value for row in bench.rows("fused", "forward", problem, "seed")}
            assert found["ceiling"] == pytest.approx(100 * faster / (max(1.0, again) if faster > 1 else 1))
            assert found["ceiling_same_size"] == pytest.approx(200 * faster)


def test_a_stream_of_the_same_size_that_is_the_fastest_is_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from repro.measure import kernel_rows, norm_modulate, stream, timing

    device = torch.device("cuda", 0)
    problem = norm_modulate.Problem(1, 10, 10, torch.float32)
    size = problem.traffic("forward")

    def timed(us: float) -> timing.Timing:
        return timing.Timing((us,) * 30, "graph", 2)

    monkeypatch.setattr(stream, "_best", {})
    stream.offer(stream.Traffic(timed(100), size), torch.float32, stream.Mix(1, 1), device)
    us = {"stream": 80.0, "eager": 400.0, "fused": 90.0}
    monkeypatch.setattr(
        norm_modulate, "measure", lambda impl, *_: norm_modulate.Times(timed(us[impl]), timed(us[impl]))
    )
    bench = kernel_rows.Bench(device, 0.1)
    of_stream = {row.metric: row.value for row in bench.rows("stream", "forward", problem, "seed")}
    of_fused = {row.metric: row.value for row in bench.rows("fused", "forward", problem, "seed")}
    assert of_stream["ceiling"] == pytest.approx(100)
    assert of_fused["ceiling"] == of_fused["ceiling_same_size"] == pytest.approx(100 * 80 / 90)


def test_k1_and_k2_come_from_their_cell() -> None:
    times = {"stream": 100.0, "eager": 450.0, "wan": 900.0, "compile": 200.0, "fused": 110.0, "dtile": 300.0}

    def metrics(c: Case) -> dict[str, float]:
        impl = str(c.key["impl"])
        scale = 1.0 if all(c.key[k] == v for k, v in kernel_speed.CLAIMED.items()) else 7.0
        row = {"time": times[impl], "ceiling": 1e4 / times[impl]}
        return row if impl in ("stream", "eager") else {**row, "speedup": scale * 450.0 / times[impl]}

    rows = table(kernel_speed, "full", [(c, metrics(c)) for c in full()], "nvidia-h200")
    k1, k2 = kernel_speed.evidence(rows)
    assert (k1.claim, k1.value, k1.baseline, k1.treated) == ("K1", pytest.approx(450 / 110), 450.0, 110.0)
    assert (k2.claim, k2.value, k2.treated) == ("K2", pytest.approx(1.5), 300.0)
    assert "fused 4.09x" in k2.note and "wan 0.50x" in k1.note and "fused 91%" in k1.note
    assert "fused is the fastest in all 36 cells" in k1.note
    old = rows.copy()
    cell = (old["impl"] == "fused") & (old["tokens"] == 1_024)
    old.loc[cell, "run_id"] = "before"
    old.loc[cell & (old["metric"] == "time"), "value"] = 999.0
    assert "fused is the fastest in all 32 cells" in kernel_speed.evidence(old)[0].note, "of older kernels"
    apart = rows.copy()
    cell = (apart["impl"] == "compile") & (apart["tokens"] == 1_024)
    apart.loc[cell, "run_id"] = "before"
    apart.loc[cell & (apart["metric"] == "time"), "value"] = 1.0
    told = "fused is the fastest in all 36 cells (compile not measured in 4)"
    assert told in kernel_speed.evidence(apart)[0].note, "times of another run are not to be compared with"
    ahead = apart.assign(run_id=apart["run_id"].where(apart["tokens"] != 1_024, rows["run_id"].iloc[0]))
    assert "another is faster than fused in 4 of 36 cells, most at" in kernel_speed.evidence(ahead)[0].note
    with style.context():
        told = [{f.name: f.caption for f in kernel_speed.draw(r)}["kernel_speedup-nvidia-h200"] for r in (rows, old)]
        single = rows[rows["tokens"] == 64_000]
        assert not [f for f in kernel_speed.draw(single) if f.name.endswith("nvidia-h200")], "a size is no line"
    assert ["earlier kernels" in caption for caption in told] == [False, True]
    assert claims.BY_ID["K1"].rule.verdict(3.21, k1) == "exceeded"
    assert claims.BY_ID["K2"].rule.verdict(1.42, k2) == "reproduced"
    assert kernel_speed.evidence(rows[rows["tokens"] != 64_000]) == []
    assert [e.claim for e in kernel_speed.evidence(rows[rows["impl"] != "dtile"])] == ["K1"]


def memory_rows(fused: float = 2.0) -> pd.DataFrame:
    per_element = {"wan": 8.0, "eager": 4.0, "compile": 2.5, "fused": fused}

    def metrics(c: Case) -> dict[str, float]:
        each = per_element[str(c.key["impl"])]
        gb = each * int(c.key["tokens"]) * int(c.key["dim"]) / 1e9
        return {"saved_bytes": gb, "reduction": 100 * (1 - each / 8), "peak": 2 * gb}

    cases = activation_memory.cases("full", H200)
    return table(activation_memory, "full", [(c, metrics(c)) for c in cases], "nvidia-h200")


def test_k3_and_k4_compare_wans_formula_with_the_fused_op() -> None:
    k3, k4 = activation_memory.evidence(memory_rows())
    assert (k3.claim, k3.value, k3.ci_low, k3.ci_high) == ("K3", 75.0, 75.0, 75.0)
    assert k4.value == pytest.approx(6 * 64_000 * 5_120 / 1e9) and k4.baseline == pytest.approx(2.62144)
    assert "eager op 50.0%" in k3.note and "eager op 0.66 GB" in k4.note and "op 5.24 to 1.31 GB" in k4.note
    rows = memory_rows()
    assert activation_memory.evidence(rows[rows["impl"] != "fused"]) == []


def test_activation_memory_rows() -> None:
    pytest.importorskip("torch")
    rows = activation_memory.measure(case(activation_memory, impl="fused", chain="op"), CPU, pd.DataFrame())
    found = {r.metric: r for r in rows}
    assert set(found) == {"saved_bytes", "reduction"}, "a CPU has no peaks"
    tokens, dim = 256, 96
    assert found["saved_bytes"].value == (2 * dim + 8) * tokens / 1e9
    # Wan's formula keeps two float32 rows, two statistics, and 1 + scale once
    assert found["reduction"].value == pytest.approx(100 * (1 - (2 * dim + 8) * 256 / ((8 * dim + 8) * 256 + 4 * dim)))
    assert all(r.ci_low == r.value == r.ci_high and r.n == 1 for r in rows)


def test_graph_nodes_rows_and_k5() -> None:
    pytest.importorskip("torch")
    cases = graph_nodes.cases("full", CPU)
    measured = [(c, {m.metric: m.value for m in graph_nodes.measure(c, CPU, pd.DataFrame())}) for c in cases]
    rows = table(graph_nodes, "full", measured, "cpu-x86-64-2c")
    (k5,) = graph_nodes.evidence(rows)
    assert (k5.baseline, k5.treated, k5.value) == (6.0, 1.0, 6.0) and "eager 5" in k5.note
    assert claims.BY_ID["K5"].rule.verdict(5.0, k5) == "reproduced"
    launches = table(graph_nodes, "full", [(c, {**m, "launches_forward": 7}) for c, m in measured], "nvidia-h200")
    assert "launches forward: wan 7, eager 7, fused 7" in graph_nodes.evidence(launches)[0].note


@pytest.mark.parametrize("profile", ["full", "smoke"])
def test_figures_mark_the_papers_values(profile: str) -> None:
    def metrics(c: Case) -> dict[str, float]:
        return {"time": 1.0, "speedup": 2.0, "ceiling": 50.0}

    speed = kernel_speed.cases(profile, H200)  # type: ignore[arg-type]
    nodes = graph_nodes.cases("full", H200)
    with style.context():
        speeds = kernel_speed.draw(table(kernel_speed, profile, [(c, metrics(c)) for c in speed], "nvidia-h200"))
        (memory,) = activation_memory.draw(memory_rows().assign(profile=profile))
        (graph,) = graph_nodes.draw(table(graph_nodes, profile, [(c, {"nodes": 6}) for c in nodes], "nvidia-h200"))
    stems = ("kernel_speedup", "kernel_speedup_fp32", "kernel_ceiling", "kernel_ceiling_fp32")
    assert [f.name for f in speeds] == [f"{stem}-nvidia-h200" for stem in stems]
    assert all(set(f.claims) == {"K1", "K2"} for f in speeds)
    said = {f.name: " ".join(t.get_text() for ax in f.figure.axes for t in ax.texts) for f in (*speeds, memory, graph)}
    texts = {name: text.replace("\n", " ") for name, text in said.items()}
    assert "3.21x" in texts["kernel_speedup-nvidia-h200"] and "1.42x" in texts["kernel_speedup-nvidia-h200"]
    assert "paper" not in texts["kernel_speedup_fp32-nvidia-h200"], "the paper's speedups are taken as bf16's"
    assert "61.9%" in texts["activation_memory-nvidia-h200"] and "5 to 8" in texts["graph_nodes-nvidia-h200"]
    assert ("4.8 GB" in texts["activation_memory-nvidia-h200"]) == (profile == "full")


def test_devices_with_shapes_in_common_are_drawn_together() -> None:
    cases = kernel_speed.cases("full", CPU)
    rows = [
        table(kernel_speed, "full", [(c, {"time": 1.0, "speedup": 2.0, "ceiling": 50.0}) for c in cases], device)
        for device in ("cpu-x86-64-2c", "nvidia-h200")
    ]
    with style.context():
        drawn = kernel_speed.draw(pd.concat(rows, ignore_index=True))
        apart = kernel_speed.draw(pd.concat([rows[0], rows[1].assign(dim=5_120)], ignore_index=True))
    assert drawn[-1].name == "kernel_speed-devices"
    labels = {t for ax in drawn[-1].figure.axes for t in ax.get_legend_handles_labels()[1]}
    assert labels == {"cpu-x86-64-2c", "nvidia-h200"}
    assert "kernel_speed-devices" not in [f.name for f in apart]


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
def test_no_rows_no_figures_no_evidence(suite: Any) -> None:
    empty = table(suite, "full", [], "d").reindex(
        columns=["device", "suite", "profile", *suite.PARAMETERS, "metric", "value"]
    )
    assert suite.draw(empty) == [] and suite.evidence(empty) == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
def test_smoke_profile_on_a_gpu(suite: Any) -> None:
    from repro.measure.machine import read_machine

    machine = read_machine()
    for c in suite.cases("smoke", machine):
        rows = {m.metric: m for m in suite.measure(c, machine, pd.DataFrame())}
        assert all(m.value >= 0 for m in rows.values())
        if suite is graph_nodes:
            assert rows["launches_forward"].value >= 1
