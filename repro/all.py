"""From one command to a verdict: measure what is missing here, draw the figures, judge the paper's claims.

    python -m repro.all                     the smoke profile, about a minute on any machine
    python -m repro.all --no-measure        figures and verdicts from the recorded rows, without PyTorch
    python -m repro.all --profile full      what verdicts use

Exit codes: 0 done, 1 something failed (the rest is done), 2 wrong usage, or a file that cannot be read or written (one
line says which), 130 interrupted, 143 ended by SIGTERM. Whatever ends it, what was measured is kept.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.text import Text

from repro import runner, verdicts
from repro import suite as registry
from repro.measure.machine import Machine, h200s, read_machine
from repro.names import unknown
from repro.records import Store, files
from repro.report import documents, draw, html, kernel_words, tables
from repro.suite import PROFILES, Profile, Suite
from repro.wan.nodes import Nodes, NodesError, leading, lend

ROOT = Path(__file__).resolve().parents[1]
MOST_PLANNED = 1024
console = Console()
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main(
    profile: Annotated[str, typer.Option(help="smoke or full; verdicts use full")] = "smoke",
    only: Annotated[list[str] | None, typer.Option(help="this suite and what it needs; repeatable")] = None,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="measure what is missing here")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show what would be measured, and stop; needs no GPUs")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="measure recorded cases (of --only) again; old rows stay")
    ] = False,
    device: Annotated[str | None, typer.Option(help="simulate from this device's recorded rows instead")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs to use, which name the device; else one, or the CPU")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="begin no case that would not be done so long after the start")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="machines that measure together, --gpus on all of them")] = 1,
    node_rank: Annotated[
        int, typer.Option(min=0, help="this machine's number; 0 measures, the others lend it their GPUs")
    ] = 0,
    rendezvous: Annotated[str | None, typer.Option(help="host:port of node 0, as all machines reach it")] = None,
    results: Annotated[Path, typer.Option(help="folder of results", show_default=False)] = ROOT / "results",
    figures: Annotated[Path | None, typer.Option(help="folder of figures, if not beside the results")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Measure what is missing on this machine, redraw the figures, judge the paper's claims.

    Rows and run records go to results/<device>/, figures and report.html to figures/. Whatever ends it, what was
    measured is kept, and the same command goes on from there. Exit codes: 0 done, 1 something failed (the rest is
    done), 2 wrong usage, or a file that cannot be read or written, 130 interrupted, 143 ended by SIGTERM.

    \b
    python -m repro.all                      the smoke profile: a minute or two on any machine
    python -m repro.all --no-measure         figures and verdicts from recorded rows, without PyTorch
    python -m repro.all --profile full       what verdicts use, on this GPU
    python -m repro.all --only kernel_speed --again
    python -m repro.all --profile full --minutes 9 --dry-run
    python -m repro.all --profile full --device nvidia-h200   simulate again from recorded rows
    """  # noqa: D301 - click reads the backspace: keep these lines
    began = time.monotonic()
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    with _in_order(debug):
        _check(profile, only, device, results)
        if minutes is not None and not math.isfinite(minutes):
            raise typer.BadParameter(f"must be a number of minutes, got {minutes}", param_hint="--minutes")
        nodes = _nodes(nnodes, node_rank, rendezvous, measure and not device)
        _check_folders(results, figures, measure or dry_run)
        chosen_profile = cast(Profile, profile)
        store = Store(results)
        suites, errors = runner.load_suites()

        if measure or dry_run:
            machine = _recorded_machine(store, device) if device else _machine(gpus, nnodes, dry_run)
            if nodes is not None and nodes.rank and not dry_run:
                _lend(nodes, machine)
            selected = runner.load_suites(only)[0] if only else suites
            if device:
                selected = {n: s for n, s in selected.items() if registry.is_simulated(s)}
            planned, unlisted = runner.plan(store, selected, machine, chosen_profile, (only or suites) if again else ())
            errors += unlisted
            if dry_run:
                console.print(runner.table(planned, machine, chosen_profile))
                if minutes is not None:
                    for name, cases in runner.not_fitting(planned, 60 * minutes).items():
                        console.print(Text(runner.left_out_line(name, cases), style="yellow"))
                _end(errors)
            deadline = None if minutes is None else began + 60 * minutes
            with _leading(nodes, machine) as at:
                outcome = runner.measure(store, planned, at, chosen_profile, _command(), console, debug, deadline)
            errors += outcome.failed
        _end(errors + _conclude(store, suites, figures or results.parent / "figures", debug))


class _Terminated(KeyboardInterrupt):
    """SIGTERM, with which schedulers and service managers announce the end: it ends a run as Ctrl-C does."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated


@contextlib.contextmanager
def _in_order(debug: bool) -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and what the system refuses (a full disk, a read-only folder) end in one line."""
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except KeyboardInterrupt as ended:
        console.print("Interrupted; what was measured is kept. The same command goes on from there.")
        raise typer.Exit(143 if isinstance(ended, _Terminated) else 130) from ended
    except BrokenPipeError:  # of what reads the output: typer's own matter
        raise
    except OSError as error:
        if debug:
            raise
        told = " ".join(str(error).split())
        typer.echo(f"error: {told}; what was recorded before stands, and the same command goes on from there", err=True)
        raise typer.Exit(2) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _conclude(store: Store, suites: dict[str, Suite], folder: Path, debug: bool) -> list[str]:
    """Draw into `folder`, judge and report all that is recorded; a line for each thing that failed."""
    results = store.root
    drawn, undrawn = draw.draw_all(store, suites, folder)
    chosen, rest, unjudged = verdicts.judge_all(store, suites)
    verdicts.write(chosen, rest, results)
    rows = verdicts.read(results)
    drawn += draw.draw_claims(rows, folder, [v.row() for v in rest])
    kernels = kernel_words.section(store, next((r["device"] for r in rows if r["id"] == "K1"), ""))
    tables.update_readme(results.parent / "README.md", tables.readme_section(rows), kernels)
    told, untold = documents.sections(store, suites, [h200s(gpus) for gpus in (1, 2)])
    documents.update(results.parent, told)
    undrawn += untold

    console.print(tables.terminal(rows, console.width))
    console.print(f"{len(drawn)} figures in {folder}, verdicts in {results / 'claims.csv'}", highlight=False)
    try:
        report = html.write(folder, store, suites, drawn, chosen, rest)
        console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    except OSError:
        raise
    except Exception as e:
        undrawn.append(f"report: not written: {type(e).__name__}: {e}")
        if debug:
            console.print_exception()
    return [*undrawn, *unjudged]


