"""The balanced policy: near perfect, the corpus' mix kept, nobody starved, as far as the reference case goes."""

from __future__ import annotations

import numpy as np
import pytest

from repro.balance import metrics
from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.policies import EqualToken, LongestFirst
from repro.balance.schedule import ABSENT, Layout
from repro.balance.simulate import simulate
from repro.corpus.mixes import named
from repro.corpus.shapes import Corpus, Shape, Tokenizer

COST = reference_wan14b()
M_MEM = 48_000
SAMPLES = {8: 60_000, 16: 100_000, 64: 300_000}


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize(("ranks", "gain"), [(8, 1.5), (16, 1.68), (64, 1.68)])
def test_reference_case_is_near_perfect_and_keeps_the_mix(ranks: int, gain: float, micro_batches: int) -> None:
    corpus, layout = named("wan-uniform", samples=SAMPLES[ranks]), Layout(ranks, M_MEM, micro_batches)
    schedule = Balanced(M_MEM, COST).schedule(corpus, layout)
    ours = simulate(schedule, COST, layout)
    drawn = simulate(EqualToken(M_MEM).schedule(corpus, layout), COST, layout)
    assert ours.share_of_perfect >= 0.98
    assert ours.samples_per_s >= gain * drawn.samples_per_s
    assert ours.rank_cv <= 0.03
    assert ours.mix_distance <= (drawn.mix_distance + 0.03 if micro_batches == 8 else 0.25)
    assert ours.backlog_steps <= 2
    assert 0 < ours.max_wait_steps <= schedule.wait_limit_steps
    assert ours.samples_per_step == pytest.approx(drawn.samples_per_step, rel=0.01)


@pytest.mark.parametrize(("ranks", "gain"), [(8, 1.4), (16, 1.6)])
def test_one_micro_batch_a_step_is_near_perfect_too(ranks: int, gain: float) -> None:
    corpus, layout = named("wan-uniform", samples=30_000), Layout(ranks, M_MEM)
    ours = simulate(Balanced(M_MEM, COST).schedule(corpus, layout), COST, layout)
    drawn = simulate(EqualToken(M_MEM).schedule(corpus, layout), COST, layout)
    assert ours.samples_per_s >= gain * drawn.samples_per_s
    assert ours.backlog_steps <= 4
    assert ours.mix_distance < 0.8  # a step of one bucket is 0.9 away on average


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_meeting_once_a_step_is_better_than_longest_first_at_a_smaller_distance(micro_batches: int) -> None:
    corpus, layout = named("wan-uniform", samples=60_000), Layout(16, M_MEM, micro_batches, "step")
    ours = simulate(Balanced(M_MEM, COST).schedule(corpus, layout), COST, layout)
    greedy = simulate(LongestFirst(M_MEM, COST).schedule(corpus, layout), COST, layout)
    assert ours.share_of_perfect >= 0.98
    assert ours.samples_per_s > greedy.samples_per_s
    assert ours.mix_distance < greedy.mix_distance


def test_more_weight_on_the_mix_trades_balance_for_it() -> None:
    corpus, layout = named("wan-uniform", samples=60_000), Layout(16, M_MEM, 4)
    policies = (Balanced(M_MEM, COST, mix_weight=weight) for weight in (0.01, 1.0))
    fast, mixed = (simulate(policy.schedule(corpus, layout), COST, layout) for policy in policies)
    assert mixed.mix_distance < 0.6 * fast.mix_distance
    assert mixed.share_of_perfect < fast.share_of_perfect


def test_a_longer_run_does_not_wait_longer() -> None:
    waits, backlogs = [], []
    for samples in (50_000, 200_000):
        schedule = Balanced(M_MEM, COST).schedule(named("wan-uniform", samples=samples), Layout(64, M_MEM, 4))
        waits.append(schedule.max_wait_steps)
        backlogs.append(schedule.backlog_steps)
    assert waits[1] <= waits[0] + 2
    assert backlogs[1] == pytest.approx(backlogs[0], abs=0.1)


def test_a_tighter_wait_is_kept_or_refused() -> None:
    corpus, layout = named("wan-uniform", samples=10_000), Layout(8, M_MEM)
    free = Balanced(M_MEM, COST).schedule(corpus, layout)
    tight = Balanced(M_MEM, COST, max_wait_steps=15).schedule(corpus, layout)
    assert free.max_wait_steps > 12
    assert tight.max_wait_steps <= tight.wait_limit_steps == 15
    with pytest.raises(ValueError, match="max_wait_steps must be at least 15"):
        Balanced(M_MEM, COST, max_wait_steps=14).schedule(corpus, layout)


def test_backlog_can_be_asked_for() -> None:
    corpus, layout = named("wan-uniform", samples=30_000), Layout(16, M_MEM)
    small, large = (Balanced(M_MEM, COST, backlog_steps=b).schedule(corpus, layout).backlog_steps for b in (1.0, 6.0))
    assert small < 2 < 5 < large


