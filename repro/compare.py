"""Devices side by side, or two measurements of one device with a verdict.

    python -m repro.compare                                          every device in results/
    python -m repro.compare ../before/results/nvidia-h200 results/nvidia-h200 --fail-on slower
    python -m repro.compare results/nvidia-h200 --runs previous latest

Exit codes: 0 compared, 1 something is slower (with --fail-on slower), 2 nothing to compare (one line says why).
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from repro import compare_cells, compare_judge, compare_read, compare_view
from repro.compare_cells import Comparison
from repro.compare_read import Source, SourceError
from repro.names import unknown
from repro.records import Store, files

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 200
"""Columns of the tables where the output is no terminal."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main(
    given: Annotated[
        list[str] | None,
        typer.Argument(metavar="RESULTS", help="devices' folders, or see above  [default: every device]"),
    ] = None,
    runs: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="OLD NEW", help="runs of one folder: ids, parts of ids, first, previous or latest"),
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(help="only this suite; repeatable")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="only this metric, derived ones too; repeatable")] = None,
    threshold: Annotated[float, typer.Option(min=0.1, help="% by which a time must differ to matter")] = 100
    * compare_judge.THRESHOLD,
    everything: Annotated[bool, typer.Option("--all", help="cells that are the same too, however many")] = False,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="tables as Markdown")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="every shared cell, simulated ones too")] = None,
    figure: Annotated[Path | None, typer.Option(metavar="FILE", help="picture: .png, .svg or .pdf")] = None,
    fail_on: Annotated[str | None, typer.Option(metavar="slower", help="exit with 1 where a time is slower")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Devices side by side, absolute and in % of their ceiling; two measurements of one device with a verdict.

    RESULTS are devices' folders or slugs, folders of them, other checkouts, or JSON files of pytest-benchmark.
    FASTER, SLOWER: the ranks of the samples differ (p < 0.05), and the 95% interval of the ratio of medians lies beyond
    the threshold, and beyond what plain streams moved by. SAME: it lies within the threshold. AMBIGUOUS: neither.
    Different devices get no verdict. Exit codes: 0 compared, 1 slower with --fail-on, 2 nothing to compare.

    \b
    python -m repro.compare results/nvidia-h200 results/cpu-x86-64-2c --suite kernel_speed
    python -m repro.compare ../before/results/nvidia-h200 nvidia-h200 --fail-on slower
    python -m repro.compare nvidia-h200 --runs previous latest --figure change.png
    python -m repro.compare before.json after.json --markdown change.md
    """  # noqa: D301 - click reads the backspace: keep these lines
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        _check(figure, fail_on, threshold)
        sources = _sources(given, runs)
        _check_targets(sources, {"--markdown": markdown, "--csv": csv, "--figure": figure})
        _check_names(sources, suite or (), metric or ())
        share = threshold / 100
        comparison = compare_cells.compare(sources, suite or (), metric or (), share)
        if len(sources) > 1 and not comparison.cells:
            raise SourceError(f"nothing is shared: {'; '.join(comparison.alone) or 'no cell of what was asked for'}")
        if fail_on and not comparison.judged:
            raise SourceError("--fail-on needs times of one device that were measured twice, and there are none")
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        console.print(compare_view.terminal(comparison, everything))
        for path in _write(comparison, markdown, csv, figure, share):
            console.print(f"wrote {path}")
    except (SourceError, ValueError, OSError) as error:
        if debug:
            raise
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from None
    if fail_on and comparison.judged["SLOWER"]:
        raise typer.Exit(1)


def _check(figure: Path | None, fail_on: str | None, threshold: float) -> None:
    if not math.isfinite(threshold):
        raise SourceError(f"--threshold must be finite, got {threshold}")
    if fail_on not in (None, "slower"):
        raise SourceError(f"--fail-on knows slower only, got {fail_on!r}")
    if figure is not None:
        from repro.compare_figure import KINDS

        if figure.suffix.lower() not in KINDS:
            raise SourceError(f"--figure must end in {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {str(figure)!r}")


def _check_targets(sources: Sequence[Source], targets: Mapping[str, Path | None]) -> None:
    """Raise SourceError for one file asked for twice or one that would replace what is read, OSError for no file."""
    wanted = {option: path.resolve() for option, path in targets.items() if path is not None}
    for option, path in wanted.items():
        if list(wanted.values()).count(path) > 1:
            raise SourceError(f"{option} {path} is asked for twice: give both a name of their own")
        if any(_among(path, s.store) for s in sources if s.store is not None):
            raise SourceError(f"{option} {path} lies among the results that are read: give another place")
        files.require_target(path)


def _among(path: Path, store: Store) -> bool:
    """Whether a file would lie in any device's folder of a store, or replace one beside them.

    A store is where a device's folder lies, which may be anywhere, in one's home too: beside the folders there is room.
    """
    root = store.root.resolve()
    rows = any(root / device in path.parents for device in store.devices() if compare_read.is_device(root / device))
    return rows or (root == path.parent and path.exists())


def _sources(given: Sequence[str] | None, runs: tuple[str, str] | None) -> list[Source]:
    """What was named, or every device here. Raises SourceError."""
    results = ROOT / "results"
    if runs is not None:
        if not given or len(given) != 1:
            raise SourceError(f"--runs wants one device's folder, got {len(given or ())}")
        return compare_read.named(compare_read.read_runs(given[0], runs, results))
    found = [s for text in given or [str(results)] for s in compare_read.read(text, results)]
    return compare_read.named(found)


def _check_names(sources: Sequence[Source], suites: Sequence[str], metrics: Sequence[str]) -> None:
    """Raise SourceError for a suite or metric that no source has."""
    for kind, column, asked in (("suite", "suite", suites), ("metric", "metric", metrics)):
        known = sorted({str(v) for s in sources for v in s.rows[column].unique()})
        for name in asked:
            if name not in known:
                raise SourceError(unknown(kind, name, known))


def _write(
    comparison: Comparison, markdown: Path | None, csv: Path | None, figure: Path | None, threshold: float
) -> list[Path]:
    if markdown is not None:
        files.replace(markdown, compare_view.markdown(comparison).encode())
    if csv is not None:
        files.replace(csv, compare_view.table_csv(comparison).encode())
    if figure is not None:
        from repro import compare_figure

        compare_figure.write(comparison, figure, threshold)
    return [p for p in (markdown, csv, figure) if p is not None]


if __name__ == "__main__":
    app(prog_name="python -m repro.compare")
