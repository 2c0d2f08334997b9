"""Draws every suite's figures from its rows and writes them; the same rows give the same bytes."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib.figure
import pandas as pd

from repro.measure import throttle
from repro.records import Store, files
from repro.report import overview, style, tables
from repro.suite import PROFILES, Figure, Suite, load, other_needs

# dates and versions would change the bytes without a change in the picture
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


_MANY = 16
"""Suites with rows, over all devices, from which on it pays to start processes, which takes two seconds each."""


@dataclass(frozen=True)
class Drawn:
    """A figure that was saved as <name>.svg and <name>.png; see `repro.suite.Figure`."""

    name: str
    caption: str
    claims: tuple[str, ...] = ()


def rows_to_draw(store: Store, suites: Sequence[str]) -> pd.DataFrame:
    """Of each suite and device the `full` rows where there are any, else the `smoke` rows."""
    frames = []
    for device in store.devices():
        for suite in suites:
            for profile in reversed(PROFILES):
                rows = store.rows(suite, device, profile)
                if len(rows):
                    frames.append(rows)
                    break
    return pd.concat(frames, ignore_index=True) if frames else store.rows("")


def draw_all(store: Store, suites: Mapping[str, Suite], folder: Path) -> tuple[list[Drawn], list[str]]:
    """Draw and save what every suite with rows has to show; the figures, and one line for each suite that failed.

    With much to draw, suites are drawn in as many processes as there are cores; the bytes are the same.
    Raises WriteError where a figure cannot be saved.
    """
    drawn: list[Drawn] = []
    errors: list[str] = []
    for found, error in _draw_each(store, suites, folder):
        drawn += found
        errors += [error] if error else []
    return drawn, errors


def _draw_each(store: Store, suites: Mapping[str, Suite], folder: Path) -> Iterator[tuple[list[Drawn], str]]:
    """What `_draw_suite` returns of each suite, in order."""
    recorded = {name: sum(name in store.suites(device) for device in store.devices()) for name in suites}
    workers = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, len(suites))
    if workers < 2 or sum(recorded.values()) < _MANY:
        for name, suite in suites.items():
            yield _draw_suite(store, name, suite, folder)
        return
    # processes that are started anew, not forked: this one may hold CUDA, and threads of numerical libraries
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin_worker) as pool:
        # what takes longest first, so that no core waits for it at the end
        order = sorted(suites, key=lambda name: recorded[name], reverse=True)
        jobs = {name: pool.submit(_draw_elsewhere, store.root, name, folder) for name in order}
        try:
            for name, suite in suites.items():
                try:
                    yield jobs[name].result()
                except BrokenExecutor:  # a process was killed, most likely for memory: this one draws instead
                    yield _draw_suite(store, name, suite, folder)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interrupt waits for what is being drawn, not for all


def _begin_worker() -> None:
    """A drawing process leaves Ctrl-C to the process that started it, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _draw_elsewhere(root: Path, name: str, folder: Path) -> tuple[list[Drawn], str]:
    return _draw_suite(Store(root), name, load(name), folder)


def _draw_suite(store: Store, name: str, suite: Suite, folder: Path) -> tuple[list[Drawn], str]:
    """Draw and save a suite's figures; what was drawn, and why not all of it. Raises WriteError."""
    drawn: list[Drawn] = []
    try:
        rows = rows_to_draw(store, [name, *other_needs(suite)])
        if (rows["suite"] == name).any():
            with style.context():
                for figure in suite.draw(rows):
                    save(figure.figure, folder, figure.name)
                    slow = throttle.told(rows[[figure.name.endswith(f"-{d}") for d in rows["device"]]])
                    drawn.append(Drawn(figure.name, figure.caption + (f" {slow}." if slow else ""), figure.claims))
    except files.WriteError:  # nor can the next suite's be saved
        raise
    except Exception as e:
        return drawn, f"{name}: not drawn: {type(e).__name__}: {e}"
    return drawn, ""


def draw_claims(rows: Sequence[tables.Row], folder: Path, others: Sequence[tables.Row] = ()) -> list[Drawn]:
    """Write and return the overview of the claims: claims, and claims-devices where several were judged on.

    Beside them claims.md. rows: of results/claims.csv. others: of claims_by_device.csv.
    """
    with style.context():
        figures = [Figure("claims", overview.draw(rows), "Every claim of the paper: its value, ours, the verdict.")]
        if (figure := overview.draw_devices([*rows, *others])) is not None:
            figures.append(
                Figure(
                    "claims-devices",
                    figure,
                    "The claims that were judged on several devices, but for those that a threshold decides.",
                )
            )
        for overall in figures:
            save(overall.figure, folder, overall.name)
    text = "# The paper's claims\n\n" + tables.markdown(rows, notes=True)
    if others:
        text += "\n## On other devices\n\n" + tables.markdown(others, notes=True)
    files.replace(folder / "claims.md", text.encode())
    return [Drawn(f.name, f.caption, f.claims) for f in figures]


def save(figure: matplotlib.figure.Figure, folder: Path, name: str) -> None:
    """Write folder/name.svg and .png atomically; a file that would not change is left alone."""
    for suffix in ("svg", "png"):
        content, path = picture(figure, suffix), folder / f"{name}.{suffix}"
        if not path.exists() or path.read_bytes() != content:
            files.replace(path, content)


def picture(figure: matplotlib.figure.Figure, kind: str) -> bytes:
    """The figure as svg, png or pdf; the same figure gives the same bytes. Call it inside `style.context()`."""
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)  # once, whatever the number of files
        figure.set_layout_engine(None)  # under "none" every file would be drawn twice
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()
