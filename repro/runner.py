"""Measures what is missing: plans a profile's cases in dependency order, runs them one by one, persists each."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from repro import suite as registry
from repro.measure.machine import Machine, host_cores, load_average, read_clocks, throttle_watch
from repro.measure.throttle import METRIC, Watch
from repro.records import Run, Store, case_key
from repro.records.files import WriteError
from repro.suite import Case, CaseSkipped, Measurement, Profile, Suite

THROTTLED = Measurement(METRIC, "flag", 1.0, 1.0, 1.0, 1)


@dataclass(frozen=True)
class Planned:
    """What a suite has to measure. cases: all of the profile's on this machine. todo: those that are not recorded."""

    name: str
    suite: Suite
    cases: tuple[Case, ...]
    todo: tuple[Case, ...]

    @property
    def seconds(self) -> float:
        """Estimated seconds of what is to do."""
        return sum(c.seconds for c in self.todo)


class _Advance:
    """Feeds the progress bar, whose unit is the estimated second."""

    def __init__(self, progress: Progress, planned: Sequence[Planned]) -> None:
        self._progress = progress
        self._todo = {p.name: p.todo for p in planned}
        self._task = progress.add_task("", began=time.monotonic(), cases=0, **self._totals())

    def expect(self, p: Planned) -> None:
        """Correct what is to do of a suite."""
        self._todo[p.name] = p.todo
        self._progress.update(self._task, **self._totals())

    def begin(self, suite: str) -> None:
        self._progress.update(self._task, description=suite, began=time.monotonic())

    def end(self, seconds: float) -> None:
        self._progress.update(self._task, advance=seconds, cases=self._progress.tasks[0].fields["cases"] + 1)

    def _totals(self) -> dict[str, Any]:
        todo = [c for cases in self._todo.values() for c in cases]
        return {"total": sum(c.seconds for c in todo), "of": len(todo)}


@dataclass
class Outcome:
    """How measuring went. failed: a line a case that raised.

    throttled: of each case that was measured on a slowed-down GPU twice, its suite, key and the reasons. load: the
    largest load average of the host after a case that was measured.
    """

    counts: Counter[str] = field(default_factory=Counter)
    throttled: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    load: float = 0.0


def load_suites(names: Iterable[str] | None = None) -> tuple[dict[str, Suite], list[str]]:
    """Suites by name with all that they need, each after its needs; and a line for each that cannot be loaded.

    names: None loads every suite. Raises KeyError for an unknown name, ValueError where needs go in a circle.
    """
    known = registry.names()
    loaded: dict[str, Suite] = {}
    errors: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> bool:
        if name in path:
            raise ValueError(f"suites need each other in a circle: {' -> '.join((*path, name))}")
        if name in loaded or name in errors:
            return name in loaded
        try:
            suite = registry.load(name)
        except KeyError:
            if not path:
                raise
            errors[name] = f"{name}: no such suite, but {path[-1]} needs it"
            return False
        except Exception as e:
            errors[name] = f"{name}: cannot be loaded: {type(e).__name__}: {e}"
            return False
        # a suite whose need is broken can still be drawn and judged from its rows
        for need in registry.other_needs(suite):
            visit(need, (*path, name))
        loaded[name] = suite
        return True

    for name in known if names is None else names:
        visit(name, ())
    return loaded, list(errors.values())


def plan(
    store: Store, suites: dict[str, Suite], machine: Machine, profile: Profile, again: Collection[str] = ()
) -> tuple[list[Planned], list[str]]:
    """What is to do on this machine, in the suites' order; and a line for each suite whose cases cannot be listed.

    again: suites whose recorded cases are planned too.
    """
    planned: list[Planned] = []
    errors: list[str] = []
    for name, suite in suites.items():
        try:
            cases = tuple(suite.cases(profile, machine))
            todo = cases if name in again else _missing(store, suite, cases, machine.slug, profile)
            planned.append(Planned(name, suite, cases, todo))
        except Exception as e:
            errors.append(f"{name}: cases cannot be listed: {type(e).__name__}: {e}")
    return planned, errors


