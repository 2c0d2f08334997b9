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
def target(request: pytest.FixtureRequest, poisoned_memory: None) -> tuple[str, str]:
    """Device and `impl` argument; on CPU `impl` changes nothing. Outputs are poisoned."""
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
def cuda(poisoned_memory: None) -> str:
    """For tests of what only a GPU has; mark them `gpu`. Outputs are poisoned."""
    _require_kernels()
    return "cuda"


@pytest.fixture
def poisoned_memory():
    """Fill fresh memory with NaN (integers: all ones), so that an element that nobody wrote shows."""
    # A side effect of this mode; the rest of it is of no interest, so what it cannot do is only warned of.
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def _require_kernels() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # The composite would pass most of these tests too: they must not pass without the kernels.
    assert build.ensure_loaded(), build.failure()