def _corpus(*counts: int, frames: tuple[int, ...] = (1, 33, 81)) -> Corpus:
    shapes = tuple(Shape(f, 480, 832) for f in frames[: len(counts)])
    tokens = np.array([Tokenizer().tokens(s) for s in shapes])
    return Corpus("small", "", shapes, tokens, np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def test_fewer_clips_than_ranks_are_spread_and_filled_up() -> None:
    schedule = Balanced(M_MEM, COST).schedule(_corpus(2, 1), Layout(8, M_MEM, 4))
    assert schedule.bucket.shape[0] == 1
    assert schedule.slots_of_step.tolist() == [1]
    assert sorted(schedule.batch.ravel()[:8]) == [0] * 5 + [1] * 3
    assert schedule.fillers == 5


def test_the_last_slot_is_cut_anew_for_idle_ranks() -> None:
    # 300 images are ten micro-batches of 30 on eight ranks: two are left for the second slot, 60 samples on 8 ranks.
    schedule = Balanced(M_MEM, COST).schedule(_corpus(300), Layout(8, M_MEM, 2))
    assert schedule.fillers == 0
    assert sorted(schedule.batch[schedule.batch < 30]) == [7] * 4 + [8] * 4


def test_the_last_steps_leave_no_dear_slot_half_empty_and_a_cheap_one_full() -> None:
    # 106 clips on 16 ranks are 6 slots and 10 micro-batches: the seventh slot has room for images, which shortens the
    # last slot of images. Perfect but for that: 7 slots of clips, and the images beside them or spread over 16 ranks.
    corpus, layout = named("worst-case", samples=16_000), Layout(16, M_MEM)
    clips = int(corpus.counts[1])
    images = int(corpus.counts[0]) - (16 - clips % 16) * 30
    slots = images // (16 * 30)
    last = -(-(images - slots * 16 * 30) // 16)
    clip_slots = clips // 16 + 1
    batches, tokens = [1] * clip_slots + [30] * slots + [last], [46_800] * clip_slots + [1_560] * (slots + 1)
    best = COST.seconds(batches, tokens).sum()
    ours = simulate(Balanced(M_MEM, COST).schedule(corpus, layout), COST, layout)
    assert ours.step_seconds.sum() == pytest.approx(best)


def test_a_single_bucket_is_perfectly_balanced() -> None:
    schedule = Balanced(M_MEM, COST).schedule(_corpus(30 * 8 * 12), Layout(8, M_MEM, 4))
    assert np.all(schedule.batch == 30)
    assert schedule.steps == 3


def test_empty_buckets_are_never_costed() -> None:
    shapes = (Shape(81, 2160, 3840), Shape(1, 480, 832))
    corpus = Corpus("gap", "", shapes, np.array([680_400, 1_560]), np.ones(100, dtype=np.int32))
    layout = Layout(4, M_MEM)
    assert simulate(Balanced(M_MEM, COST).schedule(corpus, layout), COST, layout).share_of_perfect > 0.5


def test_rare_buckets_do_not_wait_for_a_full_micro_batch() -> None:
    schedule = Balanced(M_MEM, COST).schedule(_corpus(60_000, 3, 2_000), Layout(8, M_MEM, 2))
    # Its three samples make one full micro-batch, but the first of them is used long before the last is drawn.
    assert schedule.batch[schedule.bucket == 1].max() < 3
    assert schedule.max_wait_steps <= schedule.wait_limit_steps == 40 < schedule.steps / 5


def test_many_buckets_keep_the_references_samples_a_step() -> None:
    areas = ((480, 832), (832, 480), (640, 640), (544, 720), (720, 544), (448, 896))
    shapes = tuple(Shape(f, h, w) for f in range(1, 81, 8) for h, w in areas)
    tokens = np.array([Tokenizer().tokens(s) for s in shapes])
    shares = np.random.default_rng(0).dirichlet(np.full(len(shapes), 0.7))
    buckets = np.random.default_rng(1).choice(len(shapes), 40_000, p=shares).astype(np.int32)
    corpus, layout = Corpus("many", "", shapes, tokens, buckets), Layout(16, M_MEM)
    ours = simulate(Balanced(M_MEM, COST).schedule(corpus, layout), COST, layout)
    drawn = simulate(EqualToken(M_MEM).schedule(corpus, layout), COST, layout)
    assert ours.samples_per_step == pytest.approx(drawn.samples_per_step, rel=0.01)
    assert ours.samples_per_s > 1.3 * drawn.samples_per_s


def test_slots_match_until_the_tail() -> None:
    corpus, layout = named("wan-uniform", samples=60_000), Layout(16, M_MEM, 8)
    schedule = Balanced(M_MEM, COST).schedule(corpus, layout)
    seconds = metrics.compute_seconds(schedule, COST)[:-3]
    cv = metrics.rank_cv(metrics.meetings(seconds, "micro_batch"))
    # Groups span up to 7% (1,560 to 3,600 tokens): half of that is the largest CV a slot of two costs can have.
    assert cv.max() < 0.04
    assert (schedule.bucket != ABSENT)[:-3].all()
