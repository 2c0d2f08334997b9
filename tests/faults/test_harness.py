"""Cheats of kernels and clocks beyond those in tests/measure/test_verify.py."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch")

from repro.measure import timing  # noqa: E402
from repro.measure.verify import WrongResultError  # noqa: E402
from tests.measure.test_verify import DEVICES, honest, timed  # noqa: E402

Tensor = torch.Tensor
CPU = torch.device("cpu")


def right_for_zeros_only(x: Tensor) -> Tensor:
    """3 x^2 of zeros is zeros."""
    return torch.zeros_like(x)


def right_for_few_rows(x: Tensor) -> Tensor:
    """As if only the first tile were ever tested."""
    out = torch.zeros_like(x)
    out[:8] = honest(x[:8])
    return out


def right_up_to_its_sign(x: Tensor) -> Tensor:
    """The same sums, the same norms."""
    return -honest(x)


def in_half_precision(x: Tensor) -> Tensor:
    """Faster, and wrong in the fourth digit."""
    return honest(x.bfloat16()).float()


class KnowsItsInputs:
    """Computes for real only where it has not seen the values before."""

    def __init__(self) -> None:
        self.known: dict[float, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        key = float(x.view(-1)[0])
        if key not in self.known:
            self.known[key] = honest(x)
        return self.known[key]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "kernel",
    [right_for_zeros_only, right_for_few_rows, right_up_to_its_sign, in_half_precision],
    ids=lambda k: k.__name__,
)
def test_a_kernel_that_is_nearly_right_is_caught(kernel, device) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(WrongResultError, match="is wrong before timing"):
        timed(kernel, device)


def test_a_kernel_that_knows_its_inputs_by_value_is_caught() -> None:
    with pytest.raises(WrongResultError, match="before timing"):
        timed(KnowsItsInputs(), CPU)


@pytest.mark.gpu
def test_work_on_another_stream_is_caught() -> None:
    """What is timed does not wait for it, so its output is not there yet, or the capture refuses it."""
    device = torch.device("cuda", 0)
    other = torch.cuda.Stream(device)

    def elsewhere(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000_000)
            out.copy_(honest(x))
        return out

    with pytest.raises((WrongResultError, RuntimeError)):
        timed(elsewhere, device)


@pytest.mark.parametrize(
    ("clock", "told"),
    [
        (lambda: 0.0, "a sample of 0.0 us is no time"),  # stands still
        (iter(range(10**6, 0, -1)).__next__, "a sample of -"),  # runs backwards
        (lambda: float("nan"), "a sample of nan us"),
        (iter([0.0, float("inf")] * 10**5).__next__, "a sample of inf us"),
    ],
    ids=["stands still", "runs backwards", "is no number", "never ends"],
)
def test_a_clock_that_was_tampered_with_gives_no_time(monkeypatch: pytest.MonkeyPatch, clock, told: str) -> None:  # type: ignore[no-untyped-def]
    a_pass = timing.ClockPass([lambda: (honest(torch.ones(4)),)])
    monkeypatch.setattr(time, "perf_counter", clock)
    with pytest.raises(ValueError, match=told):
        timing.Timing(tuple(a_pass._sample(3)), "clock", 1)
