"""Ranks for tests: processes on this machine that meet through gloo, forked from a server that has PyTorch loaded."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(
    [
        *("tests.wan.checkpoint_ranks", "tests.wan.gradient_ranks"),
        *("tests.wan.epoch_ranks", "tests.wan.parallel_ranks", "tests.wan.sweep_ranks"),
        *("tests.faults.moments_all", "tests.faults.moments_train", "tests.faults.lost_ranks"),
    ]
)


def run(work: Callable[..., None], ranks: int, *args: Any, backend: str = "gloo") -> None:
    """Run `work(*args)` on `ranks` processes that are one process group; what fails in one fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, f"{folder}/meeting", backend, work, args), ranks, start_method="forkserver")


def run_on_gpus(work: Callable[..., None], count: int, *args: Any) -> None:
    """The same over NCCL, a GPU for each rank; skipped where there are fewer."""
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, PyTorch sees {torch.cuda.device_count()}")
    run(work, count, *args, backend="cpu:gloo,cuda:nccl")


def _rank(rank: int, ranks: int, meeting: str, backend: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    try:
        work(*args)
    finally:
        dist.destroy_process_group()
