"""Suite `peers` and its adapters: grid and order, rows, peers that are absent, failing or wrong, argument order."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from repro.measure.machine import Machine
from repro.report import style
from repro.suite import Case, CaseSkipped, load
from suites import peers

CPU = Machine("cpu-x86-64-2c", "cpu x86_64 2c", 0, None, None, 24 << 30, 2, {})
H200 = Machine("nvidia-h200", "NVIDIA H200", 1, (9, 0), 132, 150 << 30, 16, {})


def full() -> list[Case]:
    return peers.cases("full", H200)


@pytest.mark.parametrize("profile", ["smoke", "full"])
def test_cases_keep_the_contract(profile: Any) -> None:
    load("peers")
    cases = peers.cases(profile, H200)
    keys = [tuple(c.key.items()) for c in cases]
    assert cases and len(set(keys)) == len(keys)
    assert all(tuple(c.key) == peers.PARAMETERS and c.seconds > 0 for c in cases)
    assert sum(c.seconds for c in cases) < 600, "one lease's command"


def test_the_grid_covers_every_size_width_and_dtype() -> None:
    cells = {tuple(c.key[p] for p in ("impl", "form", "batch", "tokens", "dim", "dtype")) for c in full()}
    for tokens in (*(1 << k for k in range(10, 18)), 64_000):
        for dim in (1_536, 3_072, 5_120):
            for dtype in ("bf16", "fp32"):
                for impl in ("stream", "eager", "cudnn", "liger", "quack", "fused"):
                    assert (impl, "per_sample", 1, tokens, dim, dtype) in cells
    assert {c.key["batch"] for c in full()} == {1, 8}
    assert not any(c.key["impl"] in ("liger", "quack") for c in full() if c.key["batch"] == 8)
    for tokens, dim, dtype in ((32_768, 1_536, "bf16"), (64_000, 5_120, "fp32-bf16")):
        assert ("unfused", "gated", 1, tokens, dim, dtype) in cells


def test_large_cells_come_first_and_fused_last_in_its_cell() -> None:
    large = [c for c in full() if c.key["form"] != "per_token" and c.key["tokens"] in (32_768, 64_000)]
    assert full()[: len(large)] == large
    models = [c for c in large if c.key["form"] == "per_sample" and c.key["dim"] != 3_072]
    assert full()[: len(models)] == models and models[0].key["dim"] == 5_120
    seen: list[tuple[Any, ...]] = []
    for c in full():
        cell = tuple(c.key[p] for p in ("form", "dtype", "batch", "tokens", "dim"))
        if cell not in seen:
            assert c.key["impl"] == "stream"
            seen.append(cell)
        assert seen[-1] == cell, "cells are not interleaved"
    last = {tuple(c.key[p] for p in ("form", "dtype", "batch", "tokens", "dim")): c.key["impl"] for c in full()}
    assert set(last.values()) == {"fused"}


def test_without_a_gpu_there_is_nothing_to_compare_in_full() -> None:
    assert peers.cases("full", CPU) == [] and peers.cases("smoke", CPU)
    assert not any(c.key["impl"] in ("cudnn", "liger", "quack") for c in peers.cases("smoke", CPU))


@pytest.fixture
def fresh_bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("torch")
    from repro.measure import kernel_rows, norm_modulate, stream

    monkeypatch.setattr(stream, "_best", {})
    monkeypatch.setattr(stream, "_LARGE_CPU", (1 << 18,))  # what a ceiling is here does not matter
    kernel_rows.bench.cache_clear()
    norm_modulate._peer.cache_clear()
    yield
    kernel_rows.bench.cache_clear()
    norm_modulate._peer.cache_clear()


def case(impl: str, direction: str = "forward", form: str = "per_sample") -> Case:
    values = (impl, form, direction, "fp32", 1, 64, 32)
    return Case(dict(zip(peers.PARAMETERS, values, strict=True)))


def rows(c: Case) -> dict[str, Any]:
    return {m.metric: m for m in peers.measure(c, CPU, pd.DataFrame())}


@pytest.mark.usefixtures("fresh_bench")
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_fused_is_compared_with_the_fastest_of_its_cell(direction: str) -> None:
    # Starts with fused, as a resumed run may: what it is compared with has to be measured first.
    fused, eager = (rows(case(impl, direction)) for impl in ("fused", "eager"))
    assert set(eager) == {"time", "time_called", "bandwidth", "ceiling", "ceiling_same_size"}
    assert set(fused) == {*eager, "speedup", "over_best_peer"}
    others = (
        eager["time"].value,
        *([] if 64 not in peers.WAN_TOKENS else [rows(case("wan", direction))["time"].value]),
    )
    assert fused["over_best_peer"].value == pytest.approx(min(others) / fused["time"].value)
    assert fused["over_best_peer"].ci_low <= fused["over_best_peer"].value <= fused["over_best_peer"].ci_high


@pytest.mark.usefixtures("fresh_bench")
def test_the_gated_form_is_compared_with_the_unfused_pair() -> None:
    fused, unfused = (rows(case(impl, form="gated")) for impl in ("fused", "unfused"))
    assert fused["over_unfused"].value == pytest.approx(unfused["time"].value / fused["time"].value)
    assert "over_unfused" not in unfused and "over_best_peer" not in unfused


@pytest.mark.usefixtures("fresh_bench")
def test_a_peer_that_is_absent_or_fails_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.measure import peers as adapters

    class Broken:
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            raise AssertionError("Weight must be\nfloat32")

    with pytest.raises(CaseSkipped, match="liger needs a CUDA device"):
        rows(case("liger"))
    monkeypatch.setattr(adapters, "load", lambda name, problem: Broken())
    with pytest.raises(CaseSkipped, match="quack fails: AssertionError: Weight must be float32"):
        rows(case("quack", "backward"))
    # and does not take fused's row with it
    monkeypatch.setattr(peers, "_impls", lambda cell, machine: ["stream", "eager", "quack", "fused"])
    assert "over_best_peer" in rows(case("fused"))


@pytest.mark.usefixtures("fresh_bench")
def test_a_wrong_peer_fails_its_own_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.measure import peers as adapters
    from repro.measure import verify

    class Wrong:
        def forward(self, x: Any, weight: Any, bias: Any) -> Any:
            return x * 2, x, x

    monkeypatch.setattr(adapters, "load", lambda name, problem: Wrong())
    with pytest.raises(verify.WrongResultError):
        rows(case("cudnn"))
    monkeypatch.setattr(peers, "_impls", lambda cell, machine: ["stream", "eager", "cudnn", "fused"])
    assert "over_best_peer" in rows(case("fused"))


@pytest.mark.usefixtures("fresh_bench")
def test_a_peer_faster_than_memory_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own case fails; of the fused op's nothing is worked out from times that cannot be."""
    from repro.measure import kernel_rows

    bounded = kernel_rows.Bench._ceiling

    def ceiling(self: Any, impl: str, *rest: Any) -> Any:
        if impl == "eager":
            raise kernel_rows.HarnessError("eager reads 120% of the fastest stream")
        return bounded(self, impl, *rest)

    monkeypatch.setattr(kernel_rows.Bench, "_ceiling", ceiling)
    monkeypatch.setattr(peers, "_impls", lambda cell, machine: ["stream", "eager", "wan", "fused"])
    with pytest.raises(kernel_rows.HarnessError):
        rows(case("eager"))
    got, wan = rows(case("fused")), rows(case("wan"))
    assert got["over_best_peer"].value == pytest.approx(wan["time"].value / got["time"].value)


