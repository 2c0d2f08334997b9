"""The store keeps its row contract, loses nothing it need not lose, and finds the newest run of a case."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from repro.measure.machine import Machine
from repro.records import HEAD, TAIL, SchemaError, Store, case_key, files, schema
from repro.records import store as store_module
from repro.suite import Case, Measurement

DEVICE = "some-gpu"
MACHINE = Machine(DEVICE, "Some GPU", 1, (9, 0), 132, 10**11, 4, {"gpu_name": "Some GPU", "unavailable": {}})


def case(**key):
    return Case(key)


def timing(value=2.0, metric="time", **kwargs):
    return Measurement(metric, "us", value, value - 0.5, value + 0.5, 30, **kwargs)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


@pytest.fixture
def run(store):
    return store.start(MACHINE, ["python", "-m", "repro.all"], None, "smoke")


def csv_of(store, suite="speed"):
    return store.root / DEVICE / f"{suite}.csv"


def test_columns_are_the_fixed_ones_around_the_parameters(store, run):
    store.append(run, "speed", case(impl="fused", tokens=1024), [timing()])
    header = csv_of(store).read_text().splitlines()[0]
    assert header == (
        "schema,run_id,suite,profile,impl,tokens,metric,unit,value,ci_low,ci_high,n,kind,source"
    )  # what other people's scripts read
    rows = store.rows("speed")
    assert list(rows.columns) == ["device", *HEAD, "impl", "tokens", *TAIL]


def test_values_come_back_exactly_and_typed(store, run):
    third = 1 / 3
    store.append(run, "speed", case(impl="fused", tokens=64_000, ratio=1.25), [timing(third)])
    row = store.rows("speed", DEVICE, "smoke").iloc[0]
    assert row["value"] == third
    assert (row["tokens"], row["ratio"], row["impl"], row["n"]) == (64_000, 1.25, "fused", 30)
    assert (row["device"], row["profile"], row["kind"], row["source"]) == (DEVICE, "smoke", "measured", "")


def test_an_interval_may_be_unknown(store, run):
    nan = float("nan")
    store.append(run, "speed", case(impl="a"), [Measurement("time", "us", 1.0, nan, nan, 1)])
    assert store.rows("speed")["ci_low"].isna().all()


def test_no_rows_is_an_empty_frame_with_the_fixed_columns(store):
    rows = store.rows("never_measured")
    assert rows.empty
    assert list(rows.columns) == ["device", *HEAD, *TAIL]
    assert store.done("never_measured", DEVICE, "smoke") == set()
    assert store.devices() == []
    assert store.gather(["a", "b"], DEVICE, "full").empty


def test_the_newest_run_owns_all_metrics_of_a_case(store, run):
    store.append(run, "speed", case(impl="a"), [timing(1.0), timing(9.0, "bandwidth")])
    store.append(run, "speed", case(impl="b"), [timing(5.0)])
    later = store.start(MACHINE, ["again"], None, "smoke")
    store.append(later, "speed", case(impl="a"), [timing(2.0)])
    rows = store.rows("speed").set_index("impl")
    assert rows.loc["a", "value"] == 2.0  # a scalar: the old run's bandwidth went with its time
    assert rows.loc["b", "value"] == 5.0
    assert len(csv_of(store).read_text().splitlines()) == 1 + 4  # nothing was removed


def test_the_rows_of_one_run_whatever_came_after_it(store, run):
    store.append(run, "speed", case(impl="fused"), [timing(1.0)])
    later = store.start(MACHINE, ["x"], None, "smoke")
    store.append(later, "speed", case(impl="fused"), [timing(2.0)])
    assert store.rows("speed")["value"].tolist() == [2.0]
    assert store.rows("speed", DEVICE, run_id=run.id)["value"].tolist() == [1.0]
    assert store.rows("speed", DEVICE, run_id="none").empty


def test_a_file_that_another_process_changed_is_read_again(store, run):
    store.append(run, "speed", case(impl="fused"), [timing(1.0)])
    assert len(store.rows("speed")) == 1
    Store(store.root).append(run, "speed", case(impl="eager"), [timing(2.0)])
    assert len(store.rows("speed")) == 2


@pytest.mark.parametrize("merged", ["rows", "records"])
def test_the_newest_run_wins_wherever_a_merge_has_put_it(store, run, clock_set_back, merged):
    """git may join two branches' lines in any order."""
    store.append(run, "speed", case(impl="a"), [timing(1.0), timing(9.0, "bandwidth")])
    later = store.start(MACHINE, ["again"], None, "smoke")
    store.append(later, "speed", case(impl="a"), [timing(2.0)])
    if merged == "rows":
        path, head = csv_of(store), 1
    else:
        path, head = csv_of(store).with_name("runs.jsonl"), 0
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:head], *reversed(lines[head:])]))
    assert store.rows("speed")["value"].tolist() == [2.0]
    assert store.done("speed", DEVICE, "smoke", since=later.id) == {case_key({"impl": "a"})}
    clock_set_back()
    assert store.start(MACHINE, ["a third time"], None, "smoke").id > later.id


