"""Whole epochs of the trainer under every policy and AdaLN, measured step by step, and replayed from solo times.

wan-uniform, and on several GPUs the worst mix, scaled to what a sitting of minutes holds: on fewer than eight GPUs Wan
1.3B's widths with 6 of its 30 blocks, so that a micro-batch of the published 48,000 tokens takes a fifth of what it
takes at full depth; on eight or more, whose epochs decide claims, the 14B widths that these assume, with 2 of 40
blocks. Ratios between shapes stay, as all blocks are alike; what does not grow with depth (embeddings, head, update)
weighs five or twenty times as much. Policies get the same samples, and costs fitted to the solo times of the first
case, `calibration`; AdaLNs get the same schedules. An epoch is short, so each bucket has whole micro-batches of the
baseline's, ROUNDS of them a rank: of thousands of steps, partial ones would be a handful, of twenty they would be a
third.

Columns: `repro.balance.campaign.PARAMETERS`, layers.
Metrics of `calibration`: solo_at_BxS (ms, forward and backward of B samples of S tokens on all ranks at once). Of all
others: solo_at_BxS of their shapes, on the same engine; step_at_t, replay_at_t and work_at_t (ms, step t as measured,
as the simulator has it from solo times, and its samples in perfect balance, `repro.balance.replay`), replay_error (%,
mean absolute, over steps), replay_total_error (%), rank_time and rank_wait (ms, medians of a rank's step and of its
wait; samples are steps x ranks), update_time (ms); tokens_per_s, samples_per_s (whole epoch), samples_per_step,
share_of_perfect (of full micro-batches at solo times and as many updates), mix_distance, load_cv (CV over ranks of B
S^2), rank_cv (of compute time), step_cv, wait_share; r_tokens and r_squared (over steps without partial micro-batches,
correlation of step time with tokens and with the square of the longest S); on GPUs peak_memory (GB, mean over steps and
ranks) and device_use (fraction). Intervals are bootstrapped over steps; those of throughput over steps' time a unit of
work, since which samples an epoch has is no chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions, campaign
from repro.balance.campaign import Setting
from repro.balance.models import MODELS
from repro.balance.types import Sync
from repro.corpus import mixes
from repro.corpus.shapes import Corpus
from repro.measure.stats import measured, median_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile
from suites import _epoch_claims, _epochs, _ranks
from suites._epochs import CALIBRATION, POLICIES, SOLO, scaled_model, solo_shape

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "throughput_measured"
CLAIMS = ("B1", "B2", "B3", "B4", "B5", "B7", "T1", "T2", "T3", "T6")
NEEDS = (NAME,)
PARAMETERS = (*campaign.PARAMETERS, "layers")

ROUNDS = {assumptions.CORPUS: 2, assumptions.WORST_CORPUS: 3}
"""How often an epoch holds the fewest whole equal-token micro-batches of a corpus on every rank: 20 and 18 steps."""
MATCHED_MICRO_BATCHES = 2
"""With one, it would not matter whether ranks meet in every micro-batch or once a step."""
TINY_BUDGET, TINY_SAMPLES_A_RANK = 256, 10

ENGINES: tuple[tuple[str, Sync], ...] = (
    ("fused", "micro_batch"),
    ("eager", "micro_batch"),
    ("fused", "step"),
    ("wan", "micro_batch"),
    ("eager", "step"),
    ("wan", "step"),
)
"""One after the other, as an engine serves all its cases; those that decide most come first."""

WORST = {"fused": ("dual_constraint", "balanced"), "eager": ("equal_token",), "wan": ()}
"""Policies measured on the worst mix, by AdaLN: the two sides of T3, and ours."""
PASSES = 3
"""Of a calibrated solo time, its warm-up included: for estimates."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Calibration, then what is compared, engine by engine.

    On several GPUs {policy} x {protocol} under every engine, and the worst mix for those that T3 is about. The first
    two engines' hold the simulator against reality, balanced against the others, and fused against eager. On as many
    GPUs as claims speak of, what decides those comes first, then the rest for as long as there is time. On one GPU,
    where nobody waits, every policy once and every AdaLN once.
    """
    if profile == "smoke":
        ranks = machine.gpu_count if machine.has_gpu else 2
        start = Setting("equal_token", "fused", ranks, "tiny", "tiny", token_budget=TINY_BUDGET, m_mem=TINY_BUDGET)
        return [_case(replace(start, policy=p), 1, 3.0) for p in (CALIBRATION, *POLICIES)]
    if not machine.has_gpu:
        return []  # a CPU's times say nothing about training
    model, layers = scaled_model(machine.gpu_count)
    start = Setting(CALIBRATION, "fused", machine.gpu_count, model=model)
    settings = _settings(start) if machine.gpu_count > 1 else _alone(start)
    known: dict[tuple[str, str], set[tuple[int, int]]] = {}
    return [_case(s, layers, _seconds(s, layers, known)) for s in (start, *settings)]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """One epoch on all ranks, with solo times of its shapes among its steps."""
    setting, layers = Setting.of(case.key), int(case.key["layers"])
    corpus = _corpus(setting)
    engine = {"model": setting.model, "layers": layers, "adaln": setting.adaln, "sync": setting.sync}
    solo = _epochs.calibration_shapes(corpus, setting.token_budget, setting.m_mem)
    if setting.policy == CALIBRATION:
        shapes = [[[s.frames, s.height, s.width], b] for k, b in solo for s in [corpus.shapes[k]]]
        call = "solo_times"
        arguments: dict[str, Any] = {"setting": engine, "shapes": shapes}
    else:
        costs = _costs(inputs, layers)
        policy = _epochs.policy(setting, corpus, costs)
        schedule = policy.schedule(corpus, setting.layout)
        solo = _epochs.wanted(schedule, setting)
        call, arguments = "epoch", _epochs.question(schedule, solo, costs.table, engine)
    what = f"{layers} layers of {setting.model} on {setting.ranks} ranks"
    answer = _ranks.ask(setting.ranks, f"repro.wan.probing_epoch:{call}", arguments, case, machine, what)
    seed = seed_text(NAME, case.key)
    if setting.policy == CALIBRATION:
        return [
            measured(f"{SOLO}{b}x{corpus.tokens[k]}", "ms", median_interval(ms, seed), ms)
            for (k, b), passes in zip(solo, answer["passes"], strict=True)
            for ms in [1e3 * np.array(passes)]
        ]
    full = _epochs.batches(policy, corpus, setting.m_mem)
    memory = machine.memory_bytes if machine.has_gpu else None
    return _epochs.Epoch(setting, schedule, full, solo, answer).rows(seed, memory)


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B1, B2 and T6 from measured steps; other claims from as many GPUs as they speak of, from fewer beside."""
    own = rows[rows["suite"] == NAME]
    return _epoch_claims.evidence(own, lambda setting: _corpus(setting).samples) if len(own) else []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device throughput and balance of all cells, and steps against their replay; then all devices."""
    from suites import _epoch_figures

    own = rows[(rows["suite"] == NAME) & (rows["policy"] != CALIBRATION)]
    return _epoch_figures.draw(own, _epoch_claims.REPLAY_BARS)


def tell(rows: pd.DataFrame) -> dict[str, str]:
    """The simulator against these epochs, `balanced` against the other policies, fused against eager."""
    from suites import _epoch_words

    return _epoch_words.tell(rows)


def _settings(start: Setting) -> Iterator[Setting]:
    matched: dict[str, Any] = {"micro_batches": MATCHED_MICRO_BATCHES, "protocol": "matched"}
    published, even = {}, {}
    for adaln, sync in ENGINES:
        at = [replace(start, policy=p, adaln=adaln, sync=sync) for p in POLICIES]
        even[adaln, sync] = [replace(s, **matched, m_mem=mixes.TOKEN_BUDGET) for s in at]
        if sync == "micro_batch":
            at += [replace(start, policy=p, adaln=adaln, corpus=assumptions.WORST_CORPUS) for p in WORST[adaln]]
        published[adaln, sync] = at
    first, second, *others = ENGINES
    if start.ranks >= _epochs.CLAIMED_RANKS:  # both sides of a claim before all else, though an engine is made twice
        *decide, beside = published[first]
        yield from [*decide, *published[second], *even[second], *even[first], beside]
    else:
        yield from [*even[first], *published[first], *published[second], *even[second]]
    for engine in others:
        yield from [*even[engine], *published[engine]] if engine[0] == "fused" else [*published[engine], *even[engine]]


def _alone(start: Setting) -> Iterator[Setting]:
    for adaln, policies in (("fused", POLICIES), ("eager", POLICIES[:1]), ("wan", POLICIES[:1])):
        yield from (replace(start, policy=p, adaln=adaln) for p in policies)


def _seconds(setting: Setting, layers: int, known: dict[tuple[str, str], set[tuple[int, int]]]) -> float:
    """Estimate on H200s: blocks at 430 TFLOP/s or launch-bound, ranks busy for 85% or 65%, 60 ms an update.

    known: shapes that the engine at hand has run; kept up to date.
    """
    corpus, ranks = _corpus(setting), setting.ranks
    tokens, full = corpus.tokens, np.maximum(1, setting.token_budget // corpus.tokens)

    def once(batch: int, tokens: int) -> float:
        return max(4 * layers * float(MODELS[setting.model].forward_flops(batch, tokens)) / 430e12, 9e-3 * layers)

    engine, begins, busy = (setting.adaln, setting.sync), 0.0, 0.85 if ranks < _epochs.CLAIMED_RANKS else 0.65
    if engine not in known:
        begins = 6.0 if known else 15.0  # an engine; at first ranks too
        known.clear()
    of_engine = known.setdefault(engine, set())
    if setting.policy == CALIBRATION:
        wanted = {(b, int(tokens[k])) for k, b in _epochs.calibration_shapes(corpus, *_limits(setting))}
        work = PASSES * sum(once(*shape) for shape in sorted(wanted))
    else:
        wanted = {(max(1, limit // s), s) for limit in _limits(setting) for s in tokens.tolist()}
        micro_batches = corpus.counts / full / ranks
        work = sum(n * (once(b, s) / busy + 0.06) for n, b, s in zip(micro_batches, full, tokens, strict=True))
        work += sum(_epochs.passes(once(*shape)) * once(*shape) for shape in sorted(wanted))
        work += sum(once(*shape) for shape in sorted(wanted - of_engine))  # run once before the steps
    of_engine |= wanted
    return round(float(begins + work), 1)


def _limits(setting: Setting) -> tuple[int, int]:
    return setting.token_budget, setting.m_mem


def _case(setting: Setting, layers: int, seconds: float) -> Case:
    key = setting.key if setting.policy != CALIBRATION else {**setting.key, "m_comp": ""}
    return Case({**key, "layers": layers}, seconds)


def _corpus(setting: Setting) -> Corpus:
    """The same samples for all settings on as many ranks."""
    if setting.model == "tiny":
        from repro.wan.batching import tiny_corpus

        return tiny_corpus(TINY_SAMPLES_A_RANK * setting.ranks)
    of_round = sum(mixes.mix(setting.corpus).weights)  # the samples of whole equal-token micro-batches
    return mixes.named(setting.corpus, ROUNDS[setting.corpus] * setting.ranks * round(of_round))


def _costs(inputs: pd.DataFrame, layers: int) -> _epochs.Costs:
    """Fitted to this device's calibration. Raises CaseSkipped where there is none."""
    own = inputs[(inputs["suite"] == NAME) & (inputs["policy"] == CALIBRATION)] if len(inputs) else inputs
    own = own[own["metric"].str.startswith(SOLO)] if len(own) else own
    if own.empty:
        raise CaseSkipped("its first case, calibration, is not recorded here")
    shapes = [solo_shape(str(m)) for m in own["metric"]]
    times = tuple((b, s, float(v) / 1e3) for (b, s), v in sorted(zip(shapes, own["value"], strict=True)))
    return _epochs.costs(times, layers, " ".join(sorted(set(own["run_id"].astype(str)))))
