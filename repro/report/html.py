"""The report: one HTML file with everything that was found, which needs no network and nothing beside it.

The same rows give the same bytes. All text goes through Jinja2's autoescaping, so that a cell of a CSV file stays text.
The page asks browsers to load nothing but what it holds (Content-Security-Policy).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from repro.balance.assumptions import ASSUMPTIONS
from repro.claims import VERDICTS
from repro.records import Store, files
from repro.report import draw, explorer, html_claims, html_images, html_runs
from repro.report.draw import Drawn
from repro.report.html_claims import ClaimView
from repro.report.html_images import Picture
from repro.report.html_runs import RunView
from repro.suite import Suite, is_simulated
from repro.verdicts import Verdict

NAME = "report.html"
_ASSETS = resources.files("repro.report").joinpath("assets")
_KINDS = ("measured", "simulated")


@dataclass(frozen=True)
class SuiteView:
    """How a suite works. summary, details: paragraphs of its docstring. computes: from other suites' rows only.

    rows: number by device and profile. runs: behind the newest rows.
    """

    name: str
    summary: str
    details: tuple[str, ...]
    claims: tuple[str, ...]
    computes: bool
    rows: Mapping[str, int]
    runs: tuple[RunView, ...]


@dataclass(frozen=True)
class Behind:
    """What stands behind a claim: runs that made its rows, runs that those were built from, the command to repeat."""

    runs: tuple[RunView, ...]
    sources: tuple[RunView, ...]
    unrecorded: tuple[str, ...]
    command: str


def write(
    folder: Path,
    store: Store,
    suites: Mapping[str, Suite],
    figures: Sequence[Drawn],
    chosen: Sequence[Verdict],
    rest: Sequence[Verdict],
) -> Path:
    """Write folder/report.html, or leave it alone where it would not change; its path.

    figures: already saved in `folder`; `claims` is left out, since the table says the same. chosen, rest: as from
    `repro.verdicts.judge_all`.
    """
    path = folder / NAME
    content = render(folder, store, suites, figures, chosen, rest).encode()
    if not path.exists() or path.read_bytes() != content:
        files.replace(path, content)
    return path


def render(
    folder: Path,
    store: Store,
    suites: Mapping[str, Suite],
    figures: Sequence[Drawn],
    chosen: Sequence[Verdict],
    rest: Sequence[Verdict],
) -> str:
    """The page as text. Arguments as of `write`."""
    rows = draw.rows_to_draw(store, list(suites))
    claims = html_claims.views(chosen, rest)
    deciding = [c for c in claims if c.decides]
    devices = store.devices()
    runs = html_runs.views(store, {d: _ids(rows[rows["device"] == d]) for d in devices})
    front = {c.row["device"] for c in deciding if c.row["device"]} or set(devices)
    pictures = html_images.embed([f for f in figures if f.name != "claims"], folder, devices, front)
    maps = [p for p in pictures if p.name.startswith("sensitivity")]
    overview = [p for p in pictures if p.name == "claims-devices"]
    shown = _by_claim([p for p in pictures if p not in maps and p not in overview], deciding)
    return _template().render(
        claims=claims,
        groups=_groups(deciding),
        summary=_summary(deciding),
        short=[c for c in deciding if not c.holds],
        others={c.claim.id: [o for o in claims if o.claim.id == c.claim.id and not o.decides] for c in deciding},
        behind={c.claim.id: _behind(c, rows, runs, suites) for c in deciding},
        pictures=shown,
        seen={
            c.claim.id: _seen(c.claim.id, [p for p in pictures if p.device in {"", *front}], shown) for c in deciding
        },
        front={"", *front},
        maps=maps,
        overview=overview,
        explorer=explorer.payload(rows),
        suites=[_suite(name, suite, rows, runs) for name, suite in suites.items()],
        runs=list(runs.values()),
        devices=_devices(devices, rows, runs),
        assumptions=ASSUMPTIONS,
        verdicts=VERDICTS,
        kinds=_KINDS,
        css=Markup(_asset("report.css")),
        scripts=[Markup(_asset(name)) for name in ("claims.js", "explorer.js")],
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["code"] = _code
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.get_template("report.html.jinja")


def _asset(name: str) -> str:
    return _ASSETS.joinpath(name).read_text(encoding="utf-8")


def _code(text: str) -> Markup:
    """Escaped text with what stands in backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _groups(deciding: Sequence[ClaimView]) -> list[tuple[str, list[ClaimView]]]:
    known = [(title, [c for c in deciding if c.claim.id.startswith(letter)]) for letter, title in html_claims.GROUPS]
    other = [c for c in deciding if not c.claim.id.startswith(tuple(letter for letter, _ in html_claims.GROUPS))]
    return [(title, found) for title, found in (*known, ("Others", other)) if found]


