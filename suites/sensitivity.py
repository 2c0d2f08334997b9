"""Where AdaptiveLoad's gain holds: gain of each policy over equal_token against what the paper leaves open.

A lattice around the base point of `repro.balance.assumptions` (wan-uniform, 14B, M_mem 1.227 x the baseline's budget,
16 ranks, one micro-batch a step): M_mem / budget from 1 to 3, ranks from 1 to 1,024, every named corpus, 1.3B and 14B;
for AdaptiveLoad as a whole (dual_constraint, fused AdaLN) also M_mem with ranks, and M_mem with M_comp. M_mem on the
paper's numbers of ranks and on the worst mix too: what the notes of T3, B3, B4, B5 and B7 say beyond the base point. A
second lattice compares policies with samples a step matched: every corpus on 2 to 1,024 ranks, four micro-batches a
step, M_mem = budget.

Columns: `repro.balance.campaign.PARAMETERS`. Metrics: gain (%, tokens/s over equal_token with eager AdaLN, seeds
paired), those of METRICS, for the paper's rule and its baseline with eager AdaLN those of EVEN, and in the second
lattice balanced_lead (%, samples/s of balanced over this policy's, seeds paired). Simulated from the device's
step times (`repro.balance.whole`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from repro.balance import assumptions, policies, whole
from repro.balance.campaign import PARAMETERS as PARAMETERS
from repro.balance.campaign import WIDE, Setting
from repro.corpus import mixes
from repro.corpus.mixes import TOKEN_BUDGET
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _campaign

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "sensitivity"
CLAIMS: tuple[str, ...] = ()
NEEDS = whole.SUITES
SIMULATED = True

RATIOS = (1.0, 1.1, assumptions.MEMORY_RISE, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""M_mem / the baseline's token budget."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
M_COMPS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""M_comp in units of B * S^p of the longest bucket's baseline batch."""
M_COMP_RATIOS = (assumptions.MEMORY_RISE, 1.5, 2.0)
MODELS = (assumptions.MODEL, "wan-1.3b")
MATCHED_RANKS = (2, 8, 16, 64, 1024)
MATCHED_MICRO_BATCHES = 4
BASE_RANKS = 16

METRICS = (
    "tokens_per_s",
    "samples_per_s",
    "samples_per_step",
    "share_of_perfect",
    "mix_distance",
    "rank_cv",
    "step_cv",
    "pinned_share",
)
EVEN = ("load_cv", "peak_memory")
PLAIN = (assumptions.BASELINE, (assumptions.ADAPTIVELOAD[0], assumptions.BASELINE[1]))
"""Policy and AdaLN of what the imbalance and memory claims compare."""

PAPER_GAIN = {8: 25.6, 16: 27.18}
"""Gain in tokens/s in % on so many GPUs (AdaptiveLoad, arXiv 2605.17923)."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """The two lattices, each setting once."""
    if profile == "smoke":
        base = Setting("equal_token", "eager", 2, model="tiny")
        tiny = [replace(base, policy=p, m_mem=m) for m in (TOKEN_BUDGET, 2 * TOKEN_BUDGET) for p in policies.NAMES[:3]]
        matched = [_matched(replace(base, policy=p)) for p in ("equal_token", "balanced")]
        return _campaign.cases([*tiny, *matched], 0.1)
    if not _campaign.can_simulate(profile, machine):
        return []
    return _campaign.cases(_settings(), 0.15)


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Simulate one setting, and what it is compared with on the same seeds."""
    found, setting, outcome = _campaign.simulated(case, inputs, WIDE)
    rows = _campaign.rows(outcome, METRICS)
    if setting.protocol == "as_published" and (setting.policy, setting.adaln) in PLAIN:
        rows += _campaign.rows(outcome, EVEN)
    if setting != setting.baseline():
        rows.append(_campaign.paired(found, setting, setting.baseline(), "tokens_per_s", "gain"))
    if setting.protocol == "matched" and setting.policy != "balanced":
        ours = replace(setting, policy="balanced")
        rows.append(_campaign.paired(found, ours, setting, "samples_per_s", "balanced_lead"))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """None of its own: the notes of claims in other suites quote these rows."""
    return []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: where the paper's gain holds, every policy's gain, and balanced's lead; then all devices."""
    from suites import _sensitivity_figures

    return _sensitivity_figures.draw(rows[(rows["suite"] == NAME) & (rows["model"] != "tiny")])


def along_m_mem(table: pd.DataFrame, setting: Setting, effect: str = "gain") -> tuple[list[float], list[float]]:
    """M_mem in tokens and an effect in %, as far as they were simulated, whatever the setting's own M_mem.

    effect: `gain`, or a metric whose change from the baseline's mean is meant: the fall of a CV, the rise of any other.
    """
    points = [(float(m), _effect(table, replace(setting, m_mem=m), effect)) for m in m_mems()]
    known = [(m, e) for m, e in points if e is not None]
    return [m for m, _ in known], [e for _, e in known]


def m_mem_for(table: pd.DataFrame, setting: Setting, wanted: float, effect: str = "gain") -> float | None:
    """The least M_mem in tokens at which an effect is `wanted` %, interpolated; None where it is that nowhere."""
    m_mem, found = along_m_mem(table, setting, effect)
    for (m0, e0), (m1, e1) in zip(zip(m_mem, found, strict=True), zip(m_mem[1:], found[1:], strict=True), strict=False):
        if e0 >= wanted:
            return m0
        if e1 >= wanted:
            return m0 + (wanted - e0) / (e1 - e0) * (m1 - m0)
    return None


