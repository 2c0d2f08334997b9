"""The script around compute-sanitizer, with a stand-in for the tool."""

from __future__ import annotations

import os
import select

import pytest
import torch
import typer
from typer.testing import CliRunner

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

    def install(summaries=CLEAN, tests="4 passed in 1.0s", code=0, version="Version 2026.4.0.0", first=""):
        path = tmp_path / "compute-sanitizer"
        cases = "\n".join(f"{name}) echo '{line}' ;;" for name, line in summaries.items())
        path.write_text(
            f"#!/bin/sh\n[ $1 = --version ] && echo '{version}' && exit\n"
            f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/calls\n{first}\n'
            f"echo '{tests}'\ncase $2 in\n{cases}\nesac\nexit {code}\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / "calls"

    return install


def test_clean(machine, tool, capsys):
    calls = tool()
    sanitize.main()
    program, *lines = capsys.readouterr().out.splitlines()
    assert program == f"{calls.with_name('compute-sanitizer')} 2026.4.0.0"
    assert [line.split(", ")[:2] for line in lines] == [[f"{name}: clean", "4 tests"] for name in CLEAN]
    ports = set()
    for call, name in zip(calls.read_text().splitlines(), CLEAN, strict=True):
        assert call.startswith(f"1 --tool {name} ") and "-m pytest tests/adaln/test_op_sanitizer.py" in call
        assert ("kns=adaln" in call) == (name != "initcheck"), "initcheck has to see what other kernels write"
        assert ("--num-cuda-barriers 16 " in call) == (name == "racecheck"), "as many as a ring may have"
        ports.add(call.split("--port ")[1].split()[0])
    assert len(ports) == 3, "tools may run side by side"


def test_one_tool_with_its_output_kept(machine, tool, tmp_path, capsys):
    tool()
    sanitize.main(tool=["racecheck"], logs=tmp_path / "kept")
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert [f.name for f in (tmp_path / "kept").iterdir()] == ["racecheck.log"]
    assert CLEAN["racecheck"] in (tmp_path / "kept/racecheck.log").read_text()


def test_side_by_side(machine, tool, tmp_path, capsys):
    """Each waits until all have begun: one after the other they would be stopped."""
    tool(first=f"while [ $(wc -l < {tmp_path}/calls) -lt 3 ]; do :; done")
    sanitize.main(jobs=3, seconds=60)
    assert capsys.readouterr().out.count(": clean") == 3


def test_too_slow(machine, tool, tmp_path, capsys):
    """The tests that the tool started are stopped as well: the end of a pipe that they hold is closed."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    tool(first=f"sh -c 'exec 3> {tmp_path}/pipe; echo begun >&3; while :; do :; done'")
    with pytest.raises(typer.Exit) as exit_:
        sanitize.main(tool=["memcheck"], seconds=3)
    assert exit_.value.exit_code == 1
    assert "memcheck: stopped, too slow, 0 tests passed, 3 s; see " in capsys.readouterr().out
    assert os.read(pipe, 100) == b"begun\n"
    assert select.select([pipe], [], [], 30)[0] and os.read(pipe, 100) == b""
    os.close(pipe)


@pytest.mark.parametrize(
    ("version", "doubtful"), [("2025.3.1.0", ["racecheck", "initcheck"]), ("2026.1.0.0", ["racecheck"]), ("2026.3", [])]
)
def test_findings_of_an_old_version_come_with_a_warning(machine, tool, capsys, version, doubtful):
    found = {
        "memcheck": "========= ERROR SUMMARY: 1 error",
        "racecheck": "========= RACECHECK SUMMARY: 1 hazard displayed",
        "initcheck": "========= ERROR SUMMARY: 1 error",
    }
    tool(summaries=found, code=99, version=f"Version {version}")
    with pytest.raises(typer.Exit):
        sanitize.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if "can find what is not there" in line] == doubtful


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
    assert len(lines) == 4 and any(line.startswith(said) and "; see " in line for line in lines)


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


@pytest.mark.parametrize("folder", ["bin", "compute-sanitizer"])
def test_the_toolkits_own_is_found(tool, tmp_path, monkeypatch, folder):
    tool()
    place = tmp_path / "cuda" / folder / "compute-sanitizer"
    place.parent.mkdir(parents=True)
    (tmp_path / "compute-sanitizer").rename(place)
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path / "cuda"))
    assert sanitize.find_sanitizer() == sanitize.Sanitizer(str(place), (2026, 4, 0, 0))


def test_a_named_one_comes_first(machine, tool, tmp_path, monkeypatch):
    tool(version="Version 1.2")
    named = tmp_path / "elsewhere" / "compute-sanitizer"
    named.parent.mkdir()
    (tmp_path / "compute-sanitizer").rename(named)
    tool()
    done = CliRunner().invoke(sanitize.app, [], env={"REPRO_COMPUTE_SANITIZER": str(named)})
    assert done.exit_code == 0 and done.output.splitlines()[0] == f"{named} 1.2"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sanitizer": "/nowhere/compute-sanitizer"}, "there is no program /nowhere/compute-sanitizer"),
        ({"sanitizer": "/bin/true"}, "names no version"),
        ({"tool": ["synccheck"]}, "--tool must be one of memcheck, racecheck, initcheck, got 'synccheck'"),
    ],
)
def test_bad_options_are_named(machine, tool, capsys, arguments, said):
    tool()
    with pytest.raises(typer.Exit) as exit_:
        sanitize.main(**arguments)
    assert exit_.value.exit_code == 2
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
