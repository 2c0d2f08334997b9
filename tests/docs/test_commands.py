"""Every command in README, CONTRIBUTING and docs/: run where that is cheap, else parsed by what would run it.

The README's two marked commands are run as they stand by .ci/run, and those of docs/extending.md by test_extending.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.compare.conftest import Recorder
from tests.compare.test_compare import benchmarks
from tests.docs.documents import DOCUMENTS, ROOT, blocks, inline_code, inline_commands, printed_commands

ENTRIES = ("all", "plan", "compare", "train", "wan.make_corpus", "adaln.sanitize")
NEED_TORCH = ("train", "wan.make_corpus", "adaln.sanitize")
EXTENDING, SLURM = ROOT / "docs" / "extending.md", ROOT / "docs" / "slurm.sbatch"
PRINTED = list(dict.fromkeys(w for d in DOCUMENTS if d != EXTENDING for w in printed_commands(d)))
INLINE = list(dict.fromkeys(w for d in DOCUMENTS for w in inline_commands(d)))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with what commands name: clips, results of two devices and of another checkout, benchmarks."""
    root = tmp_path_factory.mktemp("docs") / "here"
    root.mkdir()
    (root / "clips.csv").write_text("frames,height,width\n" + "81,480,832\n49,720,1280\n1,720,1280\n" * 40)
    recorder = Recorder(root)
    for folder, slug in (("results", "nvidia-h200"), ("results", "nvidia-h200"), ("results", "cpu-x86-64-2c")):
        recorder.run(folder, slug, suite="kernel_speed")
    recorder.run("../before/results", "nvidia-h200", suite="kernel_speed")
    for name in ("before", "after"):
        benchmarks(root / f"{name}.json", 1e-3)
    recorded = root / "recorded" / "nvidia-h200"
    recorded.mkdir(parents=True)
    for name in ("graph_nodes.csv", "runs.jsonl"):
        shutil.copy(ROOT / "results" / "nvidia-h200" / name, recorded)
    return root


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which commands replace


def app_of(module: str) -> typer.Typer:
    if module in NEED_TORCH:
        pytest.importorskip("torch")
    return importlib.import_module(f"repro.{module}").app


