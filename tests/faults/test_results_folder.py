"""Broken files in a folder of results: what can be read is read, the rest is named, and nothing is lost by writing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro.compare import app as compare
from repro.measure.machine import Machine
from repro.records import Store
from repro.suite import Case, Measurement
from tests.faults.recorded_rows import FILES, HEADER, OTHER, ROW, RUN, Broken, write

MACHINE = Machine("acme-1", "Acme", 1, (9, 0), 132, None, 4, {"gpu_name": "Acme", "unavailable": {}})
EVERY_FILE = pytest.mark.parametrize("broken", FILES, ids=lambda b: f"{b.file}: {b.name}")


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    """Warnings, which is how readers tell what they leave out."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def lines(folder: Path) -> list[bytes]:
    """Every line of a device's folder, what was set aside included."""
    return [line for p in sorted(folder.rglob("*")) if p.is_file() for line in p.read_bytes().splitlines()]


@EVERY_FILE
def test_reading_goes_on_and_names_what_it_leaves_out(
    broken: Broken, tmp_path: Path, told: list[warnings.WarningMessage]
) -> None:
    folder = write(tmp_path / "acme-1", broken)
    before = lines(folder)
    store = Store(tmp_path)
    if broken.content is None:
        with pytest.raises(OSError, match=re.escape(broken.file)):
            store.runs("acme-1"), store.rows("speed")
        return
    rows, runs, done = store.rows("speed"), store.runs("acme-1"), store.done("speed", "acme-1", "full")
    assert all(isinstance(r["run_id"], str) for r in runs)
    assert len(done) <= len(rows)
    said = " / ".join(str(w.message) for w in told)
    assert bool(said) == bool(broken.told) and re.search(broken.told, said), said
    assert all(len(str(w.message)) < 500 + len(str(folder)) for w in told)
    if broken.file == "speed.csv" and OTHER.encode() in broken.content and "cut" not in broken.name:
        assert 8192 in rows["tokens"].tolist(), "one bad row must not cost the good one"
    assert lines(folder) == before


@EVERY_FILE
def test_writing_on_loses_no_line(broken: Broken, tmp_path: Path, told: list[warnings.WarningMessage]) -> None:
    folder = write(tmp_path / "acme-1", broken)
    store = Store(tmp_path)
    if broken.content is None:
        with pytest.raises(OSError, match=re.escape(broken.file)):
            _measure(store)
        return
    good = [line for line in (ROW, OTHER) if line.encode() in broken.content or broken.file != "speed.csv"]
    _measure(store)
    after = b"\n".join(lines(folder)).decode(errors="replace")
    for line in good:
        assert line.split(",", 4)[-1].strip() in after
    rows = store.rows("speed")
    assert 512 in rows["tokens"].tolist(), "what was measured now can be read"
    assert [r["end"]["status"] for r in store.runs("acme-1") if r.get("end")] == ["finished"]
    aside = {"speed.csv.rejected", "runs.jsonl.rejected"}
    assert {p.name for p in folder.iterdir()} <= {"speed.csv", "runs.jsonl", "samples", "cases", ".lock", *aside}


def _measure(store: Store) -> None:
    run = store.start(MACHINE, ["x"], None, "full")
    store.append(run, "speed", Case({"tokens": 512}), [Measurement("time", "x", 1.0, 1.0, 1.0, 2, samples=(1.0, 1.0))])
    store.finish(run, "finished", {"measured": 1}, {})


@EVERY_FILE
def test_comparing_with_a_broken_folder(broken: Broken, tmp_path: Path) -> None:
    """Compared on what can be read, or refused in one line where that is nothing."""
    old, new = write(tmp_path / "old" / "acme-1", broken), write(tmp_path / "new" / "acme-1")
    done = CliRunner().invoke(compare, [str(old), str(new)], env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert done.exit_code in (0, 2)
    if done.exit_code == 2:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and "acme-1" in line


def test_the_good_folder_is_good(tmp_path: Path, told: list[warnings.WarningMessage]) -> None:
    write(tmp_path / "acme-1")
    store = Store(tmp_path)
    assert store.rows("speed")["value"].tolist() == [4.0, 3.0] and len(store.runs("acme-1")) == 1
    assert store.samples("speed", "acme-1", RUN).empty and not told
    assert (tmp_path / "acme-1" / "speed.csv").read_text() == HEADER + ROW + OTHER


@pytest.mark.parametrize("content", [b"", b"no gzip", b"\x1f\x8b\x08\x00" * 8, b"\xff" * 100])
def test_samples_that_cannot_be_read_are_none(
    content: bytes, tmp_path: Path, told: list[warnings.WarningMessage]
) -> None:
    path = write(tmp_path / "acme-1") / "samples" / "speed" / f"{RUN}.csv.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert Store(tmp_path).samples("speed", "acme-1", RUN).empty
    assert bool(told) == bool(content)
