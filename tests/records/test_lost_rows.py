"""A case that lost rows, wherever its file was cut, is not done, and an older run that has all of its own stands in."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.measure.machine import Machine
from repro.records import Key, Run, Store, case_key, counts, files
from repro.suite import Case, Measurement, Profile

DEVICE = "some-gpu"
MACHINE = Machine(DEVICE, "Some GPU", 1, (9, 0), 132, 10**11, 4, {"gpu_name": "Some GPU", "unavailable": {}})
METRICS = ("time", "bandwidth", "ceiling")
LOST = r"speed\.csv: lost rows of a case \(impl=b, tokens=1\): an older run stands in where there is one, and the "


class Row(NamedTuple):
    """Which row of which case of which run, as the file is believed to have it."""

    run_id: str
    key: Key
    metric: str


class Written(NamedTuple):
    """A store's root with two runs of four cases, which the second measured in another order, and its rows as told.

    stopped: whether both runs were, rather than finished, so that each may lack the rows of its last case.
    """

    root: Path
    rows: tuple[Row, ...]
    stopped: bool

    @property
    def path(self) -> Path:
        return self.root / DEVICE / "speed.csv"

    def metrics(self, run_id: str, key: Key) -> set[str]:
        return {r.metric for r in self.rows if (r.run_id, r.key) == (run_id, key)}

    def lost(self, run_id: str, key: Key, kept: set[str]) -> bool:
        """Whether a run that kept these metrics of a case is known to have lost some."""
        if not kept and self.stopped:
            return key != next(r.key for r in reversed(self.rows) if r.run_id == run_id)
        return kept != self.metrics(run_id, key)


def measured(run: int, count: int) -> list[Measurement]:
    return [Measurement(m, "us", run + i, run + i, run + i, 1, samples=(1.0,)) for i, m in enumerate(METRICS[:count])]


def write(root: Path, stopped: bool) -> Written:
    store, rows = Store(root), []
    cases = [Case({"impl": impl, "tokens": n}) for impl in "ab" for n in (1, 11)]
    for number, order in enumerate((cases, cases[::-1])):
        run = store.start(MACHINE, ["x"], None, "full")
        for count, case in enumerate(order):
            found = measured(number, 1 + count % 3)
            store.append(run, "speed", case, found)
            rows += [Row(run.id, case_key(case.key), m.metric) for m in found]
        if not stopped:
            store.finish(run, "finished", {}, {})
    return Written(root, tuple(rows), stopped)


@pytest.fixture(scope="module", params=["finished", "stopped"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("written"), request.param == "stopped")


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def hold(written: Written, kept: list[Row], content: bytes) -> None:
    """What a file with these of its rows must be read as: `done`, and the rows that count."""
    written.path.write_bytes(content)
    store = Store(written.root)
    runs = sorted({r.run_id for r in written.rows})
    done: set[Key] = set()
    stands: dict[Key, str] = {}
    for key in {r.key for r in kept}:
        metrics = {run: {r.metric for r in kept if r[:2] == (run, key)} for run in runs}
        lost = [run for run in runs if written.lost(run, key, metrics[run])]
        having = [run for run in runs if metrics[run]]
        stands[key] = ([run for run in having if run not in lost] or having)[-1]
        if having[-1] >= max(lost, default="") and having[-1] not in lost:
            done.add(key)
    assert store.done("speed", DEVICE, "full") == done
    parameters = ("impl", "tokens")
    found = [Row(r["run_id"], case_key({p: r[p] for p in parameters}), r["metric"]) for r in _records(store)]
    assert found == [r for r in kept if r.run_id == stands[r.key]]


def _records(store: Store) -> list[dict[str, str]]:
    rows = store.rows("speed", DEVICE, "full")
    return [] if rows.empty else rows[["run_id", "impl", "tokens", "metric"]].to_dict("records")


def test_a_file_cut_at_any_line_end_or_inside_any_line(written: Written, quiet: None) -> None:
    whole = written.path.read_bytes()
    begin = whole.index(b"\n") + 1
    ends = [i + 1 for i in range(begin, len(whole)) if whole[i : i + 1] == b"\n"]
    try:
        for cut in sorted({begin, *ends, *range(begin, len(whole), 7)}):
            hold(written, list(written.rows[: whole[:cut].count(b"\n") - 1]), whole[:cut])
    finally:
        written.path.write_bytes(whole)


@given(data=st.data())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_any_lines_taken_out_and_the_rest_in_any_order(data: st.DataObject, written: Written) -> None:
    whole = written.path.read_bytes()
    header, *lines = whole.splitlines(keepends=True)
    kept = data.draw(st.lists(st.sampled_from(range(len(lines))), unique=True))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hold(written, [written.rows[i] for i in kept], header + b"".join(lines[i] for i in kept))
    finally:
        written.path.write_bytes(whole)


def lose(root: Path, metric: str, count: int = 1, run: Run | None = None, impl: str = "b", tokens: int = 1) -> None:
    """Take the last rows of a metric of a case out of the file."""
    path = root / DEVICE / "speed.csv"
    lines = path.read_text().splitlines(keepends=True)
    at = [
        i for i, line in enumerate(lines) if f",{impl},{tokens},{metric}," in line and (run is None or run.id in line)
    ]
    for i in reversed(at[-count:]):
        del lines[i]
    path.write_text("".join(lines))


@pytest.fixture
def two_runs(tmp_path: Path) -> tuple[Store, Run, Run]:
    """Both measured b, of two metrics; the first a as well."""
    store = Store(tmp_path)
    runs = [store.start(MACHINE, ["x"], None, "full") for _ in range(2)]
    store.append(runs[0], "speed", Case({"impl": "a", "tokens": 1}), measured(0, 2))
    for number, run in enumerate(runs):
        store.append(run, "speed", Case({"impl": "b", "tokens": 1}), measured(number, 2))
    return store, *runs


B = case_key({"impl": "b", "tokens": 1})


def test_one_line_tells_of_it_until_it_is_measured_again(two_runs: tuple[Store, Run, Run]) -> None:
    store, first, _ = two_runs
    lose(store.root, "bandwidth")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with pytest.warns(UserWarning, match=LOST) as heard:
            store.rows("speed"), store.rows("speed", DEVICE, "full")
            assert B not in store.done("speed", DEVICE, "full")
    assert len({(w.filename, w.lineno, str(w.message)) for w in heard}) == 1, "which Python shows once"
    assert set(store.rows("speed")["run_id"]) == {first.id}
    before = store.root.joinpath(DEVICE, "speed.csv").read_bytes()
    again = store.start(MACHINE, ["x"], None, "full")
    store.append(again, "speed", Case({"impl": "b", "tokens": 1}), measured(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert B in store.done("speed", DEVICE, "full")
        assert set(store.rows("speed").query("impl == 'b'")["run_id"]) == {again.id}
    assert store.root.joinpath(DEVICE, "speed.csv").read_bytes().startswith(before), "what was saved stays"


def test_where_no_run_has_all_rows_the_newest_stands(two_runs: tuple[Store, Run, Run], quiet: None) -> None:
    store, _, second = two_runs
    lose(store.root, "bandwidth", count=2)
    rows = store.rows("speed").query("impl == 'b'")
    assert rows[["run_id", "metric"]].to_numpy().tolist() == [[second.id, "time"]]
    assert store.done("speed", DEVICE, "full") == {case_key({"impl": "a", "tokens": 1})}


def test_an_older_run_that_lost_rows_is_of_no_matter(two_runs: tuple[Store, Run, Run]) -> None:
    store, first, second = two_runs
    lose(store.root, "bandwidth", run=first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert B in store.done("speed", DEVICE, "full")
        assert set(store.rows("speed").query("impl == 'b'")["run_id"]) == {second.id}


def test_the_rows_of_a_run_that_is_named_are_its_own(two_runs: tuple[Store, Run, Run], quiet: None) -> None:
    store, _, second = two_runs
    lose(store.root, "bandwidth")
    assert store.rows("speed", DEVICE, run_id=second.id)["metric"].tolist() == ["time"]


def test_a_row_that_can_no_longer_be_read_is_a_lost_one(two_runs: tuple[Store, Run, Run], quiet: None) -> None:
    store, first, _ = two_runs
    path = store.root / DEVICE / "speed.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], lines[-1].replace(",measured,", ",guessed,")]))
    assert B not in store.done("speed", DEVICE, "full")
    assert set(store.rows("speed")["run_id"]) == {first.id}


def test_a_case_measured_twice_in_a_run_needs_the_metrics_of_the_second_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.start(MACHINE, ["x"], None, "full")
    for count in (3, 2):
        store.append(run, "speed", Case({"impl": "b", "tokens": 1}), measured(0, count))
    assert store.done("speed", DEVICE, "full") == {B}


def test_rows_of_an_older_checkout_have_no_count_and_are_taken_for_whole(two_runs: tuple[Store, Run, Run]) -> None:
    store, first, second = two_runs
    (store.root / DEVICE / "cases" / "speed" / f"{second.id}.jsonl").unlink()
    lose(store.root, "bandwidth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert B in store.done("speed", DEVICE, "full")
        assert store.rows("speed")["run_id"].tolist() == [first.id] * 2 + [second.id]


def test_without_counts_a_line_that_is_no_whole_row_still_tells_of_its_case(
    two_runs: tuple[Store, Run, Run], quiet: None
) -> None:
    store, *_ = two_runs
    shutil.rmtree(store.root / DEVICE / "cases")
    path = store.root / DEVICE / "speed.csv"
    path.write_bytes(path.read_bytes()[:-10])
    assert store.done("speed", DEVICE, "full") == {case_key({"impl": "a", "tokens": 1})}


def test_a_row_that_stands_twice_makes_up_for_no_other(two_runs: tuple[Store, Run, Run], quiet: None) -> None:
    """As a merge may leave them."""
    store, *_ = two_runs
    path = store.root / DEVICE / "speed.csv"
    *lines, time, _ = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, time, time]))
    assert B not in store.done("speed", DEVICE, "full")


def take_out(store: Store, run: Run, tokens: Iterable[int] = range(10)) -> None:
    """Take all rows of these cases of a run out of the file."""
    path = store.root / DEVICE / "speed.csv"
    lines = path.read_text().splitlines(keepends=True)
    out = [f",{run.id},speed,{run.profile},b,{n}," for n in tokens]
    path.write_text("".join(line for line in lines if not any(o in line for o in out)))


def five_cases(store: Store, profile: Profile = "full") -> Run:
    """A finished run of five cases of two metrics."""
    run = store.start(MACHINE, ["x"], None, profile)
    for n in range(5):
        store.append(run, "speed", Case({"impl": "b", "tokens": n}), measured(n, 2))
    store.finish(run, "finished", {"measured": 5}, {})
    return run


def keys(*tokens: int) -> set[Key]:
    return {case_key({"impl": "b", "tokens": n}) for n in tokens}


@pytest.mark.parametrize("cases", [1, 4, 5])
def test_cases_of_which_no_row_is_left_are_lost(tmp_path: Path, cases: int) -> None:
    store = Store(tmp_path)
    older, newer = five_cases(store), five_cases(store)
    take_out(store, newer, range(5 - cases, 5))
    others = f" and {cases - 1} more" if cases > 1 else ""
    told = rf"lost rows of a case \(impl=b, tokens={5 - cases}\){others}: an older run stands in"
    with pytest.warns(UserWarning, match=told) as heard:
        assert store.done("speed", DEVICE, "full") == keys(*range(5 - cases))
        assert store.rows("speed").query(f"tokens >= {5 - cases}")["run_id"].tolist() == [older.id] * 2 * cases
    assert len({str(w.message) for w in heard}) == 1
    third = five_cases(store)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.done("speed", DEVICE, "full") == keys(*range(5))
        assert set(store.rows("speed")["run_id"]) == {third.id}


def test_cases_of_which_no_run_has_a_row_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = five_cases(store)
    take_out(store, run, [3, 4])
    told = r"lost rows of a case \(impl=b, tokens=3\) and 1 more"
    with pytest.warns(UserWarning, match=told):
        assert store.done("speed", DEVICE, "full") == keys(0, 1, 2)
    (store.root / DEVICE / "speed.csv").unlink()
    told = r"speed\.csv: lost rows of a case \(impl=b, tokens=0\) and 4 more"
    with pytest.warns(UserWarning, match=told):
        assert store.done("speed", DEVICE, "full") == set()
    with pytest.warns(UserWarning, match=told):
        assert store.rows("speed").empty


def test_an_older_run_that_lost_all_rows_of_a_case_is_of_no_matter(tmp_path: Path) -> None:
    store = Store(tmp_path)
    older, newer = five_cases(store), five_cases(store)
    take_out(store, older)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.done("speed", DEVICE, "full") == keys(*range(5))
        assert set(store.rows("speed")["run_id"]) == {newer.id}


@pytest.mark.parametrize(("lost", "other"), [("smoke", "full"), ("full", "smoke")])
def test_what_one_profile_lost_the_other_did_not(tmp_path: Path, quiet: None, lost: Profile, other: Profile) -> None:
    store = Store(tmp_path)
    before, _, after = five_cases(store, lost), five_cases(store, other), five_cases(store, lost)
    take_out(store, after, [1, 2])
    assert store.done("speed", DEVICE, other) == keys(*range(5))
    assert store.done("speed", DEVICE, lost) == keys(0, 3, 4)
    assert store.rows("speed", DEVICE, lost).query("tokens == 1")["run_id"].tolist() == [before.id] * 2


def _without_profile(store: Store, run: Run) -> None:
    """Counts as they were written before they told it."""
    path = store.root / DEVICE / "cases" / "speed" / f"{run.id}.jsonl"
    path.write_text(path.read_text().replace(f'"profile": "{run.profile}", ', ""))
    assert "profile" not in path.read_text()


def test_a_count_without_profile_is_of_a_full_run(tmp_path: Path, quiet: None) -> None:
    store = Store(tmp_path)
    five_cases(store, "smoke"), five_cases(store)
    newer = five_cases(store)
    _without_profile(store, newer)
    take_out(store, newer, [1, 2])
    assert store.done("speed", DEVICE, "full") == keys(0, 3, 4)
    assert store.done("speed", DEVICE, "smoke") == keys(*range(5))


def test_rows_tell_the_profile_of_a_count_that_does_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    five_cases(store)
    smoke = five_cases(store, "smoke")
    _without_profile(store, smoke)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.done("speed", DEVICE, "full") == store.done("speed", DEVICE, "smoke") == keys(*range(5))
    lose(store.root, "bandwidth", run=smoke)
    with pytest.warns(UserWarning, match=LOST):
        assert store.done("speed", DEVICE, "full") == keys(*range(5))
    with pytest.warns(UserWarning, match=LOST):
        assert store.done("speed", DEVICE, "smoke") == keys(0, 2, 3, 4)


@pytest.mark.parametrize("end", [None, {"status": "interrupted"}, {"status": "failed"}, "soon"])
@pytest.mark.parametrize("torn", ["", '{"metrics": 2, "prof'])
def test_only_the_last_count_of_a_stopped_run_may_be_without_rows(
    tmp_path: Path, quiet: None, torn: str, end: object
) -> None:
    """A count that is itself cut off was the last one."""
    store = Store(tmp_path)
    five_cases(store)
    run = store.start(MACHINE, ["x"], None, "full")
    for n in (1, 2):
        store.append(run, "speed", Case({"impl": "b", "tokens": n}), measured(n, 2))
    path = store.root / DEVICE / "cases" / "speed" / f"{run.id}.jsonl"
    path.write_text(path.read_text() + torn)
    records = store.root / DEVICE / "runs.jsonl"
    records.write_text(records.read_text().replace('"end": null', f'"end": {json.dumps(end)}'))
    take_out(store, run)
    assert store.done("speed", DEVICE, "full") == (keys(0, 3, 4) if torn else keys(0, 2, 3, 4))


def test_a_run_that_goes_on_while_its_rows_are_read_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    five_cases(store)
    run = store.start(MACHINE, ["x"], None, "full")
    read_counts, read_table = counts.read, files.read_table

    def go_on(*tokens: int) -> None:
        for n in tokens:
            other.append(run, "speed", Case({"impl": "b", "tokens": n}), measured(n, 2))

    def and_measure(folder: Path) -> dict[counts.At, counts.Count]:
        found = read_counts(folder)
        go_on(11, 12)
        return found

    def and_finish(path: Path) -> files.Table:
        found = read_table(path)
        go_on(13, 10)
        other.finish(run, "finished", {}, {})
        return found

    counts.append(
        tmp_path / DEVICE / "cases" / "speed" / f"{run.id}.jsonl", "full", Case({"impl": "b", "tokens": 10}), 2
    )
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("repro.records.counts.read", and_measure)
        patch.setattr("repro.records.files.read_table", and_finish)
        assert store.done("speed", DEVICE, "full") == keys(*range(5), 11, 12)


def test_a_count_that_was_not_followed_by_rows_changes_nothing(
    two_runs: tuple[Store, Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a run is killed between the two, or its disk is full."""
    store, _, second = two_runs
    run = store.start(MACHINE, ["x"], None, "full")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("repro.records.files.append_rows", fail)
        with pytest.raises(OSError, match="no space"):
            store.append(run, "speed", Case({"impl": "b", "tokens": 1}), measured(2, 2))
    assert (store.root / DEVICE / "cases" / "speed" / f"{run.id}.jsonl").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert B in store.done("speed", DEVICE, "full")
        assert set(store.rows("speed").query("impl == 'b'")["run_id"]) == {second.id}


