"""Gradients of the sharded engine against one process that sees every sample of the step alone."""

from __future__ import annotations

import pytest

from repro.balance import policies
from tests.wan import gradient_ranks, ranks


def test_every_policy_and_sync_on_two_ranks_has_the_gradient_of_one_process():
    """Relative error within rounding: 1e-12 in float64, 1e-5 in float32, for other orders of summation."""
    ranks.run(gradient_ranks.stand_in, 2, policies.NAMES, ("micro_batch", "step"))


def test_wan_on_two_ranks_has_the_gradient_of_one_process():
    ranks.run(gradient_ranks.wan_model, 2, ("balanced",), ("micro_batch", "step"))


def test_four_ranks_have_the_gradient_of_one_process():
    ranks.run(gradient_ranks.stand_in, 4, ("balanced",), ("micro_batch", "step"))


def test_batch_means_are_another_gradient_where_batch_sizes_differ():
    """The bars above can tell a wrong weighting apart."""
    ranks.run(gradient_ranks.mixed_shapes, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_wan_on_gpus_has_the_gradient_of_one_process(count):
    ranks.run_on_gpus(gradient_ranks.on_gpus, count)