def elsewhere(rows: pd.DataFrame, setting: Setting, wanted: float, effect: str = "gain", what: str = "") -> str:
    """For a note: an effect at M_mem (a) and (b), what fits the device, and from which M_mem on it is `wanted` %.

    what: names the wanted effect, where that is not the paper's. rows: of this suite and of its needs.
    """
    what = what or f"the paper's {wanted:g}%"
    own = rows[rows["suite"] == NAME]
    m_mem, found = along_m_mem(own, setting, effect)
    if not m_mem:
        return "M_mem was not varied here"
    text = f"{np.interp(setting.m_mem, m_mem, found):+.1f}% at (a), "
    fits = _campaign.m_mem_of_device(rows, setting.model, setting.adaln, setting.ranks)
    if fits is not None:
        beyond = "" if fits <= m_mem[-1] else f", taken at {m_mem[-1]:,.0f}"
        where = f"{fits:,.0f} tokens, what fits the device on {setting.ranks} ranks{beyond}"
        text += f"{np.interp(fits, m_mem, found):+.1f}% at (b) ({where}), "
    needed = m_mem_for(own, setting, wanted, effect)
    if needed is None:
        return f"{text}{what} is reached nowhere up to {m_mem[-1]:,.0f} tokens"
    if needed == m_mem[0]:
        return f"{text}{what} holds at {needed:,.0f} tokens already, the least that was simulated"
    return f"{text}{what} needs M_mem {needed:,.0f} tokens"


def _effect(table: pd.DataFrame, setting: Setting, effect: str) -> float | None:
    if effect == "gain":
        return _campaign.value(table, setting, effect)
    ratio = _campaign.ratio(_campaign.compare(table, setting, effect))
    if ratio is None:
        return None
    return 100 * (1 - ratio if effect.endswith("_cv") else ratio - 1)


def rivals(table: pd.DataFrame) -> pd.DataFrame:
    """Of the second lattice, each corpus and number of ranks: the policies of no larger mix distance than balanced.

    Columns: corpus, ranks, policy, and value, ci_low, ci_high of balanced's lead over it in %.
    """
    import pandas as pd

    matched = table[(table["suite"] == NAME) & (table["protocol"] == "matched") & (table["model"] != "tiny")]
    found = []
    for corpus, ranks in matched[["corpus", "ranks"]].drop_duplicates().itertuples(index=False):
        cell = matched[(matched["corpus"] == corpus) & (matched["ranks"] == ranks)]
        distance = cell[cell["metric"] == "mix_distance"].set_index("policy")["value"]
        if "balanced" not in distance:
            continue
        near = distance.index[distance <= distance["balanced"] + 1e-9]
        leads = cell[(cell["metric"] == "balanced_lead") & cell["policy"].isin(near)]
        found.append(leads[["corpus", "ranks", "policy", "value", "ci_low", "ci_high"]])
    return pd.concat(found, ignore_index=True) if found else matched.iloc[:0]


def _m_mem(ratio: float) -> int:
    return round(ratio * TOKEN_BUDGET)


def m_mems() -> list[int]:
    """M_mem in tokens, as far as it is varied."""
    return [_m_mem(r) for r in RATIOS]


def _matched(setting: Setting) -> Setting:
    return replace(setting, protocol="matched", micro_batches=MATCHED_MICRO_BATCHES, m_mem=TOKEN_BUDGET)


def _settings() -> Iterator[Setting]:
    rules = [Setting(p, "eager", BASE_RANKS) for p in policies.NAMES]
    whole = [Setting(p, "fused", BASE_RANKS) for p in (assumptions.ADAPTIVELOAD[0], "balanced")]
    for m_mem in m_mems():
        yield from (replace(s, m_mem=m_mem) for s in (*rules, *whole))
    for ranks in RANKS:
        yield from (replace(s, ranks=ranks) for s in (*rules, *whole))
    for corpus in mixes.names():
        yield from (replace(s, corpus=corpus) for s in (*rules, *whole))
    loose = replace(whole[0], m_comp=assumptions.M_COMP_LOOSE)
    for model in MODELS:
        yield from (replace(s, model=model) for s in (*rules, *whole))
        for ranks in PAPER_GAIN:
            yield from (replace(s, model=model, ranks=ranks, m_mem=m) for s in (whole[0], loose) for m in m_mems())
    for ranks in RANKS:
        yield from (replace(s, ranks=ranks, m_mem=m) for s in (whole[0], loose) for m in m_mems())
    plain = [Setting(p, a, r) for p, a in PLAIN for r in PAPER_GAIN]
    worst = [replace(s, corpus=assumptions.WORST_CORPUS) for s in (*plain, replace(whole[0], ranks=16))]
    for m_mem in m_mems():
        yield from (replace(s, m_mem=m_mem) for s in (*plain, *worst))
    for ratio in M_COMP_RATIOS:
        yield from (replace(whole[0], m_mem=_m_mem(ratio), m_comp=c) for c in M_COMPS)
    for corpus in mixes.names():
        for ranks in MATCHED_RANKS:
            yield from (_matched(replace(s, corpus=corpus, ranks=ranks)) for s in rules)
