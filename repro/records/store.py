"""The results store: one folder a device, one CSV file a suite, one line of `runs.jsonl` a run.

    results/<device>/<suite>.csv                          rows (`repro.records.schema`)
    results/<device>/runs.jsonl                           where each run_id comes from (`repro.records.provenance`)
    results/<device>/samples/<suite>/<run_id>.csv.gz      raw samples by case key
    results/<device>/cases/<suite>/<run_id>.jsonl         how many metrics each case has (`repro.records.counts`)

Rows are never removed. On reading, the newest run of a case owns all its metrics; one that lost some of them or all, in
a file that was cut or edited, does not count as long as an older one has all of its own.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from repro.records import counts, files, provenance, samples
from repro.records.schema import (
    HEAD,
    SCHEMA,
    TAIL,
    Key,
    Record,
    SchemaError,
    check,
    header,
    migrate,
    parameter_columns,
    records,
    row_key,
    schema_of,
)
from repro.suite import Case, Measurement, Profile

if TYPE_CHECKING:
    from repro.measure.machine import Machine

_NUMBERS = ("value", "ci_low", "ci_high", "n")
_RUNS = "runs.jsonl"
_ID_TIME = "%Y%m%dT%H%M%S.%fZ"


@dataclass(frozen=True)
class Run:
    """One run of one command on one device. `id` sorts by start within a device.

    began: `time.monotonic()` at its start, since the clock behind `started` may be set in between.
    """

    id: str
    device: str
    profile: Profile
    started: datetime
    began: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True)
class _Read:
    """A suite's file as read.

    rows: in the current schema. whole: of each counted case of a run, whether its rows are all there. lost: cases whose
    newest run lost rows. rejected: (columns, line) of what is no whole row.
    """

    rows: list[Record]
    whole: Mapping[counts.At, bool]
    lost: Sequence[counts.CaseOf]
    rejected: Sequence[tuple[tuple[str, ...], str]]


class Store:
    """Rows, raw samples and run records under one `results` folder. Reading writes nothing and tolerates gaps."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._parsed: dict[Path, tuple[tuple[int, ...], list[Record], set[counts.At]]] = {}

    def start(self, machine: Machine, command: Sequence[str], seed: int | None, profile: Profile) -> Run:
        """Open a run and record where it comes from: code, command, versions, machine. Raises WriteError."""
        folder = self.root / machine.slug
        started = datetime.now(UTC)
        with files.locked(folder):
            files.sweep(folder)
            known = _take_runs(folder)
            run = Run(_new_id(started, [r["run_id"] for r in known]), machine.slug, profile, started)
            record = {
                "schema": SCHEMA,
                "run_id": run.id,
                "device": machine.slug,
                "profile": profile,
                "started": started.isoformat(timespec="seconds"),
                **provenance.collect(command, seed, machine),
                "end": None,
            }
            record["unavailable"]["end"] = "still running, or killed"
            _write_runs(folder, [*known, record])
        return run

    def finish(self, run: Run, status: str, counts: Mapping[str, int], clocks: Mapping[str, Any]) -> None:
        """Complete the run's record: how it ended, counts of its cases, and clocks and throttle reasons after it."""
        folder = self.root / run.device
        end = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - run.began, 1),
            "status": status,
            "cases": dict(counts),
            "clocks": dict(clocks),
        }
        with files.locked(folder):
            known = _take_runs(folder)
            for record in known:
                if record["run_id"] == run.id:
                    record["end"] = end
                    record.get("unavailable", {}).pop("end", None)
            _write_runs(folder, known)

    def append(self, run: Run, suite: str, case: Case, measurements: Sequence[Measurement]) -> None:
        """Persist one case: its raw samples, how many metrics it has, then all its rows in one write.

        Raises SchemaError where a measurement breaks the format (`repro.records.schema.records`), WriteError where it
        cannot be written: then no row of the case stands.
        """
        rows = records(run.id, suite, run.profile, case, measurements)
        folder = self.root / run.device
        with files.locked(folder):
            samples.append(self._samples_path(run.device, suite, run.id), case, measurements)
            counts.append(self._counts(run.device, suite) / f"{run.id}.jsonl", run.profile, case, len(rows))
            files.append_rows(folder / f"{suite}.csv", tuple(case.key), rows)

    def devices(self) -> list[str]:
        """Slugs of the devices that have a folder, alphabetical."""
        if not self.root.is_dir():
            return []
        return sorted(p.name for p in self.root.iterdir() if p.is_dir() and not p.name.startswith("."))

    def suites(self, device: str) -> list[str]:
        """Names of the suites that have rows on a device, alphabetical."""
        return sorted(p.stem for p in (self.root / device).glob("*.csv"))

    def rows(
        self, suite: str, device: str | None = None, profile: Profile | None = None, run_id: str | None = None
    ) -> pd.DataFrame:
        """Rows of a suite: of each case those of its newest run, in the order in which they were written.

        Warns where that run is known to have lost some or all; the newest that lost none stands in, if there is one.

        Columns: `device`, the fixed ones before, the suite's parameters, the fixed ones after. `value`, `ci_low` and
        `ci_high` are float64, `n` int64, a parameter column is numeric where every cell in it is a number (a missing
        one then NaN) and text otherwise (a missing one then ""). No rows: an empty frame with the fixed columns.

        device: None reads all. profile: None reads both. run_id: only the rows of this run, whatever came after it.
        """
        devices = self.devices() if device is None else [device]
        frames = [self._frame(suite, d, profile, run_id) for d in devices]
        frames = [f for f in frames if len(f)]
        if not frames:
            return _typed(pd.DataFrame(columns=["device", *header(())], dtype=str))
        return _typed(pd.concat(frames, ignore_index=True).fillna(""))

    def gather(self, suites: Sequence[str], device: str, profile: Profile) -> pd.DataFrame:
        """Rows of several suites on one device under one profile, told apart by column `suite`."""
        frames = [f for f in (self.rows(s, device, profile) for s in suites) if len(f)]
        return pd.concat(frames, ignore_index=True) if frames else self.rows("", device, profile)

    def done(self, suite: str, device: str, profile: Profile, since: str = "") -> set[Key]:
        """Keys (`case_key`) of the cases that need no measuring: recorded, with all the rows of their newest run.

        since: run_id of the oldest run that counts.
        """
        read = self._read(suite, device)
        lost = {key for of, key in read.lost if of == profile}
        cut = [_prefix(columns, line) for columns, line in read.rejected]
        found = set()
        for row in _newest(read.rows, profile):
            at = row["run_id"], row_key(row)
            if row["run_id"] >= since and (at in read.whole or not any(_matches(row, p) for p in cut)):
                found.add(at[1])
        return found - lost

    def samples(self, suite: str, device: str, run_id: str) -> pd.DataFrame:
        """Raw samples that a run kept: the suite's parameters, metric, unit, index, value. Empty where it kept none."""
        return samples.read(self._samples_path(device, suite, run_id))

    def runs(self, device: str) -> list[dict[str, Any]]:
        """Run records of a device, oldest first. A line that is no record is left out with a warning."""
        path = self.root / device / _RUNS
        found, broken = _read_runs(path)
        if broken:
            warnings.warn(f"{path}: line {_numbers(broken)} is no run record and is left out", stacklevel=2)
        return found

    def _path(self, suite: str, device: str) -> Path:
        return self.root / device / f"{suite}.csv"

    def _samples_path(self, device: str, suite: str, run_id: str) -> Path:
        return self.root / device / "samples" / suite / f"{run_id}.csv.gz"

    def _counts(self, device: str, suite: str) -> Path:
        return self.root / device / "cases" / suite

    def _finished(self, device: str) -> set[str]:
        """Runs of which every case ended well: their ids. Others may have been stopped between count and rows."""
        ends = {r["run_id"]: r.get("end") for r in _read_runs(self.root / device / _RUNS)[0]}
        return {run_id for run_id, end in ends.items() if isinstance(end, dict) and end.get("status") == "finished"}

    def _read(self, suite: str, device: str) -> _Read:
        """Read a suite's file. Warns of what it lost."""
        path, folder = self._path(suite, device), self._counts(device, suite)
        # in an order in which a run that goes on meanwhile seems to have lost nothing
        finished = self._finished(device) if folder.is_dir() else set()
        counted = counts.read(folder)
        table = files.read_table(path)
        rows, newer = _current(path, table)
        # of a run whose rows only a newer checkout can read nothing is known to be lost
        counted = {at: count for at, count in counted.items() if at[0] not in newer}
        whole = counts.compare(counted, rows, finished)
        lost = counts.lost(counted, rows, whole)
        _tell_lost(path, table.columns, lost)
        return _Read(rows, whole, lost, table.rejected)

    def _records(self, suite: str, device: str) -> tuple[list[Record], set[counts.At]]:
        """Rows of a file in the current schema, and which cases lack some, read once as long as it does not change."""
        path = self._path(suite, device)
        state: tuple[int, ...] = ()
        if path.exists():
            stat = path.stat()
            state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)  # a clock set back may repeat a time
        if path not in self._parsed or self._parsed[path][0] != state:
            read = self._read(suite, device)
            self._parsed[path] = (state, read.rows, {at for at, all_there in read.whole.items() if not all_there})
        return self._parsed[path][1:]

    def _frame(self, suite: str, device: str, profile: Profile | None, run_id: str | None) -> pd.DataFrame:
        rows, lacking = self._records(suite, device)
        rows = _newest([r for r in rows if run_id is None or r["run_id"] == run_id], profile, lacking)
        frame = pd.DataFrame(rows, columns=list(header(_parameters(rows))), dtype=str)
        frame.insert(0, "device", device)
        return frame


