"""What `python -m repro.compare` reads: devices' folders, whole results folders, single runs, pytest-benchmark's JSON.

Everything becomes a `Source`: rows in the columns of `repro.records`, where they come from, and their raw samples.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from repro.names import unknown
from repro.records import Key, Store, case_key, parameter_columns
from repro.records.schema import HEAD, TAIL

GPU_FACTS = ("gpu_name", "gpu_count", "mig_profile", "power_limit_w")
CPU_FACTS = ("cpu_name", "cores")
"""Facts of a run record by which two devices of one slug are told apart; a GPU's do not include its host's."""
BENCHMARKS = "pytest-benchmark"
"""Suite of the rows that are read from pytest-benchmark's JSON."""
RUN_WORDS = {"first": 0, "previous": -2, "latest": -1}
"""Which measurement of each case is meant, counted as in a list."""

Cell = tuple[str, str, str, Key]
"""suite, profile, metric, case: what is compared with what."""


Samples = dict[tuple[str, Key], npt.NDArray[np.float64]]
"""Raw samples of one run and suite, by metric and case."""


class SourceError(ValueError):
    """What was named cannot be read; the message says what there is instead."""


@dataclass(frozen=True)
class Source:
    """One column of the comparison.

    label: what it is called, of all sources different. device: its folder's name, a slug unless somebody renamed it, or
    the machine's name. slug: as the run records have it, where they do. machine: facts of the run
    that its newest rows stem from. about: versions, commit and time of that run. parameters: of each suite, in the
    order of its file. notes: what could not be read.
    """

    label: str
    device: str
    machine: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: pd.DataFrame = field(repr=False)
    parameters: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()
    store: Store | None = field(default=None, repr=False, compare=False)
    recorded: Mapping[Cell, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)
    slug: str = ""
    _read: dict[tuple[str, str], Samples] = field(default_factory=dict, repr=False, compare=False)

    def cells(self) -> dict[Cell, dict[str, Any]]:
        """Every row by what it is compared by."""
        parameters = parameter_columns(c for c in self.rows.columns if c != "device")
        found = {}
        for row in self.rows.to_dict("records"):
            key = case_key({p: row[p] for p in parameters if row[p] == row[p]})  # NaN: has no such parameter
            found[str(row["suite"]), str(row["profile"]), str(row["metric"]), key] = row
        return {cell: {str(k): v for k, v in row.items()} for cell, row in found.items()}

    def samples(self, cell: Cell, run_id: str) -> npt.NDArray[np.float64]:
        """Raw samples of a row that stems from `run_id`; empty where none were kept."""
        if self.store is None:
            return self.recorded.get(cell, np.empty(0))
        suite, _, metric, key = cell
        if (suite, run_id) not in self._read:
            self._read[suite, run_id] = _samples(self.store, self.device, suite, run_id)
        return self._read[suite, run_id].get((metric, key), np.empty(0))


def read(text: str, results: Path) -> list[Source]:
    """Sources that a path, or the slug of a device under `results`, stands for.

    A path may be a device's folder, a results folder or a checkout (every device in it), or a JSON file that
    pytest-benchmark wrote. Raises SourceError.
    """
    path = Path(text)
    if path.suffix == ".json" and path.is_file():
        return [_read_benchmarks(path)]
    return [_read_device(store, device) for store, device in _devices(text, results)]


def read_runs(text: str, runs: Sequence[str], results: Path) -> list[Source]:
    """One source for each of `runs` of a device's folder: an id (or its beginning or end), or a word of RUN_WORDS.

    A word chooses case by case, since a run may have measured a part only. Raises SourceError.
    """
    devices = _devices(text, results)
    if len(devices) != 1:
        raise SourceError(f"--runs wants one device's folder, and {text} holds {', '.join(d for _, d in devices)}")
    store, device = devices[0]
    suites = {s: sorted(set(_run_ids(store, s, device))) for s in store.suites(device)}
    known = sorted({r for ids in suites.values() for r in ids})
    found = []
    for name in runs:
        if name in RUN_WORDS:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                frames = [_nth(store, s, device, ids, RUN_WORDS[name]) for s, ids in suites.items()]
            frames = [f for f in frames if len(f)]
            if not frames:
                raise SourceError(f"{text}: no case was measured twice, so there is no {name} run to compare with")
            found.append(_source(store, device, frames, caught, name))
        else:
            run_id = _find_run(name, known)
            found.append(_read_device(store, device, run_id))
    return found


