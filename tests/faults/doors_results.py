"""Bad input to `python -m repro.all` and `repro.compare`: options, places, files of pytest-benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import recorded_rows
from tests.faults.cases import Arguments, Case, options

ALL, COMPARE = "repro.all", "repro.compare"

ARGUMENTS = [
    options(ALL, "empty", "no profile ''", "--profile", ""),
    options(ALL, "empty", "no suite ''", "--only", ""),
    options(ALL, "empty", "no device ''", "--device", ""),
    options(ALL, "missing", "no device 'nvidia-h900'", "--device", "nvidia-h900"),
    options(ALL, "missing", "--results.*rows of no device", "--no-measure", "--results", "reslts"),
    options(ALL, "malformed", "No such option", "--profil", "full"),
    options(ALL, "malformed", "unexpected extra argument", "full"),
    options(ALL, "malformed", "no suite 'kernel_sped'; nearest: kernel_speed", "--only", "kernel_sped"),
    options(ALL, "wrong type", "--gpus", "--gpus", "two"),
    options(ALL, "negative", "--gpus", "--gpus", "-1"),
    options(ALL, "huge", "--gpus", "--gpus", 10**9),
    options(ALL, "overflow", "--gpus", "--gpus", "9" * 30),
    options(ALL, "NaN", "--minutes", "--minutes", "nan"),
    options(ALL, "negative", "--minutes", "--minutes", "-1"),
    options(ALL, "overflow", "--minutes", "--minutes", "1e999"),
    options(ALL, "wrong type", "--minutes", "--minutes", "nine"),
    options(ALL, "missing", "--rendezvous must be host:port", "--nnodes", "2"),
    options(ALL, "malformed", "--rendezvous must be host:port", "--nnodes", "2", "--rendezvous", "head"),
    options(ALL, "huge", "--node-rank must lie in 0..1", "--nnodes", "2", "--node-rank", 10**9),
    options(ALL, "negative", "--nnodes", "--nnodes", "-2"),
    options(ALL, "duplicated", "leave out --no-measure", "--nnodes", "2", "--rendezvous", "h:1", "--no-measure"),
    options(ALL, "missing", "gpus must be told", "--nnodes", "2", "--rendezvous", "h:1", "--dry-run"),
    options(ALL, "adversarial", "no device", "--device", "../../etc"),
    options(ALL, "adversarial", "no suite", "--only", "../suites/kernel_speed"),
    options(ALL, "adversarial", "no suite", "--only", "_campaign"),
    options(ALL, "adversarial", "measures: run it on", "--only", "kernel_speed", "--device", "acme-1"),
    options(COMPARE, "missing", "'nowhere' is neither a folder nor a .json file", "nowhere"),
    options(COMPARE, "missing", "neither a folder nor a .json file", "nowhere.json"),
    options(COMPARE, "missing", "no suite 'sped'; nearest: speed", "results/acme-1", "--suite", "sped"),
    options(COMPARE, "missing", "no metric 'tine'; nearest: time", "results/acme-1", "--metric", "tine"),
    options(COMPARE, "missing", "is no run with rows here", "results/acme-1", "--runs", "a", "b"),
    options(COMPARE, "missing", "no case was measured twice", "results/acme-1", "--runs", "previous", "latest"),
    options(COMPARE, "malformed", "--fail-on knows slower only", "results/acme-1", "--fail-on", "faster"),
    options(COMPARE, "malformed", "--figure must end in", "results/acme-1", "--figure", "x.gif"),
    options(COMPARE, "wrong type", "--threshold", "results/acme-1", "--threshold", "much"),
    options(COMPARE, "wrong type", "--runs", "results/acme-1", "--runs", "latest"),
    options(COMPARE, "NaN", "--threshold", "results/acme-1", "--threshold", "nan"),
    options(COMPARE, "negative", "--threshold", "results/acme-1", "--threshold", "-5"),
    options(COMPARE, "overflow", "--threshold", "results/acme-1", "--threshold", "1e999"),
    options(COMPARE, "duplicated", "--fail-on needs", "results/acme-1", "results/acme-1", "--fail-on", "slower"),
    options(COMPARE, "adversarial", "neither a folder", "res\0ults"),
    options(
        COMPARE, "adversarial", "--csv.*results that are read", "results/acme-1", "--csv", "results/acme-1/speed.csv"
    ),
    options(
        COMPARE,
        "adversarial",
        "--markdown.*results that are read",
        "results/acme-1",
        "--markdown",
        "results/acme-1/runs.jsonl",
    ),
    options(COMPARE, "adversarial", "x.md is asked for twice", "results/acme-1", "--csv", "x.md", "--markdown", "x.md"),
    options(
        COMPARE, "adversarial", "results is a folder: give the name of a file", "results/acme-1", "--csv", "results"
    ),
    options(
        COMPARE, "adversarial", "results that are read", "results/acme-1", "--csv", "results/acme-1/speed.csv/x.csv"
    ),
]
"""Given beside a folder `results` with device acme-1."""


def _as_file(option: str) -> Callable[[Path], Arguments]:
    def given(folder: Path) -> Arguments:
        (folder / "file").write_text("kept")
        return ["--no-measure", option, "file"]

    return given


def _folder(name: str) -> Callable[[Path], Arguments]:
    """A device's folder with a folder in place of a file."""

    def given(folder: Path) -> Arguments:
        recorded_rows.write(folder / "other" / "acme-1")
        (folder / "other" / "acme-1" / name).unlink()
        (folder / "other" / "acme-1" / name).mkdir()
        return ["--no-measure", "--results", "other"]

    return given


