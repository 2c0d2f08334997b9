"""Every door, and every case."""

from __future__ import annotations

import typer

from repro import plan
from repro.plan_setup import PlanError
from tests.faults import doors_plan

COMMANDS: dict[str, typer.Typer] = {"repro.plan": plan.app}
FUNCTIONS: dict[str, tuple[type[Exception], ...]] = {"plan files": (PlanError,)}
CASES = doors_plan.CASES
