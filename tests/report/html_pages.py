"""Small pages for the report's tests: two devices, a measuring and a simulating suite, text of one's own everywhere.

python -m tests.report.html_pages FOLDER    writes the page of FOLDER/results again, in a process of its own
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure as Drawing

from repro import runner, verdicts
from repro.balance import campaign
from repro.balance.campaign import Setting
from repro.claims import CLAIMS, VERDICTS
from repro.measure.machine import Machine
from repro.records import Store
from repro.report import draw, html
from repro.suite import Case, Evidence, Figure, Measurement

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = "some-gpu", "cpu-x86-64-2c"
GAINS = {"equal_token": 0.0, "dual_constraint": 10.0, "balanced": 60.0}
"""Gain of each policy with eager AdaLN on 16 ranks; the fused one adds 2, and 8 ranks take half of it."""


@dataclass(frozen=True)
class Page:
    """A written page and what it was made from."""

    path: Path
    store: Store
    suites: dict[str, Any]

    @property
    def text(self) -> str:
        return self.path.read_text()


def suite(name: str, doc: str, **members: Any) -> Any:
    """A suite module with these members."""
    made = ModuleType(f"suites.{name}", doc)
    defaults = {"NAME": name, "CLAIMS": (), "NEEDS": (), "evidence": lambda rows: [], "draw": lambda rows: []}
    for key, value in {**defaults, **members}.items():
        setattr(made, key, value)
    return made


def suites(text: str = "") -> dict[str, Any]:
    """Suite `speed` measures K1 and K4, `gains` simulates T1. text: stands in notes, captions and descriptions."""

    def speed(rows):
        time = float(rows["value"].iloc[0])
        note = f"how it was; the paper's value (on another device; unknown) may differ{text}"
        yield Evidence("K1", time, time - 0.1, time + 0.1, "measured", 8.0, 2.0, note)
        yield Evidence("K4", 2.0, 2.0, 2.0, "measured", 3.0, 1.0, "a block has two of them" + text)

    def gain(rows):
        found = rows[(rows["metric"] == "gain") & (rows["ranks"] == 8) & (rows["policy"] == "dual_constraint")]
        yield from (Evidence("T1", v, v - 1, v + 1, "simulated", note=text) for v in found["value"].iloc[:1])

    def picture(name, claims, rows):
        figures = []
        for device in sorted(set(rows["device"])):
            drawing = Drawing(figsize=(3, 2))
            drawing.add_subplot().plot([1, 2, 4])
            figures.append(Figure(f"{name}-{device}", drawing, f"{name} over time{text}", claims))
        return figures

    parts = (("speed", ("K1", "K4"), speed), ("gains", ("T1",), gain))
    parameters = {"speed": ("tokens",), "gains": campaign.PARAMETERS}
    made = {
        name: suite(
            name,
            f"What `{name}` does.\n\nMore of it.{text}",
            CLAIMS=claims,
            PARAMETERS=parameters[name],
            SIMULATED=name == "gains",
            evidence=evidence,
            draw=lambda rows, name=name, claims=claims: picture(
                "sensitivity" if name == "gains" else name, claims, rows
            ),
        )
        for name, claims, evidence in parts
    }
    return made | {"empty": suite("empty", "Has no rows.", CLAIMS=("T2",), PARAMETERS=("tokens",))}


def machine(slug: str, **facts: Any) -> Machine:
    return Machine(slug, slug, 0, None, None, None, 1, facts)


def settings(corpus: str) -> list[Setting]:
    """Two numbers of ranks and two memory limits on the assumed corpus; on `corpus` one of each."""
    policies = [Setting(p, a, 16) for p in GAINS for a in ("eager", "fused")]
    found = [Setting(s.policy, s.adaln, r, m_mem=m) for s in policies for r in (8, 16) for m in (48_000, 58_896)]
    loose = [Setting("dual_constraint", "fused", 16, m_comp=1.5)]
    return found + loose + [Setting(s.policy, "eager", 16, corpus=corpus) for s in policies if s.adaln == "eager"]


def simulated(setting: Setting, source: str, seeds: int = 5) -> list[Measurement]:
    gain = (GAINS[setting.policy] + 2 * (setting.adaln == "fused")) * setting.ranks / 16
    found = [("tokens_per_s", 1000 + 10 * gain), ("share_of_perfect", 0.5), ("mix_distance", 0.25)]
    if setting != setting.baseline():
        found.append(("gain", gain))
    return [Measurement(m, "1", v, v - 1, v + 1, seeds, "simulated", source) for m, v in found]


def fill(store: Store, text: str = "", corpus: str = "images") -> None:
    """Rows of a GPU under `full`, and fewer of a CPU under `smoke` and of one more claim under `full`."""
    fast = store.start(machine(GPU, gpu_name=f"Some GPU{text}", gpu_count=1, driver="1"), ["python"], None, "full")
    store.append(fast, "speed", Case({"tokens": 64_000}), [Measurement("time", "us", 4.0, 3.9, 4.1, 30)])
    later = store.start(machine(GPU), ["python", "-m", "repro.all", f"/tmp/{text or 'x'}"], None, "full")
    for setting in settings(corpus):
        store.append(later, "gains", Case(setting.key), simulated(setting, fast.id))
    store.finish(later, "finished", {"measured": 1}, {})
    slow = store.start(machine(CPU, cpu_name="Some CPU"), ["python"], None, "full")
    store.append(slow, "speed", Case({"tokens": 64_000}), [Measurement("time", "us", 3.0, 2.9, 3.1, 30)])
    tiny = store.start(machine(CPU, cpu_name="Some CPU"), ["python"], None, "smoke")
    for policy in GAINS:
        setting = Setting(policy, "eager", 2, model="tiny")
        store.append(tiny, "gains", Case(setting.key), simulated(setting, tiny.id))


def write(folder: Path, text: str = "") -> Page:
    """Draw, judge and write the page of folder/results into folder."""
    store, found = Store(folder / "results"), suites(text)
    drawn, errors = draw.draw_all(store, found, folder)
    chosen, rest, unjudged = verdicts.judge_all(store, found)
    assert not errors + unjudged, errors + unjudged
    assert {v.verdict for v in chosen} <= set(VERDICTS)
    return Page(html.write(folder, store, found, drawn, chosen, rest), store, found)


def make(folder: Path, text: str = "", corpus: str = "images") -> Page:
    """A page with rows of two devices."""
    fill(Store(folder / "results"), text, corpus)
    return write(folder, text)


@functools.cache
def committed() -> str:
    """The page of the committed results and figures, whose captions and claims are made up."""
    found, errors = runner.load_suites()
    store = Store(ROOT / "results")
    chosen, rest, unjudged = verdicts.judge_all(store, found)
    assert not errors + unjudged, errors + unjudged
    claims = tuple(c.id for c in CLAIMS[:2])
    figures = [Figure(p.stem, Drawing(), f"about {p.stem}", claims) for p in sorted((ROOT / "figures").glob("*.png"))]
    return html.render(ROOT / "figures", store, found, figures, chosen, rest)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