def parse(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Check arguments against the entry point's own options, without running it. Returns their values."""
    try:
        return typer.main.get_command(app_of(module)).make_context(module, list(arguments)).params
    except typer.Exit as done:  # what --help ends with
        assert done.exit_code == 0 and "--help" in arguments
        return {}


def run(module: str, arguments: Sequence[str]) -> str:
    done = CliRunner().invoke(app_of(module), list(arguments), env={"COLUMNS": "140"})
    assert done.exit_code == 0, done.output
    return done.output


def run_all(arguments: Sequence[str]) -> None:
    """For real where nothing is measured, or next to nothing; else what it would measure."""
    if "--gpus" in arguments:
        parse("all", arguments)
        return
    own = [*arguments, "--results", "recorded"]
    cheap = "--no-measure" in arguments or "graph_nodes" in arguments
    output = run("all", own if cheap or "--dry-run" in arguments else [*own, "--dry-run"])
    assert ("Report: " if cheap else "estimated") in output


def run_compare(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import repro.compare

    monkeypatch.setattr(repro.compare, "ROOT", Path.cwd())
    output = run("compare", arguments)
    assert "Different devices: side by side, no verdicts" in output or "SAME" in output
    for option in ("--csv", "--figure", "--markdown"):
        assert option not in arguments or Path(arguments[list(arguments).index(option) + 1]).stat().st_size


def run_plan(arguments: Sequence[str]) -> None:
    assert "Expected throughput (simulated)" in run("plan", arguments)
    assert "--write" not in arguments or Path("plan.yaml").exists()


def run_train(arguments: Sequence[str]) -> None:
    values = parse("train", arguments)
    if values.get("model") == "tiny":
        assert "step 1  loss" in run("train", [*arguments, "--device", "cpu", "--results", "none", "--steps", "2"])
        assert (Path(values["out"]) / "steps.csv").exists()


def check_torchrun(words: Sequence[str]) -> None:
    torchrun = pytest.importorskip("torch.distributed.run")
    found = torchrun.get_args_parser().parse_args(list(words[1:]))
    assert found.module and found.training_script == "repro.train"
    parse("train", found.training_script_args)


def check_pip(words: Sequence[str]) -> None:
    assert words[:3] == ("pip", "install", "-e")
    extras = re.fullmatch(r"\.(?:\[(.*)\])?", words[3])
    assert extras and set((extras[1] or "").split(",")) - {""} <= set(PROJECT["project"]["optional-dependencies"])


def check_tox(words: Sequence[str]) -> None:
    known = configparser.ConfigParser(interpolation=None)
    known.read(ROOT / "tox.ini")
    assert words[1] == "-e" and f"testenv:{words[2]}" in {*known, *(f"testenv:{e}" for e in ("lint", "typecheck"))}


@functools.cache
def pytest_help() -> str:
    done = subprocess.run([sys.executable, "-m", "pytest", "--help"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout


def check_pytest(words: Sequence[str]) -> None:
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            assert any(m.startswith(f"{next(rest)}:") for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"])
        elif word == "-k":
            next(rest)
        elif word.startswith("-"):
            assert re.search(rf"^\s+{word}\b", pytest_help(), re.MULTILINE), word
        else:
            assert (ROOT / word).exists(), word


def check_git(words: Sequence[str]) -> None:
    assert words[:2] == ("git", "add")
    assert all(any(ROOT.glob(pattern)) for pattern in words[2:])


def check_script(words: Sequence[str]) -> None:
    script = ROOT / words[0]
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


CHECKS = {"torchrun": check_torchrun, "pip": check_pip, "tox": check_tox, "pytest": check_pytest, "git": check_git}


@pytest.mark.parametrize("words", PRINTED, ids=" ".join)
def test_a_printed_command(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[:2] != ("python", "-m"):
        CHECKS.get(words[0], check_script)(words)
        return
    module, arguments = words[2].removeprefix("repro."), words[3:]
    if module == "all":
        run_all(arguments)
    elif module == "compare":
        run_compare(arguments, monkeypatch)
    elif module == "plan":
        run_plan(arguments)
    elif module == "train":
        run_train(arguments)
    else:
        parse(module, arguments)


@pytest.mark.parametrize("words", [w for w in INLINE if w not in PRINTED], ids=" ".join)
def test_a_command_in_a_sentence_parses(words: tuple[str, ...]) -> None:
    if words[0] == "sbatch":  # the script itself: below
        assert words == ("sbatch", str(SLURM.relative_to(ROOT)))
    elif words[:2] == ("python", "-m"):
        parse(words[2].removeprefix("repro."), words[3:] or ["--help"])
    elif words[0] == "torchrun":
        assert words == ("torchrun", "-m", "repro.train")
    elif words[0] == "tox" and len(words) == 1:
        pass
    else:
        CHECKS.get(words[0], check_script)(words)


def test_the_slurm_script_starts_a_rank_a_task(place: Path) -> None:
    """Under stand-ins of Slurm's commands: `srun` is one task, `python` tells how it was called."""
    (script,) = (b.text for d in DOCUMENTS for b in blocks(d, "bash") if "#SBATCH" in b.text)
    assert script == SLURM.read_text(), "the README shows the file that is there"
    options = dict(re.findall(r"--([\w-]+)(?:=(\S+))?", re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)[0]))
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "requeue" in options
    assert re.fullmatch(r"USR1@\d+", options["signal"])
    tools = place / "tools"
    tools.mkdir()
    told = '#!/bin/bash\necho "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT" "$@"\n'
    for name, text in {
        "scontrol": "#!/bin/bash\necho node0; echo node1\n",
        "srun": '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nSLURM_PROCID=9 SLURM_LOCALID=1 exec "$@"\n',
        "python": told,
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", **slurm}
    done = subprocess.run(["bash", "-euo", "pipefail"], input=script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *ranks, dash_m, module = (words := done.stdout.split())[:8]
    assert ranks == ["9", "1", "16", options["ntasks-per-node"], "node0", "29500"] and dash_m == "-m"
    assert module == "repro.train" and parse("train", words[8:])["ranks"] == 16


@functools.cache
def known_options() -> str:
    helps = [CliRunner().invoke(app_of(m), ["--help"]).stdout for m in ENTRIES]
    torchrun = pytest.importorskip("torch.distributed.run")
    return "\n".join([*helps, torchrun.get_args_parser().format_help(), pytest_help(), SLURM.read_text()])


def test_options_that_the_text_names_exist() -> None:
    named = {o for d in DOCUMENTS for code in inline_code(d) for o in re.findall(r"(?<!\S)--[a-z][\w-]*", code)}
    assert len(named) > 15
    unknown = [o for o in sorted(named) if not re.search(rf"(?<![\w-]){o}(?![\w-])", known_options())]
    assert not unknown


@pytest.mark.parametrize(("document", "module"), [("results", "all"), ("training", "train")])
def test_exit_codes_are_those_of_help(document: str, module: str) -> None:
    table = re.search(r"^\| exit code .*?\n\n", (ROOT / "docs" / f"{document}.md").read_text(), re.DOTALL | re.M)
    assert table
    told = re.findall(r"^\| (\d+) \|", table.group(), re.MULTILINE)
    help_text = " ".join(CliRunner().invoke(app_of(module), ["--help"]).stdout.split())
    codes = re.search(r"Exit codes: (.*?)\. ?(?:python|torchrun|[A-Z])", help_text)
    assert codes and told == re.findall(r"(?:^|, )(\d+) ", codes[1])
