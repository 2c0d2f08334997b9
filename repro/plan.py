"""Batch sizes and expected gain for your clips, before you rent the GPUs.

    python -m repro.plan clips.csv --ranks 16
    python -m repro.plan wan-uniform --model wan-1.3b --m-mem 48000 --write plan.yaml

Exit codes: 0 done, 2 nothing to plan with (one line says why; --debug shows the traceback).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console

from repro import plan_file, plan_setup, plan_view, planner
from repro.balance import policies
from repro.balance.types import Sync
from repro.corpus import mixes
from repro.corpus.buckets import BucketGrid
from repro.corpus.manifest import ManifestError, load
from repro.corpus.shapes import Corpus
from repro.measure.machine import read_machine
from repro.names import unknown
from repro.plan_setup import Costs, PlanError, Setup
from repro.planner import Plan
from repro.records import Store, files

ROOT = Path(__file__).resolve().parents[1]
NAMED_SAMPLES = 1_000_000
"""Clips that a corpus given by name is shown with."""
WIDTH = 140
"""Columns of the tables where the output is no terminal."""
PICTURES = (".png", ".svg", ".pdf")

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main(
    clips: Annotated[str, typer.Argument(metavar="MANIFEST|CORPUS", help="a file, tar shards, or a corpus by name")],
    model: Annotated[str, typer.Option(help="wan-14b or wan-1.3b")] = "wan-14b",
    device: Annotated[str, typer.Option(help="whose measured step times to use")] = "nvidia-h200",
    ranks: Annotated[int, typer.Option(min=1, help="GPUs that train together")] = 8,
    memory_gb: Annotated[float | None, typer.Option(min=1, help="GB of one GPU, if not the device's")] = None,
    m_mem: Annotated[int | None, typer.Option(min=1, help="tokens a micro-batch may hold, if not as measured")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="equal-token's today, if below M_mem")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="a step and rank")] = 1,
    sync: Annotated[str, typer.Option(help="micro_batch (full sharding) or step: where ranks meet")] = "micro_batch",
    adaln: Annotated[str, typer.Option(help="eager, wan or fused")] = "eager",
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="of collectives, GB/s; else taken as hidden")
    ] = None,
    fps: Annotated[float | None, typer.Option(min=0.1, help="training frame rate, 16 unless given")] = None,
    repeat: Annotated[list[str] | None, typer.Option(metavar="SOURCE=N", help="epochs of a source in one")] = None,
    policy: Annotated[str | None, typer.Option(help="whose batch sizes to write; else the best table")] = None,
    write: Annotated[Path | None, typer.Option(help="plan.yaml; a picture goes beside it")] = None,
    figure: Annotated[Path | None, typer.Option(help="picture, .png, .svg or .pdf")] = None,
    log: Annotated[Path | None, typer.Option(help="CSV of every clip dropped or changed")] = None,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="beyond the measured shapes")] = False,
    results: Annotated[Path, typer.Option(help="folder of results", show_default=False)] = ROOT / "results",
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Batch size of each bucket, its step time, and what each batching policy would gain on your clips.

    MANIFEST is .csv, .jsonl, .parquet or WebDataset .tar shards with columns height, width and frames (with fps) or
    duration. CORPUS is one of wan-uniform, opensora-1.1, opensora-1.2, koala-36m, knapformer-32, wan-curriculum,
    images, worst-case. Exit codes: 0 done, 2 nothing to plan with (one line says why).

    \b
    python -m repro.plan clips.csv --ranks 16
    python -m repro.plan "shards/clips-{000..127}.tar" --repeat koala=2 --write plan.yaml
    python -m repro.plan wan-uniform --memory-gb 80 --ranks 32
    """  # noqa: D301 - click reads the backspace: keep these lines
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        store = _store(results)
        size = plan_setup.known_model(model)
        _check_policy(policy)
        figure = _picture(write, figure)
        _check_numbers({"--memory-gb": memory_gb, "--bandwidth": bandwidth, "--fps": fps})
        _check_targets(clips, {"--write": write, "--figure": figure, "--log": log})
        reading = {"fps": fps, "repeats": _repeats(repeat), "log": log}
        _check_reading(clips, reading)
        device, borrowed = _measured(store, device)
        setup = _setup(
            store,
            memory_gb,
            sync,
            bandwidth,
            model=size,
            device=device,
            ranks=ranks,
            micro_batches=micro_batches,
            adaln=adaln,
            m_mem=m_mem,
            token_budget=token_budget,
            extrapolate=extrapolate,
        )
        costs, memory = plan_setup.read_costs(store, setup)
        limit, notes = plan_setup.token_limit(setup, costs, memory)
        corpus, about = _clips(clips, limit, costs, extrapolate, reading)
        plan = planner.make(setup, costs, corpus, limit)
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        plan_view.show(plan, console, about, [*borrowed, *_elsewhere(setup, store), *notes, *plan.warnings])
        for path in _write(plan, policy, write, figure):
            console.print(f"wrote {path}")
    except (ManifestError, PlanError, ValueError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None


def _setup(store: Store, memory_gb: float | None, sync: str, bandwidth: float | None, **given: Any) -> Setup:
    """The setup, with the device's recorded memory unless told otherwise. Raises PlanError."""
    if sync not in get_args(Sync):
        raise PlanError(f"--sync must be {' or '.join(get_args(Sync))}, got {sync!r}")
    memory = memory_gb * 1e9 if memory_gb else plan_setup.recorded_memory(store, given["device"])
    if memory is None:
        raise PlanError(f"{given['device']} has no record of its memory: give --memory-gb")
    rate = bandwidth * 1e9 if bandwidth else None
    return Setup(memory_bytes=memory, sync=cast(Sync, sync), bandwidth=rate, **given)


def _store(results: Path) -> Store:
    """The results that step times come from. Raises PlanError."""
    if not results.is_dir():
        raise PlanError(f"no such folder: --results {results}")
    return Store(results)


def _check_policy(name: str | None) -> None:
    if name is not None and name not in policies.NAMES:
        raise PlanError(unknown("policy", name, policies.NAMES))


def _picture(write: Path | None, figure: Path | None) -> Path | None:
    """Where the picture goes, if anywhere. Raises PlanError for a kind that is not drawn, or the plan's own file."""
    if figure is None and write is not None:
        figure = write.with_suffix(".png")
    if figure is not None and figure.suffix.lower() not in PICTURES:
        raise PlanError(f"--figure must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}, got {str(figure)!r}")
    if figure is not None and figure == write:
        raise PlanError(f"plan and picture would both be {write}: give --write a name in .yaml, or another --figure")
    return figure


def _check_numbers(given: Mapping[str, float | None]) -> None:
    """Raise PlanError for NaN and infinity, which pass a lower limit."""
    for option, value in given.items():
        if value is not None and not math.isfinite(value):
            raise PlanError(f"{option} must be finite, got {value}")


def _check_targets(clips: str, targets: Mapping[str, Path | None]) -> None:
    """Raise PlanError for a file that would replace the manifest, OSError for one that cannot be written."""
    for option, path in targets.items():
        if path is None:
            continue
        if "\0" not in clips and path.absolute() == Path(clips).absolute():
            raise PlanError(f"{option} {path} would replace the manifest itself: give another name")
        files.require_target(path)


def _check_reading(clips: str, reading: Mapping[str, object]) -> None:
    """Raise PlanError for options of a manifest that a corpus by name has no use for."""
    given = [f"--{'repeat' if name == 'repeats' else name}" for name, value in reading.items() if value]
    if clips in mixes.names() and given:
        raise PlanError(
            f"{', '.join(given)} would change nothing: {clips} is a corpus by name, not a manifest; leave it out"
        )


def _measured(store: Store, device: str) -> tuple[str, list[str]]:
    """The device whose rows tell step times, and the line that says so where it is one of several that were named.

    Step times of blocks are of one GPU, so nvidia-h200-x8 without rows of its own has nvidia-h200's. Raises PlanError
    where neither was measured.
    """
    one = plan_file.one_device(device)
    try:
        plan_setup.require_measured(store, device)
    except PlanError:
        if one == device or store.rows("block_time", one, "full").empty:
            raise
        return one, [f"no step times of {device} itself: planned with those of one such device, {one}"]
    return device, []


def _repeats(given: list[str] | None) -> dict[str, float]:
    """SOURCE=N options. Raises PlanError for anything else."""
    found = {}
    for text in given or []:
        source, _, number = text.rpartition("=")
        try:
            found[source] = float(number)
        except ValueError:
            source = ""
        if not source:
            raise PlanError(f"--repeat must be SOURCE=NUMBER, got {text!r}")
    return found


def _clips(
    text: str, limit: int, costs: Costs, extrapolate: bool, reading: Mapping[str, Any]
) -> tuple[Corpus, list[str]]:
    """The corpus to plan for, and the lines that tell what became of its clips. Raises ManifestError, PlanError.

    A manifest's clips go to Wan 2.1's buckets up to the longest sequence that memory, and the measurements, allow.
    """
    if text in mixes.names():
        corpus = mixes.named(text, NAMED_SAMPLES)
        chosen = mixes.mix(text)
        about = [f"{text}: {chosen.summary}", f"  source: {chosen.source}", f"  assumed: {chosen.assumptions}"]
        return corpus, about
    if not Path(text).suffix and not Path(text).exists():
        raise PlanError(f"{text!r} is no file; {unknown('corpus', text, mixes.names())}")
    longest = limit if extrapolate else min(limit, costs.quadratic.range.tokens[1])
    given = {name: value for name, value in reading.items() if value}
    manifest = load(text, BucketGrid(max_tokens=longest), **given)
    return manifest.corpus, [f"{Path(text).name}: buckets up to {longest:,} tokens", *manifest.report.lines()]


def _elsewhere(setup: Setup, store: Store) -> list[str]:
    """Says so where the plan is for another device than this machine's, or for another memory than the device's."""
    here = read_machine()
    told = []
    if plan_file.one_device(here.slug) != plan_file.one_device(setup.device):
        told.append(f"made for {setup.device}, not for this machine ({here.slug})")
    recorded = plan_setup.recorded_memory(store, setup.device)
    if recorded is not None and abs(setup.memory_bytes / recorded - 1) > plan_file.SAME_MEMORY:
        told.append(
            f"made for {setup.memory_bytes / 1e9:.0f} GB a device; step times are {setup.device}'s, "
            f"which has {recorded / 1e9:.0f} GB"
        )
    return told


def _write(plan: Plan, policy: str | None, write: Path | None, figure: Path | None) -> list[Path]:
    written = []
    if write is not None:
        plan_file.write(plan, policy or plan.best_table(), write)
        written.append(write)
    if figure is not None:
        plan_view.draw(plan, figure)
        written.append(figure)
    return written


if __name__ == "__main__":
    app(prog_name="python -m repro.plan")