def _check(profile: str, only: list[str] | None, device: str | None, results: Path) -> None:
    """Stop at the door what cannot work. Raises BadParameter (exit code 2)."""
    if profile not in PROFILES:
        raise typer.BadParameter(unknown("profile", profile, PROFILES), param_hint="--profile")
    sys.path.insert(0, str(ROOT))  # suites belong to the checkout, not to the installed package
    known = registry.names()
    for name in only or []:
        if name not in known:
            raise typer.BadParameter(unknown("suite", name, known), param_hint="--only")
        if device and not registry.is_simulated(registry.load(name)):
            raise typer.BadParameter(f"{name} measures: run it on {device} itself", param_hint="--device")
    devices = Store(results).devices()
    if device is not None and device not in devices:
        raise typer.BadParameter(unknown("device", device, devices), param_hint="--device")


def _check_folders(results: Path, figures: Path | None, new: bool) -> None:
    """Stop at the door where no results can be read or nothing can be written. new: results may begin here.

    Raises BadParameter.
    """
    for option, folder in (("--results", results), ("--figures", figures)):
        if folder is None:
            continue
        try:
            files.require_target(folder / "file")
        except OSError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error
    devices = Store(results).devices()
    if not new and not any(Store(results).suites(d) for d in devices):
        raise typer.BadParameter(f"{results} has rows of no device: nothing to draw", param_hint="--results")
    for device in devices:
        for path in (*(results / device).glob("*.csv"), *(results / device).glob("runs.jsonl")):
            if not path.is_file():
                raise typer.BadParameter(f"{path} must be a file: move the folder away", param_hint="--results")


def _nodes(count: int, rank: int, rendezvous: str | None, measures: bool) -> Nodes | None:
    """The machines that measure together, None for this one alone. Raises BadParameter."""
    try:
        found = Nodes.of(count, rank, rendezvous)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--nnodes") from error
    if found is not None and not measures:
        raise typer.BadParameter("several machines measure: leave out --no-measure and --device", param_hint="--nnodes")
    return found


@contextlib.contextmanager
def _leading(nodes: Nodes | None, machine: Machine) -> Iterator[Machine]:
    """The machine to measure on: this one, or inside with all the others."""
    if nodes is None:
        yield machine
        return
    try:
        with leading(nodes, machine) as at:
            yield at
    except NodesError as error:
        _end([str(error)])


def _lend(nodes: Nodes, machine: Machine) -> None:
    """This machine's part where another one measures; ends the command."""
    console.print(f"Node {nodes.rank} of {nodes.count}: lends its ranks to node 0, which measures and writes.")
    try:
        lend(nodes, machine)
    except NodesError as error:
        _end([str(error)])
    _end([])


def _machine(gpus: int | None, nodes: int, plans: bool) -> Machine:
    """This machine with so many GPUs, its share of those of so many machines.

    plans: nothing is measured, so that GPUs which are not here will do.
    """
    try:
        return read_machine(gpus, nodes)
    except ValueError as error:
        if not plans or not gpus or not 0 < gpus <= MOST_PLANNED or gpus % nodes:
            raise typer.BadParameter(str(error), param_hint="--gpus") from error
        console.print(f"{gpus} GPUs are not visible here: a plan for as many H200s, which estimates are made for.")
        return h200s(gpus)


def _recorded_machine(store: Store, device: str) -> Machine:
    """The machine that a device's newest run was recorded on, for suites that compute from its rows."""
    runs = store.runs(device)
    if not runs:
        raise typer.BadParameter(f"{device!r} has no run record (runs.jsonl)", param_hint="--device")
    facts = runs[-1].get("machine", {})
    capability = facts.get("compute_capability")
    return Machine(
        slug=device,
        name=facts.get("gpu_name") or facts.get("cpu_name") or device,
        gpu_count=facts.get("gpu_count") or 0,
        compute_capability=(capability[0], capability[1]) if capability else None,
        sm_count=facts.get("sm_count"),
        memory_bytes=facts.get("memory_bytes") or facts.get("host_memory_bytes"),
        cores=facts.get("cores") or 1,
        record={**facts, "facts_of_run": runs[-1]["run_id"]},
    )


def _command() -> list[str]:
    """The command for the run record; of folders elsewhere only the name, of other machines nothing."""
    told = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]]
    for i, argument in enumerate(told):
        if argument == "--rendezvous" and i + 1 < len(told):
            told[i + 1] = "NODE0:" + told[i + 1].rpartition(":")[2]
        elif argument.startswith("--rendezvous="):
            told[i] = "--rendezvous=NODE0:" + argument.rpartition(":")[2]
    return ["python", "-m", "repro.all", *told]


def _end(errors: list[str]) -> None:
    for line in errors:
        console.print(Text(line, style="red"))
    raise typer.Exit(1 if errors else 0)


if __name__ == "__main__":
    app(prog_name="python -m repro.all")
