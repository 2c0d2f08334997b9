"""A full disk, a read-only folder, two runs at once, clocks that are set, files that were cut or changed."""

from __future__ import annotations

import csv
import ctypes
import io
import json
import os
import random
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from repro import train
from repro.measure.machine import Machine, read_machine
from repro.records import Store, files, store
from repro.suite import Case, Measurement
from repro.wan import checkpoint_index
from repro.wan.log import COLUMNS, StepCsv
from tests.all import conftest
from tests.all.conftest import Checkout
from tests.faults import doors_train, moments
from tests.faults.moments_all import CASES, All

HERE = read_machine(0).slug
MACHINE = Machine("acme-1", "Acme", 1, (9, 0), 132, None, 4, {"gpu_name": "Acme", "unavailable": {}})
KEPT = "what was recorded before stands, and the same command goes on from there"

checkout = conftest.checkout

FILLING = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "filling", (), (), ("x",)
    def cases(profile, machine): return [Case({"x": x}) for x in range(4)]
    def measure(case, machine, inputs):
        LOG(f"filling {case.key['x']}")
        if case.key["x"] == 2:
            FULL("rows")
        return [exactly(1.0)]
    def evidence(rows): return []
    def draw(rows):
        FULL("figures")
        from repro.report import style
        return [Figure("filling", style.subplots()[0], "made up")]
