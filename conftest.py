"""Tests and benchmarks everywhere in the checkout: which of them this machine can run."""

from __future__ import annotations

import functools

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
