"""The script around compute-sanitizer, with a stand-in for the tool."""

from __future__ import annotations

import os

import pytest
import torch
import typer

from repro.adaln import build, sanitize

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "initcheck": "========= ERROR SUMMARY: 0 errors",
}


@pytest.fixture
def machine(monkeypatch):
    """A machine with a GPU and the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(build, "ensure_loaded", lambda: True)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a compute-sanitizer on PATH that says `summaries` and `tests`, and exits with `code`."""

    def install(summaries=CLEAN, tests="4 passed in 1.0s", code=0):
        path = tmp_path / "compute-sanitizer"
        cases = "\n".join(f"{name}) echo '{line}' ;;" for name, line in summaries.items())
        path.write_text(
            f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/calls\n'
            f"echo '{tests}'\ncase $2 in\n{cases}\nesac\nexit {code}\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / "calls"

    return install


def test_clean(machine, tool, capsys):
    calls = tool()
    sanitize.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[:2] for line in lines] == [[f"{name}: clean", "4 tests"] for name in CLEAN]
    for call, name in zip(calls.read_text().splitlines(), CLEAN, strict=True):
        assert call.startswith(f"1 --tool {name} ") and "-m pytest tests/adaln/test_op_sanitizer.py" in call
        assert ("kns=adaln" in call) == (name != "initcheck"), "initcheck has to see what other kernels write"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"summaries": CLEAN | {"racecheck": "===== RACECHECK SUMMARY: 2 hazards displayed"}, "code": 99},
            "racecheck: 2 findings",
        ),
        ({"summaries": CLEAN | {"memcheck": "===== ERROR SUMMARY: 1 error"}, "code": 99}, "memcheck: 1 finding, "),
        # racecheck's warnings leave the exit code alone
        ({"summaries": CLEAN | {"racecheck": "===== RACECHECK SUMMARY: 1 hazard displayed"}}, "racecheck: 1 finding, "),
        ({"tests": "1 failed, 3 passed in 1.0s", "code": 1}, "memcheck: nothing found, but tests failed (exit code 1)"),
        ({"tests": "4 skipped in 1.0s"}, "memcheck: no test ran"),
        ({"summaries": {}, "code": 1}, "initcheck: did not run to its end"),
    ],
)
def test_whatever_is_not_clean_fails(machine, tool, capsys, change, said):
    tool(**change)
    with pytest.raises(typer.Exit) as exit_:
        sanitize.main()
    assert exit_.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and any(line.startswith(said) and "; see " in line for line in lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.setattr(torch.cuda, "is_available", lambda: False), "no CUDA device is visible"),
        (lambda patch: patch.setattr(build, "ensure_loaded", lambda: False), "the kernels are not there"),
        (lambda patch: patch.setattr(sanitize, "CHECKOUT", sanitize.CHECKOUT / "repro"), "run from a checkout"),
        (lambda patch: patch.setenv("PATH", "/nowhere"), "compute-sanitizer is neither on PATH nor"),
    ],
    ids=["device", "kernels", "checkout", "tool"],
)
def test_what_is_missing_is_named(machine, tool, capsys, monkeypatch, change, said):
    tool()
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    change(monkeypatch)
    with pytest.raises(typer.Exit) as exit_:
        sanitize.main()
    assert exit_.value.exit_code == 2
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


def test_the_toolkits_own_is_found(tool, tmp_path, monkeypatch):
    tool()
    (tmp_path / "cuda/bin").mkdir(parents=True)
    (tmp_path / "compute-sanitizer").rename(tmp_path / "cuda/bin/compute-sanitizer")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path / "cuda"))
    assert sanitize.find_sanitizer() == str(tmp_path / "cuda/bin/compute-sanitizer")
