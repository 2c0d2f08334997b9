"""Bad input at every door: one line that says what is wrong and what would be right, and nothing written or lost."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.faults import doors, doors_train, recorded_rows
from tests.faults.cases import Case
from tests.plan import recorded

TRACEBACK = "Traceback (most recent call last)"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded.write(tmp_path_factory.mktemp("faults") / "results")


def everything(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, but for the locks that writers leave; folders without files do not count."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def invoke(app: typer.Typer, arguments: list[str]) -> tuple[int, str, BaseException | None]:
    """Exit code, what was said on stderr and as warnings, and what was raised but an exit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    raised = None if isinstance(done.exception, SystemExit) else done.exception
    return done.exit_code, done.stderr + "".join(f"warning: {w.message}\n" for w in caught), raised


@pytest.mark.parametrize("case", [c for c in doors.CASES if c.door in doors.COMMANDS], ids=lambda c: c.id)
def test_a_command_refuses_in_one_line(
    case: Case, tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # which commands replace
    monkeypatch.chdir(tmp_path)
    arguments = [str(a) for a in case.given(tmp_path)]  # type: ignore[union-attr]
    if case.door == "repro.plan":
        arguments += ["--results", str(results)]
    if case.door in ("repro.all", "repro.compare"):
        recorded_rows.write(tmp_path / "results" / "acme-1")
    if case.door == "repro.all" and "--results" not in arguments:
        arguments += ["--results", "results"]
    if case.door == "repro.train":
        made_up = () if "--data" in arguments else doors_train.MADE_UP
        arguments = [*map(str, doors_train.TINY), *made_up, *arguments]
    before = everything(tmp_path)
    code, told, raised = invoke(doors.COMMANDS[case.door], arguments)
    assert raised is None, f"{type(raised).__name__}: {raised}"
    (error,) = (line for line in told.splitlines() if re.match(r"(?i)error: ", line))
    assert re.search(case.told, error), error
    assert code == 2 and TRACEBACK not in told and len(error) < 1000
    after = everything(tmp_path)
    if "records is usable" in error:
        after.pop("log.csv", None)  # asked for, and it tells which records are at fault
    assert after == before


@pytest.mark.parametrize("case", [c for c in doors.CASES if c.door in doors.FUNCTIONS], ids=lambda c: c.id)
def test_a_function_raises_what_it_documents(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = case.given(tmp_path)
    before = everything(tmp_path)
    with pytest.raises(doors.FUNCTIONS[case.door]) as caught:
        call()  # type: ignore[operator]
    told = " ".join(str(caught.value).split())
    assert re.search(case.told, told), told
    assert len(told) < 1000
    assert everything(tmp_path) == before
