"""Timing that cannot be fooled: no time is reported for a call whose results are wrong, stale, partial or borrowed.

A call is checked against a float64 reference before it is timed, after it was timed (its outputs having been filled
with NaN before the timed runs), and once more on fresh inputs in the same memory. What each step catches:

    output filled with NaN before a run    results left over from earlier, handed out again, or written in part
    other inputs in every set              one set's result returned for another
    worst row, not the whole norm          a few wrong rows among many
    new inputs in place after timing       copies of a remembered result; work skipped once warmed up
    checksums of the inputs                a call that spoils what it reads
    storages compared                      an input returned as output
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.measure import timing

_CHUNK = 1 << 25
"""Elements that are compared at a time: bounds the float64 temporaries to a few 256 MB."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WrongResultError(Exception):
    """A call under test computed something else than its reference, or touched what it must not."""


@dataclass(frozen=True)
class Subject:
    """A call under test on one input set.

    call: returns the outputs, named by `outputs` in that order. inputs: everything that it reads, by name.
    reference: float64 outputs for what the inputs hold at the time. refill: puts new random values into those inputs
    that may change without preparing the call anew (a backward's saved tensors may not), from the given seed.
    tolerance: largest relative error of a row (norm over the last dimension) that each output may have.
    """

    call: timing.Call
    inputs: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    reference: Callable[[], tuple[Tensor, ...]]
    refill: Callable[[int], None]
    tolerance: float


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Largest relative error among the rows of `out` (over its last dimension) against a float64 reference.

    A row's error is ||out - reference|| / ||reference||, where the divisor is at least a thousandth of the typical
    (root mean square) norm of a row, so that rows of zeros do not divide by zero. NaN where anything is NaN.
    """
    if out.shape != reference.shape:
        raise WrongResultError(f"shape must be {tuple(reference.shape)}, got {tuple(out.shape)}")
    if out.numel() == 0:
        return 0.0
    rows = out.detach().reshape(-1, out.shape[-1])
    wanted = reference.detach().reshape(-1, out.shape[-1])
    norms = torch.linalg.vector_norm(wanted, dim=-1)
    divisor = norms.clamp_min(1e-3 * norms.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny))
    step = max(1, _CHUNK // out.shape[-1])
    worst = [
        (
            torch.linalg.vector_norm(rows[i : i + step].double() - wanted[i : i + step], dim=-1) / divisor[i : i + step]
        ).max()
        for i in range(0, rows.shape[0], step)
    ]
    return float(torch.stack(worst).max())


def checksum(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of a tensor's bits along its rows and along its columns: any one change shows, whatever its size."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1).contiguous()
    size = rows.element_size()
    aligned = rows.shape[1] * size % 8 == 0 and rows.storage_offset() * size % 8 == 0
    # Eight bytes at a time where rows allow it: sums of whole words are what every device adds fastest.
    bits = rows.view(torch.int64 if aligned else _INTEGERS[size])
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


def verified_time(
    subjects: Sequence[Subject],
    device: torch.device,
    seconds: float = 0.3,
    method: timing.Method | None = None,
    seed: int = 1,
) -> timing.Timing:
    """Device time of the subjects' call, one subject an input set, checked before, during and after.

    seconds: about how long to time (at least 30 samples). seed: of the fresh inputs that are checked at the end.
    Call it, and everything that makes the inputs, inside `timing.work_stream(device)`.

    Raises WrongResultError where a result is wrong, and as `timing.make_pass`.
    """
    before = _checksums(subjects)
    run = timing.make_pass([s.call for s in subjects], device, method)
    try:
        run.run()
        _check_storages(subjects, run)
        run.poison()
        run.run()
        _check_unchanged(subjects, before)
        _check(subjects, run, "before timing")
        run.poison()
        timed = run.time(seconds)
        _check_unchanged(subjects, before)
        _check(subjects, run, "as left by the timed runs")
        for i, subject in enumerate(subjects):
            subject.refill(seed + i)
        before = _checksums(subjects)
        run.poison()
        run.run()
        _check_unchanged(subjects, before)
        _check(subjects, run, "on new inputs after timing")
        return timed
    finally:
        run.close()


def check_once(subjects: Sequence[Subject]) -> None:
    """Run every subject's call once and compare. Raises WrongResultError where one is wrong or spoils its inputs."""
    before = _checksums(subjects)
    run = timing.ClockPass([s.call for s in subjects])
    run.run()
    _check_storages(subjects, run)
    _check_unchanged(subjects, before)
    _check(subjects, run, "in a single run")


def _check(subjects: Sequence[Subject], run: timing.Pass, when: str) -> None:
    for i, (subject, outputs) in enumerate(zip(subjects, run.outputs, strict=True)):
        references = subject.reference()
        for name, out, reference in zip(subject.outputs, outputs, references, strict=True):
            error = relative_error(out, reference)
            if not error <= subject.tolerance:  # written so that NaN fails
                raise WrongResultError(
                    f"{name} of input set {i} is wrong {when}: relative error {error:.3g} in its worst row, "
                    f"allowed {subject.tolerance:.3g} (NaN: not everything was written)"
                )


def _checksums(subjects: Sequence[Subject]) -> list[dict[str, tuple[Tensor, Tensor]]]:
    return [{name: checksum(tensor) for name, tensor in s.inputs.items()} for s in subjects]


def _check_unchanged(subjects: Sequence[Subject], before: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> None:
    for i, (old, new) in enumerate(zip(before, _checksums(subjects), strict=True)):
        for name in old:
            if not all(torch.equal(a, b) for a, b in zip(old[name], new[name], strict=True)):
                raise WrongResultError(f"the call changed its input {name} (input set {i})")


def _check_storages(subjects: Sequence[Subject], run: timing.Pass) -> None:
    for subject, outputs in zip(subjects, run.outputs, strict=True):
        owners = {t.untyped_storage().data_ptr(): name for name, t in subject.inputs.items()}
        for name, out in zip(subject.outputs, outputs, strict=True):
            if out.numel() and out.untyped_storage().data_ptr() in owners:
                raise WrongResultError(f"{name} shares memory with input {owners[out.untyped_storage().data_ptr()]}")
