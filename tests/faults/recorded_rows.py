"""A device's folder of results, good, and broken in every way that files break: what reads results must bear it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RUN = "20260101T000000.000000Z-0000"
HEADER = "schema,run_id,suite,profile,tokens,metric,unit,value,ci_low,ci_high,n,kind,source\n"
ROW = f"1,{RUN},speed,full,64000,time,x,4.0,4.0,4.0,30,measured,\n"
OTHER = f"1,{RUN},speed,full,8192,time,x,3.0,3.0,3.0,30,measured,\n"
RECORD = f'{{"schema": 1, "run_id": "{RUN}", "device": "acme-1", "machine": {{"gpu_name": "Acme"}}}}\n'


@dataclass(frozen=True)
class Broken:
    """One broken file of a folder. told: regular expression of what is said about it; empty where nothing need be."""

    kind: str
    name: str
    file: str
    content: bytes | None
    told: str


def write(folder: Path, broken: Broken | None = None) -> Path:
    """The folder of a device: good, or with one file broken."""
    folder.mkdir(parents=True)
    (folder / "speed.csv").write_text(HEADER + ROW + OTHER)
    (folder / "runs.jsonl").write_text(RECORD)
    if broken is not None and broken.content is None:
        (folder / broken.file).unlink()
        (folder / broken.file).mkdir()
    elif broken is not None:
        (folder / broken.file).write_bytes(broken.content)
    return folder


def _rows(kind: str, name: str, told: str, *lines: str | bytes, header: str = HEADER) -> Broken:
    content = b"".join(x if isinstance(x, bytes) else x.encode(errors="surrogateescape") for x in (header, *lines))
    return Broken(kind, name, "speed.csv", content, told)


def _row(old: str, new: str) -> str:
    assert old in ROW
    return ROW.replace(old, new)


def _runs(kind: str, name: str, told: str, content: str | bytes) -> Broken:
    return Broken(kind, name, "runs.jsonl", content if isinstance(content, bytes) else content.encode(), told)


LINE = r"speed\.csv: line {} is no whole row"
LEFT_OUT = r"speed\.csv: 1 rows left out: "
FILES = [
    Broken("empty", "a file of no bytes", "speed.csv", b"", ""),
    _rows("empty", "a header alone", ""),
    _rows("malformed", "no table", LEFT_OUT + "schema must be a whole number", "what is this?\n", header="garbage\n"),
    _rows(
        "malformed", "conflict markers", LINE.format("2, 4, 6"), "<<<<<<< ours\n", ROW, "=======\n", OTHER, ">>>>>>>\n"
    ),
    _rows("malformed", "a column too few", LINE.format("3"), ROW, ROW.replace(",30", "")),
    _rows("malformed", "no run_id", LEFT_OUT, ROW.replace(RUN, ""), OTHER),
    _rows(
        "malformed",
        "a column of run_id is missing",
        "run_id",
        ROW.replace(RUN + ",", ""),
        header=HEADER.replace("run_id,", ""),
    ),
    _rows("malformed", "a parameter within spaces", LEFT_OUT + "a parameter must be", _row("64000", " 64000"), OTHER),
    _rows("truncated", "the last line", LINE.format("3"), ROW, OTHER[:40]),
    _rows("truncated", "in the header", LINE.format("1"), header=HEADER[:30]),
    _rows("not UTF-8", "a cell", LINE.format("3"), ROW, OTHER.encode().replace(b"time", b"t\xff\xfe")),
    _rows("not UTF-8", "the header", LINE.format("2"), ROW, header=HEADER.replace("tokens", "tok\udc80ens")),
    _rows("not UTF-8", "all of it", LINE.format("2"), HEADER.encode("utf-16"), header=""),
    _rows("wrong type", "a value in words", LEFT_OUT, _row("4.0,4.0,4.0", "many,4.0,4.0"), OTHER),
    _rows("wrong type", "half a sample", LEFT_OUT, _row(",30,", ",1.5,"), OTHER),
    _rows(
        "wrong type", "a schema in words", LEFT_OUT + "schema must be a whole number", _row("1,2026", "one,2026"), OTHER
    ),
    _rows("wrong type", "an unknown profile", LEFT_OUT, _row("full", "weekly"), OTHER),
    _rows("wrong type", "an unknown kind", LEFT_OUT, _row("measured", "guessed"), OTHER),
    _rows("duplicated", "a row", "", ROW, ROW, OTHER),
    _rows(
        "duplicated",
        "a column",
        "tokens",
        ROW.replace("64000", "64000,64000"),
        header=HEADER.replace("tokens", "tokens,tokens"),
    ),
    _rows("NaN", "a value", "", _row("4.0,4.0,4.0", "nan,nan,nan"), OTHER),
    _rows("negative", "a time", "", _row("4.0,4.0,4.0", "-4.0,-4.0,-4.0"), OTHER),
    _rows("negative", "a reversed interval", LEFT_OUT, _row("4.0,4.0,4.0", "4.0,5.0,3.0"), OTHER),
    _rows("negative", "samples", LEFT_OUT, _row(",30,", ",-30,"), OTHER),
    _rows("overflow", "a value", "", _row("4.0,4.0,4.0", "1e999,1e999,1e999"), OTHER),
    _rows("overflow", "samples", LEFT_OUT, _row(",30,", f",{'9' * 30},"), OTHER),
    _rows("overflow", "a schema of 5,000 digits", LEFT_OUT, _row("1,2026", "9" * 5000 + ",2026"), OTHER),
    _rows("overflow", "a newer schema", LEFT_OUT + "schema 99 is newer", _row("1,2026", "99,2026"), OTHER),
    _rows("huge", "a line of a megabyte", LINE.format("2"), "x" * 1_000_000 + "\n", OTHER),
    _rows("huge", "a cell of a megabyte", "", _row("time", "x" * 1_000_000), OTHER),
    _rows("adversarial", "an unclosed quote", LINE.format("2"), _row("time", '"time'), OTHER),
    _rows(
        "adversarial", "a quoted cell of a megabyte", LINE.format("2"), _row("time", '"' + "x" * 1_000_000 + '"'), OTHER
    ),
    _rows("adversarial", "null bytes", "", _row("time", "ti\0me"), OTHER),
    _rows("adversarial", "null bytes in a parameter", LEFT_OUT + "a parameter must be", _row("64000", "6\0"), OTHER),
    _rows("adversarial", "a run from the end of time", "", _row(RUN, "zzzz"), OTHER),
    _rows("adversarial", "a path as run", "", _row(RUN, "../../../etc/passwd"), OTHER),
    _rows("adversarial", "a formula", "", _row("time", "=cmd()"), OTHER),
    Broken("adversarial", "a folder in place of rows", "speed.csv", None, "speed"),
    _runs("malformed", "no JSON", r"runs\.jsonl: line 2 is no run record", RECORD + "what\n"),
    _runs("wrong type", "a list", r"runs\.jsonl: line 1 is no run record", "[]\n" + RECORD),
    _runs("wrong type", "a number as id", r"runs\.jsonl: line 2", RECORD + '{"run_id": 5}\n'),
    _runs("wrong type", "an id that is no time", "", RECORD + '{"run_id": "soon", "machine": {}}\n'),
    _runs(
        "wrong type",
        "no machine",
        r"runs\.jsonl: line 2 is no run record",
        RECORD + '{"run_id": "20270101T000000.000000Z-0000", "machine": null}\n',
    ),
    _runs(
        "wrong type",
        "a machine in words",
        r"runs\.jsonl: line 2 is no run record",
        RECORD + '{"run_id": "20270101T000000.000000Z-0000", "machine": "fast"}\n',
    ),
    _runs("not UTF-8", "bytes", r"runs\.jsonl: line 2", RECORD.encode() + b"\xff\xfe{}\n"),
    _runs("truncated", "the last line", r"runs\.jsonl: line 2", RECORD + RECORD[:20]),
    _runs("duplicated", "a run", "", RECORD + RECORD),
    _runs("adversarial", "nested 100,000 deep", r"runs\.jsonl: line 2", RECORD + "[" * 100_000 + "\n"),
    _runs("empty", "no bytes", "", ""),
    Broken("adversarial", "a folder in place of run records", "runs.jsonl", None, "runs"),
]