def _summary(deciding: Sequence[ClaimView]) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """Measured, simulated and not run: how many claims, and how many of each verdict."""
    judged = [c.row for c in deciding if c.row["verdict"] != "not run"]
    found = []
    for kind in _KINDS:
        counts = Counter(r["verdict"] for r in judged if r["kind"] == kind)
        found.append((kind, counts.total(), [(v, counts[v]) for v in VERDICTS if counts[v]]))
    left = len(deciding) - len(judged)
    return [*found, ("not run", left, [("not run", left)] if left else [])]


def _behind(
    claim: ClaimView, rows: pd.DataFrame, runs: Mapping[tuple[str, str], RunView], suites: Mapping[str, Suite]
) -> Behind:
    device = claim.row["device"]
    own = rows[(rows["suite"] == claim.suite) & (rows["device"] == device) & (rows["profile"] == "full")]
    made, built = sorted(set(own["run_id"])), sorted(_sources(own))
    return Behind(
        runs=tuple(runs[device, i] for i in made if (device, i) in runs),
        sources=tuple(runs[device, i] for i in built if (device, i) in runs),
        unrecorded=tuple(i for i in (*made, *built) if (device, i) not in runs),
        command=html_claims.command(claim, suites),
    )


def _by_claim(pictures: Sequence[Picture], deciding: Sequence[ClaimView]) -> dict[str, list[Picture]]:
    """Claim -> pictures that it is the first to be illustrated by; under "" those of no claim."""
    order = [c.claim.id for c in deciding]
    found: dict[str, list[Picture]] = {}
    for picture in pictures:
        first = next((i for i in order if i in picture.claims), "")
        found.setdefault(first, []).append(picture)
    return found


def _seen(claim: str, pictures: Sequence[Picture], shown: Mapping[str, Sequence[Picture]]) -> list[Picture]:
    """The pictures that illustrate a claim but are shown in another place."""
    return [p for p in pictures if claim in p.claims and p not in shown.get(claim, ())]


def _suite(name: str, suite: Suite, rows: pd.DataFrame, runs: Mapping[tuple[str, str], RunView]) -> SuiteView:
    own = rows[rows["suite"] == name]
    paragraphs = [" ".join(p.split()) for p in inspect.cleandoc(suite.__doc__ or "").split("\n\n")]
    made = sorted(set(zip(own["device"], own["run_id"], strict=True)))
    return SuiteView(
        name=name,
        summary=paragraphs[0],
        details=tuple(paragraphs[1:]),
        claims=suite.CLAIMS,
        computes=is_simulated(suite),
        rows=dict(sorted(Counter(f"{d} ({p})" for d, p in zip(own["device"], own["profile"], strict=True)).items())),
        runs=tuple(runs[key] for key in made if key in runs),
    )


def _devices(
    devices: Sequence[str], rows: pd.DataFrame, runs: Mapping[tuple[str, str], RunView]
) -> list[dict[str, Any]]:
    """Slug, newest hardware, profiles and number of rows of each device with rows."""
    found = []
    for device in devices:
        own = rows[rows["device"] == device]
        newest = max((r.id for (d, _), r in runs.items() if d == device and r.here), default="")
        if len(own):
            hardware = runs[device, newest].line if newest else "no run record"
            found.append(
                {"slug": device, "hardware": hardware, "profiles": sorted(set(own["profile"])), "rows": len(own)}
            )
    return found


def _ids(rows: pd.DataFrame) -> set[str]:
    """run_ids that made these rows or that they were built from."""
    return set(rows["run_id"]) | _sources(rows)


def _sources(rows: pd.DataFrame) -> set[str]:
    return {i for source in set(rows["source"]) for i in str(source).split()}
