"""From a manifest of real clips to a `Corpus`: records are checked, resampled to the training frame rate and bucketed.

A manifest is CSV (or TSV), JSON lines or Parquet with a record for each clip, or WebDataset shards whose .json members
are the records. A record needs a height, a width and either frames (with fps, if they are not at the training rate)
or a duration. Nonsense costs the record, never the run: it is counted by reason and shown with its place.
"""

from __future__ import annotations

import glob
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from repro.corpus import readers
from repro.corpus.buckets import REASONS, Assignment, BucketGrid
from repro.corpus.cleaning import FIELDS, Clips, check
from repro.corpus.readers import ManifestError, RawChunk
from repro.corpus.report import ClipReport, Recorder
from repro.corpus.shapes import Corpus

_READERS = {
    ".csv": readers.read_csv,
    ".tsv": readers.read_csv,
    ".jsonl": readers.read_jsonl,
    ".ndjson": readers.read_jsonl,
    ".parquet": readers.read_parquet,
}

MOST_SHARDS = 1_000_000
"""Shards that a {000..127} range may stand for; a slip of the finger must not fill the memory with names."""
MOST_REPEATS = 10_000
"""Times that an epoch may show a clip."""


@dataclass(frozen=True)
class Manifest:
    """A manifest as training sees it.

    corpus: only buckets with clips, by tokens; sample ids count through records and their repeats in file order.
    record_of: int64 [N], 0-based number of the record (broken ones count too) behind each sample id.
    report: what was dropped or changed, and why.
    """

    corpus: Corpus
    record_of: npt.NDArray[np.int64]
    report: ClipReport


def shards(path: str) -> list[Path]:
    """Tar shards that `path` stands for: a folder of them, a glob, or a numeric range such as clips-{000..127}.tar.

    Raises ManifestError for a range of more than MOST_SHARDS.
    """
    span = re.search(r"\{(\d+)\.\.(\d+)\}", path)
    if span:
        first, last = span.groups()
        if max(len(first), len(last)) > 18 or int(last) - int(first) >= MOST_SHARDS:
            raise ManifestError(f"{path} stands for more than {MOST_SHARDS:,} shards: give a smaller range")
        numbers = (str(i).zfill(len(first)) for i in range(int(first), int(last) + 1))
        return [Path(path[: span.start()] + n + path[span.end() :]) for n in numbers]
    if Path(path).is_dir():
        return sorted(p for p in Path(path).iterdir() if p.suffix == ".tar")
    return sorted(map(Path, glob.glob(path)))


