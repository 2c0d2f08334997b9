"""Bad input to `python -m repro.plan`: manifests of every format, options, and plan files that are read back."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from repro import plan_file
from tests.faults.cases import Arguments, Case, options

COMMAND, PLAN_FILE = "repro.plan", "plan files"
GOOD = "frames,height,width\n81,480,832\n1,720,1280\n"
OUTPUTS = ("--write", "plan.yaml", "--log", "log.csv")


def manifest(kind: str, name: str, content: str | bytes, told: str, *more: object) -> Case:
    """A manifest of this content; a plan, a picture and a log are asked for, none of which may appear."""

    def given(folder: Path) -> Arguments:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return [folder / name, *(folder / a if i % 2 else a for i, a in enumerate(OUTPUTS)), *more]

    about = content.decode(errors="replace") if isinstance(content, bytes) else content
    return Case(COMMAND, kind, f"{name} {about[:24]!r} {' '.join(map(str, more))}".strip(), given, told)


def parquet(**columns: object) -> bytes:
    """A Parquet file of these columns."""
    buffer = io.BytesIO()
    pd.DataFrame(columns).to_parquet(buffer)
    return buffer.getvalue()


def tar(**members: bytes) -> bytes:
    """A tar file; `_` in a member's name stands for its dot."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name.replace("_", "."))
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def line(**record: object) -> str:
    """A line of JSON."""
    return json.dumps(record) + "\n"


def over_itself(option: str) -> Case:
    """A command that would write over the manifest that it reads."""

    def given(folder: Path) -> Arguments:
        path = folder / "clips.csv"
        path.write_text(GOOD)
        return [path, option, path]

    return Case(COMMAND, "adversarial", f"clips.csv {option} clips.csv", given, rf"{option}.*clips\.csv.*itself")


