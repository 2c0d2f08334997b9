"""Measured epochs: the grid, schedules as ranks are given them, rows from known times, evidence, figures, two ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.balance import assumptions
from repro.balance.campaign import Setting
from repro.balance.schedule import Schedule
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.measure.machine import read_machine
from repro.report import style
from repro.suite import CaseSkipped, load
from suites import _epoch_claims, _epochs, throughput_measured

CPU = SimpleNamespace(has_gpu=False, gpu_count=0)
UPDATE = 0.02


def gpus(count):
    return SimpleNamespace(has_gpu=True, gpu_count=count, memory_bytes=150_000_000_000)


def seconds(batch, tokens, adaln="fused"):
    """Of a micro-batch; AdaLN is traffic proportional to tokens."""
    extra = {"fused": 0.0, "eager": 0.04, "wan": 0.08}[adaln]
    return batch * (0.1 * (1 + extra) * tokens / 1e4 + 0.05 * (tokens / 1e4) ** 2)


def on_mix(count, corpus):
    return [c for c in throughput_measured.cases("full", gpus(count)) if c.key["corpus"] == corpus]


class Ranks:
    """Stands in for the ranks: steps take what the simulator says, times `slower`."""

    def __init__(self, slower=1.0):
        self.slower, self.asked = slower, []

    def ask(self, call, arguments, limit):
        self.asked.append((call, arguments))
        adaln, sync = arguments["setting"]["adaln"], arguments["setting"]["sync"]
        tokens = lambda shape: (shape[0] // 4 + 1) * shape[1] // 16 * (shape[2] // 16)  # noqa: E731
        if call.endswith(":solo_times"):
            return {"passes": [[seconds(b, tokens(s))] * 2 for s, b in arguments["shapes"]]}
        shapes = [tokens(s) for s in arguments["shapes"]]
        own = [[[seconds(len(ids), shapes[k], adaln) for k, ids, _ in r] for r in s] for s in arguments["steps"]]
        walls = [max(map(sum, s)) if sync == "step" else sum(map(max, zip(*s, strict=True))) for s in own]
        return {
            "passes": [[seconds(b, shapes[k], adaln)] * count for k, b, count in arguments["solo"]],
            "update": [UPDATE] * 3,
            "wall": [self.slower * (w + UPDATE) for w in walls],
            "seconds": [[w] * len(s) for w, s in zip(walls, own, strict=True)],
            "wait": [[w - sum(r) for r in s] for w, s in zip(walls, own, strict=True)],
            "peak_bytes": [
                [2e9 + 1e5 * max(len(ids) * shapes[k] for k, ids, _ in r) for r in s] for s in arguments["steps"]
            ],
        }  # fmt: skip


def table(cases, machine, monkeypatch, ranks=None, device="nvidia-test-x2"):
    """Rows of these cases, each measured with those before it as inputs."""
    pytest.importorskip("torch")
    from repro.wan import launch

    ranks = ranks or Ranks()
    monkeypatch.setattr(launch, "ranks", lambda count, kind: ranks)
    rows = pd.DataFrame({"suite": []})
    for case in cases:
        head = {"suite": throughput_measured.NAME, "profile": "full", "run_id": "r1", "device": device, **case.key}
        found = [
            {**head, "metric": m.metric, "value": m.value, "ci_low": m.ci_low, "ci_high": m.ci_high, "n": m.n,
             "kind": m.kind}
            for m in throughput_measured.measure(case, machine, rows)
        ]  # fmt: skip
        rows = pd.concat([rows, pd.DataFrame(found)], ignore_index=True)
    return rows


def of(rows, metric, **key):
    at = rows[rows["metric"] == metric]
    for name, value in key.items():
        at = at[at[name] == value]
    (value,) = at["value"]
    return value


@pytest.fixture(scope="module")
def measured():
    """Every AdaLN on two GPUs that meet in each micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        cases = throughput_measured.cases("full", gpus(2))
        return table([c for c in cases if c.key["sync"] == "micro_batch"], gpus(2), patch)


