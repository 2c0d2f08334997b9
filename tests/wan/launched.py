"""What the ranks of `test_launch` are asked for."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist

from repro.wan.parallel import World

_kept: list[int] = []


def total(world: World, *, start: float) -> dict[str, Any]:
    """The sum over ranks of start + rank, and how often this was asked."""
    value = torch.tensor([start + world.rank])
    dist.all_reduce(value)
    _kept.append(1)
    return {"sum": value.item(), "asked": len(_kept), "device": world.device.type}


def fail(world: World, *, rank: int) -> None:
    """A rank raises; the others wait for it."""
    if world.rank == rank:
        raise ArithmeticError("no such\nnumber")
    dist.barrier()


def die(world: World, *, rank: int) -> None:
    """A rank is killed; the others wait for it."""
    if world.rank == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever(world: World) -> None:
    """A rank waits for a message that none sends."""
    dist.recv(torch.zeros(1), src=1 - world.rank)
