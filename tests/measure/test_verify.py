"""The harness under attack: every way of cheating that we know of is caught, an honest kernel is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from repro.measure import timing  # noqa: E402
from repro.measure.verify import (  # noqa: E402
    Subject,
    WrongResultError,
    check_once,
    checksum,
    relative_error,
    verified_time,
)

Tensor = torch.Tensor
Kernel = Callable[[Tensor], Tensor]
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
SHAPE = (40, 64)


def subjects(kernel: Kernel, device: torch.device, count: int = 2) -> list[Subject]:
    """`kernel` is asked to compute 3 x^2, on `count` input sets."""

    def make(seed: int) -> Subject:
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(SHAPE, device=device, generator=generator)
        return Subject(
            call=lambda: (kernel(x),),
            inputs={"x": x},
            outputs=("y",),
            reference=lambda: (3 * x.double().square(),),
            refill=lambda seed: x.normal_(generator=torch.Generator(device).manual_seed(1000 + seed)),
            tolerance=1e-5,
        )

    with timing.work_stream(device):
        return [make(seed) for seed in range(count)]


def timed(kernel: Kernel, device: torch.device) -> timing.Timing:
    made = subjects(kernel, device)
    with timing.work_stream(device):
        return verified_time(made, device, seconds=0)


def honest(x: Tensor) -> Tensor:
    return 3 * x * x


@pytest.mark.parametrize("device", DEVICES)
def test_an_honest_kernel_passes(device: torch.device) -> None:
    assert len(timed(honest, device).samples_us) == timing.MIN_SAMPLES
    check_once(subjects(honest, device))


@pytest.mark.gpu
def test_an_honest_kernel_passes_between_events() -> None:
    device = torch.device("cuda", 0)
    made = subjects(honest, device)
    with timing.work_stream(device):
        assert verified_time(made, device, seconds=0, method="events").method == "events"


class RemembersOutput:
    """Computes once for each input, then hands the same tensor out again."""

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        if x.data_ptr() not in self.known:
            self.known[x.data_ptr()] = honest(x)
        return self.known[x.data_ptr()]


class CopiesWhatItRemembers(RemembersOutput):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * 1.0


class ComputesOnceForAll:
    """One result for whatever input."""

    def __init__(self) -> None:
        self.known: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.known is None:
            self.known = honest(x)
        return self.known * 1.0


class SharesOneBuffer:
    """Right, but every call writes the same memory."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.buffer is None:
            self.buffer = torch.empty_like(x)
        return self.buffer.copy_(honest(x))


class StopsWorking:
    """Honest for the first calls, then leaves its output as the allocator gave it."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, x: Tensor) -> Tensor:
        self.left -= 1
        return honest(x) if self.left >= 0 else torch.empty_like(x)


class StopsWriting(RemembersOutput):
    """Writes its own buffers, honestly at first; later calls leave there what the last honest one wrote."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.left = after

    def __call__(self, x: Tensor) -> Tensor:
        out = super().__call__(x)
        self.left -= 1
        return out.copy_(honest(x)) if self.left >= 0 else out


def writes_part(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:-1] = honest(x[:-1])
    return out


class WritesPartOfItsOwnBuffer(RemembersOutput):
    """The first call writes everything, later ones only a part: what is left from before is still right."""

    def __call__(self, x: Tensor) -> Tensor:
        first = x.data_ptr() not in self.known
        out = super().__call__(x)
        if not first:
            out[:-1] = honest(x[:-1])
        return out


def misses_one_row(x: Tensor) -> Tensor:
    out = honest(x)
    out[7] = 0
    return out


def misses_one_element(x: Tensor) -> Tensor:
    out = honest(x)
    out.view(-1)[-1] *= 1.01
    return out


def spoils_input(x: Tensor) -> Tensor:
    out = honest(x)
    x[3, 5] += 1e-3
    return out


def clears_input(x: Tensor) -> Tensor:
    out = honest(x)
    x.mul_(1.0000001)
    return out


