"""What becomes of ranks when one of them dies, hangs, or cannot go on: all end in time, and say why.

A rank that cannot go on leaves its last word in the store where the ranks met. One that finds another gone, or waits
for it longer than `World.patience`, looks there, so that its own last line names the cause. gloo finds a dead rank at
once. NCCL's watchdog aborts the process once the patience is over, before Python can say anything; torchrun, and
`srun --kill-on-bad-exit`, end the others sooner where a rank is dead.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from repro.wan.parallel import World

LAST_WORD_SECONDS = 3.0
"""How long a rank that misses another waits for word of it."""
_SHOWN = 8
_GLOO = "gloo"
"""In every message of gloo's, whose errors are plain RuntimeErrors: it names its source file."""


class RanksLost(RuntimeError):
    """Other ranks are gone or do not come; the message says which, and what they said last."""


@contextlib.contextmanager
def meeting(world: World) -> Iterator[None]:
    """Inside, what PyTorch raises where another rank is gone, or did not come in time, becomes RanksLost."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not (isinstance(error, dist.DistError) or _GLOO in str(error)):
            raise
        first_line = str(error).splitlines()[0]
        raise RanksLost(f"{_told_by_others(world)} ({first_line[:300]})") from error


def say_last(rank: int, cause: str) -> None:
    """Leave word of why this rank ends, for those that will miss it."""
    with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone, with the rank that hosts it
        _last_words().set(str(rank), cause)


def _told_by_others(world: World) -> str:
    """Which ranks are missing, and what they said last. A rank that misses another says so itself: silence tells."""
    say_last(world.rank, "")
    deadline = time.monotonic() + LAST_WORD_SECONDS
    silent: list[int] = []
    told: list[str] = []
    for rank in (r for r in range(world.size) if r != world.rank):
        try:
            _last_words().wait([str(rank)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            if word := _last_words().get(str(rank)).decode():
                told.append(f"rank {rank} ended: {word}")
        except RuntimeError:
            silent.append(rank)
    if silent:
        more = f" and {len(silent) - _SHOWN} more" if silent[_SHOWN:] else ""
        told.append(f"no word from rank {', '.join(map(str, silent[:_SHOWN]))}{more}: killed, hanging or cut off")
    return "; ".join(told) or "the ranks lost touch with each other"


def _last_words() -> dist.Store:
    return dist.PrefixStore("last word", dist.distributed_c10d._get_default_store())