UNUSABLE = r"clips\.\w+: none of \d+ records is usable"
WHOLE = parquet(frames=[81], height=[480], width=[832])
MANIFESTS = [
    manifest("empty", "clips.csv", "", r"clips\.csv is empty: want a header line"),
    manifest("empty", "clips.csv", "frames,height,width\n", r"none of 0 records is usable \(it has none\)"),
    manifest("empty", "clips.jsonl", "", r"none of 0 records"),
    manifest("empty", "clips.jsonl", "\n\n  \n", r"none of 0 records"),
    manifest("empty", "clips.parquet", b"", r"clips\.parquet is not a Parquet file"),
    manifest("empty", "clips.parquet", parquet(frames=[], height=[], width=[]), "none of 0 records"),
    manifest("empty", "clips.tar", b"", r"clips\.tar.*none of 1 records"),
    manifest("empty", "clips.csv.gz", b"", r"clips\.csv\.gz is empty"),
    manifest("malformed", "clips.csv", "a,b,c\n1,2,3\n", "has no column for height; looked for height, h"),
    manifest("malformed", "clips.csv", "height,width\n480,832\n", "no column for frames or duration"),
    manifest("malformed", "clips.csv", "frames,height,width\n81,480\n", "1 wrong number of fields"),
    manifest("malformed", "clips.csv", GOOD + '"' + "x" * 200_000, r"clips\.csv:\d+ is not CSV.*unclosed quote"),
    manifest("malformed", "clips.jsonl", "not json\n", "1 not JSON"),
    manifest("malformed", "clips.jsonl", "[1, 2]\n3\nnull\n", "3 not a JSON object"),
    manifest("malformed", "clips.parquet", b"PAR1 no parquet PAR1", "not a Parquet file"),
    manifest("malformed", "clips.tar", b"no tar at all", "1 unreadable shard"),
    manifest("malformed", "clips.csv.gz", GOOD, r"cannot read .*clips\.csv\.gz: Not a gzipped file"),
    manifest("malformed", "clips.txt", GOOD, r"clips\.txt is no manifest: want \.csv, \.tsv, \.jsonl"),
    manifest("truncated", "clips.csv.gz", gzip.compress(GOOD.encode())[:-9], r"cannot read .*clips\.csv\.gz"),
    manifest("truncated", "clips.parquet", WHOLE[: len(WHOLE) // 2], "not a Parquet file"),
    manifest("truncated", "clips.tar", tar(a_json=line(frames=81).encode() * 60)[:700], "1 unreadable shard"),
    manifest("truncated", "clips.jsonl", '{"frames": 81, "height"', "1 not JSON"),
    manifest("not UTF-8", "clips.csv", GOOD.encode("utf-16"), "has no column for height"),
    manifest("not UTF-8", "clips.csv", b"\xff\xfe\x00\x81" * 40, "has no column for height"),
    manifest(
        "not UTF-8", "clips.jsonl", b'{"frames": 81, "height": "\xff\xff", "width": 832}\n', "height not a number"
    ),
    manifest("not UTF-8", "clips.tar", tar(a_json=b"\xff\xfe{}"), "1 not JSON"),
    manifest("wrong type", "clips.csv", "frames,height,width\nmany,tall,wide\n", "height not a number"),
    manifest("wrong type", "clips.jsonl", line(frames=81, height=[480], width={"a": 1}), "height not a number"),
    manifest("wrong type", "clips.jsonl", line(frames=True, height=480, width=832), "frames not a number"),
    manifest("wrong type", "clips.parquet", parquet(frames=[[81]], height=[480], width=[832]), "frames not a number"),
    manifest(
        "wrong type", "clips.parquet", parquet(frames=[b"\xff"], height=[480], width=[832]), "frames not a number"
    ),
    manifest("wrong type", "clips.tar", tar(a_json=b'"text"'), "1 not a JSON object"),
    manifest("duplicated", "clips.csv", "frames,height,height,width\n81,480,720,832\n", "height.*twice"),
    manifest("duplicated", "clips.csv", "frames,Height,height ,width\n81,480,720,832\n", "height.*twice"),
    manifest("NaN", "clips.csv", "frames,height,width\nNaN,480,832\n", "1 frames missing or NaN"),
    manifest("NaN", "clips.jsonl", '{"frames": NaN, "height": 480, "width": 832}\n', "1 frames missing or NaN"),
    manifest("NaN", "clips.parquet", parquet(frames=[np.nan], height=[480], width=[832]), "1 frames missing or NaN"),
    manifest("NaN", "clips.csv", GOOD, "fps must be|--fps", "--fps", "nan"),
    manifest("NaN", "clips.csv", GOOD, "repeats of source 'a' must be", "--repeat", "a=nan"),
    manifest("negative", "clips.csv", "frames,height,width\n81,-480,832\n0,480,832\n", "1 height not positive"),
    manifest("negative", "clips.csv", GOOD, "repeats of source 'a' must be", "--repeat", "a=-1"),
    manifest("overflow", "clips.csv", "frames,height,width\n1e400,480,832\n", "1 frames implausibly large"),
    manifest("overflow", "clips.jsonl", '{"frames": 1e999, "height": 480, "width": 832}\n', "frames implausibly large"),
    manifest("overflow", "clips.jsonl", '{"frames": 81, "height": ' + "9" * 400 + ', "width": 832}', "height"),
    manifest("overflow", "clips.jsonl", '{"frames": ' + "9" * 5000 + ', "height": 480, "width": 832}', "1 not JSON"),
    manifest("overflow", "clips.csv", "frames,height,width\n81,65537,832\n", "height implausibly large"),
    manifest("huge", "clips.csv", "frames,height,width,caption\n81,480," + "8" * 100_000 + ",x\n", "width"),
    manifest("huge", "clips.csv", "source," + GOOD.replace("\n", "\na,")[:-2], "source 'a'", "--repeat", "a=1e15"),
    manifest("huge", "clips.csv", ",".join(f"c{i}" for i in range(20_000)) + "\n", "has no column for height"),
    manifest("adversarial", "clips.jsonl", "[" * 200_000 + "\n", "1 not JSON"),
    manifest("adversarial", "clips.tar", tar(a_json=b'{"a":' * 200_000), "1 not JSON"),
    manifest("adversarial", "clips.csv", "frames,height,width\n\x0081,4\x0080,832\n", UNUSABLE),
    manifest("adversarial", "clips.csv", "frames,height,width\n81,480;rm -rf,832\n", "height not a number"),
    over_itself("--log"),
    over_itself("--write"),
]


def written_to(kind: str, name: str, told: str, make: Callable[[Path], Arguments]) -> Case:
    """A case about where something would be written."""
    return Case(COMMAND, kind, name, make, told)


def _onto_a_folder(option: str, suffix: str) -> Callable[[Path], Arguments]:
    def given(folder: Path) -> Arguments:
        (folder / f"taken{suffix}").mkdir()
        (folder / f"taken{suffix}" / "kept").write_text("kept")
        (folder / "clips.csv").write_text(GOOD)
        return [folder / "clips.csv", option, folder / f"taken{suffix}"]

    return given


def _below_a_file(option: str, suffix: str) -> Callable[[Path], Arguments]:
    def given(folder: Path) -> Arguments:
        (folder / "file").write_text("kept")
        (folder / "clips.csv").write_text(GOOD)
        return [folder / "clips.csv", option, folder / "file" / f"out{suffix}"]

    return given


ARGUMENTS = [
    options(COMMAND, "missing", "no such manifest: nowhere.csv", "nowhere.csv"),
    options(COMMAND, "missing", r"no \.tar shards", "nowhere-*.tar"),
    options(COMMAND, "missing", "none of 4 records", "nowhere-{0..3}.tar"),
    options(COMMAND, "missing", "Missing argument"),
    options(COMMAND, "empty", "no file|no .tar shards", ""),
    options(COMMAND, "empty", "no model ''", "wan-uniform", "--model", ""),
    options(COMMAND, "empty", "no step times of ''", "wan-uniform", "--device", ""),
    options(COMMAND, "wrong type", "--ranks", "wan-uniform", "--ranks", "many"),
    options(COMMAND, "wrong type", "--ranks", "wan-uniform", "--ranks", "1.5"),
    options(COMMAND, "wrong type", "No such option:? '?--rank", "wan-uniform", "--rank", "8"),
    options(COMMAND, "wrong type", "--repeat must be SOURCE=NUMBER", "clips.csv", "--repeat", "a=b"),
    options(COMMAND, "NaN", "--memory-gb", "wan-uniform", "--memory-gb", "nan"),
    options(COMMAND, "NaN", "--bandwidth", "wan-uniform", "--bandwidth", "nan"),
    options(COMMAND, "NaN", "--fps", "clips.csv", "--fps", "nan"),
    options(COMMAND, "negative", "--ranks", "wan-uniform", "--ranks", "-1"),
    options(COMMAND, "negative", "--m-mem", "wan-uniform", "--m-mem", "0"),
    options(COMMAND, "negative", "--micro-batches", "wan-uniform", "--micro-batches", "-3"),
    options(COMMAND, "negative", "--memory-gb", "wan-uniform", "--memory-gb", "-80"),
    options(COMMAND, "overflow", "--memory-gb", "wan-uniform", "--memory-gb", "inf"),
    options(COMMAND, "overflow", "--bandwidth", "wan-uniform", "--bandwidth", "1e999"),
    options(COMMAND, "overflow", "m_mem|M_mem", "wan-uniform", "--m-mem", "9" * 30, "--extrapolate"),
    options(COMMAND, "overflow", "ranks", "wan-uniform", "--ranks", "9" * 30),
    options(COMMAND, "overflow", "micro.batches", "wan-uniform", "--micro-batches", "9" * 30),
    options(COMMAND, "huge", "ranks", "wan-uniform", "--ranks", 10**9),
    options(COMMAND, "huge", "micro.batches", "wan-uniform", "--micro-batches", 10**9),
    options(COMMAND, "huge", "shards", "clips-{0..999999999999}.tar"),
    options(COMMAND, "huge", "name too long", "x" * 300),
    options(COMMAND, "adversarial", "no step times", "wan-uniform", "--device", "../nvidia-h200/../.."),
    options(COMMAND, "adversarial", "null", "clips\0.csv"),
    written_to("adversarial", "--write onto a folder", "taken", _onto_a_folder("--write", ".yaml")),
    written_to("adversarial", "--figure onto a folder", "taken", _onto_a_folder("--figure", ".png")),
    written_to("adversarial", "--log onto a folder", "taken", _onto_a_folder("--log", ".csv")),
    written_to("adversarial", "--write below a file", "file", _below_a_file("--write", ".yaml")),
    written_to("adversarial", "--log below a file", "file", _below_a_file("--log", ".csv")),
]

PLAN = """format: 1
policy: equal_token
made_for: {device: nvidia-h200, memory_bytes: 141000000000, ranks: 8}
limits: {m_mem: 48000}
buckets:
- {frames: 81, height: 480, width: 832, batch_size: 1}
"""


def plan(kind: str, name: str, content: str | bytes, told: str) -> Case:
    """A plan file of this content, read back."""

    def given(folder: Path) -> Callable[[], object]:
        path = folder / "plan.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return lambda: plan_file.read(path)

    return Case(PLAN_FILE, kind, name, given, r"plan\.yaml.*" + told)


def change(old: str, new: str) -> str:
    """The good plan with one thing changed."""
    assert old in PLAN
    return PLAN.replace(old, new)


PLANS = [
    Case(PLAN_FILE, "missing", "no file", lambda d: lambda: plan_file.read(d / "plan.yaml"), r"plan\.yaml is no plan"),
    plan("empty", "no bytes", "", "is no plan"),
    plan("empty", "no buckets", change(PLAN[PLAN.index("buckets") :], "buckets: []\n"), "bucket"),
    plan("malformed", "no YAML", "{", "is no plan"),
    plan("malformed", "a list", "- 1\n", "is no plan"),
    plan("malformed", "another format", change("format: 1", "format: 99"), "format 99, this reads 1"),
    plan("malformed", "no limits", change("limits: {m_mem: 48000}\n", ""), "limits"),
    plan("truncated", "cut off", PLAN[:-30], "is no plan"),
    plan("not UTF-8", "Latin-1", PLAN.encode() + b"# \xe9\xff\n", "is no plan"),
    plan("wrong type", "batch size in words", change("batch_size: 1", "batch_size: many"), "batch_size"),
    plan("wrong type", "half a sample", change("batch_size: 1", "batch_size: 1.5"), "batch_size"),
    plan("wrong type", "true", change("batch_size: 1", "batch_size: true"), "batch_size"),
    plan("wrong type", "frames in words", change("frames: 81", "frames: many"), "frames"),
    plan("wrong type", "ranks null", change("ranks: 8", "ranks: null"), "ranks"),
    plan("wrong type", "buckets by name", change("- {", "  a: {"), "is no plan"),
    plan("duplicated", "one bucket twice", PLAN + PLAN[PLAN.index("- {") :], "81x480x832.*twice"),
    plan("NaN", "memory", change("141000000000", ".nan"), "memory_bytes"),
    plan("negative", "batch size", change("batch_size: 1", "batch_size: -1"), "batch_size"),
    plan("negative", "no samples", change("batch_size: 1", "batch_size: 0"), "batch_size"),
    plan("negative", "ranks", change("ranks: 8", "ranks: 0"), "ranks"),
    plan("overflow", "memory", change("141000000000", ".inf"), "memory_bytes"),
    plan("overflow", "5,000 digits", change("ranks: 8", "ranks: " + "9" * 5000), "is no plan|ranks"),
    plan("adversarial", "an object of Python", "!!python/object/apply:os.system ['touch owned']\n", "is no plan"),
    plan("adversarial", "nested 100,000 deep", "[" * 100_000, "is no plan"),
    plan("adversarial", "contains itself", "&a [*a]\n", "is no plan"),
]

CASES = [*MANIFESTS, *ARGUMENTS, *PLANS]