def test_contract():
    assert load("throughput_measured") is throughput_measured
    for profile, machine in (("full", gpus(1)), ("full", gpus(2)), ("smoke", CPU)):
        found = throughput_measured.cases(profile, machine)
        assert all(tuple(c.key) == throughput_measured.PARAMETERS for c in found)
        assert len({tuple(c.key.values()) for c in found}) == len(found)
        assert found[0].key["policy"] == throughput_measured.CALIBRATION
        assert all(c.seconds < 90 for c in found)
    assert throughput_measured.cases("full", CPU) == []
    grid = {tuple(map(c.key.get, ("policy", "adaln", "sync", "protocol"))) for c in on_mix(2, assumptions.CORPUS)[1:]}
    assert len(grid) == 3 * 3 * 2 * 2
    assert len(on_mix(2, assumptions.WORST_CORPUS)) == 3 and on_mix(1, assumptions.WORST_CORPUS) == []
    assert {c.key["ranks"] for c in throughput_measured.cases("full", gpus(1))} == {1}
    for count in (1, 2):
        assert {c.key["ranks"] for c in throughput_measured.cases("smoke", gpus(count))} == {count}, "a GPU each"


def test_what_is_asked_of_two_gpus_is_decided_by_the_cases_of_five_minutes():
    found = throughput_measured.cases("full", gpus(2))
    done = [c.key for i, c in enumerate(found) if sum(c.seconds for c in found[: i + 1]) <= 300]
    cells = {tuple(map(k.get, ("policy", "adaln", "protocol", "corpus"))) for k in done if k["sync"] == "micro_batch"}
    uniform, worst = assumptions.CORPUS, assumptions.WORST_CORPUS
    assert {(p, "fused", "matched", uniform) for p in throughput_measured.POLICIES} <= cells
    assert {(p, a, "as_published", uniform) for p in throughput_measured.POLICIES for a in ("fused", "eager")} <= cells
    assert {
        ("equal_token", "eager", "as_published", worst),
        ("dual_constraint", "fused", "as_published", worst),
    } <= cells
    first = [k["protocol"] for k in done[1:4]]
    assert first == ["matched"] * 3, "what judges policies comes first"
    assert sum(c.seconds for c in throughput_measured.cases("full", gpus(1))) < 185


def test_all_policies_get_the_same_samples_and_adalns_the_same_schedule(monkeypatch):
    ranks = Ranks()
    cases = [c for c in on_mix(2, assumptions.CORPUS) if c.key["sync"] == "micro_batch" and c.key["adaln"] != "wan"]
    table(cases, gpus(2), monkeypatch, ranks)
    epochs = [arguments for call, arguments in ranks.asked if call.endswith(":epoch")]
    assert len(epochs) == 12
    for arguments in epochs:
        ids = [i for s in arguments["steps"] for r in s for _, of_batch, w in r if any(w) for i in of_batch]
        assert sorted(ids) == list(range(240))
        total = [sum(sum(w) for r in s for _, _, w in r) for s in arguments["steps"]]
        assert total == pytest.approx([1.0] * len(total))
    fused, eager = epochs[:6], epochs[9:] + epochs[6:9]  # of the second engine the published steps come first
    assert [a["steps"] for a in fused] == [a["steps"] for a in eager]
    assert [a["setting"]["adaln"] for a in epochs] == ["fused"] * 6 + ["eager"] * 6


