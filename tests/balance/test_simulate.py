"""Step times and metrics of simulated epochs, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from repro.balance import metrics
from repro.balance.cost import reference_wan14b
from repro.balance.policies import EqualToken, EqualTokenSameBucket
from repro.balance.schedule import ABSENT, Layout, Schedule
from repro.balance.simulate import Communication, simulate, simulate_epochs
from repro.corpus.mixes import named
from repro.corpus.shapes import Corpus, Shape


class PerToken:
    """A second for every thousand tokens."""

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.asarray(batch, np.float64) * np.asarray(tokens, np.float64) / 1_000


COST = PerToken()
SHAPES = (Shape(1, 16, 16), Shape(5, 16, 16))
CORPUS = Corpus("two", "", SHAPES, np.array([1_000, 2_000]), np.array([0, 0, 0, 0, 1, 1], dtype=np.int32))
# Step 0: 2 images | 1 clip, then 1 image | 1 clip. Step 1: 1 image | filler.
SCHEDULE = Schedule(
    CORPUS,
    np.array([[[0, 1], [0, 1]], [[0, 0], [ABSENT, ABSENT]]], dtype=np.int32),
    np.array([[[2, 1], [1, 1]], [[1, 0], [0, 0]]], dtype=np.int32),
    np.arange(6),
)


@pytest.mark.parametrize(("sync", "seconds"), [("micro_batch", [2 + 2, 1]), ("step", [4, 1])])
def test_ranks_wait_for_the_slowest_where_they_meet(sync: str, seconds: list[float]) -> None:
    result = simulate(SCHEDULE, COST, Layout(2, 2_000, 2, sync))  # type: ignore[arg-type]
    assert result.step_seconds.tolist() == seconds
    assert result.samples_per_s == pytest.approx(6 / 5)
    assert result.tokens_per_s == pytest.approx(8_000 / 5)
    assert result.share_of_perfect == pytest.approx(8 / (2 * 5))
    assert result.samples_per_step == 3


def test_imbalances_are_told_apart() -> None:
    seconds = metrics.compute_seconds(SCHEDULE, COST)
    assert seconds.tolist() == [[[2, 2], [1, 2]], [[1, 1], [0, 0]]]  # the filler costs what one sample costs
    at_slots = metrics.meetings(seconds, "micro_batch")
    assert at_slots.tolist() == [[2, 2], [1, 2], [1, 1]]
    assert metrics.rank_cv(at_slots) == pytest.approx([0, 1 / 3, 0])
    assert metrics.bubble(at_slots) == pytest.approx(5 / 4.5 - 1)
    assert metrics.bubble(metrics.meetings(seconds, "step")) == pytest.approx(5 / 4.5 - 1)
    assert metrics.variation(np.array([4.0, 1.0])) == pytest.approx(0.6)
    # Micro-batches of 2, 2, 1, 2 and 1 seconds, the filler left out.
    assert metrics.bucket_cv(SCHEDULE, seconds) == pytest.approx(np.std([2, 2, 1, 2, 1]) / 1.6)
    assert metrics.memory_use(SCHEDULE, 2_000) == pytest.approx((1 + 1 + 0.5 + 0) / 4)
    assert metrics.pinned_share(SCHEDULE) == pytest.approx(4 / 5)


def test_mix_distance_is_total_variation_over_samples() -> None:
    # The corpus has 2/3 images; step 0 has 3 of 5, step 1 has 1 of 1.
    assert metrics.mix_distance(SCHEDULE) == pytest.approx([2 / 3 - 3 / 5, 1 / 3])


def test_communication_is_hidden_as_far_as_assumed() -> None:
    moved = Communication(8e9, 4e9, all_gather=4e9, reduce_scatter=2e9)
    assert moved.seconds(2, "micro_batch") == pytest.approx(0.5 * (2 * 2 + 2))
    assert moved.seconds(2, "step") == pytest.approx(0.5 * (2 + 2))
    assert moved.seconds(1, "step") == 0
    layout = Layout(2, 2_000, 2)
    hidden = simulate(SCHEDULE, COST, layout, moved)
    assert hidden.step_seconds.tolist() == [3 + 3, 3]  # three seconds of collectives in every slot, two of compute
    shown = simulate(SCHEDULE, COST, layout, Communication(8e9, 4e9, 4e9, 2e9, overlap=0.0))
    assert shown.step_seconds.tolist() == [4 + 2 * 3, 1 + 3]
    with pytest.raises(ValueError, match=r"overlap must lie in 0\.\.1, got 2"):
        Communication(1, 1, 1, 1, overlap=2)


def test_faster_than_perfect_is_an_error() -> None:
    class Quantised(PerToken):
        def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
            return super().seconds(batch, tokens) * np.where(np.asarray(batch) == 2, 3.0, 1.0)

    with pytest.raises(ValueError, match=r"share of perfect balance is 2\.0+, above 1"):
        schedule = EqualToken(1_000).schedule(CORPUS, Layout(1, 2_000))
        simulate(schedule, Quantised(), Layout(1, 2_000))
    with pytest.raises(ValueError, match="schedule is for 2 ranks"):
        simulate(SCHEDULE, COST, Layout(3, 2_000, 2))


def test_one_bucket_for_all_is_perfect_balance_and_one_bucket_a_step() -> None:
    corpus, cost = named("wan-uniform", samples=48_000), reference_wan14b()
    result = simulate(EqualTokenSameBucket(48_000).schedule(corpus, Layout(8, 48_000)), cost, Layout(8, 48_000))
    assert result.share_of_perfect > 0.995  # all but the tail
    # A step is one of ten buckets, equally often: the mean of 1 - share is 1 - 1/10.
    assert result.mix_distance == pytest.approx(0.9, abs=0.01)


def test_equal_token_on_16_ranks_waits_as_the_order_statistics_say() -> None:
    corpus, cost = named("wan-uniform", samples=96_000), reference_wan14b()
    result = simulate(EqualToken(48_000).schedule(corpus, Layout(16, 48_000)), cost, Layout(16, 48_000))
    seconds = np.sort(cost.seconds(48_000 // corpus.tokens, corpus.tokens))
    chances = np.diff((np.arange(11) / 10) ** 16)  # of each of ten equally frequent costs being the largest of 16
    assert result.share_of_perfect == pytest.approx(seconds.mean() / (seconds @ chances), rel=0.01)
    assert result.step_cv == pytest.approx(
        np.sqrt(seconds**2 @ chances - (seconds @ chances) ** 2) / (seconds @ chances), rel=0.1
    )


def test_epochs_are_paired_by_seed() -> None:
    corpus, layout = named("wan-uniform", samples=3_000), Layout(4, 48_000)
    epochs = simulate_epochs(EqualToken(48_000), corpus, layout, reference_wan14b(), seeds=(3, 5))
    alone = simulate(EqualToken(48_000).schedule(corpus, layout, seed=5), reference_wan14b(), layout)
    assert epochs.samples("samples_per_s")[1] == alone.samples_per_s
    assert epochs.mean("rank_cv") == pytest.approx(epochs.samples("rank_cv").mean())
    with pytest.raises(KeyError):
        epochs.samples("step_seconds")
