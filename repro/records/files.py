"""Files that grow by whole lines and survive a kill, a full disk and two writers at once.

Lines are appended in one write under a lock and synced; a file is replaced only by a complete new one. A last line
without its newline was cut off: readers leave it out, the next writer sets it aside. `<name>.rejected` keeps what was
set aside, one JSON object a line with the columns that it was written under.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from repro.records.schema import Record, SchemaError, header, migrate, parameter_columns

LOCK_SECONDS = 60.0
_LOCK = ".lock"
_PARTIAL = ".partial"


class WriteError(OSError):
    """A file could not be written, and stands as it was; the message names it and the reason."""


@dataclass(frozen=True)
class Table:
    """What a CSV file holds.

    columns: its header. rows: whole rows as they stand, cells in the header's order. rejected: (columns, line) of
    everything that is not a whole row, set aside earlier or found now. tail: bytes of a cut-off last line.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    rejected: tuple[tuple[tuple[str, ...], str], ...]
    tail: bytes

    def records(self) -> Iterator[Record]:
        """Rows as column -> non-empty cell."""
        for row in self.rows:
            yield {c: text for c, text in zip(self.columns, row, strict=True) if text}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's write lock (`.lock`, released by the system when its holder dies)."""
    lock = FileLock(folder / _LOCK)
    try:  # from here on, since a signal may come as soon as it is taken
        with _named(folder):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=LOCK_SECONDS)
            except Timeout as e:
                raise WriteError(
                    f"{folder} has been locked by another run for {LOCK_SECONDS:.0f} s: wait for it"
                ) from e
        yield
    finally:
        lock.release()


def hold(folder: Path, seconds: float) -> BaseFileLock:
    """Take a folder's lock until it is released or this process ends. Raises Timeout after `seconds` in vain."""
    lock = FileLock(folder / _LOCK)
    lock.acquire(timeout=seconds)
    return lock


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes a WriteError that names `path`: a full disk's own message does not."""
    try:
        yield
    except WriteError:
        raise
    except OSError as e:
        raise WriteError(f"{path} could not be written: {e.strerror or e}") from e


def require_target(path: Path) -> None:
    """Raise OSError, naming the path, where no file can stand: on a folder, or below a file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file")
    above = next(p for p in path.absolute().parents if p.exists())
    if not above.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {above} is a file, not a folder")


def replace(path: Path, content: bytes) -> None:
    """Write a whole file atomically: a reader sees the old content or the new, never a part. Raises WriteError."""
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        # mkstemp makes files private; results are as readable as the checkout they lie in
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def append(path: Path, content: bytes) -> None:
    """Append bytes in one write and sync; a failed write leaves the file as it was. Raises WriteError."""
    with _named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as f:
            size = f.seek(0, os.SEEK_END)
            try:
                written = f.write(content)
                if written != len(content):
                    raise OSError(f"wrote {written} of {len(content)} bytes; is the disk full?")
                os.fsync(f.fileno())
            except BaseException:
                f.truncate(size)
                raise


def sweep(folder: Path) -> None:
    """Remove what a killed writer left of a file that it never completed. The caller holds the lock."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def read_table(path: Path) -> Table:
    """Read a CSV file of rows; a missing one is empty. Warns, once a file and state, of lines that are no rows."""
    if not path.exists():
        return Table((), (), (), b"")
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    tail = content[end:]
    # cells hold no line breaks, so lines are parsed one by one: a stray quote spoils its own line only
    text = content[:end].decode(errors="surrogateescape")
    foreign = re.compile("[\udc80-\udcff]") if not _is_utf8(content[:end]) else None
    lines = [fields_of(line) for line in text.splitlines()]
    columns = lines[0] if lines else ()
    wrong = _wrong_header(columns)
    rows, rejected = [], _set_aside(path)
    bad = []
    for number, fields in enumerate(lines[1:], start=2):
        if len(fields) == len(columns) and not wrong and not (foreign and any(map(foreign.search, fields))):
            rows.append(fields)
        elif any(fields):
            rejected.append((columns, _line(fields)))
            bad.append(number)
    if tail:
        rejected.append((columns, tail.decode(errors="replace")))
        bad.append(len(lines) + 1)
    if bad:
        numbers = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        warnings.warn(f"{path}: line {numbers} is no whole row and is left out{wrong}", stacklevel=2)
    return Table(columns, tuple(rows), tuple(rejected), tail)


