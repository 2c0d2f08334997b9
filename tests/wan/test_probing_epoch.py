"""Solo times are taken among an epoch's steps, which do not notice."""

from __future__ import annotations

from tests.wan import epoch_ranks, ranks


def test_solo_passes_come_among_the_steps_and_change_nothing():
    ranks.run(epoch_ranks.solo_passes_among_steps, 1)
