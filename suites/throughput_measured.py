"""Whole epochs of the trainer under every policy and AdaLN, measured step by step, and replayed from solo times.

wan-uniform, and on several GPUs the worst mix, scaled to what a sitting of minutes holds: Wan 1.3B's widths with LAYERS
of its 30 blocks, so that a micro-batch of the published 48,000 tokens takes a fifth of what it takes at full depth.
Ratios between shapes stay, as all blocks are alike; what does not grow with depth (embeddings, head, update) weighs
five times as much. Policies get the same samples, and costs fitted to the solo times of the first case, `calibration`;
AdaLNs get the same schedules. An epoch is short, so each bucket has whole micro-batches of the baseline's, ROUNDS of
them a rank: of thousands of steps, partial ones would be a handful, of twenty they would be a third.

Columns: `repro.balance.campaign.PARAMETERS`, layers.
Metrics of `calibration`: solo_at_BxS (ms, forward and backward of B samples of S tokens on all ranks at once). Of all
others: step_at_t, replay_at_t and work_at_t (ms, step t as measured, as the simulator has it from solo times, and its
samples in perfect balance, `repro.balance.replay`), replay_error (%, mean absolute, over steps), replay_total_error
(%), rank_time and rank_wait (ms, medians of a rank's step and of its wait; samples are steps x ranks), update_time
(ms); tokens_per_s, samples_per_s (whole epoch), samples_per_step, share_of_perfect (of full micro-batches at solo times
and as many updates), mix_distance, load_cv (CV over ranks of B S^2), rank_cv (of compute time), step_cv, wait_share;
r_tokens and r_squared (over steps without partial micro-batches, correlation of step time with tokens and with the
square of the longest S); on GPUs peak_memory (GB, mean over steps and ranks) and device_use (fraction). Intervals are
bootstrapped over steps; those of throughput over steps' time a unit of work, since which samples an epoch has is no
chance.
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
from repro.measure.stats import Interval, measured, median_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile
from suites import _epochs

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "throughput_measured"
CLAIMS = ("B1", "B2", "B3", "B4", "B5", "B7", "T1", "T2", "T3", "T6")
NEEDS = (NAME,)
PARAMETERS = (*campaign.PARAMETERS, "layers")

CALIBRATION = "calibration"
MODEL, LAYERS = "wan-1.3b", 6
ROUNDS = {assumptions.CORPUS: 2, assumptions.WORST_CORPUS: 3}
"""How often an epoch holds the fewest whole equal-token micro-batches of a corpus on every rank: 20 and 18 steps."""
MATCHED_MICRO_BATCHES = 2
"""With one, it would not matter whether ranks meet in every micro-batch or once a step."""
TINY_BUDGET, TINY_SAMPLES_A_RANK = 256, 10

POLICIES = ("equal_token", "dual_constraint", "balanced")
ENGINES: tuple[tuple[str, Sync], ...] = (
    ("fused", "micro_batch"),
    ("eager", "micro_batch"),
    ("fused", "step"),
    ("wan", "micro_batch"),
    ("eager", "step"),
    ("wan", "step"),
)
"""One after the other, as an engine's solo times serve all its cases; those that decide most come first."""

WORST = {"fused": ("dual_constraint", "balanced"), "eager": ("equal_token",), "wan": ()}
"""Policies measured on the worst mix, by AdaLN: the two sides of T3, and ours."""
PASSES = 3
"""Of a solo time, its warm-up included: for estimates."""