def _missing(store: Store, suite: Suite, cases: Sequence[Case], device: str, profile: Profile) -> tuple[Case, ...]:
    """Cases that are not recorded; of a simulated suite also those older than the rows that it is built from."""
    since = ""
    if registry.is_simulated(suite):
        needs = store.gather(registry.other_needs(suite), device, profile)
        since = str(needs["run_id"].max()) if len(needs) else ""
    done = store.done(suite.NAME, device, profile, since)
    return tuple(c for c in cases if case_key(c.key) not in done)


def table(planned: Sequence[Planned], machine: Machine, profile: Profile) -> Table:
    """The plan for people: suite, cases, done, to do, estimated time."""
    shown = Table(title=f"{profile} on {machine.slug}", title_justify="left", header_style="bold", show_footer=True)
    shown.add_column("suite", "all")
    for name, total in (
        ("cases", sum(len(p.cases) for p in planned)),
        ("done", sum(len(p.cases) - len(p.todo) for p in planned)),
        ("to do", sum(len(p.todo) for p in planned)),
    ):
        shown.add_column(name, str(total), justify="right")
    shown.add_column("estimated", _duration(sum(p.seconds for p in planned)), justify="right")
    for p in planned:
        counts = (len(p.cases), len(p.cases) - len(p.todo), len(p.todo))
        shown.add_row(p.name, *map(str, counts), _duration(p.seconds))
    return shown


def measure(
    store: Store,
    planned: Sequence[Planned],
    machine: Machine,
    profile: Profile,
    command: Sequence[str],
    console: Console,
    debug: bool = False,
    deadline: float | None = None,
) -> Outcome:
    """Measure and persist every case that is to do. A case that fails is reported and the others go on.

    Raises WriteError where a case cannot be recorded, and KeyboardInterrupt; the run's record then says so.

    machine: what the rows are about. Where its record holds `facts_of_run` it is a recorded one, not this one.
    debug: show the traceback of a failed case.
    deadline: in seconds of `time.monotonic`. No case is begun that its estimate says would end later; nor those after
    it in its suite, which are of less weight and may build on it.
    """
    outcome = Outcome()
    if not any(p.todo for p in planned):
        return outcome
    run = store.start(machine, command, None, profile)
    elsewhere = "facts_of_run" in machine.record
    watch = Watch(list) if elsewhere else throttle_watch(machine)

    def finish(status: str) -> None:
        clocks = {"unavailable": "computed elsewhere"} if elsewhere else read_clocks(machine.gpu_count)
        clocks |= {"throttled": outcome.throttled, "largest_load": outcome.load}
        store.finish(run, status, outcome.counts, clocks)
        if not elsewhere and outcome.load > host_cores():
            told = (
                f"The host was busy (load {outcome.load:.0f} on {host_cores()} cores): what waits for it took longer."
            )
            console.print(Text(f"{told} On an idle machine, --again measures anew.", style="yellow"))

    try:
        with _progress(planned, console) as advance:
            for p in planned:
                if registry.is_simulated(p.suite) and len(p.todo) < len(p.cases):
                    # what it is built from may have been measured a moment ago
                    p = replace(p, todo=_missing(store, p.suite, p.cases, run.device, profile))
                advance.expect(p)
                _measure_suite(store, run, p, machine, watch, outcome, console, debug, advance, deadline)
    except KeyboardInterrupt:
        finish("interrupted")
        raise
    except BaseException:
        with contextlib.suppress(WriteError):  # what came first must be read
            finish("failed")
        raise
    finish("failed" if outcome.failed else "finished")
    return outcome


