"""A claim's verdict as a reader wants it told: cells of the table, how it stands against the paper, what repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from repro import suite as registry
from repro.claims import BY_ID, CLAIMS, VERDICTS, AtLeast, AtMost, Claim, Counts, Tolerance, Within
from repro.report import overview, tables
from repro.suite import Suite
from repro.verdicts import Verdict

GROUPS = (("K", "The fused kernel"), ("B", "Batches and balance"), ("T", "Training"))
"""First letter of the ids, and what such claims are about."""
HOLDS = ("exceeded", "reproduced")
START, END = -0.25, 2.5
"""Ends of the table's small scale, in units of the paper's effect."""
_ORDER = {claim.id: i for i, claim in enumerate(CLAIMS)}


@dataclass(frozen=True)
class Scale:
    """An effect on the table's small scale, which runs from START to END; positions in % of its width.

    share: effect found / the paper's. none, paper: no effect, and the paper's; band: the paper's within its tolerance.
    value, interval: ours; beyond: "left" or "right" where it lies off the scale, else empty.
    """

    share: float
    none: float
    paper: float
    band: tuple[float, float]
    value: float
    interval: tuple[float, float]
    beyond: str


@dataclass(frozen=True)
class ClaimView:
    """A verdict for the page. row: cells of results/claims.csv. decides: whether it is the claim's verdict.

    suite: whose rows it comes from, empty where the claim was not run.
    """

    claim: Claim
    row: Mapping[str, str]
    suite: str
    decides: bool

    @property
    def order(self) -> int:
        """Sorts verdicts by claim, what decides first."""
        return 2 * _ORDER[self.claim.id] + (not self.decides)

    @property
    def verdict_order(self) -> int:
        """Place of the verdict from best to worst."""
        return VERDICTS.index(self.row["verdict"])

    @property
    def holds(self) -> bool:
        """Whether the claim is reproduced or better."""
        return self.row["verdict"] in HOLDS

    @property
    def was_run(self) -> bool:
        """Whether anything was found."""
        return self.row["verdict"] != "not run"

    @property
    def paper(self) -> str:
        """The paper's value, or the threshold where it prints none."""
        return tables.paper(self.row)

    @property
    def ours(self) -> str:
        """Our value with its interval."""
        return tables.ours(self.row)

    @property
    def paper_pair(self) -> str:
        """The two values that the paper compares, where it prints them."""
        return _pair(self.row["paper_baseline"], self.row["paper_treated"])

    @property
    def pair(self) -> str:
        """The two values that our effect compares, where they are known."""
        return _pair(self.row["baseline"], self.row["treated"])

    @property
    def scale(self) -> Scale | None:
        """Where the effect lies against the paper's; None where it has no natural zero or was not run."""
        ends = overview.scale(self.row)
        return None if ends is None or not self.row["value"] else _scale(self.row, *ends)

    @property
    def note(self) -> tuple[str, ...]:
        """Parts of the note."""
        return split(self.row["note"])

    @property
    def reasons(self) -> tuple[str, ...]:
        """The parts of the note that speak of the paper: where its value would hold, what it may have counted."""
        return tuple(part for part in self.note if "the paper" in part) or self.note

    @property
    def counts(self) -> str:
        """When the claim counts as reproduced, in words."""
        return counts(self.claim)

    @property
    def stands(self) -> str:
        """How ours lies against the paper's."""
        if self.row["verdict"] == "ambiguous":
            return f"Ours is {self.ours}: the interval lies on both sides of what is asked."
        scale = self.scale
        part = f", {scale.share:.0%} of the paper's effect" if scale and self.row["verdict"] == "partly" else ""
        return f"Ours is {self.ours}{part}."


def views(chosen: Sequence[Verdict], rest: Sequence[Verdict]) -> list[ClaimView]:
    """All verdicts by claim, what decides first."""
    found = [ClaimView(v.claim, v.row(), v.suite, True) for v in chosen]
    found += [ClaimView(v.claim, v.row(), v.suite, False) for v in rest]
    return sorted(found, key=lambda v: v.order)


def command(view: ClaimView, suites: Mapping[str, Suite]) -> str:
    """What decides a claim (again): on a GPU of one's own, or, where simulated, from the device's recorded rows.

    Empty where no suite answers the claim.
    """
    name = view.suite or next((n for n, s in suites.items() if view.claim.id in s.CLAIMS), "")
    if not name:
        return ""
    elsewhere = name in suites and registry.is_simulated(suites[name]) and view.row["device"]
    device = f" --device {shlex.quote(view.row['device'])}" if elsewhere else ""
    return f"python -m repro.all --profile full{device} --only {name}{' --again' if view.suite else ''}"


def counts(claim: Claim) -> str:
    """When a claim counts as reproduced, in words; empty for a rule that is not known here."""
    rule, told = claim.rule, ""
    if isinstance(rule, Tolerance) and claim.paper is not None:
        least = (1 - rule.tolerance) * claim.paper
        told = f"from {_number(least, claim)} on, {rule.tolerance:.0%} below the paper's value"
    elif isinstance(rule, AtMost):
        told = f"where the whole interval is at most {_number(rule.limit, claim)}"
    elif isinstance(rule, AtLeast):
        side = "above" if rule.strictly else "at least"
        told = f"where the whole interval is {side} {_number(rule.limit, claim)}"
    elif isinstance(rule, Within):
        told = f"where the whole interval is within {_number(rule.margin, claim)} of no difference"
    elif isinstance(rule, Counts):
        told = f"where {rule.treated:g} replaces {rule.baseline:g} or more"
    return f"counts as reproduced {told}" if told else ""


def split(note: str) -> tuple[str, ...]:
    """Parts of a note, which semicolons outside of parentheses separate."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(note):
        depth = max(0, depth + (character == "(") - (character == ")"))
        if character == ";" and depth == 0:
            parts.append(note[start:i])
            start = i + 1
    return tuple(p.strip() for p in (*parts, note[start:]) if p.strip())


def _pair(baseline: str, treated: str) -> str:
    return f"{tables.number(baseline)} → {tables.number(treated)}" if baseline and treated else ""


def _number(value: float, claim: Claim) -> str:
    return tables.number(f"{value:.6g}", claim.unit)


def _scale(row: tables.Row, none: float, paper: float) -> Scale:
    def share(value: float) -> float:
        return (value - none) / (paper - none)

    def place(value: float) -> float:
        return 100 * (min(max(share(value), START), END) - START) / (END - START)

    value = float(row["value"])
    low, high = (float(row[c]) if row[c] else value for c in ("ci_low", "ci_high"))
    rule = BY_ID[row["id"]].rule
    margin = rule.tolerance * paper if isinstance(rule, Tolerance) else 0.0
    return Scale(
        share=share(value),
        none=place(none),
        paper=place(paper),
        band=(place(paper - margin), place(paper + margin)),
        value=place(value),
        interval=(place(low), place(high)),
        beyond="right" if share(value) > END else "left" if share(value) < START else "",
    )
