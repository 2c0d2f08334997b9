"""The commands under SIGKILL and SIGTERM at many random moments. Writes tests/faults/soak.csv, a row a moment.

    python -m tests.faults.soak        about a quarter of an hour; exits with 1 where anything was lost

Every other moment is by the clock, so that it may lie in the middle of what the system or PyTorch is doing.
"""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults import moments
from tests.faults.moments import Chain, Lost, Moment, Subject
from tests.faults.moments_all import All
from tests.faults.moments_train import Train

TABLE = Path(__file__).with_name("soak.csv")
COLUMNS = ("command", "signal", "seed", "moment", "outcome")
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
MOMENTS = 50
LOST = "LOST"
CHAINS = 2
"""Of each command and signal, at the same time."""


def soak(subject: Callable[[Path], Subject], number: signal.Signals, seeds: Sequence[int]) -> list[tuple[str, ...]]:
    """Rows of a command and a signal."""
    rows: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        chain = Chain(subject, Path(folder))
        for seed in seeds:
            moment = Moment(subject.name, number, seed, "clock" if seed % 4 > 1 else "lines")
            try:
                told, outcome = chain.end_at(moment)
            except Lost as error:
                told, outcome = f"{moment.share:.0%}", f"{LOST}: {_short(str(error))}"
                chain.begin_anew()
            rows.append((subject.name, number.name, str(seed), told, outcome))
            print(*rows[-1], sep=", ", flush=True)
        chain.complete()
    return rows


def _short(text: str) -> str:
    """How it begins and how it ends."""
    text = " ".join(text.split())
    return text if len(text) <= 400 else f"{text[:150]} ... {text[-250:]}"


def main() -> int:
    """Exit code."""
    multiprocessing.set_forkserver_preload(moments.PRELOADED)
    seeds = [range(first, MOMENTS, CHAINS) for first in range(CHAINS)]
    jobs = list(itertools.product((All, Train), SIGNALS, seeds))
    with ThreadPoolExecutor(len(jobs)) as pool:
        rows = [row for part in pool.map(lambda job: soak(*job), jobs) for row in part]
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *sorted(rows, key=lambda r: (r[0], r[1], int(r[2])))])
    lost = sum(row[-1].startswith(LOST) for row in rows)
    print(f"{len(rows) - lost} of {len(rows)} moments lost nothing")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
