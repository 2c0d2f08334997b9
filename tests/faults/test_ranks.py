"""A rank that dies, hangs, runs out of memory or cannot write: all end in time, say why, and the next run goes on."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from repro.wan import checkpoint_index
from tests.faults import moments
from tests.faults.lost_ranks import FAULT_AT, Rank, in_a_long_step
from tests.faults.moments_train import EVERY, Train
from tests.wan.test_nodes import free_port

PATIENCE = ("--timeout", "12")
"""More than a busy machine takes from one exchange of the ranks to the next."""
FULL = "could not be written: No space left on device"
FAULTS = {
    # of both ranks the exit code and what its one line says
    "dies": ((1, r"no word from rank 1: killed, hanging or cut off"), (-signal.SIGKILL, "")),
    "hangs": ((1, r"no word from rank 1: killed, hanging or cut off"), (-signal.SIGKILL, "")),
    "runs_out_of_memory": (
        (1, r"rank 1 ended: out of memory, give a smaller --m-mem: "),
        (1, r"rank 1: out of memory, give a smaller --m-mem: .*can't allocate memory"),
    ),
    "cannot_log": ((1, rf"rank 0: .*steps\.csv {FULL}"), (0, "")),
    "has_a_full_disk": ((1, r"step-\d+ could not be written"), (1, r"step-\d+ could not be written")),
}


def run(folder: Path, fault: str, *options: str) -> list[moments.Ended]:
    """Both ranks, from start to end; one that was stopped is killed once the other has ended."""
    port = free_port()
    places = [folder / f"{fault or 'whole'}-{rank}" for rank in (0, 1)]
    for place in places:
        place.mkdir()
    ranks = [Rank(folder / "run", rank, port, fault, options) for rank in (0, 1)]
    children = [moments.start(rank, place) for rank, place in zip(ranks, places, strict=True)]
    ended = [moments.finish(children[0], places[0])]
    if fault == "hangs":
        children[1].kill()
    return [*ended, moments.finish(children[1], places[1])]


def saved(folder: Path) -> int:
    """Steps of the newest checkpoint; all that can be seen are whole."""
    found = [0]
    for step in (folder / "run" / "checkpoints").glob("step-*"):
        checkpoint_index.check(step, checkpoint_index.NAME)
        checkpoint_index.check_tensors(step, checkpoint_index.read(step), 0, 1)
        found.append(int(step.name.removeprefix("step-")))
    return max(found)


def run_through(folder: Path, faults: Sequence[str]) -> None:
    """Runs that go on one from the other, each of which ends with a fault, and a last one without any."""
    folder.mkdir()
    options = ("--steps", "100", "--save-every", "1")
    before = 0
    for fault in faults:
        ended = run(folder, fault, *options, *(PATIENCE if fault == "hangs" else ()))
        for one, (code, told) in zip(ended, FAULTS[fault], strict=True):
            errors = [line for line in one.said.splitlines() if line.startswith("error: ")]
            assert one.code == code and len(errors) == bool(told), (fault, one)
            assert re.search(told, "".join(errors)) and "Traceback" not in one.said, (fault, one)
        assert f"after {before} steps" in ended[0].said or not before, (fault, ended[0])
        assert saved(folder) > before, fault
        before = saved(folder)
    last = run(folder, "", "--steps", str(before + 1), "--save-every", "1")
    assert [one.code for one in last] == [0, 0] and f"after {before} steps" in last[0].said, last
    assert saved(folder) == before + 1


@pytest.mark.slow
def test_ranks_end_together_and_say_why_and_the_next_run_goes_on(tmp_path: Path) -> None:
    at_work = [fault for fault in FAULTS if fault != "hangs"]  # while PATIENCE runs out on the other two ranks
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run_through, (tmp_path / "at_work", tmp_path / "waiting"), (at_work, ["hangs"])))


def test_a_calibration_that_cannot_be_written_down_stops_all_ranks(tmp_path: Path) -> None:
    ended = run(tmp_path, "cannot_calibrate", "--calibrate", "0.001")
    assert [one.code for one in ended] == [2, 2], ended
    assert f"calibration.csv {FULL}" in ended[0].said and "Traceback" not in ended[0].said + ended[1].said


def test_ranks_that_never_come_are_given_up(tmp_path: Path) -> None:
    place = tmp_path / "alone"
    place.mkdir()
    alone = Rank(tmp_path / "run", 0, free_port(), "", ("--timeout", "1"))
    ended = moments.finish(moments.start(alone, place), place)
    assert ended.code == 2 and "the other ranks did not come within 1 s" in ended.said, ended.said


def test_a_checkpoint_on_its_way_becomes_complete_while_a_step_lasts(tmp_path: Path) -> None:
    subject = Train(tmp_path)
    ended = moments.finish(moments.start(partial(in_a_long_step, subject), tmp_path), tmp_path)
    assert ended.code == -signal.SIGKILL, ended
    assert "SIGTERM: the step under way is finished and saved first\n" in ended.said
    assert saved(tmp_path) == FAULT_AT - 1 == EVERY
