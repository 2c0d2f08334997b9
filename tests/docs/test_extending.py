"""The examples of docs/extending.md, applied to a copy of the checkout, do what the text says, and are short."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

pytest.importorskip("torch")

TEXT = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = {s.partition("\n")[0]: s for s in TEXT.split("\n## ")[1:]}
_BLOCK = re.compile(r"^`(\w+/[\w/.]+)`.*?:\n|^```(python|diff|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def parts(section: str) -> list[tuple[str, str, str]]:
    """(language, file that it is for, text) of each block, in order."""
    found, path = [], ""
    for match in _BLOCK.finditer(SECTIONS[section]):
        if match[1]:
            path = match[1]
        else:
            found.append((match[2], path, match[3]))
    return found


def apply(root: Path, section: str) -> list[list[str]]:
    """Make the section's edits; returns its commands."""
    commands = []
    for language, path, text in parts(section):
        target = root / path
        if language == "bash":
            commands += [line.split() for line in text.splitlines()]
        elif language == "python":
            assert not target.exists(), path
            target.write_text(text)
        else:
            lines = text.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            content = target.read_text()
            assert content.count(old) == 1, f"{path} has this {content.count(old)} times:\n{old}"
            target.write_text(content.replace(old, new))
    return commands


def run(root: Path, words: list[str]) -> str:
    command = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The checkout without tests, and of its results those that planning needs."""
    for name in ("repro", "suites", "csrc"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "results" / "nvidia-h200").mkdir(parents=True)
    for name in ("block_time.csv", "runs.jsonl"):
        shutil.copy(ROOT / "results" / "nvidia-h200" / name, tmp_path / "results" / "nvidia-h200")
    return tmp_path


@pytest.mark.parametrize("section", SECTIONS)
def test_an_example_is_under_twenty_lines(section: str) -> None:
    lines = [
        line
        for language, _, text in parts(section)
        for line in text.splitlines()
        if line.strip("+ ") and (language == "python" or (language == "diff" and line[0] == "+"))
    ]
    assert 1 <= len(lines) < 20


def test_a_suite_then_its_claim(copy: Path) -> None:
    # Drawing what else is recorded is not the point here.
    (copy / "results" / "nvidia-h200" / "block_time.csv").unlink()
    (command,) = apply(copy, "A suite")
    assert "query_norm: 2 measured, 0 already recorded" in run(copy, command)
    (recorded,) = copy.glob("results/cpu-*/query_norm.csv")
    rows = list(csv.DictReader(recorded.open()))
    assert [(r["profile"], r["tokens"], r["metric"]) for r in rows] == [
        ("smoke", n, "time_called") for n in ("256", "1024")
    ]

    (command,) = apply(copy, "A claim")
    run(copy, command)
    (claim,) = (r for r in csv.DictReader((copy / "results/claims.csv").open()) if r["id"] == "X1")
    (row,) = (r for r in csv.DictReader(recorded.open()) if (r["profile"], r["tokens"]) == ("full", "1024"))
    assert float(claim["value"]) == pytest.approx(float(row["value"]) / 1e3, rel=1e-5)
    assert claim["verdict"] in ("reproduced", "ambiguous", "not reproduced") and claim["kind"] == "measured"
    for name in ("claims.md", "report.html"):
        assert "The RMSNorm of 1,024 queries takes at most 1 ms" in (copy / "figures" / name).read_text()


def test_a_policy(copy: Path) -> None:
    plan, train = apply(copy, "A batch policy")
    output = run(copy, plan)
    assert re.search(r"power_of_two +\d", output[output.index("Expected throughput (simulated)") :])
    assert "power_of_two over" in run(copy, train)


def test_a_kernel(copy: Path) -> None:
    (command,) = apply(copy, "A kernel")
    assert re.search(r"\b[1-9]\d* passed", run(copy, command))
    kernel = copy / "repro/adaln/affine.py"
    kernel.write_text(kernel.read_text().replace("1 + scale_D", "1.1 + scale_D"))
    with pytest.raises(AssertionError, match="WrongResultError"):
        run(copy, [*command, "-x"])
