"""The command on recorded runs: what is shared, who is judged, what is told of the rest, and how it exits."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from repro import compare_read
from repro.measure.stats import exact
from repro.records import schema
from repro.runner import THROTTLED
from repro.suite import Measurement

from .conftest import CELLS

ROOT = Path(__file__).resolve().parents[2]


def words(output: str) -> dict[str, int]:
    """Verdicts counted, from the headline."""
    line = output.strip().splitlines()[-1]
    return {w: int(n) for n, w in re.findall(r"(\d+) (SLOWER|FASTER|SAME|AMBIGUOUS)", line)}


def test_two_measurements_of_one_device_get_a_verdict(recorder):
    old = recorder.run("before")
    new = recorder.run("after", factor={"fused": 1.3}, seed=1)
    done = recorder.call(old, new)
    assert done.exit_code == 0, done.output
    assert words(done.output) == {"SLOWER": 2, "SAME": 2}
    assert "fused  forward" in done.output or "fused" in done.output
    assert "1.30" in done.output and "69%" in done.output  # the ratio, and 90% of the ceiling / 1.3
    assert "2.0 GB" not in done.output, "what did not change is left to --all"
    assert "SAME" in recorder.call(old, new, "--all").output


@pytest.mark.parametrize(("factor", "code"), [(1.3, 1), (1.0, 0), (0.7, 0)])
def test_fail_on_slower(recorder, factor, code):
    old, new = recorder.run("before"), recorder.run("after", factor=factor, seed=1)
    assert recorder.call(old, new, "--fail-on", "slower").exit_code == code
    assert recorder.call(old, new).exit_code == 0


def test_different_devices_are_never_judged(recorder):
    one, two = recorder.run(slug="acme-1"), recorder.run(slug="acme-2", factor=9.0)
    done = recorder.call(one, two, "--all")
    assert done.exit_code == 0
    assert "side by side, no verdicts" in done.output
    assert not re.search("SLOWER|FASTER|SAME|AMBIGUOUS", done.output)
    assert "of ceiling" in done.output and " 90%" in done.output and " 10%" in done.output
    refused = recorder.call(one, two, "--fail-on", "slower")
    assert refused.exit_code == 2 and "measured twice" in refused.output


def test_one_slug_of_two_processors_is_two_devices(recorder):
    facts = {"gpu_name": None, "gpu_count": 0}
    one = recorder.run("before", "cpu-x86-64-2c", cpu_name="Tortoise", **facts)
    two = recorder.run("after", "cpu-x86-64-2c", cpu_name="Hare", **facts)
    assert "no verdicts" in recorder.call(one, two).output
    same = recorder.run("later", "cpu-x86-64-2c", cpu_name="Hare", seed=1, load_average=7.5, cores=2, **facts)
    done = recorder.call(two, same)
    assert words(done.output) == {"SAME": 4}
    assert "other processes were running (load 7.5)" in done.output


def test_of_three_sources_each_is_judged_against_the_first_of_its_device(recorder):
    a = recorder.run("a")
    b = recorder.run("b", "acme-2")
    c = recorder.run("c", factor=0.7, seed=1)
    done = recorder.call(a, b, c)
    assert "acme-1 #2 against acme-1: 4 FASTER" in done.output


def test_without_arguments_every_recorded_device_is_shown(recorder, monkeypatch):
    recorder.run(slug="acme-1")
    recorder.run(slug="acme-2")
    (recorder.root / "results" / "claims.csv").write_text("id,statement\n")
    monkeypatch.setattr("repro.compare.ROOT", recorder.root)
    for arguments in ((), ("acme-1", "acme-2"), (recorder.root,), ("results",)):
        done = recorder.call(*arguments)
        assert done.exit_code == 0 and "acme-1" in done.output and "acme-2" in done.output, (arguments, done.output)


def test_one_device_alone_is_shown(recorder):
    done = recorder.call(recorder.run())
    assert done.exit_code == 0 and "nothing to compare it with" in done.output
    assert re.search(r"8[12](\.\d)? us", done.output)


# runs inside one folder


def test_latest_against_previous_goes_case_by_case(recorder):
    folder = recorder.run()
    recorder.run(factor=2.0, cells=CELLS[:1], seed=1)
    recorder.run(factor=3.0, cells=CELLS[1:2], seed=2)  # another case: the case before keeps its previous run
    done = recorder.call(folder, "--runs", "previous", "latest")
    assert words(done.output) == {"SLOWER": 2}
    assert "latest against previous" in done.output
    assert "only in latest: 2 cases of speed" in done.output
    assert recorder.call(folder, "--runs", "first", "latest", "--fail-on", "slower").exit_code == 1


def test_runs_by_id(recorder):
    folder = recorder.run()
    recorder.run(factor=2.0, seed=1)
    first, second = [json.loads(line)["run_id"] for line in (folder / "runs.jsonl").read_text().splitlines()]
    assert words(recorder.call(folder, "--runs", first, second[-4:]).output) == {"SLOWER": 4}
    unknown = recorder.call(folder, "--runs", first, "nope")
    assert unknown.exit_code == 2 and first in " ".join(unknown.output.split()).replace(" ", "")
    several = recorder.call(folder, "--runs", "2", second)
    assert several.exit_code == 2 and "several runs" in several.output


def test_a_case_measured_once_has_no_previous_run(recorder):
    done = recorder.call(recorder.run(), "--runs", "previous", "latest")
    assert done.exit_code == 2 and "no case was measured twice" in done.output


# folders that are not alike


def test_partial_runs_and_missing_suites_are_compared_on_what_they_share(recorder):
    old = recorder.run("before")
    recorder.run("before", suite="memory")
    new = recorder.run("after", cells=CELLS[:2], seed=1)
    done = recorder.call(old, new)
    assert done.exit_code == 0 and words(done.output) == {"SAME": 2}
    assert "only in acme-1: memory (4 cases), 2 cases of speed" in done.output


def test_an_older_schema_is_migrated_and_a_newer_one_listed(recorder, monkeypatch):
    old, new = recorder.run("before"), recorder.run("after", seed=1)
    text = (old / "speed.csv").read_text()
    (old / "speed.csv").write_text(re.sub("^1,", "0,", text, flags=re.M))
    left_out = recorder.call(old, new)
    assert left_out.exit_code == 2 and "no migration from schema 0" in left_out.output
    monkeypatch.setitem(schema.MIGRATIONS, 0, lambda row: {**row, "impl": row["impl"]})
    assert words(recorder.call(old, new).output) == {"SAME": 4}
    lines = text.splitlines(keepends=True)
    newer = [re.sub("^1,", "99,", line) if "eager" in line else line for line in lines]
    (old / "speed.csv").write_text("".join(newer))
    done = recorder.call(old, new)
    assert words(done.output) == {"SAME": 2} and "schema 99 is newer" in " ".join(done.output.split())


def test_without_samples_there_is_no_verdict(recorder):
    old, new = recorder.run("before"), recorder.run("after", factor=2.0, seed=1)
    shutil.rmtree(old / "samples")
    assert words(recorder.call(old, new).output) == {"AMBIGUOUS": 4}
    shutil.rmtree(new / "samples")
    assert "nothing that both measured" in recorder.call(old, new, "--all").output


def test_without_run_records_the_slug_decides(recorder):
    old, new = recorder.run("before"), recorder.run("after", seed=1)
    (old / "runs.jsonl").unlink()
    assert words(recorder.call(old, new).output) == {"SAME": 4}


def test_a_renamed_folder_is_of_the_device_that_its_runs_name(recorder):
    old, new = recorder.run("before"), recorder.run("after", seed=1)
    done = recorder.call(old.rename(recorder.root / "last-week"), new)
    assert words(done.output) == {"SAME": 4} and "last-week" in done.output


def test_what_tells_cells_apart_is_not_cut_where_output_is_no_terminal(recorder):
    wide = [("per_sample", "bf16", 1, 1536, "each-micro-batch"), ("per_token", "fp32-bf16", 8, 131072, "once-a-step")]
    names = ("form", "dtype", "batch", "dim", "ranks-meet")
    cells = [cell | dict(zip(names, values, strict=True)) for values in wide for cell in CELLS]
    runs = [recorder.run("a", cells=cells), recorder.run("b", cells=cells, factor=1.3, seed=1)]
    assert "\u2026" not in recorder.call(*runs, "--all").output


def test_rows_that_both_hold_are_not_compared_with_themselves(recorder):
    old = recorder.run("before")
    shutil.copytree(old, recorder.root / "copy" / "acme-1")
    assert "nothing that both measured" in recorder.call(old, recorder.root / "copy" / "acme-1").output


def test_throttled_and_simulated_are_marked_and_simulated_is_not_judged(recorder):
    simulated = Measurement("gain", "1/s", 3.0, 3.0, 3.0, 5, "simulated", "run-1", samples=(3.0,) * 5)
    old = recorder.run("before", extra=(simulated,))
    new = recorder.run("after", factor=2.0, seed=1, extra=(simulated, THROTTLED))
    done = recorder.call(old, new)
    assert words(done.output) == {"SLOWER": 4}
    assert "†" in done.output and "throttled" in done.output
    alone = recorder.call(old, new, "--metric", "gain")
    assert "3 1/s~" in alone.output and "nothing that both measured" in alone.output


# pytest-benchmark


def benchmarks(path: Path, factor: float, data: bool = True, slug: str | None = "acme-1") -> Path:
    medians = {"stream": 1e-3, "fused": 1.25 * factor}  # seconds
    content = {
        "machine_info": {"node": "n", "cpu": {"brand_raw": "Tortoise", "count": 2}},
        "commit_info": {"id": "abc"},
        "datetime": f"2026-11-29T12:00:00 {path.stem}",
        "benchmarks": [
            {
                "fullname": f"suites/test_kernels.py::test_kernel[{impl}]",
                "group": "forward-bf16",
                "extra_info": {"impl": impl},
                "stats": {
                    "median": m, "q1": m, "q3": m, "rounds": 20,
                    **({"data": [m * (1 + 1e-3 * i) for i in range(20)]} if data else {}),
                },
            }
            for impl, m in medians.items()
        ],
    }  # fmt: skip
    if slug:
        content["machine_info"]["repro"] = {"slug": slug}
    path.write_text(json.dumps(content))
    return path


def test_two_files_of_pytest_benchmark(recorder):
    old, new = benchmarks(recorder.root / "old.json", 1e-3), benchmarks(recorder.root / "new.json", 2e-3)
    done = recorder.call(old, new, "--fail-on", "slower")
    assert done.exit_code == 1 and words(done.output) == {"SLOWER": 1, "SAME": 1}
    assert "80%" in done.output and "40%" in done.output, "the fused op beside the stream of its group"


def test_files_of_pytest_benchmark_without_device_or_data(recorder):
    old, new = (benchmarks(recorder.root / f"{n}.json", 1e-3, data=False, slug=None) for n in ("old", "new"))
    done = recorder.call(old, new)
    assert done.exit_code == 0 and "--benchmark-json" in done.output
    other = benchmarks(recorder.root / "other.json", 1e-3, slug="acme-2")
    assert "no verdicts" in recorder.call(benchmarks(old, 1e-3), other).output


@pytest.mark.parametrize("text", ["", "{", "[]", '{"machine_info": {}, "benchmarks": []}', '{"benchmarks": 3}'])
def test_another_json_file_is_an_error_of_one_line(recorder, text):
    path = recorder.root / "x.json"
    path.write_text(text)
    done = recorder.call(path)
    assert done.exit_code == 2 and done.output.startswith("error: ") and len(done.output.splitlines()) == 1


def test_a_benchmark_file_and_a_folder_share_nothing(recorder):
    done = recorder.call(benchmarks(recorder.root / "x.json", 1e-3), recorder.run())
    assert done.exit_code == 2 and "nothing is shared" in done.output


# files, and what is asked for


def test_csv_and_markdown_hold_every_shared_cell(recorder):
    old, new = recorder.run("before"), recorder.run("after", factor={"fused": 1.3}, seed=1)
    done = recorder.call(old, new, "--csv", "all.csv", "--markdown", "all.md")
    assert "wrote all.md" in done.output and "wrote all.csv" in done.output
    rows = list(csv.DictReader(io.StringIO(Path("all.csv").read_text())))
    assert len(rows) == 8  # times and bytes of four cases
    fused = [r for r in rows if r["impl"] == "fused" and r["metric"] == "time"]
    assert [r["acme-1 #2: verdict"] for r in fused] == ["SLOWER", "SLOWER"]
    assert float(fused[0]["acme-1 #2: ratio"]) == pytest.approx(1.3, rel=0.01)
    assert float(fused[0]["acme-1: ceiling"]) == 90
    text = Path("all.md").read_text()
    assert text.count("SLOWER") == 3 and text.count("SAME") == 3  # rows, and once each in the headline
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in tables if "forward" in line or "impl" in line}) == 1


def test_beside_a_device_s_folder_there_is_room_but_for_what_is_there(recorder):
    old, new = recorder.run("before"), recorder.run("", seed=1)
    (recorder.root / "claims.csv").write_text("id,statement\n")
    assert "wrote new.csv" in recorder.call(old, new, "--csv", "new.csv").output
    recorder.run("", "acme-2")
    before = (recorder.root / "acme-2" / "speed.csv").read_bytes()
    for refused in ("claims.csv", "acme-1/new.csv", "acme-2/speed.csv", "before/../acme-2/speed.csv"):
        done = recorder.call(old, new, "--csv", refused)
        assert done.exit_code == 2 and "lies among the results that are read" in done.output
    assert (recorder.root / "claims.csv").read_text() == "id,statement\n"
    assert (recorder.root / "acme-2" / "speed.csv").read_bytes() == before


@pytest.mark.parametrize("slug", ["acme-1", "acme-2"])
def test_pictures_are_the_same_bytes_again(recorder, slug):
    old, new = recorder.run("before"), recorder.run("after", slug, factor={"fused": 1.3}, seed=1)
    first, second = (Path(f"{n}.svg") for n in "ab")
    for path in (first, second):
        done = recorder.call(old, new, "--figure", path)
        assert done.exit_code == 0, done.output
    assert first.read_bytes() == second.read_bytes() and b"<svg" in first.read_bytes()


def test_one_suite_one_metric(recorder):
    old, new = recorder.run("before"), recorder.run("after", seed=1)
    done = recorder.call(old, new, "--suite", "speed", "--metric", "ceiling", "--all")
    assert "ceiling" in done.output and "time" not in done.output.replace("times", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "neither a folder nor a .json file"),
        (("acme-9",), "nearest: acme-1"),
        (("empty",), "no rows in it"),
        (("results/acme-1", "--suite", "sped"), "no suite 'sped'; nearest: speed"),
        (("results/acme-1", "--metric", "tine"), "no metric 'tine'; nearest: time"),
        (("results/acme-1", "--figure", "x.gif"), "--figure must end in"),
        (("results/acme-1", "--fail-on", "faster"), "slower only"),
        (("--runs", "a", "b"), "one device's folder"),
        (("results/acme-1", "results/acme-1", "--runs", "a", "b"), "one device's folder"),
    ],
)
def test_what_cannot_be_compared_is_an_error_of_one_line(recorder, monkeypatch, arguments, told):
    recorder.run()
    (recorder.root / "empty").mkdir()
    monkeypatch.setattr("repro.compare.ROOT", recorder.root)
    done = recorder.call(*arguments)
    assert done.exit_code == 2
    assert told in done.output and len(done.output.splitlines()) == 1, done.output


def test_the_committed_results_are_read_as_they_are():
    (source, *_) = compare_read.read("nvidia-h200", ROOT / "results")
    assert source.machine["gpu_name"] == "NVIDIA H200" and not source.notes
    cell = next(c for c in source.cells() if c[0] == "kernel_speed" and c[2] == "time")
    row = source.cells()[cell]
    assert source.samples(cell, row["run_id"]).size == row["n"]


def test_exact_values_have_no_spread(recorder):
    done = recorder.call(recorder.run(extra=(exact("nodes", "nodes", 6.0),)), "--metric", "nodes")
    assert re.search(r"6 nodes\s*$", done.output, re.M)


def test_bytes_that_changed_are_shown_without_a_verdict(recorder):
    old = recorder.run("before", extra=(exact("peak", "GB", 1.0),))
    new = recorder.run("after", seed=1, extra=(exact("peak", "GB", 1.5),))
    done = recorder.call(old, new)
    assert words(done.output) == {"SAME": 4}
    assert re.search(r"peak +1 GB +1\.5 GB", done.output) and "saved" not in done.output


def test_threads_that_differ_are_told(recorder):
    facts = {"gpu_name": None, "gpu_count": 0, "cpu_name": "Hare"}
    old = recorder.run("before", "cpu-x86-64-2c", omp_num_threads=1, **facts)
    new = recorder.run("after", "cpu-x86-64-2c", factor=0.6, seed=1, omp_num_threads=None, **facts)
    done = recorder.call(old, new)
    assert words(done.output) == {"FASTER": 4}
    assert "differ in OpenMP's threads 1 -> of every core" in " ".join(done.output.split())


STREAMS = [{"impl": "stream", "pass": "forward", "tokens": n} for n in (1024, 8192)]


@pytest.mark.parametrize(
    ("factor", "counts"),
    [
        ({"fused": 1.3}, {"SLOWER": 2, "SAME": 4}),
        ({"fused": 1.3, "stream": 1.5}, {"AMBIGUOUS": 4, "SAME": 2}),
        ({"fused": 2.0, "stream": 1.5}, {"SLOWER": 2, "AMBIGUOUS": 2, "SAME": 2}),
    ],
)
def test_what_moved_less_than_the_plain_streams_is_the_machines(recorder, factor, counts):
    old = recorder.run("before", cells=[*CELLS, *STREAMS])
    new = recorder.run("after", cells=[*CELLS, *STREAMS], factor=factor, seed=1)
    done = recorder.call(old, new, "--fail-on", "slower")
    assert words(done.output) == counts
    assert done.exit_code == (1 if counts.get("SLOWER") else 0)
    assert ("streams of speed, full, moved by up to" in " ".join(done.output.split())) == ("stream" in factor)


def test_another_host_is_told_and_leaves_the_gpu_the_same(recorder):
    old = recorder.run("before", cpu_name="Hare", cores=16)
    new = recorder.run("after", seed=1, cpu_name="Tortoise", cores=24)
    done = recorder.call(old, new)
    assert words(done.output) == {"SAME": 4}
    assert "differ in host Hare x16 -> Tortoise x24" in " ".join(done.output.split())