@pytest.mark.usefixtures("fresh_bench")
def test_without_kernels_the_fused_op_is_skipped_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.adaln import build

    monkeypatch.setattr(build, "ensure_loaded", lambda: False)
    monkeypatch.setattr(build, "failure", lambda: "nvcc is missing")
    for impl in ("fused", "unfused"):
        with pytest.raises(CaseSkipped, match="nvcc is missing"):
            peers.measure(case(impl), H200, pd.DataFrame())


@pytest.mark.usefixtures("fresh_bench")
def test_peers_that_do_not_cover_a_problem_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from repro.measure.norm_problem import Problem
    from repro.measure.peers import PeerUnavailable
    from repro.measure.peers import load as load_peer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(PeerUnavailable, match="liger has one weight for all samples"):
        load_peer("liger", Problem(2, 4, 8, torch.float32))
    with pytest.raises(PeerUnavailable, match="cudnn has no per_token form"):
        load_peer("cudnn", Problem(1, 4, 8, torch.float32, "per_token"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", None)
    with pytest.raises(PeerUnavailable, match="quack cannot be used: "):
        load_peer("quack", Problem(1, 4, 8, torch.float32))
    with pytest.raises(ValueError, match="cudnn, liger, quack"):
        load_peer("apex", Problem(1, 4, 8, torch.float32))


def _statistics(x: Any) -> tuple[Any, Any]:
    x = x.double()
    return x.mean(-1), (x.var(-1, correction=0) + 1e-6).rsqrt()


def _backward(dy: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> tuple[Any, Any, Any]:
    """dx, dweight, dbias of rows [N, D] in float64, from statistics [N]."""
    normalized = (x.double() - mean[:, None]) * rstd[:, None]
    g = dy.double() * weight.double()
    dx = rstd[:, None] * (g - g.mean(-1, keepdim=True) - normalized * (g * normalized).mean(-1, keepdim=True))
    return dx, (dy.double() * normalized).sum(0), dy.double().sum(0)


def liger_module() -> types.ModuleType:
    """liger_kernel.ops.layer_norm 0.8.5 as far as it is called: names, order and shapes of arguments and results."""
    import torch

    def forward(X: Any, W: Any, B: Any, eps: float) -> tuple[Any, ...]:
        rows = X.view(-1, X.shape[-1])
        assert W.shape == B.shape == (X.shape[-1],) and eps == 1e-6
        mean, rstd = _statistics(rows)
        y = torch.nn.functional.layer_norm(rows, W.shape, W.to(X.dtype), B.to(X.dtype), eps)
        return y.view(X.shape), rows, mean.float(), rstd.float(), 64, 4

    def backward(dY: Any, X: Any, W: Any, B: Any, Mean: Any, RSTD: Any) -> tuple[Any, ...]:
        assert X.dim() == 2 and dY.numel() == X.numel() and W.shape == B.shape
        dx, dw, db = _backward(dY.view(X.shape), X, W, Mean, RSTD)
        return dx.to(X.dtype).view(dY.shape), dw.to(W.dtype), db.to(B.dtype)

    module = types.ModuleType("liger_kernel.ops.layer_norm")
    module.layer_norm_forward, module.layer_norm_backward = forward, backward  # type: ignore[attr-defined]
    return module


def quack_module() -> types.ModuleType:
    """quack.rmsnorm 0.6.5 as far as it is called."""
    import torch

    def forward(
        x: Any, weight: Any, bias: Any = None, eps: float = 1e-6, return_rstd: bool = False, return_mean: bool = False
    ) -> Any:
        assert x.dim() == 2 and weight.dtype == bias.dtype == torch.float32 and weight.dim() == 1
        mean, rstd = _statistics(x)
        y = torch.nn.functional.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)
        return (y, rstd.float(), mean.float()) if return_rstd and return_mean else y

    def backward(x: Any, weight: Any, dout: Any, rstd: Any, mean: Any, has_bias: bool = True) -> tuple[Any, ...]:
        assert x.dim() == dout.dim() == 2 and rstd.dtype == mean.dtype == torch.float32
        dx, dw, db = _backward(dout, x, weight, mean, rstd)
        return dx.to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype)

    module = types.ModuleType("quack.rmsnorm")
    module.layernorm_fwd, module.layernorm_bwd = forward, backward  # type: ignore[attr-defined]
    return module


@pytest.mark.usefixtures("fresh_bench")
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["liger", "quack"])
def test_layer_norms_are_called_the_way_their_packages_want(
    name: str, direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are checked by the harness; a mix-up of mean and rstd, or of dweight and dbias, would be refused."""
    import torch

    from repro.measure import norm_modulate
    from repro.measure import peers as adapters

    module = {"liger": liger_module, "quack": quack_module}[name]()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    problem = norm_modulate.Problem(1, 24, 64, torch.float32)
    assert adapters.load(name, problem)
    times = norm_modulate.measure(name, direction, problem, torch.device("cpu"), seconds=0)
    assert len(times.device.samples_us) >= 30


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["cudnn", "liger", "quack"])
def test_peers_that_are_installed_are_captured_and_right(name: str, dtype: str, batch: int) -> None:
    import torch

    from repro.measure import kernel_rows, norm_modulate
    from repro.measure import peers as adapters

    problem = norm_modulate.Problem(batch, 1_024, 1_536, kernel_rows.DTYPES[dtype][0])
    try:
        adapters.load(name, problem)
    except adapters.PeerUnavailable as reason:
        pytest.skip(str(reason))
    for direction in ("forward", "backward"):
        times = norm_modulate.measure(name, direction, problem, torch.device("cuda", 0), seconds=0)  # type: ignore[arg-type]
        assert times.device.method == "graph"


def test_figures_show_the_peers() -> None:
    table = pd.DataFrame(
        [
            {"device": "nvidia-h200", "suite": "peers", "profile": "full", **c.key, "metric": "ceiling", "unit": "%"}
            | {"value": 80.0, "ci_low": 79.0, "ci_high": 81.0, "n": 30, "kind": "measured"}
            for c in full()
        ]
    )
    with style.context():
        figures = peers.draw(table)
    assert [f.name for f in figures] == ["peers-nvidia-h200", "peers_fp32-nvidia-h200"]
    texts = {t.get_text() for t in figures[0].figure.legends[0].get_texts()}
    assert {"Liger", "quack", "cuDNN", "fused (ours)"} <= texts
    assert peers.draw(table[table["form"] == "gated"]) == [] and peers.evidence(table) == []
