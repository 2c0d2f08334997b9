"""What a row is: its columns, the text of its cells, its key, and how rows of older schemas are read.

A row is one metric of one case of one run:

    schema, run_id, suite, profile, <the suite's own parameter columns>, metric, unit, value, ci_low, ci_high, n, kind,
    source

Every column that is not named here is a parameter column. A cell without a value is empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import get_args

from repro.suite import PROFILES, Case, Kind, Measurement

SCHEMA = 1
HEAD = ("schema", "run_id", "suite", "profile")
TAIL = ("metric", "unit", "value", "ci_low", "ci_high", "n", "kind", "source")
_FIXED = frozenset({*HEAD, *TAIL})
KINDS: tuple[str, ...] = get_args(Kind)

Record = dict[str, str]
"""A row as text: column -> cell, empty cells left out or "". """

Key = frozenset[tuple[str, str]]
"""Identity of a case within a suite and profile: (parameter, text) of every parameter that has a value."""

MIGRATIONS: dict[int, Callable[[Record], Record]] = {}
"""schema n -> function that turns a row of schema n into one of schema n + 1 (its `schema` cell is set for it).

Counts (`repro.records.counts`) have no schema: one that changes parameters must see to them as well.
"""

_DIGITS = 15
"""Of a whole number that fits into 64 bits."""


class SchemaError(ValueError):
    """A row, or what should become one, breaks the format; the message names the value and the fix."""


def cell(value: str | int | float) -> str:
    """Text of a parameter's value, the same for equal values: 64000, 64000.0 and np.int64(64000) are all "64000".

    Raises SchemaError for NaN, infinities, booleans and text that does not fit on a line.
    """
    if isinstance(value, bool):
        raise SchemaError(f"a parameter must be text or a number, got {value!r}: write 'on'/'off' or 0/1")
    if isinstance(value, str):
        if not value.isprintable() or value != value.strip():
            raise SchemaError(
                f"a parameter must be printable text on one line without outer spaces, got {value[:40]!r}"
            )
        return value
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        number = float(value)
        if not math.isfinite(number):
            raise SchemaError(f"a parameter must be finite, got {value!r}: leave it empty or use a word")
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)
    raise SchemaError(f"a parameter must be text or a number, got {value!r} ({type(value).__name__})")


def case_key(case: Mapping[str, str | int | float]) -> Key:
    """Key of a case from its parameters; empty ones do not count, so a grown header changes no old key."""
    return frozenset((name, text) for name, value in case.items() if (text := cell(value)))


def row_key(row: Record) -> Key:
    """Key of the case that a row belongs to."""
    return frozenset((p, text) for p in parameter_columns(row) if (text := row[p]))


def parameter_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """The columns that are parameters, in their order."""
    return tuple(c for c in columns if c not in _FIXED)


def header(parameters: Sequence[str]) -> tuple[str, ...]:
    """All columns of a file whose suite has these parameters. Raises SchemaError for a reserved or repeated name."""
    reserved = sorted({*HEAD, *TAIL, "device", "index"} & set(parameters))
    if reserved:
        raise SchemaError(f"parameter names {reserved} are reserved for the fixed columns: rename them")
    if len(set(parameters)) != len(parameters):
        raise SchemaError(f"parameter names must differ, got {list(parameters)}")
    return (*HEAD, *parameters, *TAIL)


def records(run_id: str, suite: str, profile: str, case: Case, measurements: Sequence[Measurement]) -> list[Record]:
    """Rows of one measured case, checked.

    Raises SchemaError for an unknown profile or kind, a repeated metric, a reversed interval, or a simulated value
    without a source.
    """
    if profile not in PROFILES:
        raise SchemaError(f"profile must be one of {PROFILES}, got {profile!r}")
    if not measurements:
        raise SchemaError(
            f"{suite} {dict(case.key)}: no measurement to store; raise CaseSkipped with the reason instead"
        )
    metrics = [m.metric for m in measurements]
    if len(set(metrics)) != len(metrics):
        raise SchemaError(f"{suite} {dict(case.key)}: metrics must differ within a case, got {metrics}")
    header(tuple(case.key))
    parameters = {name: cell(value) for name, value in case.key.items()}
    before = {"schema": str(SCHEMA), "run_id": run_id, "suite": suite, "profile": profile}
    return [{**before, **parameters, **_measured(suite, m)} for m in measurements]


def migrate(row: Record) -> Record:
    """Bring a row to the current schema, one version after the other. Rows of newer schemas come back as they are.

    Raises SchemaError for a version that is no number or that nothing migrates.
    """
    while (version := schema_of(row)) < SCHEMA:
        if version not in MIGRATIONS:
            raise SchemaError(f"no migration from schema {version} (current: {SCHEMA})")
        row = {**MIGRATIONS[version](dict(row)), "schema": str(version + 1)}
    return row


def schema_of(row: Record) -> int:
    """Schema version of a row. Raises SchemaError where it is no number."""
    text = row.get("schema", "")
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
        raise SchemaError(f"schema must be a whole number, got {text[:40]!r}")
    return int(text)


def check(row: Record) -> None:
    """Raise SchemaError, naming cell and text, where a row that was read has what none can have.

    NaN and infinities pass: they are what was measured, and decide nothing (`repro.claims.judge`).
    """
    if not row.get("run_id") or not row.get("metric"):
        raise SchemaError(f"{'metric' if row.get('run_id') else 'run_id'} is empty")
    for name, known in (("profile", PROFILES), ("kind", KINDS)):
        if row.get(name) not in known:
            raise SchemaError(f"{name} must be one of {', '.join(known)}, got {row.get(name, '')[:40]!r}")
    for name, text in row.items():
        if name not in _FIXED:
            _check_text(text)
    numbers = []
    for name in ("value", "ci_low", "ci_high"):
        text = row.get(name, "nan")
        try:
            numbers.append(float(text))
        except ValueError:
            raise SchemaError(f"{name} must be a number, got {text[:40]!r}") from None
    if numbers[1] > numbers[2]:
        raise SchemaError(f"ci_low {row['ci_low']} lies above ci_high {row['ci_high']}")
    text = row.get("n", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise SchemaError(f"n must be a whole number, got {text[:40]!r}")


@functools.lru_cache(maxsize=1024)  # the same few texts stand in tens of thousands of rows
def _check_text(text: str) -> None:
    """Raise SchemaError where a parameter that was read has a text that none can have."""
    cell(text)


def _measured(suite: str, m: Measurement) -> Record:
    if m.kind not in KINDS:
        raise SchemaError(f"{suite} {m.metric}: kind must be one of {KINDS}, got {m.kind!r}")
    if m.kind == "simulated" and not m.source:
        raise SchemaError(f"{suite} {m.metric}: a simulated value must name its source (the run_ids it was built from)")
    if m.ci_low > m.ci_high:
        raise SchemaError(f"{suite} {m.metric}: ci_low {m.ci_low} lies above ci_high {m.ci_high}")
    if not m.metric:
        raise SchemaError(f"{suite}: a measurement needs a metric name, got {m}")
    return {
        "metric": cell(m.metric),
        "unit": cell(m.unit),
        "value": repr(float(m.value)),
        "ci_low": repr(float(m.ci_low)),
        "ci_high": repr(float(m.ci_high)),
        "n": str(int(m.n)),
        "kind": m.kind,
        "source": cell(m.source),
    }
