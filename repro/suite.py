"""What a suite is: the contract between `suites/*.py` and everything that runs, stores, judges and draws them.

A suite is one module in `suites/` with these module-level names (checked by `load`):

    NAME: str                       same as the module's name; names results/<device>/<NAME>.csv
    CLAIMS: tuple[str, ...]         ids of the paper's claims that its rows answer (K1, B6, ...)
    NEEDS: tuple[str, ...]          suites whose rows it builds on
    PARAMETERS: tuple[str, ...]     its own parameter columns, in order; every case key has exactly these
    cases(profile, machine) -> list[Case]
    measure(case, machine, inputs) -> list[Measurement]
    evidence(rows) -> list[Evidence]
    draw(rows) -> list[Figure]

and, where it measures nothing but computes from other suites' rows without torch,

    SIMULATED: bool = True          so that it can be run for another device's committed rows (`--device`)

and, where it keeps measurements of a case for the cases that follow,

    forget(case, machine) -> None   drops them, so that measuring the case again measures it anew

and, where documents quote its rows,

    tell(rows) -> dict[str, str]    Markdown by the name of the place in the documents (`repro.report.documents`)

A suite knows nothing of CSV files or of the command line, and imports torch only inside `measure`, so that
figures and verdicts are made from committed rows on a machine without PyTorch.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

    from repro.measure.machine import Machine

Profile = Literal["smoke", "full"]
Kind = Literal["measured", "simulated", "paper"]
PROFILES: tuple[Profile, ...] = ("smoke", "full")


@dataclass(frozen=True)
class Case:
    """One cell of a suite's grid: the smallest thing that is measured, persisted, skipped or repeated.

    key: value of every column in the suite's PARAMETERS (str, int or float).
    seconds: estimated duration on the machine at hand; feeds the progress bar and `--dry-run` only.
    """

    key: Mapping[str, str | int | float]
    seconds: float = 1.0


@dataclass(frozen=True)
class Measurement:
    """One metric of one case; the store adds schema, run_id, suite, profile and the parameter columns.

    ci_low, ci_high: 95% interval (equal to `value` where the quantity is exact). n: samples behind it.
    source: run_ids that a simulated value was built from, separated by spaces; empty when measured.
    samples: raw samples in `unit`, kept in results/<device>/samples so that intervals can be recomputed.
    """

    metric: str
    unit: str
    value: float
    ci_low: float
    ci_high: float
    n: int
    kind: Kind = "measured"
    source: str = ""
    samples: tuple[float, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Evidence:
    """What one device's rows say about one claim: the effect in the claim's unit, oriented as the claim states it.

    Verdicts are not given here: `repro.claims` compares the interval with the paper's value.
    decides: False for what was measured at another scale than the claim's, on two GPUs where it says sixteen: it stands
    in the note of what decides, and decides nothing itself.
    """

    claim: str
    value: float
    ci_low: float
    ci_high: float
    kind: Kind
    baseline: float | None = None
    treated: float | None = None
    note: str = ""
    decides: bool = True


@dataclass(frozen=True)
class Figure:
    """A drawn figure; `name` becomes figures/<name>.svg and .png, `claims` the claims that it illustrates."""

    name: str
    figure: matplotlib.figure.Figure
    caption: str
    claims: tuple[str, ...] = ()


class Suite(Protocol):
    """Static type of a suite module."""

    NAME: str
    CLAIMS: tuple[str, ...]
    NEEDS: tuple[str, ...]
    PARAMETERS: tuple[str, ...]

    def cases(self, profile: Profile, machine: Machine) -> list[Case]:
        """The grid of this profile that this machine can measure, in the order in which to measure it."""
        ...

    def measure(self, case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
        """Measure one case.

        inputs: rows of this device and profile (of each case its newest run) of the suites in NEEDS, with the columns
        of `repro.records`. A suite that builds on its own earlier cases names itself in NEEDS.
        Raises `CaseSkipped` where the machine cannot run the case.
        """
        ...

    def evidence(self, rows: pd.DataFrame) -> list[Evidence]:
        """Read claims off the `full` rows of one device (this suite's and its NEEDS'); leave out claims without rows.

        Effects are in the claim's unit (`repro.claims`): a "%" is written as 61.9, not 0.619.
        """
        ...

    def draw(self, rows: pd.DataFrame) -> list[Figure]:
        """Draw from rows of all devices (column `device` holds the slug); deterministic, no timestamps.

        Rows are this suite's and its NEEDS', told apart by column `suite`; of each suite and device the `full` rows
        where there are any, else the `smoke` rows (column `profile`). Look and helpers: `repro.report.style`.
        """
        ...


class CaseSkipped(Exception):
    """Raised by `measure` when this machine cannot run the case; the message is the reason that the user reads."""


_MEMBERS = ("NAME", "CLAIMS", "NEEDS", "PARAMETERS", "cases", "measure", "evidence", "draw")


def names() -> list[str]:
    """Names of the suites in this checkout, alphabetical. Raises ModuleNotFoundError outside of one."""
    try:
        package = importlib.import_module("suites")
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError("there are no suites here: run from the root of a checkout") from e
    found = [m.name for m in pkgutil.iter_modules(package.__path__)]
    return sorted(n for n in found if not n.startswith(("_", "test_", "bench_", "conftest")))


def is_simulated(suite: Suite) -> bool:
    """Whether the suite computes from other suites' rows instead of measuring."""
    return bool(getattr(suite, "SIMULATED", False))


def forget(suite: Suite, case: Case, machine: Machine) -> None:
    """Have the suite drop what it keeps of a case, if it keeps anything."""
    if hasattr(suite, "forget"):
        suite.forget(case, machine)


def tell(suite: Suite, read: Callable[[], pd.DataFrame]) -> dict[str, str]:
    """What the suite says in the documents, by name; nothing is read for one that says nothing.

    read: its `full` rows of all devices, with column `device`.
    """
    return dict(suite.tell(read())) if hasattr(suite, "tell") else {}


def other_needs(suite: Suite) -> list[str]:
    """The suites that it builds on, without itself."""
    return [n for n in suite.NEEDS if n != suite.NAME]


def load(name: str) -> Suite:
    """Import suite `name` and check that it keeps the contract.

    Raises KeyError for an unknown suite, TypeError for a module that lacks a member.
    """
    if name not in names():
        raise KeyError(name)
    module: ModuleType = importlib.import_module(f"suites.{name}")
    missing = [m for m in _MEMBERS if not hasattr(module, m)]
    if missing:
        raise TypeError(f"suites/{name}.py lacks {', '.join(missing)}: see repro/suite.py for the contract")
    if name != module.NAME:
        raise TypeError(f"suites/{name}.py: NAME is {module.NAME!r}, want {name!r}")
    return cast(Any, module)
