"""Links, names, tables and numbers of the documents are true."""

from __future__ import annotations

import functools
import json
import re
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest

from repro import runner, verdicts
from repro import suite as registry
from repro.balance import policies
from repro.measure.machine import Machine, h200s
from repro.records import Store
from repro.report import documents, kernel_words
from tests.docs.documents import DOCUMENTS, ROOT

README, RESULTS, CAMPAIGN = ROOT / "README.md", ROOT / "docs" / "results.md", ROOT / "CAMPAIGN.md"
STORE = Store(ROOT / "results")
H200 = Machine("nvidia-h200", "NVIDIA H200", 1, (9, 0), 132, 150_000_000_000, 16, {})


def table(text: str, head: str) -> list[list[str]]:
    """Cells of the rows of the table whose first heading is `head`."""
    found = re.search(rf"^\| {re.escape(head)} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert found, head
    return [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in found[1].splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_paths_that_are_named_exist(document: Path) -> None:
    """Of files in the checkout; what examples add is told as new."""
    text = document.read_text()
    new = set(re.findall(r"^`([\w/.]+)`, new:$", text, re.MULTILINE))
    named = set(re.findall(r"`((?:repro|suites|tests|csrc|docs)/[\w/.*-]*)`", text)) - new
    missing = [p for p in sorted(named) if not any(ROOT.glob(p))]
    assert not missing


def test_the_readme_lists_every_part() -> None:
    paths = [p for cells in table(README.read_text(), "path") for p in re.findall(r"`([^`]+)`", cells[0])]
    listed = {q for p in paths for q in ROOT.glob(p.rstrip("/").replace("<device>", "*"))}
    assert all(any(ROOT.glob(p.rstrip("/").replace("<device>", "*"))) for p in paths)
    folders = [p.parent for p in (ROOT / "repro").glob("*/__init__.py")]
    modules = [p for p in (ROOT / "repro").glob("*.py") if p.name != "__init__.py"]
    assert not {str(p.relative_to(ROOT)) for p in [*folders, *modules] if p not in listed}


def test_the_readme_can_be_read_in_five_minutes() -> None:
    text = re.sub(r"<!-- claims: generated.*?<!-- claims: end -->", "", README.read_text(), flags=re.DOTALL)
    assert len(re.findall(r"[A-Za-z]{2,}", re.sub(r"```.*?```", "", text, flags=re.DOTALL))) <= 1250  # 250 a minute


def test_policies_are_all_told() -> None:
    rows = table((ROOT / "docs" / "library.md").read_text(), "policy")
    assert sorted(n for cells in rows for n in re.findall(r"`(\w+)`", cells[0])) == sorted(policies.NAMES)


def test_every_suite_is_told_with_its_claims_and_minutes() -> None:
    rows = {cells[0].strip("`"): cells for cells in table(RESULTS.read_text(), "suite")}
    assert sorted(rows) == registry.names(), "docs/results.md has a row for each suite"
    for name, (_, claims, what, minutes) in rows.items():
        suite = registry.load(name)
        assert claims == ", ".join(suite.CLAIMS), name
        assert ("(simulated)" in what) == registry.is_simulated(suite), name
        estimated = sum(c.seconds for c in suite.cases("full", H200)) / 60
        assert abs(float(minutes) - estimated) <= 0.1 + 0.1 * estimated, f"{name}: {estimated:.1f}"


def test_the_whole_takes_as_long_as_told() -> None:
    measuring = [s for s in map(registry.load, registry.names()) if not registry.is_simulated(s)]
    estimated = sum(c.seconds for s in measuring for c in s.cases("full", H200)) / 60
    told = re.search(r"About (\d+) minutes on one H200", (ROOT / "CONTRIBUTING.md").read_text())
    assert told and abs(float(told[1]) - estimated) <= 0.15 * estimated, f"{estimated:.0f}"


@functools.cache
def rows_of(suite: str, device: str) -> pd.DataFrame:
    return STORE.rows(suite, device, "full")


_QUOTED = re.compile(r"([\d.,]+)\s?\S*<!-- row: (\S+)/(\w+) (\w+)((?: \w+=\S+)+) -->")


def test_quoted_numbers_are_those_of_the_newest_rows() -> None:
    count = 0
    for document in DOCUMENTS:
        text = document.read_text()
        quotes = _QUOTED.findall(text)
        assert len(quotes) == text.count("<!-- row:"), document
        for told, device, suite, metric, where in quotes:
            rows = rows_of(suite, device)
            rows = rows[rows["metric"] == metric]
            for name, value in (pair.split("=") for pair in where.split()):
                rows = rows[rows[name].astype(str) == value]
            assert len(rows) == 1, where
            digits = len(told.partition(".")[2])
            assert f"{rows['value'].iloc[0]:,.{digits}f}" == told, f"{document.name}: {suite} {metric}{where}"
            count += 1
    assert count


def test_recorded_durations_are_those_of_the_runs() -> None:
    for minutes, device, run_id in re.findall(r"([\d.]+)<!-- run: (\S+) (\S+) -->", RESULTS.read_text()):
        (run,) = (r for r in STORE.runs(device) if r["run_id"] == run_id)
        assert f"{run['end']['seconds'] / 60:.1f}" == minutes, run_id


def test_what_is_said_of_the_same_cells_on_two_machines_is_so() -> None:
    text = CAMPAIGN.read_text()
    device, *runs = re.findall(r"<!-- twice: (.*?) -->", text)[0].split()
    cell = ["policy", "adaln", "sync", "protocol", "corpus", "micro_batches"]
    tables = [STORE.rows("throughput_measured", device, "full", run) for run in runs]
    rates = [t.loc[t["metric"] == "tokens_per_s", [*cell, "value", "ci_low", "ci_high"]] for t in tables]
    agree, slower, others = [], [], set()
    for first, second in combinations(rates, 2):
        both = first.merge(second, on=cell, suffixes=("_1", "_2"))
        assert f"have {len(both)} epochs in\ncommon" in text
        meet = (both["ci_low_1"] <= both["ci_high_2"]) & (both["ci_low_2"] <= both["ci_high_1"])
        agree.append(f"{meet.sum()} of {len(both)}")
        differ = 100 * (1 - both["value_2"] / both["value_1"])
        slower.append(f"{differ.min():.1f}% to {differ.max():.1f}%")
        others |= set((both["policy"] + " " + both["protocol"] + " " + both["adaln"])[~meet])
    assert others == {"balanced matched eager"}
    told = "in {} (first and second run), {} (first and third) and {}\n(second and third)"
    assert told.format(*agree) in text
    assert "the second is {} slower than the first, the third {}.".format(*slower[:2]) in text


def test_how_long_a_pass_took_before_and_among_steps() -> None:
    text = " ".join(CAMPAIGN.read_text().split())
    rows = pd.read_csv(ROOT / "results" / "nvidia-h200-x2" / "throughput_measured.csv")
    rows = rows[(rows["metric"] == "solo_at_1x46800") & (rows["adaln"] == "fused")]
    (first,) = re.findall(r"taken before the epochs \(run (\S+)\)", text)
    before = rows["run_id"].str.startswith(first) | (rows["policy"] == "calibration")
    told = [f"{at.min():.0f} to {at.max():.0f} ms" for at in (rows.loc[before, "value"], rows.loc[~before, "value"])]
    assert "took {} before an engine's first epoch and {} after or among the steps".format(*told) in text


def test_what_one_cell_read_in_three_runs() -> None:
    """T6's and the README's: how far runs are apart, beside intervals that are of one."""
    rows = pd.read_csv(ROOT / "results" / "nvidia-h200-x2" / "throughput_measured.csv")
    rows = rows[(rows["corpus"] == "wan-uniform") & (rows["sync"] == "micro_batch")]
    published = rows[(rows["protocol"] == "as_published") & (rows["policy"] == "equal_token")]
    rates = published[published["metric"] == "tokens_per_s"].pivot(index="run_id", columns="adaln", values="value")
    gains = (100 * (rates["fused"] / rates["eager"] - 1)).dropna().sort_index()
    text = " ".join(CAMPAIGN.read_text().split())
    assert "T6's own cell read {:.2f}%, {:.2f}% and {:.2f}% in three runs".format(*gains) in text
    (t6,) = (r for r in verdicts.read(ROOT / "results") if r["id"] == "T6")
    low, high = float(t6["ci_low"]), float(t6["ci_high"])
    assert f"the third's interval [{low:.2f}, {high:.2f}] holds only itself" in text
    assert [low <= gain <= high for gain in gains] == [False, False, True]
    matched = rows[(rows["protocol"] == "matched") & (rows["policy"] == "balanced") & (rows["adaln"] == "fused")]
    shares = 100 * matched[matched["metric"] == "share_of_perfect"].sort_values("run_id")["value"]
    readme = " ".join(README.read_text().split())
    assert "two earlier runs gave {:.1f}% and {:.1f}% for that cell".format(*shares[:-1]) in readme
    assert f"samples a step matched: {shares.iloc[-1]:.1f}% [" in readme


def test_how_far_a_seed_that_was_run_twice_ends_apart() -> None:
    rows = pd.read_csv(ROOT / "results" / "nvidia-h200" / "loss_parity.csv")
    rows = rows[(rows["corpus"] == "moving-shapes") & (rows["metric"] == "loss_after")]
    rows = rows[(rows["policy"] == "equal_token") & (rows["adaln"] == "eager")]
    ends = rows[rows["weighting"] == "batch_mean"].groupby("seed")["value"].agg(["min", "max", "count"])
    apart = sorted(100 * (e["max"] / e["min"] - 1) for _, e in ends[ends["count"] > 1].iterrows())
    assert "{:.1f}%, {:.1f}% and {:.1f}% apart".format(*apart) in CAMPAIGN.read_text()


def test_every_row_s_run_is_on_record() -> None:
    for device in STORE.devices():
        folder = ROOT / "results" / device
        known = {json.loads(line)["run_id"] for line in (folder / "runs.jsonl").read_text().splitlines()}
        for path in folder.glob("*.csv"):
            assert set(pd.read_csv(path, usecols=["run_id"])["run_id"]) <= known, path


def test_what_the_readme_says_of_the_kernels_is_counted() -> None:
    decides = next(row["device"] for row in verdicts.read(ROOT / "results") if row["id"] == "K1")
    assert kernel_words.section(STORE, decides) in README.read_text(), "run python -m repro.all --no-measure"


def test_what_documents_tell_of_recorded_rows_is_what_rows_say() -> None:
    suites, _ = runner.load_suites()
    texts, errors = documents.sections(STORE, suites, [h200s(1), h200s(2)])
    assert not errors
    places = {
        p: re.findall(r"<!-- ([\w-]+): generated from results -->", p.read_text()) for p in documents.documents(ROOT)
    }
    assert set(texts) <= {name for names in places.values() for name in names}, "a text that no document shows"
    for path in places:
        told = path.read_text()
        assert documents.written(told, texts) == told, f"{path.name}: run python -m repro.all --no-measure"


def test_a_place_takes_its_text_and_others_stay() -> None:
    text = "a\n" + "".join(
        f"<!-- {n}: generated from results -->\nold {n}\n<!-- {n}: end -->\n" for n in ("one", "two")
    )
    told = documents.written(text, {"one": r"new \1"})
    assert told == text.replace("old one", r"new \1") and documents.written(told, {}) == told
