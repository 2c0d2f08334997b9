"""Every test of the op that takes `device` runs on CPU and, where there is one, on a GPU with the compiled kernels."""

from __future__ import annotations

import pytest
import torch

from repro.adaln import build


@pytest.fixture(
    params=[
        ("cpu", "fused"),
        pytest.param(("cuda", "fused"), marks=pytest.mark.gpu),
        pytest.param(("cuda", "dtile"), marks=pytest.mark.gpu),
    ],
    ids="-".join,
)
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Device and `impl` argument; on CPU `impl` changes nothing."""
    if request.param[0] == "cuda":
        _require_kernels()
    return request.param


@pytest.fixture
def device(target: tuple[str, str]) -> str:
    return target[0]


@pytest.fixture
def impl(target: tuple[str, str]) -> str:
    return target[1]


@pytest.fixture
def cuda() -> str:
    """For tests of what only a GPU has; mark them `gpu`."""
    _require_kernels()
    return "cuda"


@pytest.fixture
def poisoned_memory():
    """Fill fresh memory with NaN, so that an element that nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def _require_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # The composite would pass most of these tests too: they must not pass without the kernels.
    assert build.ensure_loaded(), build.failure()
