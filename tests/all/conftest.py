"""A checkout of make-believe: fake suites, so that the command can be driven end to end."""

from __future__ import annotations

import importlib
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

HEAD = """
    from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement

    def exactly(value, metric="time", kind="measured", source="", samples=()):
        return Measurement(metric, "x", value, value, value, 30, kind, source, samples)
"""

SPEED = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "speed", ("K1",), (), ("tokens",)

    def cases(profile, machine):
        return [Case({"tokens": n}, seconds=2.0) for n in ((1, 2, 3) if profile == "smoke" else (64_000,))]

    def measure(case, machine, inputs):
        LOG(f"speed {case.key['tokens']} after {len(inputs)}")
        return [exactly(4.0, samples=(3.9, 4.1))]

    def evidence(rows):
        return [Evidence("K1", v, v, v, "measured") for v in rows["value"]]

    def draw(rows):
        from repro.report import style

        figure, axes = style.subplots()
        style.series(axes[0, 0], rows["tokens"], rows["value"], "fused", low=rows["ci_low"], high=rows["ci_high"])
        style.paper_value(axes[0, 0], 3.21, "paper")
        style.legend(figure, rows["kind"])
        return [Figure("speed", figure, "speed against tokens", ("K1",))]
"""

MODEL = """
    NAME, CLAIMS, NEEDS, PARAMETERS, SIMULATED = "model", ("T1",), ("speed",), ("ranks",), True

    def cases(profile, machine):
        return [Case({"ranks": 8})]

    def measure(case, machine, inputs):
        LOG(f"model after {sorted(inputs['suite'].unique())} on {machine.slug}")
        if inputs.empty:
            raise CaseSkipped("no rows of speed on this device")
        return [exactly(27.0, "gain", "simulated", " ".join(inputs["run_id"].unique()))]

    def evidence(rows):
        return [Evidence("T1", v, v, v, "simulated") for v in rows[rows["suite"] == "model"]["value"]]

    def draw(rows):
        return []
"""


class Checkout:
    """A folder with suites, results and figures. `run` calls the command in this process."""

    def __init__(self, root: Path) -> None:
        self.root, self.results, self.figures = root, root / "results", root / "figures"
        self.log = root / "log.txt"
        self.log.write_text("")
        (root / "suites").mkdir()

    def suite(self, name: str, body: str) -> None:
        log = f'\ndef LOG(line):\n    open({str(self.log)!r}, "a").write(line + "\\n")\n'
        (self.root / "suites" / f"{name}.py").write_text(textwrap.dedent(HEAD) + log + textwrap.dedent(body))
        sys.modules.pop(f"suites.{name}", None)
        importlib.invalidate_caches()

    def logged(self) -> list[str]:
        """What suites logged since the last call."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines

    def run(self, *arguments: str):
        import typer

        from repro.all import main

        app = typer.Typer()
        app.command()(main)
        return CliRunner().invoke(app, [*arguments, "--results", str(self.results)])


def once(draw_claims):
    """`draw_claims`, which draws the same claims only once: most runs here leave all of them open."""
    from repro.records import files

    def write(rows, folder, others=()):
        if (key := repr((rows, others))) not in _drawn:
            with tempfile.TemporaryDirectory() as made:
                figures = draw_claims(rows, Path(made), others)
                _drawn[key] = figures, {p.name: p.read_bytes() for p in Path(made).iterdir()}
        figures, written = _drawn[key]
        for name, content in written.items():
            files.replace(folder / name, content)
        return figures

    return write


_drawn = {}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    import repro.all
    import suites

    monkeypatch.setattr(repro.all.draw, "draw_claims", once(repro.all.draw.draw_claims))
    # rich wraps at the width that it sees when the console is made
    monkeypatch.setattr(repro.all.console, "_width", 200)
    made = Checkout(tmp_path)
    monkeypatch.setattr(suites, "__path__", [str(tmp_path / "suites")])
    loaded = {n: m for n, m in sys.modules.items() if n.startswith("suites.")}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    made.suite("speed", SPEED)
    made.suite("model", MODEL)
    yield made
    for name in [n for n in sys.modules if n.startswith("suites.") and n not in loaded]:
        del sys.modules[name]