def test_counts_are_on_the_disk_before_the_rows(two_runs: tuple[Store, Run, Run]) -> None:
    store, _, second = two_runs
    (line,) = (store.root / DEVICE / "cases" / "speed" / f"{second.id}.jsonl").read_text().splitlines()
    # what other people's scripts read
    assert json.loads(line) == {"metrics": 2, "profile": "full", "case": {"impl": "b", "tokens": "1"}}


def _spoiled(store: Store, spoil: Callable[[bytes], bytes]) -> list[str]:
    """What is said of counts that were spoiled, by which nothing of the rows may be hidden."""
    before = store.rows("speed"), store.done("speed", DEVICE, "full")
    paths = sorted((store.root / DEVICE / "cases").rglob("*.jsonl"))
    whole = [p.read_bytes() for p in paths]
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(spoil(content))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert Store(store.root).rows("speed").equals(before[0])
        assert Store(store.root).done("speed", DEVICE, "full") == before[1]
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
    return [str(w.message) for w in heard]


def test_counts_cut_anywhere_hide_nothing(two_runs: tuple[Store, Run, Run]) -> None:
    for cut in range(0, 120, 3):
        for told in _spoiled(two_runs[0], lambda content, cut=cut: content[:cut]):  # type: ignore[misc]
            assert ".jsonl: line " in told and told.endswith(" is no count of a case and is left out")


