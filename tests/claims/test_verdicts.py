"""One verdict a claim: which evidence decides, and what is told where none does."""

from __future__ import annotations

import csv
from types import SimpleNamespace

import pytest

from repro import verdicts
from repro.claims import CLAIMS
from repro.measure.machine import Machine
from repro.records import Store
from repro.suite import Case, Evidence, Measurement

COLUMNS = (
    "id,statement,effect,unit,paper,paper_baseline,paper_treated,value,ci_low,ci_high,baseline,treated,"
    "kind,device,verdict,note"
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def record(store, device, value, profile="full", kind="measured", suite="speed"):
    machine = Machine(device, device, 1, None, None, None, 1, {})
    run = store.start(machine, ["x"], None, profile)
    store.append(
        run,
        suite,
        Case({"impl": "a"}),
        [Measurement("time", "x", value, value, value, 3, kind, "x" * (kind == "simulated"))],
    )
    return run


def suite(claim="K1", needs=(), evidence=None):
    def of(rows):
        row = rows.iloc[-1]
        return [
            Evidence(claim, row["value"], row["ci_low"], row["ci_high"], row["kind"], note=f"from {len(rows)} rows")
        ]

    return SimpleNamespace(NAME="speed", CLAIMS=(claim,), NEEDS=needs, PARAMETERS=("impl",), evidence=evidence or of)


def decide(store, **suites):
    chosen, rest, errors = verdicts.judge_all(store, suites)
    return {v.claim.id: v for v in chosen}, rest, errors


def test_every_claim_has_exactly_one_row_with_the_fixed_columns(store):
    record(store, "some-gpu", 4.0)
    chosen, rest, _ = verdicts.judge_all(store, {"speed": suite()})
    verdicts.write(chosen, rest, store.root)
    text = (store.root / "claims.csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    rows = list(csv.DictReader(text.splitlines()))
    assert [r["id"] for r in rows] == [c.id for c in CLAIMS]
    k1 = rows[0]
    assert (k1["value"], k1["kind"], k1["device"], k1["verdict"], k1["note"]) == (
        "4", "measured", "some-gpu", "exceeded", "from 1 rows"
    )  # fmt: skip
    assert (store.root / "claims_by_device.csv").read_text().splitlines() == [COLUMNS]
    assert verdicts.read(store.root) == rows


def test_the_note_tells_of_a_throttled_gpu(store):
    run = record(store, "some-gpu", 4.0)
    assert "throttled" not in decide(store, speed=suite())[0]["K1"].note
    store.append(run, "speed", Case({"impl": "b"}), [Measurement("throttled", "flag", 1.0, 1.0, 1.0, 1)])
    noted = suite(evidence=lambda rows: [Evidence("K1", 4.0, 4.0, 4.0, "measured", note="as told")])
    assert decide(store, speed=noted)[0]["K1"].note == "as told; 1 case measured while the GPU was throttled"
    run = record(store, "other-gpu", 4.0)
    store.append(run, "slow", Case({"impl": "c"}), [Measurement("throttled", "flag", 1.0, 1.0, 1.0, 1)])
    simulated = suite("T1", ("slow",), lambda rows: [Evidence("T1", 4.0, 4.0, 4.0, "simulated", note="as told")])
    told = decide(store, speed=simulated)[0]["T1"]
    assert told.note == "as told; 1 case measured while the GPU was throttled", "of what it is computed from"


def test_measured_before_simulated_then_most_gpus_then_newest(store):
    # what decides is recorded first: neither the order of recording nor that of the names may stand in for the rank
    record(store, "gpu-x4", 3.0)
    record(store, "gpu-x8", 9.0, kind="simulated")
    record(store, "gpu", 2.0)
    chosen, rest, _ = decide(store, speed=suite())
    assert (chosen["K1"].device, chosen["K1"].evidence.value) == ("gpu-x4", 3.0)
    assert [v.device for v in rest] == ["gpu", "gpu-x8"]
    record(store, "a-gpu-x4", 5.0)
    chosen, rest, _ = decide(store, speed=suite())
    assert chosen["K1"].device == "a-gpu-x4"
    assert [v.device for v in rest] == ["gpu-x4", "gpu", "gpu-x8"]
    record(store, "gpu-x4", 4.0)  # measured again: newest once more
    chosen, rest, _ = decide(store, speed=suite())
    assert (chosen["K1"].device, chosen["K1"].evidence.value) == ("gpu-x4", 4.0)
    assert [v.device for v in rest] == ["a-gpu-x4", "gpu", "gpu-x8"]


def test_a_device_is_as_new_as_its_newest_row(store):
    """Of two that are equal otherwise, the one that was measured first and last is the newer."""
    record(store, "a-gpu", 1.0)
    record(store, "b-gpu", 2.0)
    run = store.start(Machine("a-gpu", "a-gpu", 1, None, None, None, 1, {}), ["x"], None, "full")
    store.append(run, "speed", Case({"impl": "b"}), [Measurement("time", "x", 3.0, 3.0, 3.0, 3)])
    chosen, rest, _ = decide(store, speed=suite(evidence=lambda rows: [Evidence("K1", 4.0, 4.0, 4.0, "measured")]))
    assert chosen["K1"].device == "a-gpu"
    assert [v.device for v in rest] == ["b-gpu"]


def test_evidence_that_is_no_number_gives_way_to_evidence_that_is(store):
    record(store, "gpu", 2.0, kind="simulated")
    record(store, "gpu-x8", float("nan"))
    chosen, _, _ = decide(store, speed=suite())
    assert chosen["K1"].device == "gpu"


def test_smoke_rows_decide_nothing(store):
    record(store, "some-gpu", 4.0, profile="smoke")
    chosen, rest, _ = decide(store, speed=suite())
    assert chosen["K1"].verdict == "not run"
    assert chosen["K1"].note == "no full rows yet: python -m repro.all --profile full --only speed"
    assert rest == []


def test_reasons_for_not_run(store):
    record(store, "some-gpu", 4.0)
    chosen, _, _ = decide(store, speed=suite(evidence=lambda rows: []))
    assert chosen["K1"].note == "the rows of speed lack the cases that decide it"
    assert chosen["T1"].note == "no suite measures this yet"


def test_a_suite_sees_its_needs_and_one_device_at_a_time(store):
    record(store, "gpu", 2.0)
    record(store, "gpu", 5.0, suite="base")
    record(store, "other", 3.0)
    seen = {}

    def evidence(rows):
        seen[tuple(rows["device"].unique())] = sorted(rows["suite"].unique())
        return []

    decide(store, speed=suite(needs=("base",), evidence=evidence))
    assert seen == {("gpu",): ["base", "speed"], ("other",): ["speed"]}


def test_a_failing_suite_is_one_line_and_the_others_go_on(store):
    record(store, "some-gpu", 4.0)
    record(store, "some-gpu", 2.0, suite="other")

    def fail(rows):
        raise KeyError("tokens")

    chosen, _, errors = decide(store, speed=suite(evidence=fail), other=suite("K2"))
    assert errors == ["speed on some-gpu: no evidence: KeyError: 'tokens'"]
    assert chosen["K1"].verdict == "not run"
    assert chosen["K2"].verdict == "exceeded"


def test_evidence_for_an_unknown_claim_is_an_error(store):
    record(store, "some-gpu", 4.0)
    _, _, errors = decide(store, speed=suite("Z9"))
    assert errors == ["speed on some-gpu: no evidence: KeyError: 'Z9'"]


def test_the_headline_counts_measured_and_simulated_apart():
    rows = [{"kind": k, "verdict": v} for k, v in (
        ("measured", "reproduced"), ("measured", "reproduced"), ("measured", "partly"),
        ("simulated", "exceeded"), ("measured", "not run"), ("", "not run"),
    )]  # fmt: skip
    assert verdicts.headline(rows) == "measured: 2 reproduced, 1 partly; simulated: 1 exceeded; not run: 2 of 6"
    assert verdicts.headline([]) == "measured: none; simulated: none; not run: 0 of 0"


@pytest.mark.parametrize(
    ("device", "gpus"),
    [("cpu-x86-64-2c", 0), ("nvidia-h200", 1), ("nvidia-h200-x2", 2), ("nvidia-h200-x8-500w", 8)],
)
def test_gpus_of_a_device_whose_record_is_silent(store, device, gpus):
    assert verdicts.gpus_of(store, device) == gpus


def test_the_run_record_knows_the_gpus_better_than_the_slug(store):
    machine = Machine("acme-x100", "Acme X100", 1, None, None, None, 1, {"gpu_count": 1})
    store.start(machine, ["x"], None, "full")
    assert verdicts.gpus_of(store, "acme-x100") == 1


def test_evidence_of_another_scale_stands_in_the_note_and_decides_nothing(store):
    record(store, "gpu", 12.0, kind="simulated")
    record(store, "gpu-x2", 30.0)

    def evidence(rows):
        row = rows.iloc[-1]
        own = row["kind"] == "simulated"
        return [Evidence("T1", row["value"], row["value"], row["value"], row["kind"], note="as told", decides=own)]

    chosen, rest, _ = decide(store, speed=suite("T1", evidence=evidence))
    assert (chosen["T1"].device, chosen["T1"].evidence.kind) == ("gpu", "simulated")
    assert chosen["T1"].note == "as told; measured on gpu-x2 (2 GPUs), beside this verdict: 30 [30, 30] % (as told)"
    assert [v.device for v in rest] == ["gpu-x2"]
    chosen, rest, _ = decide(
        store, speed=suite("T1", evidence=lambda rows: [e for e in evidence(rows) if not e.decides])
    )
    assert chosen["T1"].verdict == "not run" and chosen["T1"].evidence is None