def _chunks(path: str, rows: int) -> Iterator[RawChunk]:
    """Chunks of whatever `path` is. Raises ManifestError for a file that cannot be opened or is of another kind."""
    file = Path(path)
    suffixes = [s.lower() for s in file.suffixes if s.lower() != ".gz"]
    kind = suffixes[-1] if suffixes else ""
    try:
        if kind == ".tar" or file.is_dir():
            found = shards(path)
            if not found:
                raise ManifestError(f"no .tar shards at {path}")
            yield from readers.read_webdataset(found, FIELDS, rows)
        elif kind in _READERS:
            yield from _READERS[kind](file, FIELDS, rows)
        else:
            raise ManifestError(f"{path} is no manifest: want .csv, .tsv, .jsonl, .parquet, or .tar shards")
    except FileNotFoundError as error:
        raise ManifestError(f"no such manifest: {path}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise ManifestError(f"cannot read {path}: {error}") from error


def _require_columns(path: str, chunk: RawChunk) -> None:
    """Raise ManifestError for a column that no record can do without."""
    for needed in (("height",), ("width",), ("frames", "duration")):
        if not any(f in chunk.values for f in needed):
            known = ", ".join(name for f in needed for name in FIELDS[f])
            raise ManifestError(f"{path} has no column for {' or '.join(needed)}; looked for {known}")


class _Repeats:
    """How often an epoch shows each clip, by source; counts clips across chunks.

    The i-th clip of a source appears floor((i + 1) r) - floor(i r) times: 0.5 takes every other clip and 2.25 adds a
    third copy to one in four, evenly spread and without a random draw.
    Raises ValueError for r outside 0..MOST_REPEATS.
    """

    def __init__(self, times: Mapping[str, float]) -> None:
        for source, r in times.items():
            if not 0 <= r <= MOST_REPEATS:  # also catches NaN
                raise ValueError(f"repeats of source {source!r} must be a number from 0 to {MOST_REPEATS:,}, got {r:g}")
        self.times, self.seen = dict(times), Counter[str]()

    def counts(self, source: npt.NDArray[Any] | None, n: int) -> npt.NDArray[np.int64]:
        """int64 [n] for clips of `source` [n] (None: the file does not say)."""
        if source is None:
            self.seen.update({"": n})
            return np.ones(n, dtype=np.int64)
        code, unique = pd.factorize(pd.Series(source, dtype=object).fillna("").astype(str))
        before = np.array([self.seen[u] for u in unique], dtype=np.int64)
        times = np.array([self.times.get(u, 1.0) for u in unique], dtype=np.float64)
        self.seen.update(dict(zip(unique, np.bincount(code, minlength=len(unique)).tolist(), strict=True)))
        i, r = before[code] + pd.Series(code).groupby(code).cumcount().to_numpy(), times[code]
        # 1e-9: 10 * 0.1 must count as 1.
        return (np.floor((i + 1) * r + 1e-9) - np.floor(i * r + 1e-9)).astype(np.int64)


class _Samples:
    """Grows chunk by chunk: 2 bytes for a sample's bucket, 8 for its record."""

    def __init__(self, grid: BucketGrid, repeats: _Repeats, note: Recorder) -> None:
        self.grid, self.repeats, self.note = grid, repeats, note
        self.frames_of = np.array([s.frames for s in grid.shapes])
        self.buckets: list[npt.NDArray[np.int16]] = []
        self.records: list[npt.NDArray[np.int64]] = []

    def add(self, chunk: RawChunk, clips: Clips) -> None:
        got = self.grid.assign(clips.frames, clips.height, clips.width)
        kept = np.flatnonzero(got.bucket >= 0)
        source = chunk.values.get("source")
        times = self.repeats.counts(source[clips.row[kept]] if source is not None else None, len(kept))
        self._note(chunk, clips, got, kept[times == 0])
        bucket = got.bucket[kept].astype(np.int16)
        self.buckets.append(np.repeat(bucket, times))
        self.records.append(np.repeat(chunk.numbers[clips.row[kept]], times))
        used = times > 0
        report = self.note.report
        report.clips += int(used.sum())
        report.frames_seen += float(clips.frames[kept][used].sum())
        report.frames_used += float(self.frames_of[bucket[used]].sum())
        report.crop_sum += float(got.crop[kept][used].sum())

    def _note(self, chunk: RawChunk, clips: Clips, got: Assignment, never: npt.NDArray[np.intp]) -> None:
        def place(i: int) -> str:
            return chunk.places[clips.row[i]]

        def change(i: int) -> tuple[str, str]:
            before = f"{clips.frames[i]}x{clips.height[i]}x{clips.width[i]}"
            if got.bucket[i] < 0:
                return place(i), before
            return place(i), f"{before} to {self.grid.shapes[got.bucket[i]]}, {got.crop[i]:.1%} of the picture cut"

        for fate, reason in REASONS.items():
            where = np.flatnonzero(got.fate & np.uint8(fate))
            self.note.note("dropped" if fate.dropped else "changed", reason, where, change)
        self.note.note("dropped", "source repeated 0 times", never, lambda i: (place(i), "by its source's repeats"))

    def corpus(self, name: str) -> Corpus:
        """The non-empty buckets, by tokens. Raises ManifestError where there is none."""
        grid, report = self.grid, self.note.report
        bucket = np.concatenate(self.buckets) if self.buckets else np.zeros(0, dtype=np.int16)
        if not bucket.size:
            why = "; ".join(f"{n:,} {reason}" for reason, n in report.dropped.most_common(4)) or "it has none"
            raise ManifestError(f"{name}: none of {report.records:,} records is usable ({why})")
        counts = np.bincount(bucket, minlength=len(grid.shapes))
        tokens = np.array([grid.tokenizer.tokens(s) for s in grid.shapes], dtype=np.int64)
        used = sorted(np.flatnonzero(counts).tolist(), key=lambda k: (tokens[k], grid.shapes[k]))
        position = np.full(len(grid.shapes), -1, dtype=np.int32)
        position[used] = np.arange(len(used), dtype=np.int32)
        slug = re.sub(r"[^a-z0-9]+", "-", name.split(".")[0].lower()).strip("-") or "manifest"
        return Corpus(slug, f"manifest {name}", tuple(grid.shapes[k] for k in used), tokens[used], position[bucket])


def load(
    path: str | Path,
    grid: BucketGrid | None = None,
    *,
    fps: float = 16.0,
    repeats: Mapping[str, float] | None = None,
    log: str | Path | None = None,
    chunk_rows: int = readers.CHUNK_ROWS,
) -> Manifest:
    """Read the manifest at `path`: a file, a folder of tar shards, a glob or a {000..127} range of them.

    grid: buckets to assign to, Wan 2.1's unless given. fps: training frame rate (Wan 2.1: 16). repeats: how often an
    epoch shows each clip of a source (1 unless given; fractions allowed). log: CSV file that gets a line for every
    dropped or changed clip. Memory: `chunk_rows` records at a time and 10 bytes a sample, about twice that at the end.
    Raises ManifestError where the file, its columns or all of its clips are unusable, or a repeated source never
    appears; ValueError for a wrong argument.
    """
    if not (np.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be positive, got {fps}")
    name = Path(path).name
    report, tally, repeat = ClipReport(), Counter[str](), _Repeats(repeats or {})
    with Recorder(report, Path(log) if log else None) as note:
        samples = _Samples(grid or BucketGrid(), repeat, note)
        for chunk in _chunks(str(path), chunk_rows):
            _require_columns(str(path), chunk)
            report.records += len(chunk.places) + len(chunk.broken)
            note.broken(chunk.broken)
            samples.add(chunk, check(chunk, fps, note, tally))
    corpus = samples.corpus(name)
    unknown = sorted(set(repeat.times) - set(repeat.seen))
    if unknown:
        has = ", ".join(filter(None, sorted(repeat.seen))) or "none"
        raise ManifestError(f"{name} has no usable clip of source {unknown[0]!r}; its sources: {has}")
    report.samples, report.sources = corpus.samples, repeat.seen
    if tally["no_fps"]:
        report.notes.append(f"{tally['no_fps']:,} clips without fps: their frames count as being at {fps:g} fps")
    if tally["slower"]:
        report.notes.append(f"{tally['slower']:,} clips slower than {fps:g} fps keep their own frames")
    return Manifest(corpus, np.concatenate(samples.records), report)