PLACES = [
    Case(ALL, "adversarial", "--results is a file", _as_file("--results"), "--results.*file"),
    Case(ALL, "adversarial", "--figures is a file", _as_file("--figures"), "--figures.*file"),
    Case(ALL, "adversarial", "a folder in place of rows", _folder("speed.csv"), r"--results.*speed\.csv"),
    Case(ALL, "adversarial", "a folder in place of run records", _folder("runs.jsonl"), r"--results.*runs\.jsonl"),
]

BENCHMARK: dict[str, Any] = {
    "fullname": "speed",
    "group": "g",
    "extra_info": {"impl": "stream"},
    "stats": {"median": 1.0},
}
GOOD: dict[str, Any] = {"machine_info": {}, "benchmarks": [BENCHMARK]}


def benchmarks(kind: str, name: str, content: str | bytes | dict[str, Any]) -> Case:
    """A file that should be pytest-benchmark's."""

    def given(folder: Path) -> Arguments:
        text = json.dumps(content) if isinstance(content, dict) else content
        (folder / "runs.json").write_bytes(text.encode() if isinstance(text, str) else text)
        return ["runs.json"]

    return Case(COMPARE, kind, name, given, r"runs\.json: (not written by pytest-benchmark|no benchmark in it)")


def changed(**fields: Any) -> dict[str, Any]:
    """The good file with a benchmark's fields changed."""
    return {**GOOD, "benchmarks": [{**BENCHMARK, **fields}]}


FILES = [
    benchmarks("empty", "no bytes", ""),
    benchmarks("empty", "no benchmark", {**GOOD, "benchmarks": []}),
    benchmarks("malformed", "no JSON", "what"),
    benchmarks("malformed", "a list", "[]"),
    benchmarks("malformed", "null", "null"),
    benchmarks("malformed", "no machine", {"benchmarks": [BENCHMARK]}),
    benchmarks("truncated", "cut off", json.dumps(GOOD)[:-10]),
    benchmarks("not UTF-8", "bytes", b"\xff\xfe{}"),
    benchmarks("wrong type", "a machine that is a list", {**GOOD, "machine_info": []}),
    benchmarks("wrong type", "a processor in words", {**GOOD, "machine_info": {"cpu": "fast"}}),
    benchmarks("wrong type", "stats null", changed(stats=None)),
    benchmarks("wrong type", "a median in words", changed(stats={"median": "fast"})),
    benchmarks("wrong type", "rounds in words", changed(stats={"median": 1.0, "rounds": "many"})),
    benchmarks("wrong type", "samples in words", changed(stats={"median": 1.0, "data": ["fast"]})),
    benchmarks("wrong type", "extra info in words", changed(extra_info="stream")),
    benchmarks("wrong type", "a benchmark in words", {**GOOD, "benchmarks": ["speed"]}),
    benchmarks("negative", "a median of nothing", changed(stats={"median": 0.0})),
    benchmarks("negative", "a median", changed(stats={"median": -1.0})),
    benchmarks("NaN", "a median", changed(stats={"median": float("nan")})),
    benchmarks("overflow", "a median", changed(stats={"median": float("inf")})),
    benchmarks("overflow", "rounds", changed(stats={"median": 1.0, "rounds": float("inf")})),
    benchmarks("overflow", "400 digits", changed(stats={"median": 10**400})),
    benchmarks("adversarial", "nested 100,000 deep", "[" * 100_000),
    benchmarks("adversarial", "a name with line breaks", changed(fullname="a\nb")),
]

CASES = [*ARGUMENTS, *PLACES, *FILES]