def _parameters(rows: Sequence[Record]) -> tuple[str, ...]:
    """Parameters that have a value somewhere, in the order in which they appear."""
    return parameter_columns(dict.fromkeys(c for row in rows for c in row))


def _newest(
    rows: Sequence[Record], profile: Profile | None, lacking: Collection[counts.At] = frozenset()
) -> list[Record]:
    """Rows of the newest run of each case, in their order; of a metric written twice in a run, the last.

    lacking: cases of runs that give way to an older run.
    """
    parameters = _parameters(rows)
    rows = [r for r in rows if profile is None or r["profile"] == profile]
    keys = [(r["profile"], *(r.get(p, "") for p in parameters)) for r in rows]
    runs = [(not lacking or (r["run_id"], row_key(r)) not in lacking, r["run_id"]) for r in rows]
    newest: dict[tuple[str, ...], tuple[bool, str]] = {}
    for key, run in zip(keys, runs, strict=True):
        newest[key] = max(newest.get(key, run), run)
    found = enumerate(zip(keys, runs, rows, strict=True))
    last = {(key, row["metric"]): i for i, (key, run, row) in found if run == newest[key]}
    return [rows[i] for i in sorted(last.values())]


def _tell_lost(path: Path, columns: Sequence[str], lost: Sequence[counts.CaseOf]) -> None:
    """Warn of the cases whose newest run lost rows. columns: of the file, in whose order a case is told."""
    if lost:
        case = dict(sorted(lost[0][1]))
        first = ", ".join(f"{p}={case[p]}" for p in dict.fromkeys((*columns, *case)) if p in case)[:200]
        others = f" and {len(lost) - 1} more" if lost[1:] else ""
        warnings.warn(
            f"{path}: lost rows of a case ({first}){others}: an older run stands in where there is one, and "
            "the next run measures it again",
            stacklevel=1,  # one place, so that a case is told of once
        )


