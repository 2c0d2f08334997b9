"""Ranks for tests: processes on this machine that meet through gloo, started once for many cases."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(work: Callable[..., None], ranks: int, folder: Path, *args: Any) -> None:
    """Run `work(*args)` on `ranks` processes that are one process group; what fails in one fails the test."""
    meeting = folder / f"rendezvous-{ranks}"
    mp.spawn(_rank, (ranks, str(meeting), work, args), nprocs=ranks)


def _rank(rank: int, ranks: int, meeting: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        work(*args)
    finally:
        dist.destroy_process_group()