def test_a_metric_written_twice_in_a_run_counts_once(store, run):
    for value in (1.0, 2.0):
        store.append(run, "speed", case(impl="a"), [timing(value)])
    assert store.rows("speed")["value"].tolist() == [2.0]


def test_smoke_never_shadows_full(store, run):
    full = store.start(MACHINE, ["x"], None, "full")
    store.append(full, "speed", case(impl="a"), [timing(1.0)])
    smoke = store.start(MACHINE, ["x"], None, "smoke")
    store.append(smoke, "speed", case(impl="a"), [timing(3.0)])
    assert store.rows("speed", DEVICE, "full")["value"].tolist() == [1.0]
    assert store.rows("speed", DEVICE, "smoke")["value"].tolist() == [3.0]
    assert len(store.rows("speed")) == 2
    assert store.done("speed", DEVICE, "full") == {case_key({"impl": "a"})}


@pytest.fixture
def clock_set_back(run, monkeypatch):
    """Call it, and the clock is set to a time before the start of `run`."""

    class Past(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(UTC) - timedelta(days=400)

    return lambda: monkeypatch.setattr(store_module, "datetime", Past)


def test_a_clock_set_back_does_not_make_a_new_run_look_old(store, run, clock_set_back):
    clock_set_back()
    assert store.start(MACHINE, ["x"], None, "smoke").id > run.id


def test_done_recognises_cases_whatever_number_type_they_use(store, run):
    store.append(run, "speed", case(tokens=64_000, m_mem=58_896.0, ratio=np.float64(0.1)), [timing()])
    done = store.done("speed", DEVICE, "smoke")
    assert case_key({"tokens": np.int64(64_000), "m_mem": 58_896, "ratio": 0.1}) in done
    assert case_key({"tokens": 64_000, "m_mem": 58_896, "ratio": 0.2}) not in done


def test_a_cut_off_last_line_is_set_aside_and_nothing_else_is_lost(store, run):
    for impl in "abc":
        store.append(run, "speed", case(impl=impl), [timing(), timing(3.0, "bandwidth")])
    path = csv_of(store)
    path.write_bytes(path.read_bytes()[:-25])
    with pytest.warns(UserWarning, match=r"speed\.csv: line 7 is no whole row"):
        rows = store.rows("speed")
    assert list(zip(rows["impl"], rows["metric"], strict=True))[-1] == ("c", "time")
    assert len(rows) == 5
    with pytest.warns(UserWarning):
        assert store.done("speed", DEVICE, "smoke") == {case_key({"impl": "a"}), case_key({"impl": "b"})}

    store.append(run, "speed", case(impl="d"), [timing()])  # repairs the file
    assert path.with_name("speed.csv.rejected").read_text().count("\n") == 1
    assert store.rows("speed")["impl"].tolist() == ["a", "a", "b", "b", "c", "d"]
    # the half-written case still counts as missing, until it is measured again
    assert case_key({"impl": "c"}) not in store.done("speed", DEVICE, "smoke")
    store.append(store.start(MACHINE, ["x"], None, "smoke"), "speed", case(impl="c"), [timing()])
    assert case_key({"impl": "c"}) in store.done("speed", DEVICE, "smoke")


@pytest.mark.parametrize("keep", [0, 1, 30, 79])
def test_a_file_cut_off_in_its_header_starts_anew(store, run, keep):
    store.append(run, "speed", case(impl="a"), [timing()])
    path = csv_of(store)
    path.write_bytes(path.read_bytes()[:keep])
    store.append(run, "speed", case(impl="b"), [timing()])
    with pytest.warns(UserWarning, match=r"lost rows of a case \(impl=a\)"):
        assert store.rows("speed")["impl"].tolist() == ["b"]


def test_a_broken_line_in_the_middle_spoils_only_itself(store, run):
    store.append(run, "speed", case(impl="a"), [timing()])
    with csv_of(store).open("a") as f:
        f.write('<<<<<<< "ours\n')
    store.append(run, "speed", case(impl="b"), [timing()])
    with pytest.warns(UserWarning, match="line 3"):
        assert store.rows("speed")["impl"].tolist() == ["a", "b"]


def test_a_grown_header_keeps_old_rows_and_their_keys(store, run):
    store.append(run, "speed", case(impl="a"), [timing()])
    store.append(run, "speed", case(impl="a", form="per_token"), [timing(7.0)])
    assert csv_of(store).read_text().splitlines()[0].split(",")[4:6] == ["impl", "form"]
    assert store.rows("speed")["value"].tolist() == [2.0, 7.0]
    assert store.done("speed", DEVICE, "smoke") == {
        case_key({"impl": "a"}),
        case_key({"impl": "a", "form": "per_token"}),
    }


def test_an_empty_parameter_is_none(store, run):
    store.append(run, "speed", case(impl="a", form=""), [timing()])
    store.finish(run, "finished", {}, {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = store.done("speed", DEVICE, "smoke")
    assert done == {case_key({"impl": "a", "form": ""})} == {case_key({"impl": "a"})}


def test_a_failed_rewrite_leaves_the_old_file(store, run, monkeypatch):
    store.append(run, "speed", case(impl="a"), [timing()])
    before = csv_of(store).read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        store.append(run, "speed", case(impl="a", form="per_token"), [timing()])
    assert csv_of(store).read_bytes() == before
    assert [p.name for p in csv_of(store).parent.glob(".speed*")] == []


def test_a_failed_append_leaves_whole_rows_only(store, run, monkeypatch):
    store.append(run, "speed", case(impl="a"), [timing()])
    before = csv_of(store).read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        store.append(run, "speed", case(impl="b"), [timing()])
    assert csv_of(store).read_bytes() == before


def test_a_file_is_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    """Else a machine that stops may keep the new name and lose its content."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"old")
    synced, fsync = [], files.os.fsync

    def record(handle):
        (new,) = (p for p in tmp_path.iterdir() if p != path)
        assert files.os.fstat(handle).st_ino == new.stat().st_ino
        synced.append((new.read_bytes(), path.read_bytes()))
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", record)
    files.replace(path, b"new")
    assert synced == [(b"new", b"old")]
    assert path.read_bytes() == b"new"


def _write_many(root, impl, count):
    store = Store(root)
    run = store.start(MACHINE, [impl], None, "smoke")
    for i in range(count):
        extra = {"form": "x"} if i == count // 2 else {}  # one of them also makes the header grow
        store.append(run, "speed", Case({"impl": impl, "tokens": i, **extra}), [timing(), timing(1.0, "bandwidth")])
    store.finish(run, "finished", {"measured": count}, {})


def test_two_writers_in_one_checkout_do_not_interleave(store):
    count = 25
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(store.root, impl, count)) for impl in ("a", "b")]
    for w in writers:
        w.start()
    for w in writers:
        w.join()
    assert [w.exitcode for w in writers] == [0, 0]
    rows = store.rows("speed")
    assert rows.groupby(["impl", "metric"]).size().tolist() == [count] * 4
    assert [r["end"]["status"] for r in store.runs(DEVICE)] == ["finished", "finished"]


def test_raw_samples_are_kept_by_case(store, run):
    store.append(run, "speed", case(impl="a", tokens=8), [timing(samples=(0.1, 0.2)), timing(1.0, "bandwidth")])
    store.append(run, "speed", case(impl="b", tokens=8), [timing(samples=(1 / 3,))])
    samples = store.samples("speed", DEVICE, run.id)
    assert list(samples.columns) == ["impl", "tokens", "metric", "unit", "index", "value"]
    assert samples.groupby("impl")["value"].apply(list).to_dict() == {"a": [0.1, 0.2], "b": [1 / 3]}
    assert store.samples("speed", DEVICE, "no-such-run").empty
    path = store.root / DEVICE / "samples" / "speed" / f"{run.id}.csv.gz"
    assert len(pd.read_csv(path)) == 3  # plain tools read it too


def test_cut_off_samples_leave_the_whole_ones(store, run):
    store.append(run, "speed", case(impl="a"), [timing(samples=(1.0, 2.0))])
    path = store.root / DEVICE / "samples" / "speed" / f"{run.id}.csv.gz"
    size = path.stat().st_size
    store.append(run, "speed", case(impl="b"), [timing(samples=(3.0, 4.0))])
    path.write_bytes(path.read_bytes()[: size + 12])
    with pytest.warns(UserWarning, match="cut off"):
        assert store.samples("speed", DEVICE, run.id)["value"].tolist() == [1.0, 2.0]


def test_samples_after_a_failed_first_write_are_readable(store, run, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        with pytest.raises(OSError, match="no space"):
            store.append(run, "speed", case(impl="a"), [timing(samples=(1.0,))])
    assert store.samples("speed", DEVICE, run.id).empty
    store.append(run, "speed", case(impl="a"), [timing(samples=(2.0,))])
    store.append(run, "speed", case(impl="b"), [timing(samples=(3.0,))])
    samples = store.samples("speed", DEVICE, run.id)
    assert list(samples.columns) == ["impl", "metric", "unit", "index", "value"]
    assert samples["value"].tolist() == [2.0, 3.0]


def test_the_run_record_says_where_rows_come_from(store, run):
    (record,) = store.runs(DEVICE)
    assert record["run_id"] == run.id
    assert record["command"] == ["python", "-m", "repro.all"]
    assert len(record["source_hash"]) == 64
    assert record["versions"]["numpy"] == np.__version__
    assert record["machine"]["gpu_name"] == "Some GPU"
    assert record["end"] is None
    assert "killed" in record["unavailable"]["end"]
    for name, value in record.items():
        assert value is not None or record["unavailable"][name], f"{name} is null without a reason"

    store.finish(run, "interrupted", {"measured": 3}, {"sm_clock_mhz": [1980]})
    (record,) = store.runs(DEVICE)  # still one record a run
    assert record["end"]["status"] == "interrupted"
    assert record["end"]["cases"] == {"measured": 3}
    assert record["end"]["clocks"] == {"sm_clock_mhz": [1980]}
    assert "end" not in record["unavailable"]


def test_a_broken_run_record_hides_no_other(store, run):
    path = store.root / DEVICE / "runs.jsonl"
    path.write_text(path.read_text() + '{"run_id": "2026')
    with pytest.warns(UserWarning, match="line 2"):
        assert [r["run_id"] for r in store.runs(DEVICE)] == [run.id]


@pytest.mark.parametrize("write", ["start", "finish"])
def test_run_records_that_cannot_be_read_are_set_aside(store, run, write):
    path = store.root / DEVICE / "runs.jsonl"
    whole = path.read_text()
    path.write_bytes(b'<<<<<<< ours\n["run_id"]\n' + whole.encode() + b'\n{"run_id": "2026\xff')
    with pytest.warns(UserWarning) as heard:
        if write == "start":
            store.start(MACHINE, ["x"], None, "smoke")
        else:
            store.finish(run, "finished", {}, {})
    (message,) = (str(w.message) for w in heard)
    assert message == f"{path}: line 1, 2, 5 is no run record: set aside in runs.jsonl.rejected"
    aside = path.with_name("runs.jsonl.rejected").read_text().splitlines()
    assert [json.loads(line)["line"] for line in aside] == ["<<<<<<< ours", '["run_id"]', '{"run_id": "2026\ufffd']
    records = store.runs(DEVICE)  # warns no more
    assert records[0]["run_id"] == run.id and len(records) == 1 + (write == "start")
    store.finish(run, "finished", {}, {})
    assert path.with_name("runs.jsonl.rejected").read_text().splitlines() == aside


@pytest.mark.parametrize(
    ("measurements", "told"),
    [
        ([], "CaseSkipped"),
        ([timing(), timing()], "metrics must differ"),
        ([timing(kind="guessed")], "kind must be one of"),
        ([timing(kind="simulated")], "must name its source"),
        ([Measurement("time", "us", 1.0, 2.0, 0.0, 3)], "ci_low 2.0 lies above ci_high 0.0"),
        ([Measurement("", "us", 1.0, 1.0, 1.0, 3)], "needs a metric name"),
    ],
)
def test_what_breaks_the_format_is_not_stored(store, run, measurements, told):
    with pytest.raises(SchemaError, match=told):
        store.append(run, "speed", case(impl="a"), measurements)
    assert not csv_of(store).exists()


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ({"metric": "x"}, r"\['metric'\] are reserved"),
        ({"device": "x"}, "reserved"),
        ({"impl": "two\nlines"}, "one line"),
        ({"tokens": float("nan")}, "finite"),
        ({"causal": True}, "on'/'off"),
        ({"shape": (1, 2)}, "tuple"),
    ],
)
def test_a_key_that_would_not_come_back_is_refused(store, run, key, told):
    with pytest.raises(SchemaError, match=told):
        store.append(run, "speed", Case(key), [timing()])


def test_simulated_rows_carry_their_source(store, run):
    store.append(run, "sim", case(policy="balanced"), [timing(kind="simulated", source=run.id)])
    row = store.rows("sim").iloc[0]
    assert (row["kind"], row["source"]) == ("simulated", run.id)


@pytest.fixture
def schema_zero(store, monkeypatch):
    """A file of a made-up schema 0, which called `metric` by another name and knew no kind, and its migration."""

    def to_one(row):
        row["metric"] = row.pop("quantity")
        return {**row, "kind": "measured"}

    monkeypatch.setitem(schema.MIGRATIONS, 0, to_one)
    path = csv_of(store)
    path.parent.mkdir(parents=True)
    path.write_text(
        "schema,run_id,suite,profile,impl,quantity,unit,value,ci_low,ci_high,n\n"
        "0,20250101T000000.000000Z-0000,speed,smoke,a,time,us,1.0,0.5,1.5,30\n"
        "0,20250101T000000.000000Z-0000,speed,smoke,b,time,us,2.0,0.5,2.5,30\n"
    )
    return path


def test_older_rows_migrate_on_reading(store, schema_zero):
    before = schema_zero.read_bytes()
    rows = store.rows("speed")
    assert rows["metric"].tolist() == ["time", "time"]
    assert rows["schema"].tolist() == [1, 1]
    assert store.done("speed", DEVICE, "smoke") == {case_key({"impl": "a"}), case_key({"impl": "b"})}
    assert schema_zero.read_bytes() == before


def test_appending_to_an_older_file_rewrites_it(store, schema_zero):
    run = store.start(MACHINE, ["x"], None, "smoke")
    store.append(run, "speed", case(impl="a"), [timing(9.0)])
    lines = schema_zero.read_text().splitlines()
    assert lines[0] == ",".join(schema.header(("impl",)))
    assert len(lines) == 1 + 3
    assert store.rows("speed").set_index("impl")["value"].to_dict() == {"a": 9.0, "b": 2.0}


def test_rows_that_nothing_migrates_stay_in_the_file_and_are_named(store, schema_zero, monkeypatch):
    monkeypatch.delitem(schema.MIGRATIONS, 0)
    with pytest.warns(UserWarning, match="2 rows left out: no migration from schema 0"):
        assert store.rows("speed").empty
    store.append(store.start(MACHINE, ["x"], None, "smoke"), "speed", case(impl="c"), [timing()])
    assert schema_zero.read_text().count("\n0,") == 2


def test_rows_of_a_newer_checkout_are_left_out_and_named(store, run):
    store.append(run, "speed", case(impl="a"), [timing()])
    store.append(run, "speed", case(impl="b"), [timing()])
    path = csv_of(store)
    first, rest = path.read_text().split("\n1,", 1)
    path.write_text(f"{first}\n2,{rest}")
    with pytest.warns(UserWarning, match="1 rows left out: schema 2 is newer"):
        assert store.rows("speed")["impl"].tolist() == ["b"]


def test_reading_writes_nothing(store, run):
    store.append(run, "speed", case(impl="a"), [timing(samples=(1.0,))])
    before = {p: p.stat().st_mtime_ns for p in store.root.rglob("*")}
    store.rows("speed"), store.done("speed", DEVICE, "smoke"), store.samples("speed", DEVICE, run.id)
    store.runs(DEVICE), store.devices(), store.suites(DEVICE)
    assert {p: p.stat().st_mtime_ns for p in store.root.rglob("*")} == before


def test_records_of_a_run_are_plain_json(store, run):
    (line,) = (store.root / DEVICE / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["schema"] == schema.SCHEMA
