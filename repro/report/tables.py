"""Verdicts as text: a table for the terminal, Markdown, and the section of the README between its markers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from repro.claims import BY_ID, AtLeast, AtMost
from repro.records import files
from repro.verdicts import headline

Row = Mapping[str, str]
"""A row of results/claims.csv."""

COLOURS = {
    "exceeded": "green",
    "reproduced": "green",
    "ambiguous": "yellow",
    "partly": "yellow",
    "not reproduced": "red",
    "not run": "bright_black",
}
START, END = "<!-- claims: generated from results/claims.csv -->", "<!-- claims: end -->"


def number(text: str, unit: str = "") -> str:
    """A cell of claims.csv as people write it: 3.21x, 61.9%, 4.8 GB, 0.35."""
    if not text:
        return ""
    value = float(text)
    told = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return told + {"x": "x", "%": "%", "R": "", "": ""}.get(unit, f" {unit}")


def paper(row: Row) -> str:
    """The paper's value, or the threshold where it prints none."""
    rule = BY_ID[row["id"]].rule
    if row["paper"]:
        return number(row["paper"], row["unit"])
    if isinstance(rule, AtMost):
        return f"<= {number(str(rule.limit), row['unit'])}"
    if isinstance(rule, AtLeast):
        return f"{'>' if rule.strictly else '>='} {number(str(rule.limit), row['unit'])}"
    return ""


def ours(row: Row) -> str:
    """Our value with its interval, which is left out where it is exact."""
    value = number(row["value"], row["unit"])
    if not value or row["ci_low"] == row["ci_high"]:
        return value
    return f"{value} [{number(row['ci_low'])}, {number(row['ci_high'])}]"


def terminal(rows: Sequence[Row], width: int) -> Group:
    """The claims for a terminal of `width` characters; below, the headline, and why claims were not run."""
    table = Table(title="The paper's claims", header_style="bold", title_justify="left")
    columns = ["id", "claim", "paper", "ours [95%]", "kind", "verdict", *(["device"] if width >= 100 else [])]
    for name in columns:
        table.add_column(Text(name), overflow="fold", no_wrap=name in ("id", "paper", "kind", "verdict"))
    reasons: dict[str, list[str]] = {}
    for r in rows:
        claim = r["statement"] if width >= 170 else BY_ID[r["id"]].title
        verdict = Text(r["verdict"], style=COLOURS[r["verdict"]])
        cells = (r["id"], claim, paper(r), Text(ours(r)), r["kind"], verdict, r["device"])
        table.add_row(*cells[: len(columns)])
        if r["verdict"] == "not run":
            reasons.setdefault(r["note"], []).append(r["id"])
    told = [Text(f"{', '.join(ids)} not run: {reason}", style="dim") for reason, ids in reasons.items()]
    return Group(table, Text(headline(rows), style="bold"), *told)


def markdown(rows: Sequence[Row], notes: bool = False) -> str:
    """The claims as a Markdown table; with `notes`, what stands behind each, or why it was not run."""
    head = ["id", "the paper's claim", "paper", "ours [95% interval]", "kind", "device", "verdict"]
    lines = [head + ["note"] * notes, ["---"] * (len(head) + notes)]
    for r in rows:
        cells = [r["id"], r["statement"], paper(r), ours(r), r["kind"], r["device"], f"**{r['verdict']}**"]
        lines.append(cells + [r["note"]] * notes)
    return "\n".join("| " + " | ".join(c.replace("|", r"\|") for c in line) + " |" for line in lines) + "\n"


def readme_section(rows: Sequence[Row]) -> str:
    """What stands between the README's markers."""
    return f"{START}\n{headline(rows)}.\n\n{markdown(rows)}{END}"


def update_readme(readme: Path, *sections: str) -> bool:
    """Write sections, whose first and last lines are their markers, into a README; whether it had all the markers."""
    text = updated = readme.read_text() if readme.exists() else ""
    known = True
    for section in sections:
        start, *_, end = section.splitlines()
        place = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        known &= place.search(text) is not None
        updated = place.sub(section.replace("\\", r"\\"), updated)
    if updated != text:
        files.replace(readme, updated.encode())
    return known
