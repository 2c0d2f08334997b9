"""Run the op's tests at small sizes under NVIDIA's compute-sanitizer: `python -m repro.adaln.sanitize`.

    memcheck     accesses out of bounds or misaligned, in global, local and shared memory
    racecheck    hazards between threads in shared memory
    initcheck    global memory read before it was written

One line a tool: its findings and the tests that it watched. Needs a checkout, an NVIDIA GPU, and compute-sanitizer:
`--sanitizer` or REPRO_COMPUTE_SANITIZER name it, else it is looked for on PATH and in the CUDA toolkit (CUDA_HOME).
PyPI's nvidia-cuda-sanitizer-api 13.5 has it too (nvidia/cu13/compute-sanitizer; wheels up to 13.2 lack the helper
programs that it starts).

What orders a bulk copy and its readers is an mbarrier, and NVIDIA's release notes correct racecheck there up to version
2026.3, initcheck up to 2026.1: an older version can find what is not there.

Exit code: 0 nothing found, 1 a finding or a failed test, 2 the tools cannot run here.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from repro.adaln import build

CHECKOUT = Path(__file__).parents[2]
TESTS = Path("tests/adaln/test_op_sanitizer.py")

_FOUND = 99
"""Exit code that the tool is told to use; pytest has none so high."""

# PyTorch's kernels are not ours to check. initcheck has to see them nevertheless, since they write what ours read.
_OURS = ("--kernel-name", "kns=adaln")
# racecheck takes the number of barriers from what the compiler noted, which knows nothing of those in a kernel's ring.
_BARRIERS = ("--num-cuda-barriers", "16")
TOOLS = {"memcheck": ("--padding", "256", *_OURS), "racecheck": (*_BARRIERS, *_OURS), "initcheck": ()}

SOUND = {"racecheck": (2026, 3), "initcheck": (2026, 1)}
"""Version of compute-sanitizer whose release notes have the last correction of what a tool makes of bulk copies."""

_PORT = 49152  # the tool's default; it takes ten from there, and tools that run side by side must not share any

_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_PASSED = re.compile(r"(\d+) passed")


class CannotRun(Exception):
    """The tools cannot run here; the message says what is missing and how to get it."""


@dataclass(frozen=True)
class Sanitizer:
    """An installed compute-sanitizer; version as it says itself, such as (2025, 3, 1, 0)."""

    path: str
    version: tuple[int, ...]

    def is_sound(self, tool: str) -> bool:
        """Whether what `tool` finds about bulk copies can be taken at its word."""
        return self.version >= SOUND.get(tool, ())


@dataclass(frozen=True)
class Outcome:
    """What one tool found. findings: None where its summary is missing. tests: that passed under it.

    exit_code: None where it was stopped since it took too long.
    """

    tool: str
    findings: int | None
    tests: int
    exit_code: int | None
    seconds: float
    log: Path
    sound: bool = True

    @property
    def clean(self) -> bool:
        """Nothing found, every test passed, and there were some."""
        return self.findings == 0 and self.exit_code == 0 and self.tests > 0

    def __str__(self) -> str:
        if self.exit_code is None:
            what = "stopped, too slow"
        elif self.findings is None:
            what = "did not run to its end"
        elif self.findings:
            what = f"{self.findings} finding{'s' if self.findings > 1 else ''}"
            if not self.sound:
                what += f" (versions before {'.'.join(map(str, SOUND[self.tool]))} can find what is not there)"
        elif self.exit_code:
            what = f"nothing found, but tests failed (exit code {self.exit_code})"
        elif not self.tests:
            what = "no test ran"
        else:
            return f"{self.tool}: clean, {self.tests} tests, {self.seconds:.0f} s"
        return f"{self.tool}: {what}, {self.tests} tests passed, {self.seconds:.0f} s; see {self.log}"


def find_sanitizer(path: str | None = None) -> Sanitizer:
    """compute-sanitizer at `path`, else on PATH, else in the CUDA toolkit. Raises CannotRun."""
    from torch.utils.cpp_extension import CUDA_HOME

    folders = [os.environ.get("PATH", os.defpath)]
    if CUDA_HOME is not None:
        folders += [str(Path(CUDA_HOME, folder)) for folder in ("bin", "compute-sanitizer")]
    found = shutil.which(path) if path else shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found is None and path:
        raise CannotRun(f"there is no program {path}: --sanitizer wants the path of compute-sanitizer")
    if found is None:
        raise CannotRun(
            "compute-sanitizer is neither on PATH nor in the CUDA toolkit; install the toolkit and set CUDA_HOME, or "
            "name it with --sanitizer"
        )
    try:
        printed = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise CannotRun(f"{found} does not run: {error}") from error
    match = re.search(r"Version (\d+(?:\.\d+)+)", printed)
    if match is None:
        raise CannotRun(f"{found} --version names no version; is it compute-sanitizer?")
    return Sanitizer(found, tuple(int(part) for part in match.group(1).split(".")))


def run(tool: str, sanitizer: Sanitizer, logs: Path, seconds: float) -> Outcome:
    """Run the tests under one tool of TOOLS, for at most `seconds`; all output goes to `logs`/<tool>.log."""
    log = logs / f"{tool}.log"
    command = [sanitizer.path, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(_FOUND)]
    # Failed CUDA calls and failed tests show in the exit code; PyTorch makes some calls only to see whether they fail.
    command += ["--report-api-errors", "no", "--check-exit-code", "no"]
    command += ["--port", str(_PORT + 10 * list(TOOLS).index(tool))]
    # Every tensor an allocation of its own: inside PyTorch's large blocks nothing is out of bounds, or ever unwritten.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    code: int | None
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider", "--durations=5"],
            cwd=CHECKOUT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the tests as well, not the tool alone
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
    text = log.read_text(errors="replace")
    # One summary a process; a test that starts none has one.
    counts = [int(a or b) for a, b in _SUMMARY.findall(text)]
    passed = _PASSED.findall(text)
    return Outcome(
        tool,
        sum(counts) if counts else None,
        int(passed[-1]) if passed else 0,
        code,
        time.monotonic() - start,
        log,
        sanitizer.is_sound(tool),
    )


def _require_kernels() -> None:
    """Build the kernels now, not under a tool. Raises CannotRun."""
    if not (CHECKOUT / TESTS).is_file():
        raise CannotRun(f"there is no {TESTS} in {CHECKOUT}: run from a checkout")
    if not torch.cuda.is_available():
        raise CannotRun("no CUDA device is visible; check the driver and CUDA_VISIBLE_DEVICES")
    if not build.ensure_loaded():
        raise CannotRun(f"the kernels are not there: {build.failure()}")


def _require_tools(tools: list[str]) -> None:
    for tool in tools:
        if tool not in TOOLS:
            raise CannotRun(f"--tool must be one of {', '.join(TOOLS)}, got {tool!r}")


app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main(
    sanitizer: Annotated[
        str | None,
        typer.Option(envvar="REPRO_COMPUTE_SANITIZER", help="compute-sanitizer; default: on PATH or in CUDA_HOME."),
    ] = None,
    tool: Annotated[list[str] | None, typer.Option(help=f"{', '.join(TOOLS)}; repeatable. Default: all.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tools that run side by side on the GPU.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Stop a tool that takes longer.")] = 600,
    logs: Annotated[Path | None, typer.Option(help="Keep the tools' output in this folder.")] = None,
) -> None:
    """Run compute-sanitizer's memcheck, racecheck and initcheck over the op's tests.

    Exit codes: 0 nothing found, 1 a finding or a failed test, 2 the tools cannot run here (one line says why).

    \b
    python -m repro.adaln.sanitize
    python -m repro.adaln.sanitize --tool memcheck --logs build/sanitizer
    CUDA_HOME=/usr/local/cuda python -m repro.adaln.sanitize --jobs 3
    """  # noqa: D301 - click reads the backspace: keep these lines
    tools = tool or list(TOOLS)
    try:
        _require_tools(tools)
        _require_kernels()
        found = find_sanitizer(sanitizer)
    except CannotRun as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    folder = logs or Path(tempfile.mkdtemp(prefix="repro-sanitize-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{found.path} {'.'.join(map(str, found.version))}", flush=True)
    outcomes = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda name: run(name, found, folder, seconds), tools):
            outcomes.append(outcome)
            print(outcome, flush=True)
    if not all(outcome.clean for outcome in outcomes):
        raise typer.Exit(1)
    if logs is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    app(prog_name="python -m repro.adaln.sanitize")