def _new_id(now: datetime, known: Sequence[str]) -> str:
    """Time of the start and four random hex digits. A clock set back must not make a new run look old."""
    stamp = now
    for run_id in known:
        with contextlib.suppress(ValueError, OverflowError):  # an id of another making has no time
            started = datetime.strptime(run_id.rpartition("-")[0], _ID_TIME).replace(tzinfo=UTC)
            stamp = max(stamp, started + timedelta(milliseconds=1))
    return f"{stamp.strftime(_ID_TIME)}-{secrets.token_hex(2)}"


def _read_runs(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Run records of a file, and number and text of every line that is none."""
    found: list[dict[str, Any]] = []
    broken: dict[int, str] = {}
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if _is_run(record):
            found.append(record)
        elif line.strip():
            broken[number] = line
    return found, broken


def _is_run(record: object) -> bool:
    """Whether a line's value has what readers rely on."""
    if not isinstance(record, dict) or not isinstance(record.get("run_id"), str):
        return False
    return isinstance(record.get("machine", {}), dict)


def _numbers(broken: Mapping[int, str]) -> str:
    return ", ".join(map(str, broken))


def _take_runs(folder: Path) -> list[dict[str, Any]]:
    """Run records that `_write_runs` is to write again; lines that are none are set aside with one warning."""
    path = folder / _RUNS
    found, broken = _read_runs(path)
    if broken:
        files.reject(path, [((), line) for line in broken.values()])
        warnings.warn(f"{path}: line {_numbers(broken)} is no run record: set aside in {_RUNS}.rejected", stacklevel=3)
    return found


def _write_runs(folder: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    files.replace(folder / _RUNS, "".join(json.dumps(r) + "\n" for r in runs).encode())


def _current(path: Path, table: files.Table) -> tuple[list[Record], set[str]]:
    """Rows in the current schema, and runs that have rows in a newer one.

    What cannot be read is left out with one warning a reason.
    """
    rows: list[Record] = []
    newer: set[str] = set()
    reasons: dict[str, int] = {}
    for row in table.records():
        try:
            row = migrate(row)
            if (version := schema_of(row)) > SCHEMA:
                newer.add(row.get("run_id", ""))
                raise SchemaError(f"schema {version} is newer than this checkout reads ({SCHEMA}): update it")
            check(row)
            rows.append(row)
        except SchemaError as e:
            reasons[str(e)] = reasons.get(str(e), 0) + 1
    for reason, count in reasons.items():
        warnings.warn(f"{path}: {count} rows left out: {reason}", stacklevel=2)
    return rows, newer


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    for column in frame.columns:
        if column in _NUMBERS:
            frame[column] = pd.to_numeric(frame[column], errors="coerce").astype("float64")
        elif column not in (*HEAD, *TAIL, "device"):
            frame[column] = samples.numeric(frame[column])
    frame["n"] = frame["n"].fillna(0).astype("int64")
    frame["schema"] = pd.to_numeric(frame["schema"])
    return frame


def _prefix(columns: Sequence[str], line: str) -> tuple[dict[str, str], tuple[str, str] | None]:
    """What a cut-off line still tells of its case: whole cells, and the cell that it broke off in."""
    fields = files.fields_of(line)
    width = columns.index("metric") if "metric" in columns else len(columns)
    whole = dict(zip(columns[:width], fields[:-1], strict=False))
    broken = (columns[len(fields) - 1], fields[-1]) if 0 < len(fields) <= width else None
    return whole, broken


def _matches(row: Mapping[Any, Any], prefix: tuple[dict[str, str], tuple[str, str] | None]) -> bool:
    whole, broken = prefix
    if "run_id" not in whole:
        return False  # too short to belong to any case
    if any(row.get(c, "") != text for c, text in whole.items()):
        return False
    return broken is None or str(row.get(broken[0], "")).startswith(broken[1])
