"""The kernel suites under pytest-benchmark (`pytest --benchmark-only`): the smoke grid of this machine, checked.

Without `--benchmark-only` each case runs a few rounds, as a test.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from repro.adaln import build  # noqa: E402 - these import torch
from repro.measure import benchmarking, kernel_rows, norm_modulate, timing  # noqa: E402
from repro.measure.machine import read_machine  # noqa: E402
from repro.suite import Case  # noqa: E402
from suites import kernel_speed  # noqa: E402

CASES = kernel_speed.cases("smoke", read_machine())
FEW = 3


def _name(case: Case) -> str:
    return "-".join(str(case.key[p]) for p in ("pass", "dtype", "tokens", "dim", "impl"))


@pytest.mark.benchmark(timer=benchmarking.timer())
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_kernel(benchmark: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """Right before and after the rounds, on new inputs after; device time on a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    impl, direction, problem = kernel_rows.parse(case)
    if impl in norm_modulate.OWN and device.type == "cuda" and not build.ensure_loaded():
        pytest.skip(f"the CUDA kernels are not there: {build.failure()}")
    benchmark.group = "-".join(str(case.key[p]) for p in ("pass", "dtype", "tokens", "dim"))
    benchmark.extra_info.update(impl=impl, necessary_bytes=problem.traffic(direction))
    rounds = benchmarking.ROUNDS if request.config.getoption("benchmark_only") else FEW
    with timing.work_stream(device), norm_modulate.retained_graphs():
        benchmarking.run(benchmark, norm_modulate.subjects(impl, direction, problem, device), device, rounds)
