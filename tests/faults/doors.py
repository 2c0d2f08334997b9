"""Every door, and every case."""

from __future__ import annotations

import typer

import repro.all
from repro import compare, plan, train
from repro.plan_setup import PlanError
from repro.wan import make_corpus
from repro.wan.samples import DataError
from tests.faults import doors_functions, doors_plan, doors_results, doors_start, doors_train

COMMANDS: dict[str, typer.Typer] = {
    "repro.all": repro.all.app,
    "repro.plan": plan.app,
    "repro.compare": compare.app,
    "repro.train": train.app,
    "repro.wan.make_corpus": make_corpus.app,
    "checkpoints": train.app,
    "weights": train.app,
    "calibration.csv": train.app,
}
FUNCTIONS: dict[str, tuple[type[Exception], ...]] = {
    "plan files": (PlanError,),
    "shards": (DataError, FileNotFoundError),
    "the op": (TypeError, ValueError),
    "the sampler": (ValueError,),
    "policies and layouts": (ValueError, KeyError),
    "cost fit": (ValueError,),
}
CASES = [*doors_results.CASES, *doors_plan.CASES, *doors_train.CASES, *doors_start.CASES, *doors_functions.CASES]
