"""Which tests run where: the root conftest on a small test file of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKER = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise {error}

sys.meta_path.insert(0, NoTorch())
"""
TESTS = """
import pytest

@pytest.mark.gpu
def test_on_a_gpu():
    raise AssertionError("ran without PyTorch")

def test_anywhere():
    pass
"""


@pytest.mark.parametrize(
    "error", ["ModuleNotFoundError(\"No module named 'torch'\")", "OSError('libcudart.so.13: cannot open')"]
)
def test_without_pytorch_gpu_tests_are_skipped_and_the_others_run(tmp_path: Path, error: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "no_torch.py").write_text(BLOCKER.format(error=error))
    (tmp_path / "test_small.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no_torch", "-rs", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "needs PyTorch: " in done.stdout


SPEED = """
import pytest

@pytest.mark.parametrize("limit", [1e-9, 60])
def test_speed(benchmark, require_within, limit):
    benchmark.pedantic(sum, args=(range(1000),), rounds=2)
    require_within(benchmark, limit)
"""


@pytest.mark.parametrize(
    ("option", "outcome"),
    [
        ("--benchmark-only", "1 failed, 1 passed"),
        ("--benchmark-enable", "2 passed"),
        ("--benchmark-disable", "2 passed"),
    ],
)
def test_speed_limits_are_asserted_under_benchmark_only(tmp_path: Path, option: str, outcome: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_speed.py").write_text(SPEED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", option, "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert outcome in done.stdout, done.stdout + done.stderr
    assert ("the best of 2 rounds took" in done.stdout) == ("failed" in outcome)