def test_an_epoch_is_whole_micro_batches_of_the_baseline():
    setting = Setting("equal_token", "eager", 2, model="wan-1.3b")
    corpus = throughput_measured._corpus(setting)
    assert (corpus.counts == 4 * (48_000 // corpus.tokens)).all()
    worst = throughput_measured._corpus(replace(setting, corpus=assumptions.WORST_CORPUS))
    assert (worst.counts == 6 * np.array([5, 1]) * (48_000 // worst.tokens)).all()


def test_what_goes_as_simulated_replays_without_error(measured):
    errors = measured[measured["metric"].isin(_epoch_claims.REPLAY_BARS)]
    assert len(errors) == 2 * 21 and errors["value"].abs().max() < 1e-9
    at = {"adaln": "fused", "protocol": "matched"}
    share = {p: of(measured, "share_of_perfect", policy=p, **at) for p in throughput_measured.POLICIES}
    assert share["balanced"] > 0.95 > 0.9 > share["equal_token"] == pytest.approx(share["dual_constraint"])
    steps = measured[(measured["policy"] == "balanced") & measured["metric"].str.startswith("step_at_")]
    steps = steps[(steps["adaln"] == "fused") & (steps["protocol"] == "matched")]
    rate = of(measured, "samples_per_s", policy="balanced", **at)
    assert rate == pytest.approx(240 / (steps["value"].sum() / 1e3))


def test_an_epoch_that_lost_steps_has_no_gain(measured):
    """Cut off behind any of its rows, which stand in the order in which they were written, or without one of them."""
    base = Setting(*assumptions.BASELINE, 2, model="wan-1.3b")
    fused = replace(base, adaln="fused")
    whole = _epoch_claims.epoch_gain(measured, base, fused)
    assert whole is not None
    key = {name: v for name, v in base.key.items() if v != ""}
    at = measured.index[(measured[list(key)] == pd.Series(key)).all(axis=1)]
    steps = [i for i in at if str(measured.at[i, "metric"]).startswith(("step_at_", "work_at_"))]
    for i in steps:
        for lost in ([i], at[at >= i]):
            assert _epoch_claims.epoch_gain(measured.drop(lost), base, fused) is None, measured.at[i, "metric"]
    for left in range(0, len(at), 9):
        found = throughput_measured.evidence(measured.drop(at[left:]))
        assert "T6" not in {e.claim for e in found}
    replays = [i for i in at if str(measured.at[i, "metric"]).startswith("replay_at_")]
    assert _epoch_claims.epoch_gain(measured.drop(replays), base, fused) == whole


def test_the_documents_hold_epochs_against_what_was_asked(measured):
    told = throughput_measured.tell(measured)
    assert "21 of 21 cells within 5% a step (worst 0.0%), 21 of 21 cells within 3% an epoch" in told["replay"]
    assert told["replay"].count("\n| ") == 1 + 1 + 21
    balanced = next(
        line for line in told["balanced"].splitlines() if line.startswith("| matched | wan-uniform | fused")
    )
    share, verdict, *leads = balanced.split(" | ")[4:]
    at = {"adaln": "fused", "protocol": "matched"}
    assert share.startswith(f"{100 * of(measured, 'share_of_perfect', policy='balanced', **at):.1f}% [")
    assert verdict == "kept"
    rates = [of(measured, "tokens_per_s", policy=p, **at) for p in ("balanced", "equal_token")]
    assert leads[0].startswith(f"+{100 * (rates[0] / rates[1] - 1):.1f}% [")
    assert leads[0] in told["balanced-measured"] and "on 2 GPUs (nvidia-test-x2" in told["balanced-measured"]
    more = measured.copy()
    more.loc[more["metric"] == "share_of_perfect", ["value", "ci_low", "ci_high"]] *= 1.1
    other = throughput_measured.tell(more)
    (line,) = [x for x in other["balanced"].splitlines() if x.startswith("| matched | wan-uniform | fused | each")]
    assert line.split(" | ")[5] == "undecided" and "too slow" in other["balanced-measured"], "no such balance"
    assert "too slow" not in told["balanced-measured"]
    nothing = throughput_measured.tell(measured.iloc[:0])
    assert nothing.keys() == told.keys() and set(nothing.values()) == {"Nothing is recorded yet."}


def test_steps_slower_than_simulated_show_as_error(monkeypatch):
    rows = table(throughput_measured.cases("full", gpus(2))[:2], gpus(2), monkeypatch, Ranks(slower=1.25))
    assert "0 of 1 cells within 5% a step (worst 20.0%)" in throughput_measured.tell(rows)["replay"]
    assert of(rows, "replay_error") == pytest.approx(20.0)
    assert of(rows, "replay_total_error") == pytest.approx(-20.0)


def test_evidence_of_two_gpus_stands_beside_verdicts_but_for_claims_of_any_number(measured):
    found = {e.claim: e for e in throughput_measured.evidence(measured)}
    assert set(found) == set(throughput_measured.CLAIMS)
    assert {c for c, e in found.items() if e.decides} == {"B1", "B2", "T6"}
    assert all(e.kind == "measured" and e.ci_low <= e.value <= e.ci_high for e in found.values())
    assert all("6 of 30 blocks" in e.note and "unknown" not in e.note for e in found.values())
    whole = Setting(*assumptions.ADAPTIVELOAD, 2, model="wan-1.3b")
    fields = ("policy", "adaln", "protocol", "corpus")
    rate, floor = ([of(measured, "tokens_per_s", **{k: getattr(s, k) for k in fields}) for s in (w.baseline(), w)]
                   for w in (whole, replace(whole, corpus=assumptions.WORST_CORPUS)))  # fmt: skip
    assert found["T1"].value == pytest.approx(100 * (rate[1] / rate[0] - 1))
    assert (found["T1"].baseline, found["T1"].treated) == tuple(rate)
    assert found["T3"].value == pytest.approx(floor[1] / floor[0]) and "worst-case" in found["T3"].note
    assert found["B2"].value > 0.8 > found["B1"].value
    assert found["T1"].ci_high - found["T1"].ci_low < 25, "which samples an epoch has is no uncertainty"
    assert found["T6"].ci_high - found["T6"].ci_low < 1.0, "the same steps are compared with each other"
    assert 0 < found["T6"].value < 4.0


def test_a_gain_over_epochs_of_another_run_says_so(measured):
    (alone,) = (e for e in throughput_measured.evidence(measured) if e.claim == "T6")
    assert "another run" not in alone.note
    apart = measured.assign(run_id=measured["run_id"].where(measured["adaln"] != "wan", "r9"))
    (told,) = (e for e in throughput_measured.evidence(apart) if e.claim == "T6")
    assert "(of another run); blocks are" in told.note


def test_one_gpu_speaks_of_no_balance(monkeypatch):
    rows = table(throughput_measured.cases("full", gpus(1)), gpus(1), monkeypatch, device="nvidia-test")
    assert {e.claim for e in throughput_measured.evidence(rows)} == {"B1", "B2", "T6"}
    assert throughput_measured.evidence(rows[rows["policy"] == "calibration"]) == []
    with style.context():
        assert [f.name for f in throughput_measured.draw(rows)] == [
            "throughput_measured-nvidia-test",
            "replay-nvidia-test",
        ]


def test_without_calibration_the_reason_is_given():
    case = throughput_measured.cases("full", gpus(2))[1]
    with pytest.raises(CaseSkipped, match="calibration"):
        throughput_measured.measure(case, gpus(2), pd.DataFrame({"suite": []}))


def test_gain_is_of_whole_epochs_and_its_interval_of_pace():
    """Steps of other work are no uncertainty: where all lose the same share of it, the interval has no width."""
    base = _epochs.Steps(np.array([2.0, 4.0, 2.0]), np.array([1.0, 2.0, 1.0]))
    treated = _epochs.Steps(np.array([2.5, 2.5]), np.array([2.0, 2.0]))
    found = _epochs.gain(base, treated, False, "seed")
    assert (found.low, found.value, found.high) == pytest.approx((60.0, 60.0, 60.0))
    uneven = _epochs.gain(replace(base, work=np.array([1.5, 1.5, 1.0])), treated, False, "seed")
    assert uneven.low < 60 < uneven.high and uneven.value == pytest.approx(60.0)
    with pytest.raises(ValueError, match="equally many"):
        _epochs.gain(base, treated, True, "seed")


def test_errors_of_both_sides_of_a_change_add_in_quadrature():
    """Of each side the longer half on a logarithmic scale, 0.03 and 0.04: 0.05 together."""
    before, after = (
        pd.Series({"value": value, "ci_low": value * np.exp(-down), "ci_high": value * np.exp(up), "n": n})
        for value, down, up, n in ((2.0, 0.03, 0.01, 5), (1.0, 0.02, 0.04, 7))
    )
    found = _epoch_claims._change(before, after)
    assert (found.low, found.value, found.high) == pytest.approx((0.5 * np.exp(-0.05), 0.5, 0.5 * np.exp(0.05)))
    assert found.n == 7


def test_correlations_are_of_steps_whose_micro_batches_are_all_full():
    """Three full steps in one slot each, and a slow one of two slots with a partial micro-batch."""
    setting = Setting("equal_token", "eager", 2, model="wan-1.3b", micro_batches=2, protocol="matched", m_mem=2_000)
    shapes = (Shape(1, 16, 16), Shape(5, 16, 16))
    corpus = Corpus("two", "", shapes, np.array([1_000, 1_500]), np.array([0] * 9 + [1] * 4, dtype=np.int32))
    schedule = Schedule(
        corpus,
        np.array([[[0, 0], [-1, -1]], [[0, 1], [-1, -1]], [[1, 1], [-1, -1]], [[0, 0], [1, 0]]], dtype=np.int32),
        np.array([[[2, 2], [0, 0]], [[2, 1], [0, 0]], [[1, 1], [0, 0]], [[1, 2], [1, 0]]], dtype=np.int32),
        np.arange(13),
    )
    solo = _epochs.wanted(schedule, setting)
    answer = {
        "passes": [[1.0, 1.0] for _ in solo],
        "update": [0.0],
        "wall": [1.0, 2.0, 3.0, 50.0],
        "seconds": [[1.0, 1.0]] * 4,
        "wait": [[0.0, 0.0]] * 4,
        "peak_bytes": [[-1, -1]] * 4,
    }
    rows = {m.metric: m for m in _epochs.Epoch(setting, schedule, np.array([2, 1]), solo, answer).rows("seed", None)}
    # 4,000, 3,500 and 3,000 tokens in 1, 2 and 3 s; the longest samples have 1,000, 1,500 and 1,500 tokens
    assert rows["r_tokens"].value == pytest.approx(-1.0)
    assert rows["r_squared"].value == pytest.approx(np.sqrt(3) / 2)
    assert rows["r_tokens"].n == rows["r_squared"].n == 3


def test_solo_times_of_short_passes_have_more_of_them_in_rounds():
    pytest.importorskip("torch")
    from repro.wan.probing_epoch import in_rounds

    assert [_epochs.passes(s) for s in (0.01, 0.15, 0.25, 0.5, 2.0)] == [3, 3, 2, 1, 1]
    assert in_rounds([1, 3, 2]) == [0, 1, 2, 1, 2, 1] and in_rounds([]) == []


def test_two_ranks_take_an_epoch(monkeypatch):
    """On this machine's own processes: every sample once, and solo times of every shape among the steps."""
    pytest.importorskip("torch")
    from repro.wan import batching

    def few_a_micro_batch(samples):
        """Of 64 tokens and more, in the place of the tiny corpus' 4 and more: most of the time goes into prompts."""
        shapes = (Shape(1, 128, 128), Shape(1, 128, 160), Shape(5, 96, 96), Shape(9, 64, 128), Shape(17, 96, 96))
        tokens = np.array([Tokenizer().tokens(shape) for shape in shapes])
        return replace(tiny_corpus(samples), shapes=shapes, tokens=tokens)

    tiny_corpus = batching.tiny_corpus
    monkeypatch.setattr(batching, "tiny_corpus", few_a_micro_batch)
    machine = read_machine(gpus=0)
    calibration, first, *_ = throughput_measured.cases("smoke", machine)
    assert calibration.key["ranks"] == 2
    rows = pd.DataFrame()
    inputs = pd.DataFrame({"suite": []})
    for case in (calibration, first):
        found = throughput_measured.measure(case, machine, inputs)
        head = {"suite": throughput_measured.NAME, "run_id": "r1", **case.key}
        rows = pd.DataFrame([{**head, "metric": m.metric, "value": m.value, "n": m.n} for m in found])
        inputs = pd.concat([inputs, rows], ignore_index=True)
    steps = int((rows["metric"].str.startswith("step_at_")).sum())
    assert of(rows, "samples_per_step") == pytest.approx(20 / steps)
    solo = rows[rows["metric"].str.startswith(_epochs.SOLO)]
    assert len(solo) >= 5 and set(solo["n"]) <= {1, 2, 3} and solo["value"].min() > 0
    (time,) = [r for r in found if r.metric == "rank_time"]
    assert len(time.samples) == 2 * steps and min(time.samples) > 0
    assert "peak_memory" not in set(rows["metric"]), "nothing counts a CPU's memory"


def test_rows_are_drawn_for_each_device_and_for_all(measured):
    rows = pd.concat([measured, measured.assign(device="nvidia-next-x2")])
    with style.context():
        names = [f.name for f in throughput_measured.draw(rows)]
    assert names == [
        "throughput_measured-nvidia-next-x2", "replay-nvidia-next-x2", "throughput_measured-nvidia-test-x2",
        "replay-nvidia-test-x2", "throughput_measured-devices",
    ]  # fmt: skip