"""


FULL = """
def FULL(where):
    import os, pathlib, resource
    if where == {where!r}:
        sizes = [p.stat().st_size for p in pathlib.Path({results!r}).rglob("filling.csv")]
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) + 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
"""


@pytest.fixture
def nearly_full(checkout: Checkout) -> Iterator[Callable[[str], None]]:
    """Says where the suite `filling` meets a disk without space: no file may grow past its rows so far any more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(where: str) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkout.suite("filling", FILLING)
        path = checkout.root / "suites" / "filling.py"
        path.write_text(path.read_text() + FULL.format(where=where, results=str(checkout.results)))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("where", "kept", "named"), [("rows", [0, 1], "filling.csv"), ("figures", [0, 1, 2, 3], "filling.svg")]
)
def test_a_full_disk_ends_in_one_line_and_the_next_run_goes_on(
    checkout: Checkout, nearly_full: Callable[[str], None], where: str, kept: list[int], named: str
) -> None:
    nearly_full(where)
    done = checkout.run("--only", "filling")
    nearly_full("nowhere")
    (error,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert done.exit_code == 2 and f"{named} could not be written: " in error and KEPT in error, done.output
    assert Store(checkout.results).rows("filling")["x"].tolist() == kept
    assert checkout.logged() == [f"filling {x}" for x in range(max(kept) + 1 + (where == "rows"))]
    again = checkout.run("--only", "filling")
    assert again.exit_code == 0, again.output
    assert checkout.logged() == [f"filling {x}" for x in range(4) if x not in kept]
    assert Store(checkout.results).rows("filling")["x"].tolist() == [0, 1, 2, 3]
    assert not list(checkout.root.rglob("*.partial"))


def _without_rights(work: Callable[[], None]) -> None:
    """Root passes over file modes by a capability, which this process gives up."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for i in (0, 1):  # effective and permitted: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        sets[i] &= ~0b110
    assert libc.capset(header, sets) == 0
    work()


def _options(subject: All, *options: str) -> None:
    subject.options = options
    subject.run()


@pytest.mark.skipif(os.name != "posix" or not hasattr(os, "sched_getaffinity"), reason="needs Linux' capabilities")
def test_a_read_only_folder_is_named_and_can_be_read(tmp_path: Path) -> None:
    subject = All(tmp_path)

    def run(*options: str) -> moments.Ended:
        work = partial(_without_rights, partial(_options, subject, *options))
        return moments.finish(moments.start(work, tmp_path), tmp_path)

    subject.results.mkdir(mode=0o555)
    refused = run()
    assert refused.code == 2 and f"{HERE} could not be written: Permission denied" in refused.said, refused.said
    subject.results.chmod(0o755)
    assert run().code == 0
    folders = [p for p in (subject.results, *subject.results.rglob("*")) if p.is_dir()]
    before = {p: p.read_bytes() for p in subject.results.rglob("*") if p.is_file()}
    for folder in folders:
        folder.chmod(0o555)
    try:
        for options, named in ((("--again",), f"{HERE}/runs.jsonl"), (("--no-measure",), "claims.csv")):
            refused = run(*options)
            (error,) = (line for line in refused.said.splitlines() if line.startswith("error: "))
            assert refused.code == 2 and f"{named} could not be written: Permission denied" in error, refused.said
        assert run("--dry-run").code == 0
        assert {p: p.read_bytes() for p in subject.results.rglob("*") if p.is_file()} == before
    finally:
        for folder in folders:
            folder.chmod(0o755)
    ended = run()
    assert ended.code == 0 and f"{CASES} of {CASES} cases stand" in subject.check(ended, None)


def _to_a_full_pipe(subject: All) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    try:
        subject.run()
    finally:
        sys.stdout = None  # type: ignore[assignment] - multiprocessing would flush it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_cannot_be_written_costs_no_rows(tmp_path: Path) -> None:
    subject = All(tmp_path)
    ended = moments.finish(moments.start(partial(_to_a_full_pipe, subject), tmp_path), tmp_path)
    assert ended.code == 2 and "No space left on device" in ended.said, ended.said
    assert f"{CASES} of {CASES} cases stand" in subject.check(ended, None)


def _both(subject: All, meet: Any) -> None:
    import suites

    suites.meet = meet.wait  # type: ignore[attr-defined]
    subject.run()


def test_two_runs_at_once_record_both_and_mix_nothing(tmp_path: Path) -> None:
    subject, meet, others = All(tmp_path), moments.context.Barrier(2), tmp_path / "other"
    others.mkdir()
    places = (tmp_path, others)
    children = [moments.start(partial(_both, subject, meet), place) for place in places]
    for child, place in zip(children, places, strict=True):
        assert (ended := moments.finish(child, place)).code == 0, ended.said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorded = Store(subject.results)
        runs = recorded.runs(HERE)
        assert [r["end"]["status"] for r in runs] == ["finished"] * 2
        for run in runs:
            rows = recorded.rows("steady", HERE, run_id=run["run_id"])
            assert sorted(rows["tokens"]) == sorted([*range(CASES)] * 2)
    assert len((subject.results / "claims.csv").read_text().splitlines()) == 19


def test_a_folder_belongs_to_one_training_run(tmp_path: Path) -> None:
    options = [str(o) for o in (*doors_train.TINY, *doors_train.MADE_UP, "--out", tmp_path)]
    other = files.hold(tmp_path, 0)
    refused = CliRunner().invoke(train.app, options)
    other.release()
    assert refused.exit_code == 2 and f"{tmp_path} is in use by a run that is still going" in refused.stderr
    assert not (tmp_path / "checkpoints").exists()


class SetBack:
    """A clock that goes back a day whenever it is asked."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self, *_: object) -> float:
        self.now -= 86_400
        return self.now

    def datetime(self, zone: Any = None) -> datetime:
        return datetime.fromtimestamp(self(), zone)


def test_a_clock_that_is_set_back_breaks_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SetBack()

    class Datetime(datetime):
        @classmethod
        def now(cls, zone: Any = None) -> datetime:
            return clock.datetime(zone)

    monkeypatch.setattr(store, "datetime", Datetime)
    monkeypatch.setattr(time, "time", clock)
    recorded = Store(tmp_path)
    for _ in range(3):
        run = recorded.start(MACHINE, ["x"], None, "full")
        recorded.append(run, "speed", Case({"tokens": 1}), [Measurement("time", "x", 1.0, 1.0, 1.0, 1)])
        recorded.finish(run, "finished", {}, {})
    runs = recorded.runs("acme-1")
    assert [r["run_id"] for r in runs] == sorted({r["run_id"] for r in runs}), "newer runs sort later"
    assert all(0 <= r["end"]["seconds"] < 60 for r in runs)
    assert recorded.rows("speed")["run_id"].tolist() == [runs[-1]["run_id"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A device's folder with three cases of two rows each."""
    root = tmp_path_factory.mktemp("recorded")
    kept = Store(root)
    run = kept.start(MACHINE, ["x"], None, "full")
    for n in range(3):
        pair = [Measurement(m, "x", n + 0.25, n, n + 1, 2, samples=(n, n + 0.5)) for m in ("time", "other")]
        kept.append(run, "speed", Case({"tokens": n}), pair)
    kept.finish(run, "finished", {}, {})
    return root


def test_rows_cut_anywhere_are_read_whole_or_not_at_all(recorded: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "acme-1" / "speed.csv"
    whole = path.read_bytes()
    lines = whole.decode().splitlines()[1:]
    expected = [tuple(r.split(",")[k] for k in (4, 5, 7)) for r in lines]
    begin = whole.index(b"\n") + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cut in [*range(begin, len(whole) - 200, 17), *range(len(whole) - 200, len(whole), 3)]:
            path.write_bytes(whole[:cut])
            rows = Store(tmp_path).rows("speed")
            full = whole[:cut].count(b"\n") - 1
            found = [] if rows.empty else [(str(r.tokens), r.metric, repr(r.value)) for r in rows.itertuples()]
            assert found == expected[:full], cut
            missing = Store(tmp_path).done("speed", "acme-1", "full")
            if whole[cut - 1 : cut] != b"\n" and full % 2:  # the second row of a case was cut off
                assert len(missing) <= (full + 1) // 2


@pytest.mark.parametrize("name", ["runs.jsonl", "samples"])
def test_records_and_samples_cut_anywhere(recorded: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(recorded, tmp_path, dirs_exist_ok=True)
    (run,) = Store(tmp_path).runs("acme-1")
    path = tmp_path / "acme-1" / name
    if path.is_dir():
        (path,) = path.rglob("*.csv.gz")
    whole = path.read_bytes()
    samples = Store(tmp_path).samples("speed", "acme-1", run["run_id"])["value"].tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cut in range(0, len(whole), max(1, len(whole) // 150)):
            path.write_bytes(whole[:cut])
            kept = Store(tmp_path)
            if name == "samples":
                frame = kept.samples("speed", "acme-1", run["run_id"])
                found = frame["value"].tolist() if len(frame) else []
                assert found == samples[: len(found)], cut
            else:
                assert kept.runs("acme-1") == [], cut


def test_steps_cut_at_any_byte_are_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    row = ",".join(["{}", "0", "0", "0.125", *["1"] * (len(COLUMNS) - 5), "0.4321"])
    whole = "".join(f"{line}\n" for line in (",".join(COLUMNS), *(row.format(k) for k in range(3))))
    for cut in range(whole.index("\n") + 1, len(whole)):
        path.write_text(whole[:cut])
        StepCsv(path, 3)
        assert path.read_text() == whole[: whole[:cut].rindex("\n") + 1], cut


def test_a_damaged_row_of_steps_is_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(",".join(COLUMNS) + "\n0,0,0,0.1\n")
    with pytest.raises(ValueError, match=r"steps\.csv has a damaged row, '0,0,0,0\.1': move it away"):
        StepCsv(path, 3)


def test_rows_that_could_not_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.wan.test_log import logged

    log, append = StepCsv(tmp_path / "steps.csv", 0), files.append

    def full(path: Path, content: bytes) -> None:
        raise files.WriteError(f"{path} could not be written: No space left on device")

    monkeypatch.setattr(files, "append", full)
    with pytest.raises(OSError, match=r"steps\.csv could not be written: No space"):
        log.append(logged(0), None)
    monkeypatch.setattr(files, "append", append)
    log.append(logged(1), None)
    with (tmp_path / "steps.csv").open() as file:
        assert [(r["step"], r["rank"]) for r in csv.DictReader(file)] == [(s, k) for s in "01" for k in "01"]


def test_a_line_set_aside_after_a_torn_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "speed.csv"
    files.reject(path, [(("a",), "first")])
    torn = path.with_name("speed.csv.rejected")
    torn.write_bytes(torn.read_bytes() + b'{"columns": ["a"], "li')
    files.reject(path, [(("a",), "second")])
    assert [entry["line"] for line in torn.read_text().splitlines() for entry in _parsed(line)] == ["first", "second"]


def _parsed(line: str) -> list[dict[str, Any]]:
    try:
        return [json.loads(line)]
    except ValueError:
        return []


def test_a_killed_writer_s_leftovers_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "acme-1"
    folder.mkdir()
    (folder / ".speed.csv.k3k3.partial").write_text("half a file")
    Store(tmp_path).start(MACHINE, ["x"], None, "full")
    assert {p.name for p in folder.iterdir()} == {"runs.jsonl", ".lock"}


def _tensors(step: Path) -> list[Any]:
    """Everything in a checkpoint's files of tensors, as PyTorch reads it."""
    found: list[Any] = []
    index = checkpoint_index.read(step)
    for info in sorted(index.storage_data.values(), key=lambda i: (i.relative_path, i.offset)):
        content = (step / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        found.append(torch.load(io.BytesIO(content), weights_only=True))
    return found


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_a_bit_flipped_anywhere_in_a_checkpoint_is_found_or_changes_nothing(tmp_path: Path) -> None:
    step = doors_train.trained(tmp_path) / doors_train.STEP
    before, rng, found = _tensors(step), random.Random(7), 0
    paths = [p for p in sorted(step.iterdir()) if p.name != ".metadata"]  # which is never read
    for number in range(40):
        path = paths[number % len(paths)]
        content = path.read_bytes()
        at = rng.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
        try:
            for name in ("about.json", checkpoint_index.NAME):
                checkpoint_index.check(step, name)
            checkpoint_index.check_tensors(step, checkpoint_index.read(step), 0, 1)
            assert all(map(_same, _tensors(step), before)), (path.name, at)
        except (ValueError, OSError):
            found += 1
        path.write_bytes(content)
    assert found >= 36, "padding between a file's parts is all that may change unnoticed"


def test_what_latest_says_is_not_needed(tmp_path: Path) -> None:
    run = doors_train.trained(tmp_path)
    (run / "checkpoints" / "latest").write_bytes(b"\xff\x00step-")
    options = [str(o) for o in (*doors_train.TINY, *doors_train.MADE_UP, "--out", run)]
    done = CliRunner().invoke(train.app, options)
    assert done.exit_code == 0 and "after 1 steps" in done.output, done.output


def test_a_checkpoint_half_removed_by_a_kill_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.wan.checkpointing import Checkpoints

    run = doors_train.trained(tmp_path)
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints.folder = run / "checkpoints"

    def killed(path: Path) -> None:
        (path / "about.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints._remove(run / doors_train.STEP)
    assert checkpoints._complete() == []


def test_another_seed_says_what_it_reaches(tmp_path: Path) -> None:
    run = doors_train.trained(tmp_path)
    options = [str(o) for o in (*doors_train.TINY, *doors_train.MADE_UP, "--out", run, "--seed", 3)]
    done = CliRunner().invoke(train.app, options)
    assert done.exit_code == 0 and "seed: 0 -> 3, for noise and made-up samples; the samples' order" in done.output
    assert done.output.index("tiny, 1 layers") < done.output.index("seed: 0 -> 3")


def test_nothing_is_announced_before_a_run_can_go_on(tmp_path: Path) -> None:
    run = doors_train.trained(tmp_path)
    doors_train.every_shard(doors_train.halve)(run)
    options = [str(o) for o in (*doors_train.TINY, *doors_train.MADE_UP, "--out", run)]
    done = CliRunner().invoke(train.app, options)
    assert done.exit_code == 2 and "is damaged" in done.stderr and done.stdout == ""