def _measure_suite(
    store: Store,
    run: Run,
    p: Planned,
    machine: Machine,
    watch: Watch,
    outcome: Outcome,
    console: Console,
    debug: bool,
    advance: _Advance,
    deadline: float | None,
) -> None:
    skipped: Counter[str] = Counter()
    before = outcome.counts["measured"]
    inputs: pd.DataFrame | None = None
    for done, case in enumerate(p.todo):
        if deadline is not None and time.monotonic() + case.seconds > deadline:
            outcome.counts["left out"] += len(p.todo) - done
            console.print(Text(left_out_line(p.name, p.todo[done:]), style="yellow"))
            break
        advance.begin(p.name)
        try:
            if inputs is None or p.name in p.suite.NEEDS:
                inputs = store.gather(p.suite.NEEDS, run.device, run.profile)
            rows, why = watch.measure(
                partial(p.suite.measure, case, machine, inputs), partial(registry.forget, p.suite, case, machine)
            )
            store.append(run, p.name, case, [*rows, *([THROTTLED] if why else [])])
            outcome.counts["measured"] += 1
            outcome.load = max(outcome.load, load_average())
            if why:
                outcome.throttled.append({"suite": p.name, "case": dict(case.key), "reasons": why})
                key = ", ".join(f"{k}={v}" for k, v in case.key.items())
                console.print(Text(f"{p.name}: throttled twice, kept and marked ({key}): {', '.join(why)}", "yellow"))
        except WriteError:  # the next case could not be recorded either
            raise
        except CaseSkipped as e:
            skipped[str(e)] += 1
            outcome.counts["skipped"] += 1
        except Exception as e:
            told = " ".join(f"{type(e).__name__}: {e}".split())
            key = ", ".join(f"{k}={v}" for k, v in case.key.items())
            outcome.failed.append(f"{p.name}: failed ({key}): {told[:300]}")
            outcome.counts["failed"] += 1
            console.print(Text(outcome.failed[-1], style="red"))
            if debug:
                console.print_exception()
        advance.end(case.seconds)
    for reason, count in skipped.items():
        console.print(Text(f"{p.name}: {count} skipped: {reason}", style="yellow"))
    if p.todo:
        measured = outcome.counts["measured"] - before
        console.print(f"{p.name}: {measured} measured, {len(p.cases) - len(p.todo)} already recorded", highlight=False)


def left_out_line(suite: str, cases: Sequence[Case]) -> str:
    """For people: what of a suite there was no time for."""
    key = ", ".join(f"{k}={v}" for k, v in cases[0].key.items())
    told = f"{len(cases)} case{'s' if len(cases) > 1 else ''}, {_duration(sum(c.seconds for c in cases))} by estimate"
    return f"{suite}: left out for want of time: {told}, the first of them ({key})"


def not_fitting(planned: Sequence[Planned], seconds: float) -> dict[str, tuple[Case, ...]]:
    """By suite, what `measure` would leave out with so many seconds to go, were all estimates right."""
    found = {}
    for p in planned:
        for done, case in enumerate(p.todo):
            if case.seconds > seconds:
                found[p.name] = p.todo[done:]
                break
            seconds -= case.seconds
    return found


@contextmanager
def _progress(planned: Sequence[Planned], console: Console) -> Iterator[_Advance]:
    columns = (TextColumn("{task.description:<18}"), BarColumn(), _Cases(), _TimeLeft())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Advance(progress, planned)


class _Cases(MofNCompleteColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.fields['cases']}/{task.fields['of']} cases")


class _TimeLeft(ProgressColumn):
    """Time left: the estimates that are left, times how far the estimates so far were off."""

    def render(self, task: Task) -> Text:
        current = time.monotonic() - task.fields["began"]
        spent = max((task.elapsed or 0.0) - current, 0.0)
        pace = spent / task.completed if task.completed else 1.0
        left = max((task.total or 0.0) - task.completed, 0.0) * pace - current
        return Text(f"{_duration(max(left, 0.0))} left", style="cyan")


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