def named(sources: Iterable[Source]) -> list[Source]:
    """The same sources with labels that differ: of equal ones the others are numbered, and all say from where."""
    seen: dict[str, int] = {}
    found = []
    for source in sources:
        count = seen[source.label] = seen.get(source.label, 0) + 1
        found.append(source if count == 1 else replace(source, label=f"{source.label} #{count}"))
    if max(seen.values(), default=0) > 1:
        found = [replace(s, about={**s.about, "from": str(s.store.root if s.store else "")}) for s in found]
    return found


def same_device(a: Source, b: Source) -> bool:
    """Whether both were measured on one kind of device: equal slugs, and no fact known of both that differs."""
    facts = GPU_FACTS if a.machine.get("gpu_count") and b.machine.get("gpu_count") else (*GPU_FACTS, *CPU_FACTS)
    known = [f for f in facts if a.machine.get(f) is not None and b.machine.get(f) is not None]
    alike = (a.slug or a.device) == (b.slug or b.device)
    return alike and all(a.machine[f] == b.machine[f] for f in known)


def _devices(text: str, results: Path) -> list[tuple[Store, str]]:
    """Store and slug of every device that a folder, or a slug under `results`, stands for. Raises SourceError."""
    path = Path(text)
    if not path.exists() and "/" not in text and (results / text).is_dir():
        path = results / text
    if not path.is_dir():
        known = Store(results).devices()
        raise SourceError(f"{text!r} is neither a folder nor a .json file; {unknown('device', path.name, known)}")
    for folder in (path, path / "results"):
        if is_device(folder):
            return [(Store(folder.resolve().parent), folder.resolve().name)]
        devices = [d for d in Store(folder).devices() if is_device(folder / d)]
        if devices:
            return [(Store(folder), d) for d in devices]
    raise SourceError(f"{text}: no rows in it: want a folder with <suite>.csv files, or one of such folders")


def is_device(folder: Path) -> bool:
    """Whether a folder holds rows of one device; results/ itself has CSV files too, which are not rows."""
    heads = (next(iter(p.open(errors="replace")), "") for p in folder.glob("*.csv"))
    return any(set(HEAD[1:]) <= set(head.strip().split(",")) for head in heads)


def _run_ids(store: Store, suite: str, device: str) -> list[str]:
    """Runs that have rows in a suite's file, also those whose cases were all measured again."""
    from repro.records import files

    return [r["run_id"] for r in files.read_table(store.root / device / f"{suite}.csv").records() if "run_id" in r]


def _nth(store: Store, suite: str, device: str, run_ids: Sequence[str], nth: int) -> pd.DataFrame:
    """Of each case of a suite the rows of its n-th run, counted as in a list; none where it has fewer."""
    rows = pd.concat([store.rows(suite, device, run_id=r) for r in run_ids], ignore_index=True)
    if rows.empty:
        return rows
    case = ["profile", *parameter_columns(c for c in rows.columns if c != "device")]
    rank = rows.groupby(case, dropna=False)["run_id"].rank("dense", ascending=nth >= 0)
    return rows[rank == (nth + 1 if nth >= 0 else -nth)]


def _find_run(name: str, known: Sequence[str]) -> str:
    found = [r for r in known if r.startswith(name) or r.endswith(name)]
    if len(found) != 1:
        told = "is the beginning or end of several runs" if found else "is no run with rows here"
        raise SourceError(f"{name!r} {told}; there are: {', '.join(found or known) or 'none'}")
    return found[0]


def _read_device(store: Store, device: str, run_id: str | None = None) -> Source:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = [f for s in store.suites(device) if len(f := store.rows(s, device, run_id=run_id))]
    if not frames:
        raise SourceError(f"{store.root / device}: no rows that this checkout reads{_told(caught)}")
    return _source(store, device, frames, caught, f"run {run_id.rpartition('-')[2]}" if run_id else device)


def _source(
    store: Store, device: str, frames: Sequence[pd.DataFrame], caught: list[warnings.WarningMessage], label: str
) -> Source:
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        records = {r["run_id"]: r for r in store.runs(device)}
    rows = pd.concat(frames, ignore_index=True)
    own = [records[r] for r in sorted(rows["run_id"].unique()) if r in records]
    # of runs that computed on another machine from recorded rows, only what they computed from was measured here
    newest = next((r for r in reversed(own) if "facts_of_run" not in r.get("machine", {})), own[-1] if own else {})
    machine = newest.get("machine", {})
    about = {
        "measured": str(newest.get("started", ""))[:16].replace("T", " "),
        "torch": machine.get("torch"),
        "CUDA": machine.get("torch_cuda"),
        "driver": machine.get("driver"),
        "host": f"{machine.get('cpu_name')} x{machine.get('cores')}" if machine.get("gpu_count") else None,
        "commit": (newest.get("commit") or "")[:9] or None,
        "load": machine.get("load_average"),
    }
    parameters = {str(f["suite"].iloc[0]): parameter_columns(c for c in f.columns if c != "device") for f in frames}
    notes = tuple(dict.fromkeys(str(w.message) for w in (*caught, *more)))
    slug = str(newest.get("device", ""))
    return Source(label, device, machine, about, rows, parameters, notes, store, slug=slug)