@pytest.mark.parametrize(
    "lines",
    [
        b"\xff\xfe",
        b'[]\n{}\nnull\n{"metrics": 2}',
        b'{"metrics": 2, "profile": "fool", "case": {}}\n{"metrics": 2, "profile": {}, "case": {}}',
        b'{"metrics": Infinity, "case": {}}\n{"metrics": 1, "case": [1]}\n{"metrics": "two", "case": {}}',
        b"[" * 100_000,
    ],
)
def test_lines_that_are_no_counts_are_named_and_left_out(two_runs: tuple[Store, Run, Run], lines: bytes) -> None:
    numbers = ", ".join(str(1 + i) for i in range(lines.count(b"\n") + 1))
    told = _spoiled(two_runs[0], lambda content: lines + b"\n" + content)
    assert len(told) == 4 and all(f"line {numbers} is no count" in message for message in told), told


def test_rows_of_a_newer_schema_are_not_told_as_lost(two_runs: tuple[Store, Run, Run]) -> None:
    store, first, second = two_runs
    path = store.root / DEVICE / "speed.csv"
    head, *lines = path.read_text().splitlines()
    for newer in ((second.id,), (first.id, second.id)):
        path.write_text("\n".join([head, *(f"2{x[1:]}" if x.split(",")[1] in newer else x for x in lines)]) + "\n")
        with pytest.warns(UserWarning) as heard:
            found = Store(store.root).done("speed", DEVICE, "full")
        assert all("schema 2 is newer than this checkout reads" in str(w.message) for w in heard)
        assert (B in found) == (len(newer) == 1), "what an older run has is done"


def test_reading_writes_nothing(written: Written, tmp_path: Path, quiet: None) -> None:
    shutil.copytree(written.root, tmp_path, dirs_exist_ok=True)
    lose(tmp_path, "time")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    Store(tmp_path).rows("speed"), Store(tmp_path).done("speed", DEVICE, "full")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
