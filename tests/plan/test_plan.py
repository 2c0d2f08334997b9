"""The command line of the planner, and plans on disk."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from repro import plan_file
from repro.corpus import Shape
from repro.plan import app
from repro.plan_setup import PlanError
from tests.plan.recorded import write

Run = Callable[..., Result]
HEADER = "frames,height,width\n"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plan") / "results")


@pytest.fixture
def run(results: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command replaces

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [*map(str, arguments), "--results", str(results)])

    return invoke


def clips(folder: Path, text: str) -> Path:
    path = folder / "clips.csv"
    path.write_text(text)
    return path


def mixed(folder: Path, rows: int = 300) -> Path:
    kinds = ("81,480,832", "49,720,1280", "1,720,1280", "33,480,832")
    return clips(folder, HEADER + "".join(kinds[i % 4] + "\n" for i in range(rows)))


def test_a_manifest_becomes_tables(run: Run, tmp_path: Path) -> None:
    done = run(mixed(tmp_path), "--ranks", 16)
    assert done.exit_code == 0, done.output
    out = done.stdout
    for word in ("81x480x832", "32,760", "pinned", "memory", "balanced", "baseline", "95% interval", "simulated"):
        assert word in out
    assert "300 records: 300 clips used as 300 samples" in out


def test_the_table_states_batches_and_times(run: Run, tmp_path: Path) -> None:
    out = run(mixed(tmp_path), "--m-mem", 58_896).stdout
    line = next(line.split() for line in out.splitlines() if "1x720x1280" in line and "49x" not in line)
    assert line[:3] == ["1x720x1280", "3,600", "75"]
    assert line[3] == "16"
    # 40 blocks: (40 / 3) (5.7 + 127.6 * 5.76 + 47.75 * 16 * 0.36^2) ms; rows carry 3% of noise
    assert float(line[4]) == pytest.approx(11.2, rel=0.05)


def test_a_corpus_by_name_tells_source_and_assumption(run: Run) -> None:
    out = run("worst-case").stdout
    assert "source:" in out and "assumed:" in out and "1x480x832" in out


def test_another_machine_and_another_memory_are_said(run: Run) -> None:
    out = run("wan-uniform", "--memory-gb", 100, "--ranks", 16).stdout
    assert "warning: made for nvidia-h200, not for this machine" in out
    assert "warning: made for 100 GB a device; step times are nvidia-h200's, which has 141 GB" in out
    assert "made for 1" not in run("wan-uniform", "--ranks", 16).stdout


def test_nonsense_rows_are_reported_and_the_rest_goes_on(run: Run, tmp_path: Path) -> None:
    path = clips(tmp_path, HEADER + "81,480,832\n" * 40 + "0,480,832\nNaN,480,832\n81,-4,832\n")
    done = run(path)
    assert done.exit_code == 0
    assert "clips.csv:42: frames is '0'" in done.stdout
    assert "clips.csv:43: frames is 'NaN'" in done.stdout
    assert "clips.csv:44: height is '-4'" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("frames,height\n81,480\n", "has no column for width"),
        (HEADER + "0,480,832\n", "none of 1 records is usable"),
    ],
)
def test_a_useless_manifest_is_one_line_and_exit_code_2(run: Run, tmp_path: Path, text: str, message: str) -> None:
    done = run(clips(tmp_path, text))
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.csv"], "no such manifest"),
        (["wan-unifrom"], "no corpus 'wan-unifrom'; nearest: wan-uniform"),
        (["wan-uniform", "--model", "flux"], "no model 'flux'"),
        (["wan-uniform", "--device", "nvidia-h100"], "measured: nvidia-h200"),
        (["wan-uniform", "--sync", "never"], "--sync must be"),
        (["wan-uniform", "--policy", "fair"], "no policy 'fair'"),
        (["wan-uniform", "--repeat", "koala"], "SOURCE=NUMBER"),
        (["wan-uniform", "--repeat", "koala=2"], "--repeat would change nothing: wan-uniform is a corpus by name"),
        (["wan-uniform", "--fps", "16", "--log", "log.csv"], "--fps, --log would change nothing"),
        (["wan-uniform", "--figure", "x.foo"], "--figure must end in .png, .svg or .pdf, got 'x.foo'"),
        (["wan-uniform", "--figure", "x"], "--figure must end in"),
        (["wan-uniform", "--write", "x.png"], "plan and picture would both be x.png"),
        (["wan-uniform", "--device", "nvidia-h100-x8"], "no step times of 'nvidia-h100-x8'; measured: nvidia-h200"),
        (["wan-uniform", "--adaln", "fused"], "no measured AdaLN 'fused'; known: eager"),
        (["wan-uniform", "--device", "nvidia-h100", "--model", "wan14b"], "no model 'wan14b'; nearest: wan-14b"),
        (["wan-uniform", "--ranks", "1"], "use more ranks"),
        (["wan-uniform", "--m-mem", "30000"], "more than the memory limit of 30,000"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_results_that_are_no_folder_are_not_taken_for_empty_ones(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(mixed(tmp_path)), "--results", str(tmp_path / "nope")])
    assert (done.exit_code, done.stderr) == (2, f"error: no such folder: --results {tmp_path / 'nope'}\n")


def test_debug_shows_the_traceback(run: Run, tmp_path: Path) -> None:
    done = run(clips(tmp_path, ""), "--debug")
    assert type(done.exception).__name__ == "ManifestError"


def test_long_clips_go_to_buckets_that_fit(run: Run, tmp_path: Path) -> None:
    path = clips(tmp_path, HEADER + "81,720,1280\n" * 40)
    out = run(path, "--m-mem", 48_000).stdout
    assert "buckets up to 48,000 tokens" in out
    assert "49x720x1280" in out and "trimmed to the bucket's frames" in out


def test_repeats_and_the_log(run: Run, tmp_path: Path) -> None:
    path = clips(tmp_path, "frames,height,width,source\n" + "90,480,832,a\n81,480,832,b\n" * 20)
    out = run(path, "--repeat", "a=3", "--log", tmp_path / "log.csv").stdout
    assert "40 clips used as 80 samples" in out
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 21


def test_a_written_plan_reads_back_and_knows_where_it_fits(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    done = run(mixed(tmp_path), "--ranks", 16, "--m-mem", 58_896, "--write", target, "--policy", "equal_token")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    plan = plan_file.read(target)
    assert plan.batch_size[Shape(1, 720, 1280)] == 58_896 // 3_600
    assert (plan.policy, plan.device, plan.ranks, plan.m_mem) == ("equal_token", "nvidia-h200", 16, 58_896)
    assert plan.mismatches("nvidia-h200-x8", 141.5e9, 16) == []
    told = plan.mismatches("nvidia-h100", 80e9, 8)
    assert len(told) == 3
    assert "made for nvidia-h200, this is nvidia-h100" in told[0]
    assert "141 GB" in told[1] and "80 GB" in told[1]
    document = yaml.safe_load(target.read_text())
    assert document["kind"] == "simulated" and document["rests_on"]["runs"]
    assert document["buckets"][0]["policies"].keys() == document["gains"].keys()


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".PNG", b"\x89PNG"), (".pdf", b"%PDF")])
def test_a_picture_of_any_kind(run: Run, tmp_path: Path, suffix: str, start: bytes) -> None:
    picture = tmp_path / f"a{suffix}"
    assert run(mixed(tmp_path), "--figure", picture).exit_code == 0
    assert picture.read_bytes().startswith(start)


def test_nothing_is_written_before_a_refusal(run: Run, tmp_path: Path) -> None:
    done = run("wan-uniform", "--ranks", 16, "--write", tmp_path / "plan.yaml", "--figure", tmp_path / "x.foo")
    assert done.exit_code == 2 and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_several_of_a_measured_device_have_its_step_times(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "plan.yaml"
    done = run(mixed(tmp_path), "--device", "nvidia-h200-x8", "--write", target)
    assert done.exit_code == 0, done.output
    assert "warning: no step times of nvidia-h200-x8 itself: planned with those of one such device" in done.stdout
    assert plan_file.read(target).mismatches("nvidia-h200-x8", 141e9, 8) == []


def test_rows_of_the_very_device_come_first(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    write(folder, "nvidia-h200-x8")
    arguments = ["wan-uniform", "--ranks", "16", "--device", "nvidia-h200-x8", "--results", str(folder)]
    out = CliRunner().invoke(app, arguments).stdout
    assert "16 ranks of nvidia-h200-x8" in out and "itself" not in out


def test_the_frame_rate_of_a_manifest_is_16_unless_given(run: Run, tmp_path: Path) -> None:
    path = clips(tmp_path, "frames,height,width,fps\n" + "81,480,832,16\n" * 40)
    for given, bucket in (((), "81x480x832"), (("--fps", 8), "33x480x832")):
        out = run(path, *given).stdout
        assert bucket in out and "40 records: 40 clips" in out


@pytest.mark.parametrize("text", ["", "a: 1\n", "{", "format: 99\n"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError):
        plan_file.read(path)


def test_help_fits_a_screen_and_shows_examples() -> None:
    out = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).stdout
    assert len(out.splitlines()) <= 48
    assert out.count("  python -m repro.plan ") == 3
