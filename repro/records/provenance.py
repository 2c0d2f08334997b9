"""Where a run comes from. What cannot be read is null, with the reason under "unavailable"; nothing is guessed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.measure.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {"repro": ("*.py",), "suites": ("*.py",), "csrc": ("*.cu", "*.cuh", "*.h", "*.cpp")}
_PACKAGES = (
    *("torch", "triton", "numpy", "pandas", "scipy", "nvidia-ml-py"),
    *("nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "liger-kernel", "quack-kernels", "nvidia-cutlass-dsl", "diffusers"),
)


def collect(command: Sequence[str], seed: int | None, machine: Machine) -> dict[str, Any]:
    """Source hash, commit, extension build hash, command, seed, versions and machine facts."""
    unavailable: dict[str, str] = {}

    def fact(name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as e:
            unavailable[name] = f"{type(e).__name__}: {e}"
            return None

    if seed is None:
        unavailable["seed"] = "every random draw is seeded from its case key"
    return {
        "command": list(command),
        "seed": seed,
        "source_hash": fact("source_hash", source_hash),
        "commit": fact("commit", lambda: _git("rev-parse", "HEAD")),
        "clean": fact("clean", _clean),
        "extension_hash": fact("extension_hash", _extension_hash),
        "versions": {p: fact(p, partial(importlib.metadata.version, p)) for p in _PACKAGES},
        "machine": machine.record,
        "unavailable": unavailable,
    }


def source_hash(root: Path = ROOT) -> str:
    """SHA-256 over path and content of the sources of repro, suites and csrc; works without git."""
    digest = hashlib.sha256()
    for folder, patterns in _SOURCES.items():
        for path in sorted(p for pattern in patterns for p in (root / folder).rglob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _clean() -> bool:
    """Whether the sources are as committed; results and figures, which runs themselves write, do not count."""
    _git("rev-parse", "HEAD")  # without a commit there is nothing to be as clean as
    return not _git("status", "--porcelain", "--", *(folder for folder in _SOURCES if (ROOT / folder).exists()))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"git exited with {done.returncode}"])[0])
    return done.stdout.strip()


def _extension_hash() -> str:
    from repro.adaln import build

    return build.build_hash()
