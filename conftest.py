"""Tests and benchmarks everywhere in the checkout: which of them this machine can run, and how fast they must be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


@functools.cache
def _no_gpu() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of its own that PyTorch cannot load
        return f"needs PyTorch: {error}"
    return None if torch.cuda.is_available() else "needs a CUDA device, and PyTorch sees none here"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none; PyTorch is imported only if there are such tests."""
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _no_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)  # there with pytest-benchmark only
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Name the device in the files that pytest-benchmark writes, for `python -m repro.compare`."""
    from repro.measure.machine import read_machine

    machine = read_machine()
    facts = ("gpu_name", "gpu_count", "mig_profile", "power_limit_w")
    machine_info["repro"] = {"slug": machine.slug, **{f: machine.record.get(f) for f in facts}}


@pytest.fixture
def require_within(request: pytest.FixtureRequest) -> Callable[[Any, float], None]:
    """Assert that a benchmark that has run took at most so many seconds, in its best round: others use the machine too.

    Only under `--benchmark-only`; a plain test run says nothing about speed.
    """

    def check(benchmark: Any, seconds: float) -> None:
        benchmark.extra_info["limit_seconds"] = seconds
        if request.config.getoption("benchmark_only") and benchmark.stats is not None:
            best = benchmark.stats.stats.min
            assert best <= seconds, (
                f"the best of {benchmark.stats.stats.rounds} rounds took {best:.3g} s, over {seconds} s"
            )

    return check