REPLAY_BARS = {"replay_error": 5.0, "replay_total_error": 3.0}
"""% within which the simulator is taken to tell the truth; of whole epochs less, since errors of steps cancel."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Calibration, then what is compared, engine by engine.

    On several GPUs {policy} x {protocol} under every engine, and the worst mix for those that T3 is about. The first
    two engines' hold the simulator against reality, balanced against the others, and fused against eager. On one GPU,
    where nobody waits, every policy once and every AdaLN once.
    """
    if profile == "smoke":
        ranks = max(2, machine.gpu_count)
        start = Setting("equal_token", "fused", ranks, "tiny", "tiny", token_budget=TINY_BUDGET, m_mem=TINY_BUDGET)
        return [_case(replace(start, policy=p), 1, 3.0) for p in (CALIBRATION, *POLICIES)]
    if not machine.has_gpu:
        return []  # a CPU's times say nothing about training
    start = Setting(CALIBRATION, "fused", machine.gpu_count, model=MODEL)
    settings = _settings(start) if machine.gpu_count > 1 else _alone(start)
    known: dict[tuple[str, str], set[tuple[int, int]]] = {}
    return [_case(s, LAYERS, _seconds(s, known)) for s in (start, *settings)]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """One epoch on all ranks, with solo times of its shapes that the engine has not met yet."""
    from repro.measure import stack_time
    from repro.wan import launch

    setting, layers = Setting.of(case.key), int(case.key["layers"])
    corpus = _corpus(setting)
    engine = {"model": setting.model, "layers": layers, "adaln": setting.adaln, "sync": setting.sync}
    solo = _epochs.calibration_shapes(corpus, setting.token_budget, setting.m_mem)
    if setting.policy == CALIBRATION:
        shapes = [[[s.frames, s.height, s.width], b] for k, b in solo for s in [corpus.shapes[k]]]
        call = "solo_times"
        arguments: dict[str, Any] = {"setting": engine, "shapes": shapes}
    else:
        policy = _epochs.policy(setting, corpus, _costs(inputs, layers))
        schedule = policy.schedule(corpus, setting.layout)
        solo = _epochs.wanted(schedule, setting)
        call, arguments = "epoch", _epochs.question(schedule, solo, engine)
    stack_time.free()  # another suite's, in this process
    try:
        ranks = launch.ranks(setting.ranks, "cuda" if machine.has_gpu else "cpu")
        answer = ranks.ask(f"repro.wan.probing_epoch:{call}", arguments, launch.patience(case.seconds))
    except launch.RanksError as error:
        if error.raised != "OutOfMemoryError":
            raise
        raise CaseSkipped(f"{layers} layers of {setting.model} on {setting.ranks} ranks: {error}") from error
    seed = seed_text(NAME, case.key)
    if setting.policy == CALIBRATION:
        return [
            measured(f"solo_at_{b}x{corpus.tokens[k]}", "ms", median_interval(ms, seed), ms)
            for (k, b), passes in zip(solo, answer["passes"], strict=True)
            for ms in [1e3 * np.array(passes)]
        ]
    full = _epochs.batches(policy, corpus, setting.m_mem)
    memory = machine.memory_bytes if machine.has_gpu else None
    return _epochs.Epoch(setting, schedule, full, solo, answer).rows(seed, memory)


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """T6 from measured steps; the other claims' effects on these few GPUs and steps, which decide nothing.

    B1 and B2 have 20 steps here, and a thousand in `block_time`, drawn from measured times.
    """
    own = rows[rows["suite"] == NAME]
    if own.empty:
        return []
    ranks, layers = (int(own[name].max()) for name in ("ranks", "layers"))
    base = Setting(*assumptions.BASELINE, ranks, model=MODEL)
    about = _about(base, layers)
    found = _correlations(own, base, about)
    fused = {p: _gain(own, replace(base, policy=p), replace(base, policy=p, adaln="fused")) for p in POLICIES}
    if (gained := fused["equal_token"]) is not None:
        told = ", ".join(f"{p} {_percent(g)}" for p, g in fused.items() if g is not None)
        wan = _gain(own, replace(base, adaln="wan"), replace(base, adaln="fused"))
        note = (
            f"whole steps, update included, the same schedule on both sides: {about}; over eager: {told}; over Wan's "
            f"own fp32 formula (equal_token): {_percent(wan)}; blocks are 1,536 wide, and wider ones have less of it"
        )
        values = [_row(own, replace(base, adaln=a), "tokens_per_s") for a in ("eager", "fused")]
        found.append(Evidence("T6", gained.value, gained.low, gained.high, "measured", *_values(values), note=note))
    return found + (_beside(own, base, about) if ranks > 1 else [])


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device throughput and balance of all cells, and steps against their replay; then all devices."""
    from suites import _epoch_figures

    own = rows[(rows["suite"] == NAME) & (rows["policy"] != CALIBRATION)]
    return _epoch_figures.draw(own, REPLAY_BARS)


def _settings(start: Setting) -> Iterator[Setting]:
    matched: dict[str, Any] = {"micro_batches": MATCHED_MICRO_BATCHES, "protocol": "matched"}
    for adaln, sync in ENGINES:
        published = [replace(start, policy=p, adaln=adaln, sync=sync) for p in POLICIES]
        even = [replace(s, **matched, m_mem=mixes.TOKEN_BUDGET) for s in published]
        if sync == "micro_batch":
            published += [replace(start, policy=p, adaln=adaln, corpus=assumptions.WORST_CORPUS) for p in WORST[adaln]]
        yield from [*even, *published] if adaln == "fused" else [*published, *even]


def _alone(start: Setting) -> Iterator[Setting]:
    for adaln, policies in (("fused", POLICIES), ("eager", POLICIES[:1]), ("wan", POLICIES[:1])):
        yield from (replace(start, policy=p, adaln=adaln) for p in policies)


def _seconds(setting: Setting, known: dict[tuple[str, str], set[tuple[int, int]]]) -> float:
    """Estimate on H200s: blocks at 430 TFLOP/s or launch-bound, ranks busy for 85%, 60 ms an update.

    known: shapes whose solo times an engine has; kept up to date.
    """
    corpus, ranks = _corpus(setting), setting.ranks
    tokens, full = corpus.tokens, np.maximum(1, setting.token_budget // corpus.tokens)

    def once(batch: int, tokens: int) -> float:
        return max(4 * LAYERS * float(MODELS[setting.model].forward_flops(batch, tokens)) / 430e12, 9e-3 * LAYERS)

    begins = 0.0 if (setting.adaln, setting.sync) in known else 6.0 if known else 15.0  # an engine; at first ranks too
    of_engine = known.setdefault((setting.adaln, setting.sync), set())
    if setting.policy == CALIBRATION:
        wanted = {(b, int(tokens[k])) for k, b in _epochs.calibration_shapes(corpus, *_limits(setting))}
        epoch = 0.0
    else:
        wanted = {(max(1, limit // s), s) for limit in _limits(setting) for s in tokens.tolist()}
        micro_batches = corpus.counts / full / ranks
        epoch = sum(n * (once(b, s) / 0.85 + 0.06) for n, b, s in zip(micro_batches, full, tokens, strict=True))
    solo = sum((PASSES * once(*shape) for shape in sorted(wanted - of_engine)), 0.0)
    of_engine |= wanted
    return round(float(begins + solo + epoch), 1)


def _limits(setting: Setting) -> tuple[int, int]:
    return setting.token_budget, setting.m_mem


def _case(setting: Setting, layers: int, seconds: float) -> Case:
    key = setting.key if setting.policy != CALIBRATION else {**setting.key, "m_comp": ""}
    return Case({**key, "layers": layers}, seconds)


def _about(base: Setting, layers: int) -> str:
    return (
        f"{MODEL} with {layers} of 30 blocks, {base.corpus}, one epoch of {_corpus(base).samples} samples on "
        f"{base.ranks} GPU{'s' if base.ranks > 1 else ''}"
    )


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
    own = own[own["metric"].str.startswith("solo_at_")] if len(own) else own
    if own.empty:
        raise CaseSkipped("its first case, calibration, is not recorded here")
    shapes = [tuple(map(int, m.removeprefix("solo_at_").split("x"))) for m in own["metric"]]
    times = tuple((b, s, float(v) / 1e3) for (b, s), v in sorted(zip(shapes, own["value"], strict=True)))
    return _epochs.costs(times, layers, " ".join(sorted(set(own["run_id"].astype(str)))))


def _row(own: pd.DataFrame, setting: Setting, metric: str) -> pd.Series | None:
    key = {name: v for name, v in setting.key.items() if v != ""}
    at = own[own["metric"] == metric]
    for name, value in key.items():
        at = at[at[name] == value]
    return None if at.empty else at.iloc[-1]


def _steps(own: pd.DataFrame, setting: Setting) -> _epochs.Steps | None:
    """Steps in their order, None where they were not measured."""
    found: dict[str, list[float]] = {"step": [], "work": []}
    for name, values in found.items():
        while (row := _row(own, setting, f"{name}_at_{len(values)}")) is not None:
            values.append(float(row["value"]))
    return _epochs.Steps(np.array(found["step"]), np.array(found["work"])) if found["step"] else None


def _gain(own: pd.DataFrame, base: Setting, treated: Setting) -> Interval | None:
    before, after = _steps(own, base), _steps(own, treated)
    if before is None or after is None:
        return None
    paired = replace(base, adaln=treated.adaln) == treated
    return _epochs.gain(before, after, paired, f"{NAME}/{base}/{treated}")


def _correlations(own: pd.DataFrame, base: Setting, about: str) -> list[Evidence]:
    found: list[Evidence] = []
    for claim, metric, what in (
        ("B1", "r_tokens", "tokens of all ranks"),
        ("B2", "r_squared", "square of the longest sample's S, which the step waits for"),
    ):
        row = _row(own, base, metric)
        if row is None:
            continue
        others = [
            _row(own, replace(base, adaln=adaln, sync=sync), metric) for adaln, sync in ENGINES[:1] + ENGINES[3:4]
        ]
        told = ", ".join(f"{float(r['value']):.2f} with {r['adaln']} AdaLN" for r in others if r is not None)
        note = (
            f"Pearson R of step time and {what} over {int(row['n'])} measured equal-token steps without partial "
            f"micro-batches: {about}" + (f"; {told}" if told else "")
        )
        value, low, high = (float(row[c]) for c in ("value", "ci_low", "ci_high"))
        found.append(Evidence(claim, value, low, high, "measured", note=note, decides=False))
    return found


def _beside(own: pd.DataFrame, base: Setting, about: str) -> list[Evidence]:
    """T1 to T3, B3, B4, B5 and B7 on the GPUs at hand, fewer than the claims speak of."""
    rule = replace(base, policy="dual_constraint")
    found = []
    whole = _gain(own, base, replace(rule, adaln="fused"))
    if whole is not None:
        values = _values([_row(own, s, "tokens_per_s") for s in (base, replace(rule, adaln="fused"))])
        ours = _gain(own, base, replace(base, policy="balanced", adaln="fused"))
        note = f"one micro-batch a step and rank, M_mem (a) {rule.m_mem:,} tokens: {about}; balanced {_percent(ours)}"
        interval = (whole.value, whole.low, whole.high)
        found += [Evidence(c, *interval, "measured", *values, note=note, decides=False) for c in ("T1", "T2")]
    found += _floor(own, replace(base, corpus=assumptions.WORST_CORPUS), int(own["layers"].max()))
    for claim, metric, falls in (
        ("B3", "load_cv", True),
        ("B4", "step_cv", True),
        ("B5", "peak_memory", False),
        ("B7", "rank_cv", True),
    ):
        pair = [_row(own, s, metric) for s in (base, rule)]
        if pair[0] is None or pair[1] is None or not float(pair[0]["value"]) > 0:
            continue
        change = _change(pair[0], pair[1]).map(_fall if falls else _rise)
        factor = 1.0 if metric == "peak_memory" else 100.0
        before, after = (None if v is None else factor * v for v in _values(pair))
        note = f"{metric} with one micro-batch a step, M_mem (a) {rule.m_mem:,} tokens: {about}"
        interval = (change.value, change.low, change.high)
        found.append(Evidence(claim, *interval, "measured", before, after, note=note, decides=False))
    return found


def _floor(own: pd.DataFrame, base: Setting, layers: int) -> list[Evidence]:
    """T3 on the GPUs at hand: tokens/s of an epoch of the worst mix."""
    whole = replace(base, policy="dual_constraint", adaln="fused")
    gained = _gain(own, base, whole)
    if gained is None:
        return []
    floor = gained.map(lambda percent: 1 + percent / 100)
    ours = _gain(own, base, replace(whole, policy="balanced"))
    note = (
        f"one micro-batch a step and rank, M_mem (a) {whole.m_mem:,} tokens: {_about(base, layers)}; balanced "
        f"{_percent(ours)}"
    )
    values = _values([_row(own, s, "tokens_per_s") for s in (base, whole)])
    return [Evidence("T3", floor.value, floor.low, floor.high, "measured", *values, note=note, decides=False)]


def _change(before: pd.Series, after: pd.Series) -> Interval:
    """after / before, errors of both added in quadrature on a logarithmic scale."""
    center = float(after["value"]) / float(before["value"])
    halves = [
        max(np.log(max(float(r["ci_high"]), 1e-9) / v), np.log(v / max(float(r["ci_low"]), 1e-9)))
        for r in (before, after)
        for v in [max(float(r["value"]), 1e-9)]
    ]
    half = float(np.hypot(*halves))
    return Interval(center, center * float(np.exp(-half)), center * float(np.exp(half)), int(after["n"]))


def _rise(ratio: float) -> float:
    return 100 * (ratio - 1)


def _fall(ratio: float) -> float:
    return 100 * (1 - ratio)


def _values(rows: list[pd.Series | None]) -> tuple[float | None, float | None]:
    before, after = (None if r is None else float(r["value"]) for r in rows)
    return before, after


def _percent(found: Interval | None) -> str:
    return "unknown" if found is None else f"{found.value:+.1f}% [{found.low:.1f}, {found.high:.1f}]"
