"""The commands under SIGKILL and SIGTERM at moments drawn by seed: nothing recorded is lost, the next run goes on."""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults import moments, soak
from tests.faults.moments import Chain, Moment, Subject
from tests.faults.moments_all import All
from tests.faults.moments_train import Train

MOMENTS = 5
multiprocessing.set_forkserver_preload(moments.PRELOADED)


def end_at_moments(subject: Callable[[Path], Subject], folder: Path) -> list[str]:
    """Outcomes of one chain, which is brought to its end at last."""
    chain = Chain(subject, folder)
    numbers = itertools.product((signal.SIGKILL, signal.SIGTERM), range(MOMENTS))
    outcomes = [chain.end_at(Moment(subject.name, number, seed))[1] for number, seed in numbers]
    chain.complete()
    return outcomes


@pytest.mark.slow
def test_a_command_that_is_ended_at_any_moment_goes_on(tmp_path: Path) -> None:
    folders = [tmp_path / subject.name for subject in (All, Train)]
    with ThreadPoolExecutor(2) as pool:
        of_all, of_train = pool.map(end_at_moments, (All, Train), folders)
    for outcomes, in_order in ((of_all, "exit 143"), (of_train, "exit 0")):
        struck = [outcome.split(",")[0] for outcome in outcomes]
        assert struck[:MOMENTS] == ["exit -9"] * MOMENTS and in_order in struck[MOMENTS:], outcomes


def test_the_long_run_is_committed_and_nothing_was_lost_in_it() -> None:
    with soak.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == soak.COLUMNS
    for command, number in itertools.product((All.name, Train.name), soak.SIGNALS):
        own = [r for r in rows if (r["command"], r["signal"]) == (command, number.name)]
        assert len({r["seed"] for r in own}) == len(own) == soak.MOMENTS
    assert not [r for r in rows if r["outcome"].startswith(soak.LOST)]
