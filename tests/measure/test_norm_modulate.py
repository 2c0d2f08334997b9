"""Subjects of the kernel suites: right references, every implementation passes, a wrong one fails in the benchmark."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from repro.adaln import reference  # noqa: E402
from repro.measure import benchmarking, norm_modulate, norm_problem, stream, timing, verify  # noqa: E402
from repro.measure.norm_problem import EPS, FORMS, Mix, Problem, random_inputs  # noqa: E402

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


FORMULAS: dict[str, Any] = {
    "per_sample": reference.reference64,
    "per_token": reference.reference64,
    "gated": reference.gated_reference64,
}


@pytest.mark.parametrize("form", FORMS)
def test_references_in_chunks_are_those_of_the_whole(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(Problem(2, 24, 64, torch.float32, form), CPU, 3)
    wide = {name: t.detach().double().requires_grad_() for name, t in inputs.tensors.items()}
    outputs = norm_problem.as_tuple(FORMULAS[form](*wide.values(), eps=EPS))
    gradients = torch.autograd.grad(
        outputs, [wide[name] for name in FORMS[form].wanted], [t.double() for t in inputs.gradients.values()]
    )
    monkeypatch.setattr(norm_problem, "_REFERENCE_CHUNK", 7 * 2 * 64)  # 7 of 24 rows at a time
    found = (*inputs.reference(), *inputs.reference_gradients())
    for one, other in zip(found, (*outputs, *gradients), strict=True):
        # float64 sums in another order
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("out", [None, torch.bfloat16], ids=["one dtype", "float32 residual"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("form", "impl"),
    [
        ("gated", "eager"),
        ("gated", "wan"),
        ("gated", "unfused"),
        ("gated", "fused"),
        ("gated", "stream"),
        ("per_token", "eager"),
        ("per_token", "fused"),
        ("per_token", "stream"),
    ],
)
def test_every_form_is_timed_and_right(form: Any, impl: str, direction: Any, out: torch.dtype | None) -> None:
    problem = Problem(2, 24, 64, torch.float32, form, out)
    norm_modulate.measure(impl, direction, problem, CPU, seconds=0)


def test_modulation_arrives_strided_as_in_a_wan_block() -> None:
    inputs = random_inputs(SMALL, CPU, 0)
    shift, scale = inputs.tensors["shift"], inputs.tensors["scale"]
    assert shift.shape == scale.shape == (2, 1, 64)
    assert not scale.is_contiguous() and scale.is_leaf and scale.requires_grad


def test_necessary_traffic() -> None:
    """1 x 10 x 8 elements: 160 bytes in bfloat16, 320 in float32."""

    def traffic(form: Any, dtype: torch.dtype, out: torch.dtype | None = None) -> tuple[int, int]:
        problem = Problem(1, 10, 8, dtype, form, out)
        return problem.traffic("forward"), problem.traffic("backward")

    assert traffic("per_sample", torch.bfloat16) == (2 * 160, 3 * 160)
    assert traffic("per_token", torch.bfloat16) == (4 * 160, 5 * 160)
    assert traffic("gated", torch.bfloat16) == (4 * 160, 6 * 160)
    # x, h and their gradients wide, branch, y and theirs narrow
    assert traffic("gated", torch.float32, torch.bfloat16) == (2 * 320 + 2 * 160, 3 * 320 + 3 * 160)


def test_the_stream_beside_a_problem_moves_as_many_bytes() -> None:
    problem = Problem(1, 10, 8, torch.float32, "gated", torch.bfloat16)
    for direction in ("forward", "backward"):
        (subject, *_) = norm_modulate.subjects("stream", direction, problem, CPU)  # type: ignore[arg-type]
        moved = [*subject.inputs.values(), *subject.call()]
        assert sum(t.nbytes for t in moved) == problem.traffic(direction)  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_input_sets_differ(direction: norm_modulate.Direction) -> None:
    first, second = norm_modulate.subjects("eager", direction, SMALL, CPU)
    assert not torch.equal(first.inputs["x"], second.inputs["x"])


@pytest.mark.parametrize("mix", [Mix(1, 1), Mix(2, 1), Mix(3, 1), Mix(2, 2), Mix(3, 2), Mix(4, 2)])
def test_stream_traffic(mix: Mix) -> None:
    measured = stream.measure((4, 1024), torch.float32, mix, CPU, seconds=0)
    assert measured.bytes == (mix.reads + mix.writes) * 4 * 1024 * 4
    us = measured.timing.samples_us[0]
    assert measured.us_per_gb[0] == pytest.approx(us * 1e9 / measured.bytes)


@pytest.mark.parametrize("reads_writes", [(0, 1), (4, 1), (1, 2), (3, 3)])
def test_a_mix_has_inputs_for_each_output(reads_writes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 or 2 writes and 1 to 3 reads for each"):
        Mix(*reads_writes)


def test_the_best_stream_is_the_fastest_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([2.0, 3.0, 1.0])

    def measure(shape: tuple[int, ...], *_: Any) -> stream.Traffic:
        return stream.Traffic(timing.Timing((next(speeds),), "clock", 1), 1_000)

    monkeypatch.setattr(stream, "measure", measure)
    monkeypatch.setattr(stream, "_best", {})
    seen = [
        stream.best(torch.float32, Mix(1, 1), CPU, again).timing.samples_us[0] for again in (False, False, True, True)
    ]
    assert seen == [2.0, 2.0, 2.0, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tritons_streams_are_right(dtype: torch.dtype) -> None:
    """Sizes that blocks do not divide, every mix, every configuration."""
    device = torch.device("cuda", 0)
    kernels = stream._triton_kernels(device)
    assert kernels, "Triton comes with PyTorch's CUDA builds"
    for reads, writes in ((1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (4, 2)):
        inputs = tuple(torch.randn(33, 1_001, dtype=dtype, device=device) for _ in range(reads))
        one = stream._Set(inputs, tuple(torch.full_like(inputs[0], float("nan")) for _ in range(writes)))
        for kernel in kernels:
            for out, exact in zip(one.call(kernel), one.reference(), strict=True):
                assert verify.relative_error(out, exact) <= stream.TOLERANCE
                out.fill_(float("nan"))


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
