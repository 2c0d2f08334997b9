"""What suite `links` has ranks do (`repro.wan.launch`): collectives and sends by size, checked and then timed.

Results are checked with small whole numbers, which every order of adding gives exactly, before and after the timing.
A sample is the mean of several calls one after the other, on the slowest rank, between events on the stream that waits
for them; ranks start a sample together. Sizes are those of NCCL's own tests: the whole of what each rank ends up with
(all-reduce, all-gather), starts from (reduce-scatter) or sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro.measure import cuda_driver, links
from repro.wan.parallel import World
from repro.wan.probing_epoch import slowest

WARM_UP = 2
DTYPE = torch.float32
_PERIOD = 7


def collective(world: World, *, operation: str, size: int, calls: int, repeats: int) -> dict[str, Any]:
    """`repeats` samples of `calls` calls of all_reduce, all_gather or reduce_scatter on `size` bytes.

    Returns `right`, whether every rank had the right result before the timing and after it, and `seconds` of a call.
    """
    work = _OPERATIONS[operation](world, size)
    right = _is_right(work)
    seconds = _samples(world, work, calls, repeats)
    right = _is_right(work) and right
    _free(world)
    return {"right": right, "seconds": seconds}


def pairs(world: World, *, size: int, calls: int, repeats: int) -> dict[str, Any]:
    """The same of sending `size` bytes from each rank to each other, one pair at a time while the others are idle.

    Returns `right` and `seconds`, a list [from, to, samples] for each.
    """
    numbers = _numbers(world, _elements(size))
    right, found = True, []
    _all_reduce(world, DTYPE.itemsize).run()  # NCCL's channels are the whole group's, which makes them together
    for source in range(world.size):
        for target in range(world.size):
            if source != target:
                work = _send(world, numbers, source, target)
                right = _is_right(work) and right
                found.append([source, target, _samples(world, work, calls, repeats)])
                right = _is_right(work) and right
    _free(world)
    return {"right": right, "seconds": found}


def facts(world: World) -> dict[str, Any]:
    """Links of each rank's GPU and which pairs of the same node see each other over NVLink.

    Returns `gpus`, a dict a rank (`repro.measure.links.of_gpu`), and `nvlink`, [rank, rank, 0 or 1] a pair.
    """
    own = cuda_driver.visible_gpus()[world.device.index].uuid
    uuids: list[Any] = [None] * world.size
    found: list[Any] = [None] * world.size
    dist.all_gather_object(uuids, own)
    dist.all_gather_object(found, links.of_gpu(own))
    seen = [[world.rank, r, links.reach_by_nvlink(own, uuids[r])] for r in range(world.rank + 1, world.size)]
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, [[a, b, float(yes)] for a, b, yes in seen if yes is not None])
    return {"gpus": found, "nvlink": [pair for of_rank in every for pair in of_rank]}


@dataclass(frozen=True)
class _Work:
    """What is timed. right: whether this rank's result is, after `reset` and one `run`. reset: makes input and output
    what they were.
    """

    run: Callable[[], None]
    right: Callable[[], bool]
    reset: Callable[[], object]


def _all_reduce(world: World, size: int) -> _Work:
    own = _numbers(world, _elements(size))
    total = own.clone()
    return _Work(
        lambda: dist.all_reduce(total),
        lambda: torch.equal(total, _sum(world, own.numel())),
        lambda: total.copy_(own),  # sums of sums would grow beyond all bounds
    )


def _all_gather(world: World, size: int) -> _Work:
    own = _numbers(world, _elements(size, world.size))
    whole = own.new_zeros(own.numel() * world.size)
    return _Work(
        lambda: dist.all_gather_into_tensor(whole, own),
        lambda: torch.equal(whole, torch.cat([_numbers(world, own.numel(), r) for r in range(world.size)])),
        whole.zero_,
    )


def _reduce_scatter(world: World, size: int) -> _Work:
    share = _elements(size, world.size)
    whole = _numbers(world, share * world.size)
    own = whole.new_zeros(share)
    mine = slice(world.rank * share, (world.rank + 1) * share)
    return _Work(
        lambda: dist.reduce_scatter_tensor(own, whole),
        lambda: torch.equal(own, _sum(world, whole.numel())[mine]),
        own.zero_,
    )


_OPERATIONS: dict[str, Callable[[World, int], _Work]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _send(world: World, numbers: Tensor, source: int, target: int) -> _Work:
    arrived = torch.zeros_like(numbers)

    def run() -> None:
        # As a batch of one, since NCCL would make a group of its own for every pair that sends without.
        if world.rank == source:
            requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, numbers, target)])
        elif world.rank == target:
            requests = dist.batch_isend_irecv([dist.P2POp(dist.irecv, arrived, source)])
        else:
            requests = []
        for request in requests:
            request.wait()

    def right() -> bool:
        return world.rank != target or torch.equal(arrived, _numbers(world, numbers.numel(), source))

    return _Work(run, right, arrived.zero_)


def _elements(size: int, parts: int = 1) -> int:
    return max(1, size // DTYPE.itemsize // parts)


def _numbers(world: World, count: int, rank: int | None = None) -> Tensor:
    """[count] whole numbers that tell the rank (default: this one) and the place."""
    place = torch.arange(count, device=world.device, dtype=torch.int32) % _PERIOD
    return (place + (world.rank if rank is None else rank)).to(DTYPE)


def _sum(world: World, count: int) -> Tensor:
    """[count], of all ranks' numbers."""
    total = _numbers(world, count, 0)
    for rank in range(1, world.size):
        total += _numbers(world, count, rank)
    return total


def _is_right(work: _Work) -> bool:
    """Whether all ranks find the result right."""
    work.reset()
    work.run()
    return slowest([0.0 if work.right() else 1.0])[0] == 0.0


def _samples(world: World, work: _Work, calls: int, repeats: int) -> list[float]:
    """Seconds of a call on the slowest rank, `repeats` times."""
    took = []
    for _ in range(WARM_UP + repeats):
        work.reset()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        slowest([0.0])  # ranks start together
        took.append(_seconds(world, work.run, calls) / calls)
    return slowest(took)[WARM_UP:]


def _seconds(world: World, run: Callable[[], None], calls: int) -> float:
    if world.device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()  # behind which the streams of all its ranks are level, whenever their hosts came
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _free(world: World) -> None:
    """Give buffers back: a model comes next."""
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