def in_place(x: Tensor) -> Tensor:
    return x.copy_(honest(x))


def wrong_shape(x: Tensor) -> Tensor:
    return honest(x)[:-1]


def not_a_number(x: Tensor) -> Tensor:
    out = honest(x)
    out[0, 0].fill_(float("nan"))  # assignment would copy from the host, which a graph cannot capture
    return out


CHEATS = [
    RemembersOutput,
    CopiesWhatItRemembers,
    ComputesOnceForAll,
    SharesOneBuffer,
    WritesPartOfItsOwnBuffer,
    lambda: StopsWorking(2),
    lambda: StopsWriting(2),
    lambda: writes_part,
    lambda: misses_one_row,
    lambda: misses_one_element,
    lambda: spoils_input,
    lambda: clears_input,
    lambda: in_place,
    lambda: wrong_shape,
    lambda: not_a_number,
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda c: c.__name__ if isinstance(c, type) else c().__class__.__name__)
def test_cheats_are_caught(cheat: Callable[[], Kernel], device: torch.device) -> None:
    with pytest.raises(WrongResultError):
        timed(cheat(), device)


def test_work_skipped_in_the_timed_runs_is_caught() -> None:
    """Honest through all checks before timing (two runs of two sets), idle from then on."""
    for cheat in (StopsWorking(4), StopsWriting(4)):
        with pytest.raises(WrongResultError, match="as left by the timed runs"):
            timed(cheat, torch.device("cpu"))


def test_a_memory_of_the_old_inputs_is_caught_last() -> None:
    with pytest.raises(WrongResultError, match="on new inputs"):
        timed(CopiesWhatItRemembers(), torch.device("cpu"))


def test_the_message_tells_what_and_where() -> None:
    with pytest.raises(WrongResultError, match=r"y of input set 0 is wrong before timing: relative error 1 .*1e-05"):
        timed(misses_one_row, torch.device("cpu"))
    with pytest.raises(WrongResultError, match=r"changed its input x \(input set 0\)"):
        check_once(subjects(spoils_input, torch.device("cpu")))
    with pytest.raises(WrongResultError, match="y shares memory with input x"):
        check_once(subjects(in_place, torch.device("cpu")))


def test_error_is_that_of_the_worst_row() -> None:
    reference = torch.randn(1000, 16, dtype=torch.float64)
    out = reference.clone()
    assert relative_error(out, reference) == 0
    out[123] *= 1.5
    assert relative_error(out, reference) == pytest.approx(0.5)
    out[5, 5] = float("nan")
    assert relative_error(out, reference) != relative_error(out, reference)


def test_rows_of_zeros_are_compared_with_the_typical_row() -> None:
    reference = torch.ones(10, 4, dtype=torch.float64)
    reference[3] = 0
    assert relative_error(reference.float(), reference) == 0
    out = reference.clone()
    out[3, 0] = 1e-3
    assert relative_error(out, reference) > 0.4
    assert relative_error(torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)) == 0


def test_long_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("repro.measure.verify._CHUNK", 64)
    reference = torch.randn(100, 16, dtype=torch.float64)
    out = reference.clone()
    out[-1] *= 3
    assert relative_error(out, reference) == pytest.approx(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_checksum_sees_any_single_change(dtype: torch.dtype) -> None:
    x = torch.randn(8, 5).to(dtype)

    def same(a: Tensor, b: Tensor) -> bool:
        return all(torch.equal(p, q) for p, q in zip(checksum(a), checksum(b), strict=True))

    assert same(x, x.clone())
    swapped = x[torch.tensor([1, 0, *range(2, 8)])]
    negative = x.clone()
    negative[2, 2] = -negative[2, 2]
    assert not same(x, swapped) and not same(x, negative)
    strided = torch.randn(3, 6, 4).to(dtype)[:, 1:2]
    assert same(strided, strided.contiguous())
