"""The commands under SIGKILL and SIGTERM at moments drawn by seed: nothing recorded is lost, the next run goes on."""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import moments, soak
from tests.faults.moments import Chain, Moment, Subject
from tests.faults.moments_all import All
from tests.faults.moments_train import Train

MOMENTS = 5
multiprocessing.set_forkserver_preload(moments.PRELOADED)


@pytest.mark.slow
@pytest.mark.parametrize("subject", [All, Train], ids=lambda s: s.name)
def test_a_command_that_is_ended_at_any_moment_goes_on(subject: Callable[[Path], Subject], tmp_path: Path) -> None:
    chain = Chain(subject, tmp_path)
    told = [
        (number.name, *chain.end_at(Moment(subject.name, number, seed)))
        for number, seed in itertools.product((signal.SIGKILL, signal.SIGTERM), range(MOMENTS))
    ]
    chain.complete()
    assert len(told) == 2 * MOMENTS and {outcome.split(",")[0] for *_, outcome in told} >= {"exit -9"}, told


def test_the_long_run_is_committed_and_nothing_was_lost_in_it() -> None:
    with soak.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == soak.COLUMNS
    for command, number in itertools.product((All.name, Train.name), soak.SIGNALS):
        own = [r for r in rows if (r["command"], r["signal"]) == (command, number.name)]
        assert len({r["seed"] for r in own}) == len(own) == soak.MOMENTS
    assert not [r for r in rows if r["outcome"].startswith(soak.LOST)]
