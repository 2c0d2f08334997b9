"""Raw records of a manifest, in chunks of bounded size: CSV, JSON lines, Parquet, WebDataset shards.

Every reader yields `RawChunk`s of values as they stand in the file (text, numbers, None); `repro.corpus.manifest`
judges them. A record that cannot be read at all is listed in `RawChunk.broken` and the rest goes on; a file that is
not a manifest at all raises `ManifestError`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

CHUNK_ROWS = 65_536
"""Records held at a time: small enough that captions of a kilobyte stay under 100 MB, large enough for NumPy."""

Columns = Mapping[str, Sequence[str]]
"""What is wanted: field (frames, height, ...) to the column names that it may have, the best first, lower case."""


class ManifestError(ValueError):
    """The manifest as a whole cannot be used; the message names the file and the fix."""


@dataclass(frozen=True)
class Broken:
    """A record that is no record: its place in the file, the reason (a few words) and what was found."""

    place: str
    reason: str
    detail: str


@dataclass(frozen=True)
class RawChunk:
    """n readable records and the broken ones among them.

    numbers: int64 [n], 0-based position of each among all records, broken ones included. places: where each stands
    ("clips.csv:17"). values: field to object or numeric [n]; a field that the file has no column for is left out.
    """

    numbers: npt.NDArray[np.int64]
    places: Sequence[str]
    values: dict[str, npt.NDArray[Any]]
    broken: list[Broken] = field(default_factory=list)


class _Places(Sequence[str]):
    """Places of n records as file:line, put together only when asked for."""

    def __init__(self, name: str, lines: Sequence[int]) -> None:
        self._name, self._lines = name, lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: Any) -> Any:
        return f"{self._name}:{self._lines[i]}"


def choose(header: Iterable[str], wanted: Columns) -> dict[str, str]:
    """Field to the column of `header` that holds it; case and surrounding blanks do not matter."""
    given = {name.strip().lower(): name for name in header if isinstance(name, str)}
    found = {f: next((given[s] for s in synonyms if s in given), None) for f, synonyms in wanted.items()}
    return {f: column for f, column in found.items() if column is not None}


def _choose_once(path: Path, header: Sequence[str], wanted: Columns) -> dict[str, str]:
    """The same for a whole file. Raises ManifestError where a chosen column stands there more than once."""
    columns = choose(header, wanted)
    times = Counter(name.strip().lower() for name in header if isinstance(name, str))
    for column in columns.values():
        if times[column.strip().lower()] > 1:
            raise ManifestError(f"{path} has the column {column.strip()!r} twice: rename or remove one of them")
    return columns


def _open_text(path: Path) -> TextIO:
    """UTF-8 with or without a byte-order mark, gzip or not; a bad byte in a caption must not cost the manifest."""
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig", errors="replace", newline="")
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


class _Gather:
    """Collects a chunk: wanted values go into one flat list at once, so that no row object outlives its turn.

    (Keeping the rows would make Python's garbage collector walk them again and again: ten times slower.)
    """

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = fields
        self.flat: list[Any] = []
        self.numbers: list[int] = []
        self.broken: list[Broken] = []

    def chunk(self, places: Sequence[str]) -> RawChunk:
        # np.array would turn values that are lists into further axes.
        flat = np.fromiter(self.flat, dtype=object, count=len(self.flat))
        table = flat.reshape(len(self.numbers), len(self.fields))
        values = {f: table[:, i] for i, f in enumerate(self.fields)}
        return RawChunk(np.array(self.numbers, dtype=np.int64), places, values, self.broken)


def read_csv(path: Path, wanted: Columns, rows: int = CHUNK_ROWS) -> Iterator[RawChunk]:
    """Comma-separated (tab-separated for .tsv) text with a header; quoted fields may hold line breaks.

    The standard library's parser: it alone gives the line of each record whatever the captions contain.
    """
    with _open_text(path) as text:
        reader = csv.reader(text, delimiter="\t" if ".tsv" in path.suffixes else ",")
        try:
            header = next(reader, None)
            if not header:
                raise ManifestError(f"{path} is empty: want a header line and one clip a line")
            columns = _choose_once(path, header, wanted)
            at = [header.index(c) for c in columns.values()]
            # itemgetter gives a bare value for one index, and nothing for none
            pick = itemgetter(*at) if len(at) > 1 else lambda record: [record[i] for i in at]
            first = 0
            while True:
                got, lines, number, before = _Gather(list(columns)), list[int](), first, reader.line_num
                for record in islice(reader, rows):
                    if not record:
                        continue  # a blank line is not a record
                    line = reader.line_num  # of the record's last line
                    if len(record) == len(header):
                        got.flat.extend(pick(record))
                        got.numbers.append(number)
                        lines.append(line)
                    else:
                        found = f"{len(record)}, and the header has {len(header)}"
                        got.broken.append(Broken(f"{path.name}:{line}", "wrong number of fields", found))
                    number += 1
                yield got.chunk(_Places(path.name, lines))  # also of a file of a header alone: its columns are checked
                if reader.line_num == before:
                    break
                first = number
        except csv.Error as error:
            raise ManifestError(f"{path}:{reader.line_num} is not CSV: {error} (an unclosed quote?)") from error


def _parse(place: str, text: str | bytes) -> dict[str, Any] | Broken:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: nested thousands deep
        return Broken(place, "not JSON", str(error))
    return record if isinstance(record, dict) else Broken(place, "not a JSON object", f"a {type(record).__name__}")


def _from_records(
    records: Iterable[tuple[str, dict[str, Any] | Broken]], wanted: Columns, rows: int
) -> Iterator[RawChunk]:
    """Chunks of dictionaries whose keys may differ from record to record."""

    @lru_cache(maxsize=1024)  # records have few distinct sets of keys
    def columns(keys: tuple[str, ...]) -> list[str | None]:
        found = choose(keys, wanted)
        return [found.get(f) for f in wanted]

    numbered = enumerate(records)
    while True:
        got, places = _Gather(list(wanted)), list[str]()
        for n, (place, record) in islice(numbered, rows):
            if isinstance(record, Broken):
                got.broken.append(record)
                continue
            got.flat.extend([None if c is None else record[c] for c in columns(tuple(record))])
            got.numbers.append(n)
            places.append(place)
        if not places and not got.broken:
            break
        yield got.chunk(places)


def read_jsonl(path: Path, wanted: Columns, rows: int = CHUNK_ROWS) -> Iterator[RawChunk]:
    """One JSON object a line."""
    with _open_text(path) as text:
        lines = ((f"{path.name}:{n}", line) for n, line in enumerate(text, start=1) if line.strip())
        yield from _from_records(((place, _parse(place, line)) for place, line in lines), wanted, rows)


def read_parquet(path: Path, wanted: Columns, rows: int = CHUNK_ROWS) -> Iterator[RawChunk]:
    """Only the wanted columns are read; a place is the row's number, from 1."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = _choose_once(path, file.schema_arrow.names, wanted)
            first = 0
            for batch in file.iter_batches(batch_size=rows, columns=list(columns.values())):
                values = {f: batch.column(c).to_numpy(zero_copy_only=False) for f, c in columns.items()}
                last = first + batch.num_rows
                yield RawChunk(np.arange(first, last), _Places(path.name, range(first + 1, last + 1)), values)
                first = last
    except (pa.ArrowException, UnicodeDecodeError, LookupError) as error:
        raise ManifestError(f"{path} is not a Parquet file, or a damaged one: {error}") from error


def _undescribed(shard: Path, key: tuple[str, str]) -> tuple[str, Broken]:
    name = "/".join(part for part in key if part)
    return shard.name, Broken(f"{shard.name}:{name}", "no .json member", "its shape is unknown")


def _shard_records(shards: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any] | Broken]]:
    for shard in shards:
        try:
            with tarfile.open(shard) as tar:
                key: tuple[str, str] = ("", "")
                described = True
                for member in tar:  # reads headers and seeks past the data: videos are never loaded
                    if not member.isfile():
                        continue
                    folder, _, base = member.name.rpartition("/")
                    stem, _, extension = base.partition(".")  # a WebDataset key ends at the base name's first dot
                    if (folder, stem) != key:
                        if not described:
                            yield _undescribed(shard, key)
                        key, described = (folder, stem), False
                    if extension.lower() == "json":
                        described = True
                        place = f"{shard.name}:{member.name}"
                        data = tar.extractfile(member)
                        yield place, _parse(place, data.read() if data else b"")
                if not described:
                    yield _undescribed(shard, key)
        except (tarfile.TarError, EOFError, OSError) as error:
            yield shard.name, Broken(shard.name, "unreadable shard", str(error) or type(error).__name__)


def read_webdataset(shards: Sequence[Path], wanted: Columns, rows: int = CHUNK_ROWS) -> Iterator[RawChunk]:
    """The .json members of tar shards, in order; a sample without one, or a truncated shard, is reported."""
    yield from _from_records(_shard_records(shards), wanted, rows)
