"""Subjects of the kernel suites: right references, every implementation passes, a wrong one fails in the benchmark."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from repro.adaln import reference  # noqa: E402
from repro.measure import benchmarking, norm_modulate, stream, timing, verify  # noqa: E402
from repro.measure.norm_modulate import Problem  # noqa: E402

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
IMPLS = ("eager", "wan", "fused", "dtile", "stream")
SMALL = Problem(2, 24, 64, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("impl", IMPLS)
def test_every_implementation_is_timed_and_right(
    impl: str, direction: norm_modulate.Direction, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = 24 if device.type == "cpu" else 4096
    times = norm_modulate.measure(impl, direction, Problem(2, tokens, 64, dtype), device, seconds=0)
    assert len(times.device.samples_us) >= timing.MIN_SAMPLES and len(times.called.samples_us) >= timing.MIN_SAMPLES


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_compiled_formula_is_captured_and_right(direction: norm_modulate.Direction) -> None:
    device = torch.device("cuda", 0)
    norm_modulate.measure("compile", direction, Problem(1, 4096, 1536, torch.bfloat16), device, seconds=0)


def test_references_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = norm_modulate.random_inputs(SMALL, CPU, 3)
    x, shift, scale = (t.detach().double().requires_grad_() for t in (inputs.x, inputs.shift, inputs.scale))
    y = reference.reference64(x, shift, scale, norm_modulate.EPS)
    wanted = (y, *torch.autograd.grad(y, (x, shift, scale), inputs.dy.double()))
    monkeypatch.setattr(norm_modulate, "_REFERENCE_CHUNK", 7 * 2 * 64)  # 7 of 24 rows at a time
    found = (
        norm_modulate.reference_forward(inputs.x, inputs.shift, inputs.scale),
        *norm_modulate.reference_backward(inputs.dy, inputs.x, inputs.shift, inputs.scale),
    )
    for one, other in zip(found, wanted, strict=True):
        # float64 sums in another order
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_modulation_arrives_strided_as_in_a_wan_block() -> None:
    inputs = norm_modulate.random_inputs(SMALL, CPU, 0)
    assert inputs.shift.shape == inputs.scale.shape == (2, 1, 64)
    assert not inputs.scale.is_contiguous() and inputs.scale.is_leaf and inputs.scale.requires_grad


def test_necessary_traffic() -> None:
    problem = Problem(1, 10, 8, torch.bfloat16)
    assert (problem.traffic("forward"), problem.traffic("backward")) == (2 * 160, 3 * 160)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_input_sets_differ(direction: norm_modulate.Direction) -> None:
    first, second = norm_modulate.subjects("eager", direction, SMALL, CPU)
    assert not torch.equal(first.inputs["x"], second.inputs["x"])


@pytest.mark.parametrize("reads", [1, 2])
def test_stream_traffic(reads: int) -> None:
    measured = stream.measure((4, 1024), torch.float32, reads, CPU, seconds=0)
    assert measured.bytes == (reads + 1) * 4 * 1024 * 4
    us = measured.timing.samples_us[0]
    assert measured.us_per_gb[0] == pytest.approx(us * 1e9 / measured.bytes)
    with pytest.raises(ValueError, match="reads must be 1 or 2"):
        stream.subject((4, 4), torch.float32, 3, CPU, 0)


class Fixture:
    """pytest-benchmark's fixture as far as `benchmarking.run` uses it."""

    def __init__(self) -> None:
        self.calls = 0

    def pedantic(self, target: Any, setup: Any, rounds: int, warmup_rounds: int, iterations: int) -> None:
        assert iterations == 1
        for _ in range(rounds + warmup_rounds):
            args, kwargs = setup()
            target(*args, **kwargs)
            self.calls += 1


def test_benchmark_runs_rounds_on_rotating_sets() -> None:
    fixture = Fixture()
    benchmarking.run(fixture, norm_modulate.subjects("eager", "forward", SMALL, CPU), CPU, rounds=5)
    assert fixture.calls == 5 + benchmarking.WARM_UP


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_wrong_kernel_fails_its_benchmark(
    direction: norm_modulate.Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_one(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) * scale + shift

    monkeypatch.setattr(norm_modulate, "get_impl", lambda name: forgets_the_one)
    fixture = Fixture()
    with pytest.raises(verify.WrongResultError, match="y of" if direction == "forward" else "dx of"):
        benchmarking.run(fixture, norm_modulate.subjects("eager", direction, SMALL, CPU), CPU)
    assert fixture.calls == 0, "no time for a wrong result"


def test_a_kernel_that_turns_wrong_fails_its_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembers its results: right until the inputs change."""
    known: dict[int, torch.Tensor] = {}

    def remembers(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        with torch.no_grad():
            return known.setdefault(x.data_ptr(), reference.eager(x, shift, scale, eps)).clone()

    monkeypatch.setattr(norm_modulate, "get_impl", lambda name: remembers)
    fixture = Fixture()
    with pytest.raises(verify.WrongResultError):
        benchmarking.run(fixture, norm_modulate.subjects("eager", "forward", SMALL, CPU), CPU)
    assert fixture.calls > 0


@pytest.mark.gpu
def test_device_instants_measure_the_device() -> None:
    x = torch.randn(1 << 26, device="cuda")
    x.mul_(1.0)
    start = benchmarking.DeviceInstant()
    for _ in range(10):
        x.mul_(1.0)
    # 5 GB of traffic: no GPU moves it in less than 0.1 ms, none that runs this in more than a second
    assert 1e-4 < benchmarking.DeviceInstant() - start < 1
