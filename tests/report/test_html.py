"""The report without a browser: what it says and where, that it holds everything it needs, and that text stays text."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser

import pandas as pd
import pytest

from repro import verdicts
from repro.claims import BY_ID, CLAIMS, AtLeast
from repro.records import Store
from repro.report import explorer, html, html_claims, html_images, html_runs
from repro.suite import Evidence, Figure
from repro.verdicts import Verdict
from tests.report import html_pages
from tests.report.html_pages import CPU, GPU, ROOT

HOSTILE = "</script><script>window.hacked=1</script>\"'><img src=x onerror=window.hacked=1>{{ 7*7 }}<!-- &amp; `<i>`"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Parsed(HTMLParser):
    """Elements of a page as (tag, attributes), in order; text by the tag that it stands in. Tags must balance."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.words, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.words.append(("", " "))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        self.words.append(("", " "))

    def handle_data(self, data):
        self.words.append((self._open[-1] if self._open else "", data))

    def all(self, tag, **attributes):
        wanted = {k.replace("_", "-"): v for k, v in attributes.items()}
        return [a for t, a in self.elements if t == tag and wanted.items() <= a.items()]

    @property
    def text(self):
        return " ".join("".join(w for tag, w in self.words if tag not in ("script", "style")).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return html_pages.make(tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def parsed(page):
    return Parsed(page.text)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    return html_pages.make(tmp_path_factory.mktemp("hostile"), HOSTILE, HOSTILE)


def test_every_claim_has_a_row_and_a_section(parsed):
    rows = parsed.all("tr", data_decides="yes")
    assert [r["data-claim"] for r in rows] == [c.id for c in CLAIMS]
    assert [a["id"] for a in parsed.all("article") if a.get("class") == "claim"] == [c.id for c in CLAIMS]
    for c in CLAIMS:
        assert c.statement in parsed.text
        assert c.effect in parsed.text


def test_other_devices_rows_are_there_but_decide_nothing(parsed):
    others = [r for r in parsed.all("tr") if r.get("data-decides") == "no"]
    assert {(r["data-claim"], r["data-device"]) for r in others} == {("K1", CPU), ("K4", CPU)}
    (decides,) = parsed.all("tr", data_claim="K1", data_decides="yes")
    assert (decides["data-device"], decides["data-verdict"], decides["data-kind"]) == (GPU, "exceeded", "measured")


def test_the_summary_counts_measured_and_simulated_apart(page):
    tiles = re.findall(
        r'<div class="tile" data-summary="([^"]+)">.*?<strong>(\d+)</strong> of 18', page.text, re.DOTALL
    )
    assert tiles == [("measured", "2"), ("simulated", "1"), ("not run", "15")]


def test_a_claims_section_tells_how_it_was_found(page):
    section = re.search(r'<article class="claim" id="T1">.*?</article>', page.text, re.DOTALL).group()
    told = Parsed(section).text
    assert "paper 25.6% (14,383 → 18,069) ours 5% [4, 6] kind simulated on some-gpu" in told
    assert "counts as reproduced from 23% on, 10% below the paper's value" in told
    assert "What gains does. Suite gains" in told
    assert "python -m repro.all --profile full --device some-gpu --only gains --again" in told
    assert re.search(r"Recorded by python -m repro\.all x ?, which took \d+ s for all its suites", told)
    assert re.search(r"built from rows of run \S+ , \d{4}-\d\d-\d\d: 1 x Some GPU, torch", told)
    for a in html.ASSUMPTIONS:
        assert a.choice in told


def test_what_was_not_reproduced_is_listed_with_the_reason(page):
    section = re.search(r'<section id="short">.*?</section>', page.text, re.DOTALL).group()
    told = Parsed(section)
    linked = [a["href"].removeprefix("#") for a in told.all("a")]
    assert sorted(linked) == sorted({c.id for c in CLAIMS} - {"K1"})
    assert "Ours is 2 GB, 42% of the paper's effect. It counts as reproduced from 4.32 GB on" in told.text
    assert "no full rows yet: python -m repro.all --profile full --only empty" in told.text


def test_the_page_needs_nothing_but_itself(page, parsed):
    for tag, attributes in parsed.elements:
        for name in ("src", "srcset", "data", "poster", "action", "href"):
            target = attributes.get(name)
            if target and not (tag == "a" and name == "href"):
                assert target.startswith("data:"), (tag, name, target[:80])
        assert not [name for name in attributes if name.startswith("on")], attributes
    css = "".join(w for tag, w in parsed.words if tag == "style")
    assert "url(" not in css and "@import" not in css
    (policy,) = parsed.all("meta", http_equiv="Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    assert str(page.path.parent) not in page.text


def test_ids_are_unique_and_links_inside_lead_somewhere(parsed):
    ids = [a["id"] for _, a in parsed.elements if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for a in parsed.all("a") if a["href"].startswith("#")}
    assert targets <= set(ids), targets - set(ids)


def test_each_figure_is_embedded_once_where_it_belongs(page, parsed):
    figures = [a["id"] for a in parsed.all("figure")]
    assert sorted(figures) == sorted(f"figure-{n}-{d}" for n in ("sensitivity", "speed") for d in (GPU, CPU))
    images = parsed.all("img")
    assert len(images) == len(figures)
    for image in images:
        assert image["alt"] and int(image["width"]) > 0 and int(image["height"]) > 0
    section = re.search(r'<section id="sensitivity">.*?</section>', page.text, re.DOTALL).group()
    assert section.count("<img") == 2


def test_the_same_rows_give_the_same_bytes_in_another_process(page):
    before, changed = page.path.read_bytes(), page.path.stat().st_mtime_ns
    html_pages.write(page.path.parent)
    assert page.path.stat().st_mtime_ns == changed, "a page that would not change was written"
    page.path.unlink()
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-m", "tests.report.html_pages", str(page.path.parent)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    assert page.path.read_bytes() == before


def test_text_from_files_stays_text(page, hostile):
    parsed = Parsed(hostile.text)
    plain = Parsed(page.text)
    assert [t for t, _ in parsed.elements if t in ("script", "i")] == [t for t, _ in plain.elements if t == "script"]
    assert len(parsed.all("img")) == len(plain.all("img"))
    assert all(a["src"].startswith("data:") for a in parsed.all("img"))
    assert not [a for _, a in parsed.elements if any(name.startswith("on") for name in a)]
    assert HOSTILE in parsed.text, "the note is shown as it stands"
    data = re.search(r'<script type="application/json" id="explorer-data">(.*?)</script>', hostile.text).group(1)
    assert HOSTILE in json.loads(data)["dimensions"][0]["options"]


def test_no_rows_at_all(tmp_path):
    store = Store(tmp_path / "results")
    chosen, rest, _ = verdicts.judge_all(store, {})
    parsed = Parsed(html.write(tmp_path, store, {}, [], chosen, rest).read_text())
    assert len(parsed.all("tr", data_verdict="not run")) == 18
    assert not parsed.all("form", aria_label="Setting")
    assert "no suite measures this yet" in parsed.text


def test_the_committed_results_make_a_page_that_is_small_enough():
    text = html_pages.committed()
    assert len(text.encode()) < 5_000_000
    parsed = Parsed(text)
    assert {a["data-claim"] for a in parsed.all("tr") if "data-claim" in a} == {c.id for c in CLAIMS}
    shown = {p.stem for p in (ROOT / "figures").glob("*.png")} - {"claims"}
    assert {a["id"] for a in parsed.all("figure")} == {f"figure-{n}" for n in shown}
    assert len(parsed.all("img")) == len(shown)


def test_pictures_beyond_the_budget_are_named_instead(page):
    figures = [Figure(f"speed-{d}", None, "", ()) for d in (CPU, GPU)]
    one = len(html_images.embed(figures, page.path.parent, [GPU, CPU], [GPU])[1].uri)
    shown = html_images.embed(figures, page.path.parent, [GPU, CPU], [GPU], budget=one)
    assert [bool(p.uri) for p in shown] == [False, True], "the device that decides comes first"
    assert [(p.device, p.title) for p in shown] == [(CPU, "speed"), (GPU, "speed")]
    assert (shown[0].width, shown[0].height) == (288, 192)  # 3 by 2 inches


def test_a_figures_device_is_the_longest_slug_that_ends_its_name(page):
    source = page.path.parent / f"speed-{GPU}.png"
    (page.path.parent / "speed-gpu-x2.png").write_bytes(source.read_bytes())
    (picture,) = html_images.embed([Figure("speed-gpu-x2", None, "", ())], page.path.parent, ["x2", "gpu-x2"], [])
    assert (picture.device, picture.title) == ("gpu-x2", "speed")


class TestExplorer:
    @pytest.fixture
    def payload(self, page):
        return explorer.payload(page.store.rows("gains"))

    def entries(self, payload, **wanted):
        """Entries of the cell that is `start` but for the wanted options."""
        key = list(payload["start"])
        for i, d in enumerate(payload["dimensions"]):
            if d["name"] in wanted:
                key[i] = d["options"].index(wanted[d["name"]])
        return {tuple(k): v for k, v in payload["cells"]}[tuple(key)]

    def test_it_starts_at_the_assumed_setting(self, payload):
        told = {d["name"]: d["options"][i] for i, d in zip(payload["start"], payload["dimensions"], strict=True)}
        assert told["corpus"] == "wan-uniform"
        assert told["ranks"] == "16"
        assert told["memory"] == "1.227 x (58,896 tokens)"
        assert told["device"] == GPU

    def test_gains_are_those_of_the_rows(self, payload):
        found = {(e[0], e[1], e[2]): e for e in self.entries(payload, ranks="8")}
        labels = [p["label"] for p in payload["policies"]]
        assert labels == ["equal-token (baseline)", "dual constraint (paper)", "balanced (ours)"]
        assert found[1, 1, 1][3:8] == [6, 5, 7, 1060, 0.5]  # (10 + 2) / 2, ends, tokens/s, share of perfect
        assert found[2, 0, 0][3] == 30
        assert found[0, 0, 0][3:6] == [None, None, None], "the baseline has no gain over itself"
        assert found[0, 0, 0][6] == 1000

    def test_the_papers_gain_stands_where_it_says_something(self, payload):
        gains = {tuple(k): g for k, g in payload["paper"]}
        assert gains[tuple(payload["start"])] == BY_ID["T2"].paper
        corpus = next(i for i, d in enumerate(payload["dimensions"]) if d["name"] == "corpus")
        assert {k[corpus] for k in gains} == {payload["start"][corpus]}

    def test_of_two_suites_the_one_with_more_seeds_is_shown(self, page):
        rows = page.store.rows("gains")
        other = rows[(rows["policy"] == "balanced") & (rows["device"] == GPU)].assign(suite="again", n=9)
        other.loc[other["metric"] == "gain", "value"] = 1.0
        for both in ((rows, other), (other, rows)):
            found = self.entries(explorer.payload(pd.concat(both, ignore_index=True)))
            assert [(e[3], e[10]) for e in found if e[:2] == [2, 0]] == [(1, 9)]

    def test_measured_gains_and_suites_with_other_columns_are_left_out(self, page, payload):
        rows = page.store.rows("gains")
        both = pd.concat([rows, rows.assign(kind="measured", value=77.0, n=99), page.store.rows("speed")])
        assert explorer.payload(both) == payload
        other = rows[["device", "profile", "suite", "run_id", "metric", "value", "ci_low", "ci_high", "n", "kind"]]
        assert explorer.payload(other) is None

    def test_rows_with_broken_numbers_are_left_out(self, page):
        rows = page.store.rows("gains").astype({"ranks": object})
        rows.loc[rows["policy"] == "balanced", "ranks"] = "many"
        payload = explorer.payload(rows)
        assert [p["label"] for p in payload["policies"]] == ["equal-token (baseline)", "dual constraint (paper)"]
        json.dumps(payload, allow_nan=False)

    def test_without_gains_there_is_no_explorer(self, page):
        rows = page.store.rows("gains")
        assert explorer.payload(rows[rows["metric"] != "gain"]) is None
        assert explorer.payload(page.store.rows("speed")) is None


class TestRuns:
    def test_a_record_of_another_version_is_told_as_far_as_it_goes(self):
        view = html_runs.view({"run_id": "r"}, "d")
        assert (view.date, view.command, view.duration, view.ended) == ("unknown", "unknown", "", "end not recorded")
        assert dict(view.facts)["driver"] == "unknown"
        odd = html_runs.view({"run_id": "r", "machine": "?", "end": [], "command": "x", "versions": None}, "d")
        assert odd.command == "unknown"

    def test_a_fact_that_could_not_be_read_says_why(self):
        record = {
            "run_id": "r",
            "commit": None,
            "unavailable": {"commit": "no git here"},
            "machine": {"gpu_name": "G", "gpu_count": 2, "driver": None, "unavailable": {"driver": "not permitted"}},
            "end": {"seconds": 347.1, "status": "failed", "cases": {"measured": 5, "failed": 2}},
        }
        view = html_runs.view(record, "d")
        facts = dict(view.facts)
        assert facts["driver"] == "unknown (not permitted)"
        assert facts["commit"].startswith("unknown (no git here)")
        assert facts["hardware"] == "2 x G"
        assert (view.duration, view.ended) == ("5 min 47 s", "failed (5 measured, 2 failed)")

    def test_only_a_clean_commit_names_the_code(self):
        record = {"run_id": "r", "commit": "c" * 40, "source_hash": "s" * 64}
        assert "commit" not in html_runs.view({**record, "clean": False}, "d").line
        assert f"commit {'c' * 12}" in html_runs.view({**record, "clean": True}, "d").line

    def test_a_command_keeps_no_folders_of_another_machine(self):
        assert html_runs.command(["python", "-m", "repro.all", "--figures", "/elsewhere/fig"]).endswith("--figures fig")


class TestClaims:
    def test_notes_split_outside_of_parentheses(self):
        assert html_claims.split("a; b (c; d); e") == ("a", "b (c; d)", "e")
        assert html_claims.split("a) b; (c; d") == ("a) b", "(c; d")
        assert html_claims.split("") == ()

    @pytest.mark.parametrize(
        ("claim", "told"),
        [
            ("K1", "from 2.89x on, 10% below the paper's value"),
            ("B1", "where the whole interval is at most 0.5"),
            ("B2", "where the whole interval is at least 0.83"),
            ("T3", "where the whole interval is above 1x"),
            ("T5", "where the whole interval is within 2% of no difference"),
            ("K5", "where 1 replaces 5 or more"),
        ],
    )
    def test_every_rule_has_words(self, claim, told):
        assert html_claims.counts(BY_ID[claim]) == f"counts as reproduced {told}"

    @pytest.mark.parametrize(("value", "place", "beyond"), [(1.0, 9.09, ""), (3.21, 45.45, ""), (9.0, 100, "right")])
    def test_the_scale_runs_from_no_effect_past_the_papers(self, value, place, beyond):
        (view,) = html_claims.views(
            [Verdict(BY_ID["K1"], "partly", "", Evidence("K1", value, value, value, "measured"))], []
        )
        assert view.scale.value == pytest.approx(place, abs=0.01)
        assert (view.scale.beyond, view.scale.paper) == (beyond, pytest.approx(45.45, abs=0.01))

    def test_a_threshold_has_no_scale(self):
        evidence = Evidence("T3", 1.2, 1.1, 1.3, "simulated")
        (view,) = html_claims.views([Verdict(BY_ID["T3"], "reproduced", "", evidence)], [])
        assert isinstance(view.claim.rule, AtLeast) and view.scale is None


def test_the_assets_are_packaged():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert data["repro.report"] == ["assets/*"]
    names = {p.name for p in (ROOT / "repro" / "report" / "assets").iterdir()}
    assert names == {"report.html.jinja", "parts.html.jinja", "report.css", "claims.js", "explorer.js"}