def _told(caught: Sequence[warnings.WarningMessage]) -> str:
    return "".join(f"; {w.message}" for w in caught[:1])


def _samples(store: Store, device: str, suite: str, run_id: str) -> Samples:
    """Samples of a run by metric and case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is cut off has fewer samples, which the verdict then shows
        frame = store.samples(suite, device, run_id)
    parameters = [c for c in frame.columns if c not in ("metric", "unit", "index", "value")]
    found = {}
    for group, values in frame.groupby([*parameters, "metric"], dropna=False, sort=False)["value"]:
        *case, metric = cast(tuple[Any, ...], group)
        values_of = dict(zip(parameters, case, strict=True))
        key = case_key({p: v for p, v in values_of.items() if v == v})
        found[str(metric), key] = values.to_numpy(np.float64)
    return found


def _read_benchmarks(path: Path) -> Source:
    """Rows of a pytest-benchmark file: time in s a benchmark, and % of the stream in its group where there is one."""
    try:
        return _of_benchmarks(path, json.loads(path.read_text(encoding="utf-8")))
    except SourceError:
        raise
    except (OSError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SourceError(f"{path}: not written by pytest-benchmark: {type(error).__name__}: {error}") from error


def _of_benchmarks(path: Path, content: Any) -> Source:
    """The same of the file's content. Raises whatever its parts raise where they are of another kind."""
    machine, benchmarks = content["machine_info"], content["benchmarks"]
    cases = [(b["fullname"], b.get("group"), b.get("extra_info", {}), b["stats"]) for b in benchmarks]
    medians = [float(stats["median"]) for *_, stats in cases]
    wrong = [m for m in medians if not 0 < m < float("inf")]
    if wrong:
        raise ValueError(f"a median must be positive and finite, got {wrong[0]}")
    if not cases:
        raise SourceError(f"{path}: no benchmark in it")
    streams = {g: m for (_, g, extra, _), m in zip(cases, medians, strict=True) if extra.get("impl") == "stream" and g}
    run_id, profile = str(content.get("datetime", "")), "full"
    rows, recorded = [], {}
    for (name, group, extra, stats), median in zip(cases, medians, strict=True):
        case = {"benchmark": name, "impl": str(extra.get("impl", ""))}
        key = case_key(case)
        head = {"device": "", "schema": 1, "run_id": run_id, "suite": BENCHMARKS, "profile": profile, **case}
        ends = {"ci_low": float(stats.get("q1", median)), "ci_high": float(stats.get("q3", median))}
        tail = {"n": int(stats.get("rounds", 1)), "kind": "measured", "source": ""}
        rows.append({**head, "metric": "time", "unit": "s", "value": median, **ends, **tail})
        if group in streams:
            share = 100 * streams[group] / median
            rows.append(
                {**head, "metric": "ceiling", "unit": "%", "value": share, "ci_low": share, "ci_high": share, **tail}
            )
        if stats.get("data"):
            recorded[BENCHMARKS, profile, "time", key] = np.asarray(stats["data"], np.float64)
    cpu = machine.get("cpu", {})
    facts = {**machine.get("repro", {}), "cpu_name": cpu.get("brand_raw"), "cores": cpu.get("count")}
    device = str(facts.get("slug") or f"{machine.get('node', 'unknown')}: {cpu.get('brand_raw', 'unknown CPU')}")
    commit = content.get("commit_info", {}).get("id")
    about = {"measured": run_id[:16].replace("T", " "), "commit": None if commit == "unversioned" else commit}
    frame = pd.DataFrame(rows, columns=["device", *HEAD, "benchmark", "impl", *TAIL]).assign(device=device)
    notes = () if recorded else (f"{path}: no raw samples: write it with --benchmark-json, not --benchmark-save",)
    return Source(path.stem, device, facts, about, frame, {BENCHMARKS: ("benchmark", "impl")}, notes, None, recorded)
