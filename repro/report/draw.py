"""Draws every suite's figures from its rows and writes them; the same rows give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib.figure
import pandas as pd

from repro.records import Store, files
from repro.report import overview, style, tables
from repro.suite import PROFILES, Figure, Suite, other_needs

# dates and versions would change the bytes without a change in the picture
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


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


def draw_all(store: Store, suites: Mapping[str, Suite], folder: Path) -> tuple[list[Figure], list[str]]:
    """Draw and save what every suite with rows has to show; the figures, and one line for each suite that failed."""
    drawn: list[Figure] = []
    errors: list[str] = []
    for name, suite in suites.items():
        rows = rows_to_draw(store, [name, *other_needs(suite)])
        if not (rows["suite"] == name).any():
            continue
        try:
            with style.context():
                for figure in suite.draw(rows):
                    save(figure.figure, folder, figure.name)
                    drawn.append(figure)
        except Exception as e:
            errors.append(f"{name}: not drawn: {type(e).__name__}: {e}")
    return drawn, errors


def draw_claims(rows: Sequence[tables.Row], folder: Path, others: Sequence[tables.Row] = ()) -> list[Figure]:
    """Write and return the overview of the claims: claims, and claims-devices where several were judged on.

    Beside them claims.md. rows: of results/claims.csv. others: of claims_by_device.csv.
    """
    with style.context():
        drawn = [Figure("claims", overview.draw(rows), "Every claim of the paper: its value, ours, the verdict.")]
        if (figure := overview.draw_devices([*rows, *others])) is not None:
            drawn.append(Figure("claims-devices", figure, "The claims that were judged on several devices."))
        for overall in drawn:
            save(overall.figure, folder, overall.name)
    files.replace(folder / "claims.md", ("# The paper's claims\n\n" + tables.markdown(rows, notes=True)).encode())
    return drawn


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
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=_METADATA[kind])
    return buffer.getvalue()
