"""From rows to verdicts: every device's evidence is judged, and one verdict a claim is chosen.

    results/claims.csv             exactly one row a claim: of what may decide it (`Evidence.decides`) measured before
                                   simulated, then most GPUs, then newest
    results/claims_by_device.csv   the verdicts of all other evidence

Only `full` rows decide. A claim without evidence reads `not run`, with the reason in its note.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from repro.claims import BY_ID, CLAIMS, VERDICTS, Claim, judge
from repro.measure import throttle
from repro.records import Store, files
from repro.suite import Evidence, Suite, other_needs

COLUMNS = (
    "id",
    "statement",
    "effect",
    "unit",
    "paper",
    "paper_baseline",
    "paper_treated",
    "value",
    "ci_low",
    "ci_high",
    "baseline",
    "treated",
    "kind",
    "device",
    "verdict",
    "note",
)


@dataclass(frozen=True)
class Verdict:
    """A claim, what decided it (None: nothing), on which device, and the verdict.

    newest: greatest run_id behind the evidence. gpus: GPUs of the device, 0 for a CPU. suite: whose evidence it is.
    """

    claim: Claim
    verdict: str
    note: str
    evidence: Evidence | None = None
    device: str = ""
    gpus: int = 0
    newest: str = ""
    suite: str = ""

    @property
    def rank(self) -> tuple[bool, bool, int, str]:
        """The greatest decides the claim: judged, then measured, then most GPUs, then newest."""
        measured = self.evidence is not None and self.evidence.kind == "measured"
        return self.verdict != "not run", measured, self.gpus, self.newest

    @property
    def decides(self) -> bool:
        """Whether it may decide its claim."""
        return self.evidence is not None and self.evidence.decides

    def told(self) -> str:
        """It in a few words, for the note of another verdict."""
        e, gpus = self.evidence, f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}" if self.gpus else "CPU"
        assert e is not None
        ends = f"{e.value:.3g} [{e.ci_low:.3g}, {e.ci_high:.3g}] {self.claim.unit}"
        return f"{e.kind} on {self.device} ({gpus}), beside this verdict: {ends} ({e.note})"

    def row(self) -> dict[str, str]:
        """Cells of a row with the fixed COLUMNS; numbers to six digits, unknown ones empty."""
        c, e = self.claim, self.evidence
        return {
            "id": c.id,
            "statement": c.statement,
            "effect": c.effect,
            "unit": c.unit,
            "paper": _number(c.paper),
            "paper_baseline": _number(c.paper_baseline),
            "paper_treated": _number(c.paper_treated),
            **{name: _number(getattr(e, name, None)) for name in ("value", "ci_low", "ci_high", "baseline", "treated")},
            "kind": e.kind if e else "",
            "device": self.device,
            "verdict": self.verdict,
            "note": " ".join(self.note.split()),
        }


def gpus_of(store: Store, device: str) -> int:
    """GPUs used on a device, 0 for a CPU: what its newest run recorded, else what its slug says (`-xK`)."""
    counts = [r.get("machine", {}).get("gpu_count") for r in store.runs(device)]
    if counts and counts[-1] is not None:
        return int(counts[-1])
    found = re.search(r"-x(\d+)(?=-|$)", device)
    return 0 if device.startswith("cpu") else int(found.group(1)) if found else 1


def judge_all(store: Store, suites: Mapping[str, Suite]) -> tuple[list[Verdict], list[Verdict], list[str]]:
    """One verdict a claim in the order of CLAIMS, those of all other evidence, and a line for each that failed."""
    found: list[Verdict] = []
    errors: list[str] = []
    for name, suite in suites.items():
        for device in store.devices():
            rows = store.gather([name, *other_needs(suite)], device, "full")
            own = rows[rows["suite"] == name]
            if own.empty:
                continue
            try:
                for evidence in suite.evidence(rows):
                    verdict, reason = judge(BY_ID[evidence.claim], evidence)
                    note = "; ".join(filter(None, (reason, evidence.note, throttle.told(rows))))
                    newest = str(own["run_id"].max())
                    claim, gpus = BY_ID[evidence.claim], gpus_of(store, device)
                    found.append(Verdict(claim, verdict, note, evidence, device, gpus, newest, name))
            except Exception as e:
                errors.append(f"{name} on {device}: no evidence: {type(e).__name__}: {e}")
    chosen, rest = [], []
    for claim in CLAIMS:
        candidates = sorted((v for v in found if v.claim.id == claim.id), key=lambda v: v.rank, reverse=True)
        beside = [v for v in candidates if not v.decides]
        candidates = [v for v in candidates if v.decides]
        first = candidates[0] if candidates else Verdict(claim, "not run", _why_not(claim, store, suites))
        chosen.append(replace(first, note="; ".join(filter(None, (first.note, *(v.told() for v in beside))))))
        rest += candidates[1:] + beside
    return chosen, rest, errors


def write(chosen: Sequence[Verdict], rest: Sequence[Verdict], results: Path) -> None:
    """Write results/claims.csv and results/claims_by_device.csv, each replaced whole."""
    files.replace(results / "claims.csv", _csv(chosen))
    files.replace(results / "claims_by_device.csv", _csv(rest))


def read(results: Path) -> list[dict[str, str]]:
    """Rows of results/claims.csv, empty where there is none."""
    path = results / "claims.csv"
    return list(csv.DictReader(io.StringIO(path.read_text()))) if path.exists() else []


def headline(rows: Iterable[Mapping[str, str]]) -> str:
    """Counts of verdicts, measured and simulated apart: "measured: 3 reproduced, 1 partly; simulated: none; ..."."""
    rows = list(rows)
    parts = []
    for kind in ("measured", "simulated"):
        counts = Counter(r["verdict"] for r in rows if r["kind"] == kind and r["verdict"] != "not run")
        told = ", ".join(f"{counts[v]} {v}" for v in VERDICTS if counts[v])
        parts.append(f"{kind}: {told or 'none'}")
    return "; ".join((*parts, f"not run: {sum(r['verdict'] == 'not run' for r in rows)} of {len(rows)}"))


def _why_not(claim: Claim, store: Store, suites: Mapping[str, Suite]) -> str:
    answering = [n for n, s in suites.items() if claim.id in s.CLAIMS]
    if not answering:
        return "no suite measures this yet"
    recorded = [n for n in answering if any(len(store.rows(n, d, "full")) for d in store.devices())]
    if recorded:
        return f"the rows of {', '.join(recorded)} lack the cases that decide it"
    return f"no full rows yet: python -m repro.all --profile full --only {answering[0]}"


def _csv(verdicts: Sequence[Verdict]) -> bytes:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(v.row() for v in verdicts)
    return buffer.getvalue().encode()


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.6g}"
