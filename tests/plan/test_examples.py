"""The planner's printed examples work as printed, on the committed results and clips like those that they name."""

from __future__ import annotations

import io
import json
import re
import shlex
import tarfile
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro import plan

COMMAND = re.compile(r"^ *python -m repro\.plan (.+)$", re.MULTILINE)


def printed() -> list[list[str]]:
    """Arguments of the examples in the module's docstring and in --help (at a terminal's usual width)."""
    shown = CliRunner().invoke(plan.app, ["--help"], env={"COLUMNS": "80"}).stdout
    texts = {"docstring": plan.__doc__ or "", "--help": shown}
    found = {where: COMMAND.findall(text) for where, text in texts.items()}
    assert all(found.values()), f"no example to run: {found}"
    return [shlex.split(line, comments=True) for lines in found.values() for line in lines]


EXAMPLES = list(dict.fromkeys(tuple(arguments) for arguments in printed()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that examples name."""
    (tmp_path / "clips.csv").write_text("frames,height,width\n" + "81,480,832\n49,720,1280\n1,720,1280\n" * 40)
    (tmp_path / "shards").mkdir()
    for number in range(128):
        with tarfile.open(tmp_path / f"shards/clips-{number:03}.tar", "w") as tar:
            clip = json.dumps({"frames": 81 - number % 3 * 32, "height": 480, "width": 832, "source": "koala"}).encode()
            member = tarfile.TarInfo("000.json")
            member.size = len(clip)
            tar.addfile(member, io.BytesIO(clip))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which the command replaces
    return tmp_path


@pytest.mark.parametrize("arguments", EXAMPLES, ids=" ".join)
def test_a_printed_example_makes_a_plan(arguments: tuple[str, ...], folder: Path) -> None:
    done = CliRunner().invoke(plan.app, arguments)
    assert done.exit_code == 0, done.output
    assert "Expected throughput (simulated)" in done.stdout
    assert (folder / "plan.yaml").exists() == ("--write" in arguments)