def _wrong_header(columns: Sequence[str]) -> str:
    """Why no row under this header can be read, in words; empty where they can."""
    twice = [c for c in columns if columns.count(c) > 1]
    if twice:
        return f": its header has {twice[0]!r} twice"  # nobody knows which of two cells is meant
    return "" if "".join(columns).isprintable() else ": its header is no text"


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def append_rows(path: Path, parameters: Sequence[str], rows: Sequence[Record]) -> None:
    """Append a set of rows in one write, or rewrite the file where its header must grow. The caller holds the lock."""
    columns, whole = _head(path)
    if (
        whole
        and len(set(columns)) == len(columns)
        and columns == header([*parameter_columns(columns), *(p for p in parameters if p not in columns)])
    ):
        append(path, _lines(columns, rows))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading warns; here the lines are set aside
        table = read_table(path)
    reject(path, table.rejected[len(_set_aside(path)) :])
    rows = [*map(_migrated, table.records()), *rows]
    used = set(parameters).union(*rows)
    order = dict.fromkeys((*table.columns, *parameters, *(c for row in rows for c in row)))
    columns = header([c for c in parameter_columns(order) if c in used])
    replace(path, (_line(columns) + "\n").encode() + _lines(columns, rows))


def _head(path: Path) -> tuple[tuple[str, ...], bool]:
    """Header of a file, and whether its last line is whole; cheap, because every append asks."""
    if not path.exists() or path.stat().st_size == 0:
        return (), False
    with path.open("rb") as f:
        columns = fields_of(f.readline().decode(errors="replace").rstrip("\r\n"))
        f.seek(-1, os.SEEK_END)
        return columns, f.read(1) == b"\n"


def _migrated(row: Record) -> Record:
    """A rewritten file keeps a row that nothing migrates as it is: rows are never removed."""
    try:
        return migrate(row)
    except SchemaError:
        return row


def _lines(columns: Sequence[str], rows: Sequence[Record]) -> bytes:
    return "".join(_line([row.get(c, "") for c in columns]) + "\n" for row in rows).encode()


def fields_of(line: str) -> tuple[str, ...]:
    """Cells of a line of CSV."""
    if '"' not in line:
        return tuple(line.split(","))
    try:
        return tuple(next(csv.reader([line]), ()))
    except csv.Error:  # a cell of hundreds of kilobytes
        return (line,)


def _line(fields: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(fields)
    return buffer.getvalue()


def _rejected_path(path: Path) -> Path:
    return path.with_name(path.name + ".rejected")


def reject(path: Path, rejected: Sequence[tuple[tuple[str, ...], str]]) -> None:
    """Set (columns, line) of lines of `path` aside, ahead of a rewrite without them. The caller holds the lock."""
    text = "".join(json.dumps({"columns": c, "line": line}) + "\n" for c, line in rejected)
    if text:
        aside = _rejected_path(path)
        torn = aside.exists() and not aside.read_bytes().endswith(b"\n")  # by a kill: it must not spoil what follows
        append(aside, ("\n" * torn + text).encode())


def _set_aside(path: Path) -> list[tuple[tuple[str, ...], str]]:
    aside = _rejected_path(path)
    if not aside.exists():
        return []
    found = []
    for line in aside.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            entry = json.loads(line)
            found.append((tuple(entry["columns"]), entry["line"]))
    return found
