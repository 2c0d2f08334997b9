"""Results of make-believe machines: stores with samples that are known, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from repro.compare import app
from repro.measure.machine import Machine
from repro.measure.stats import exact, measured, median_interval
from repro.records import Store
from repro.suite import Case, Measurement

CELLS = [{"impl": i, "pass": "forward", "tokens": n} for n in (1024, 8192) for i in ("eager", "fused")]


class Recorder:
    """Records runs of suite `speed` with times whose medians are given."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def machine(self, slug: str, **facts: object) -> Machine:
        record = {"gpu_name": slug.replace("-", " "), "gpu_count": 1, "torch": "2.11.0", "unavailable": {}, **facts}
        return Machine(slug, slug, 1, (9, 0), 132, None, 16, record)

    def run(
        self,
        folder: str = "results",
        slug: str = "acme-1",
        factor: dict[str, float] | float = 1.0,
        cells: list[dict[str, object]] | None = None,
        count: int = 40,
        seed: int = 0,
        extra: tuple[Measurement, ...] = (),
        suite: str = "speed",
        **facts: object,
    ) -> Path:
        """One run; `factor` of every implementation's times, by name. Returns the device's folder."""
        store = Store(self.root / folder)
        run = store.start(self.machine(slug, **facts), ["test"], None, "full")
        generator = np.random.default_rng(seed)
        for key in CELLS if cells is None else cells:
            by = factor if isinstance(factor, float) else factor.get(str(key["impl"]), 1.0)
            base = by * 1e-2 * float(str(key["tokens"])) * (5.0 if key["impl"] == "eager" else 1.0)
            samples = base * (1 + 0.005 * generator.standard_normal(count))
            rows = [
                measured("time", "us", median_interval(samples, "x"), samples),
                exact("ceiling", "%", 90 / by),
                exact("saved", "GB", 2.0),
                *extra,
            ]
            store.append(run, suite, Case(key), rows)
        store.finish(run, "finished", {}, {})
        return self.root / folder / slug

    def call(self, *arguments: object):
        return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Recorder(tmp_path)
