"""Run the op's tests at small sizes under NVIDIA's compute-sanitizer: `python -m repro.adaln.sanitize`.

    memcheck     accesses out of bounds or misaligned, in global, local and shared memory
    racecheck    hazards between threads in shared memory
    initcheck    global memory read before it was written

One line a tool: its findings and the tests that it watched. Needs a checkout, an NVIDIA GPU, and compute-sanitizer on
PATH or in the CUDA toolkit (CUDA_HOME). Takes about two minutes.

Exit code: 0 nothing found, 1 a finding or a failed test, 2 the tools cannot run here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import typer

from repro.adaln import build

CHECKOUT = Path(__file__).parents[2]
TESTS = Path("tests/adaln/test_op_sanitizer.py")

_FOUND = 99
"""Exit code that the tool is told to use; pytest has none so high."""

# PyTorch's kernels are not ours to check. initcheck has to see them nevertheless, since they write what ours read.
_OURS = ("--kernel-name", "kns=adaln")
TOOLS = {"memcheck": ("--padding", "256", *_OURS), "racecheck": _OURS, "initcheck": ()}

_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")


class CannotRun(Exception):
    """The tools cannot run here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Outcome:
    """What one tool found. findings: None where its summary is missing. tests: that passed under it."""

    tool: str
    findings: int | None
    tests: int
    exit_code: int
    seconds: float
    log: Path

    @property
    def clean(self) -> bool:
        """Nothing found, every test passed, and there were some."""
        return self.findings == 0 and self.exit_code == 0 and self.tests > 0

    def __str__(self) -> str:
        if self.findings is None:
            what = "did not run to its end"
        elif self.findings:
            what = f"{self.findings} finding{'s' if self.findings > 1 else ''}"
        elif self.exit_code:
            what = f"nothing found, but tests failed (exit code {self.exit_code})"
        elif not self.tests:
            what = "no test ran"
        else:
            return f"{self.tool}: clean, {self.tests} tests, {self.seconds:.0f} s"
        return f"{self.tool}: {what}, {self.tests} tests passed, {self.seconds:.0f} s; see {self.log}"


def find_sanitizer() -> str:
    """Path of compute-sanitizer. Raises CannotRun."""
    from torch.utils.cpp_extension import CUDA_HOME

    found = shutil.which("compute-sanitizer")
    if found is None and CUDA_HOME is not None:
        found = shutil.which("compute-sanitizer", path=str(Path(CUDA_HOME, "bin")))
    if found is None:
        raise CannotRun(
            "compute-sanitizer is neither on PATH nor in the CUDA toolkit; install the toolkit and set CUDA_HOME"
        )
    return found


def run(tool: str, sanitizer: str, logs: Path) -> Outcome:
    """Run the tests under one tool of TOOLS; all output goes to `logs`/<tool>.log."""
    log = logs / f"{tool}.log"
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(_FOUND)]
    # Failed CUDA calls and failed tests show in the exit code; PyTorch makes some calls only to see whether they fail.
    command += ["--report-api-errors", "no", "--check-exit-code", "no"]
    # Every tensor an allocation of its own: inside PyTorch's large blocks nothing is out of bounds, or ever unwritten.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(
            [*command, sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider"],
            cwd=CHECKOUT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    text = log.read_text(errors="replace")
    # One summary a process; a test that starts none has one.
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    passed = _PASSED.findall(text)
    return Outcome(
        tool, sum(counts) if counts else None, int(passed[-1]) if passed else 0, code, time.monotonic() - start, log
    )


def _require_kernels() -> None:
    """Build the kernels now, not under a tool. Raises CannotRun."""
    if not (CHECKOUT / TESTS).is_file():
        raise CannotRun(f"there is no {TESTS} in {CHECKOUT}: run from a checkout")
    if not torch.cuda.is_available():
        raise CannotRun("no CUDA device is visible; check the driver and CUDA_VISIBLE_DEVICES")
    if not build.ensure_loaded():
        raise CannotRun(f"the kernels are not there: {build.failure()}")


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main() -> None:
    """Run compute-sanitizer's memcheck, racecheck and initcheck over the op's tests.

    Exit codes: 0 nothing found, 1 a finding or a failed test, 2 the tools cannot run here (one line says why).

    \b
    python -m repro.adaln.sanitize
    CUDA_HOME=/usr/local/cuda python -m repro.adaln.sanitize
    """  # noqa: D301 - click reads the backspace: keep these lines
    try:
        _require_kernels()
        sanitizer = find_sanitizer()
    except CannotRun as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    logs = Path(tempfile.mkdtemp(prefix="repro-sanitize-"))
    outcomes = []
    for tool in TOOLS:
        outcomes.append(run(tool, sanitizer, logs))
        print(outcomes[-1], flush=True)
    if all(outcome.clean for outcome in outcomes):
        shutil.rmtree(logs)
    else:
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m repro.adaln.sanitize")
