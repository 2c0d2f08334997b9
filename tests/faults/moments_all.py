"""`python -m repro.all` over a make-believe suite, for `moments`: what is recorded is known from what was begun."""

from __future__ import annotations

import csv
import json
import signal
import sys
import warnings
from pathlib import Path

import repro.all
import suites
from repro.measure.machine import read_machine
from repro.records import Store
from tests.faults.moments import Ended, Lost

CASES = 25
SUITE = """
from pathlib import Path
import suites
from repro.suite import Case, Figure, Measurement

NAME, CLAIMS, NEEDS, PARAMETERS = "steady", ("K1",), (), ("tokens",)

def cases(profile, machine):
    return [Case({"tokens": n}) for n in range(CASES)]

def measure(case, machine, inputs):
    n = case.key["tokens"]
    with Path(__file__).with_name("begun.txt").open("a") as file:
        file.write(f"{n}\\n")
    if n == 0:
        getattr(suites, "meet", int)()  # two runs at once wait for each other here
    samples = tuple(n + i / 8 for i in range(4))
    values = {"time": n + 0.5, "time_called": n + 0.25}
    return [Measurement(metric, "us", value, n, n + 1, 4, samples=samples) for metric, value in values.items()]

def evidence(rows):
    return []

def draw(rows):
    from repro.report import style
    figure, axes = style.subplots()
    axes[0, 0].plot(rows["tokens"], rows["value"])
    return [Figure("steady", figure, "made up", ("K1",))]
""".replace("CASES", str(CASES))


class All:
    """The command in a folder with one suite, results and figures."""

    name = "repro.all"
    options: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, folder / "results"
        (folder / "suites").mkdir()
        (folder / "suites" / "steady.py").write_text(SUITE)
        self._begun = folder / "suites" / "begun.txt"
        self._before: set[int] = set()
        self._seen = 0

    def run(self) -> None:
        """In a process of its own."""
        suites.__path__ = [str(self.folder / "suites")]
        sys.argv = ["repro.all", "--gpus", "0", "--results", str(self.results), *self.options]
        repro.all.app()

    @property
    def complete(self) -> bool:
        """Whether every case is recorded."""
        return len(self._before) == CASES

    def check(self, ended: Ended, sent: signal.Signals | None) -> str:
        """As `moments.Subject` says."""
        if "Traceback" in ended.said:
            raise Lost(ended.said)
        if sent is signal.SIGTERM and ended.code not in (143, -signal.SIGTERM):
            raise Lost(f"SIGTERM ended with {ended.code}: {ended.said[-500:]}")
        begun = [int(n) for n in self._begun.read_text().split()] if self._begun.exists() else []
        now, self._seen = begun[self._seen :], len(begun)
        if again := self._before.intersection(now):
            raise Lost(f"measured again though recorded: {sorted(again)}")
        kept = self._recorded()
        if gone := (self._before.union(now[:-1]) if sent else self._before.union(now)) - kept:
            raise Lost(f"gone: {sorted(gone)}")
        self._runs(ended)
        self._files()
        self._before = kept
        return f"exit {ended.code}, {len(kept)} of {CASES} cases stand"

    def _recorded(self) -> set[int]:
        """Cases that need no measuring, each with all of its rows and samples as they were measured."""
        store = Store(self.results)
        device = read_machine(0).slug
        with warnings.catch_warnings():  # of a row cut off by a kill, which is left out
            warnings.filterwarnings("ignore", message=".*is no whole row and is left out")
            warnings.filterwarnings("ignore", message=".*cut off; its last samples are left out")
            rows = store.rows("steady", device)
            if rows.empty:
                return set()
            done = {int(dict(key)["tokens"]) for key in store.done("steady", device, "smoke")}
            for row in rows[rows["tokens"].isin(done)].itertuples():
                n, samples = int(row.tokens), store.samples("steady", device, row.run_id)
                samples = samples[(samples["tokens"] == n) & (samples["metric"] == row.metric)]
                whole = (row.value, row.ci_low, row.ci_high) == (n + (0.5 if row.metric == "time" else 0.25), n, n + 1)
                if not whole or samples["value"].tolist() != [n + i / 8 for i in range(4)]:
                    raise Lost(f"{row}, {samples['value'].tolist()}")
            if len(rows[rows["tokens"].isin(done)]) != 2 * len(done):
                raise Lost(f"half a case: {rows[['tokens', 'metric']].to_numpy().tolist()}")
        return done

    def _runs(self, ended: Ended) -> None:
        for path in self.results.glob("*/runs.jsonl"):
            runs = [json.loads(line) for line in path.read_text().splitlines()]
            ends = [run["end"] and run["end"]["status"] for run in runs]
            if not set(ends) <= {None, "interrupted", "failed", "finished"}:
                raise Lost(f"runs ended {ends}")

    def _files(self) -> None:
        """What is drawn and judged appears whole: figures end as such files do, verdicts have a row a claim."""
        for path in self.folder.rglob("*"):
            hidden = path.name.startswith(".") and path.name != ".lock"
            if path.suffix == ".svg" and not hidden and not path.read_text().rstrip().endswith("</svg>"):
                raise Lost(f"{path.name} is cut off")
            if path.suffix == ".png" and not hidden and not path.read_bytes().endswith(b"IEND\xaeB`\x82"):
                raise Lost(f"{path.name} is cut off")
        claims = self.results / "claims.csv"
        if claims.exists() and len(list(csv.DictReader(claims.open()))) != 18:
            raise Lost("claims.csv is cut off")
