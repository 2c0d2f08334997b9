"""The command end to end on fake suites: measure, resume, fail, skip, interrupt, draw, judge."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from repro.measure.machine import read_machine
from repro.records import Store

ROOT = Path(__file__).resolve().parents[2]
HERE = read_machine().slug


def claims(checkout):
    return {r["id"]: r for r in csv.DictReader((checkout.results / "claims.csv").open())}


def test_one_command_measures_draws_and_judges(checkout):
    done = checkout.run()
    assert done.exit_code == 0, done.output
    assert checkout.logged() == [
        "speed 1 after 0",
        "speed 2 after 0",
        "speed 3 after 0",
        f"model after ['speed'] on {HERE}",
    ]
    assert Store(checkout.results).rows("speed", HERE, "smoke")["value"].tolist() == [4.0] * 3
    assert {p.name for p in checkout.figures.iterdir()} == {
        "speed.svg", "speed.png", "claims.svg", "claims.png", "claims.md", "report.html"
    }  # fmt: skip
    assert len(claims(checkout)) == 18
    assert claims(checkout)["K1"]["verdict"] == "not run"  # smoke decides nothing
    assert "measured: none; simulated: none; not run: 18 of 18" in done.output
    (run,) = Store(checkout.results).runs(HERE)
    assert (run["end"]["status"], run["end"]["cases"]) == ("finished", {"measured": 4})


def test_a_report_that_cannot_be_written_is_named_and_the_rest_is_done(checkout, monkeypatch):
    done = checkout.run()
    assert f"Report: {checkout.figures / 'report.html'}" in done.output.replace("\n", "")
    monkeypatch.setattr("repro.all.html.write", lambda *_: 1 / 0)
    (checkout.results / "claims.csv").unlink()
    done = checkout.run("--no-measure")
    assert done.exit_code == 1
    assert "report: not written: ZeroDivisionError: division by zero" in done.output
    assert len(claims(checkout)) == 18


def test_a_suite_that_names_itself_sees_its_own_earlier_cases(checkout):
    body = (checkout.root / "suites" / "speed.py").read_text()
    checkout.suite("speed", body.replace('("K1",), (), ', '("K1",), ("speed",), '))
    assert checkout.run("--only", "speed").exit_code == 0
    assert checkout.logged() == ["speed 1 after 0", "speed 2 after 1", "speed 3 after 2"]


def test_full_rows_decide(checkout):
    assert checkout.run("--profile", "full").exit_code == 0
    rows = claims(checkout)
    assert (rows["K1"]["verdict"], rows["K1"]["kind"]) == ("exceeded", "measured")
    assert (rows["T1"]["verdict"], rows["T1"]["kind"]) == ("reproduced", "simulated")
    checkout.run()  # a smoke run afterwards does not make them worse
    assert claims(checkout) == rows


def test_a_second_run_skips_what_is_done(checkout):
    checkout.run()
    checkout.logged()
    again = checkout.run()
    assert (again.exit_code, checkout.logged()) == (0, [])
    assert len(Store(checkout.results).runs(HERE)) == 1  # nothing to do, nothing recorded
    assert checkout.run("--again", "--only", "speed").exit_code == 0
    assert len(checkout.logged()) == 3


PAIRS = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "pairs", (), (), ("x",)
    def cases(profile, machine): return [Case({"x": x}) for x in range(3)]
    def measure(case, machine, inputs):
        LOG(f"pairs {case.key['x']}")
        return [exactly(1.0), exactly(2.0, "bandwidth")]
    def evidence(rows): return []
    def draw(rows): return []
"""


@pytest.mark.parametrize("bytes_of_the_last_line", [0, 3, 30])
def test_a_case_that_lost_rows_is_told_in_one_line_and_measured_again(checkout, bytes_of_the_last_line):
    """Cut at the end of a line, before its run id is whole, and behind it."""
    checkout.suite("pairs", PAIRS)
    checkout.run("--only", "pairs")
    assert checkout.logged() == ["pairs 0", "pairs 1", "pairs 2"]
    path = checkout.results / HERE / "pairs.csv"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:bytes_of_the_last_line])
    with pytest.warns(UserWarning) as heard:
        again = checkout.run("--only", "pairs")
    assert (again.exit_code, checkout.logged()) == (0, ["pairs 2"]), again.output
    (line,) = {str(w.message) for w in heard if "lost rows" in str(w.message)}
    assert line == (
        f"{path}: lost rows of a case (x=2): an older run stands in where there is one, and the next run "
        "measures it again"
    )
    assert path.read_bytes().startswith(b"".join(lines[:-1])), "what was saved stays"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lost rows")
        assert (checkout.run("--only", "pairs").exit_code, checkout.logged()) == (0, [])


def test_again_repeats_the_named_suite_only(checkout):
    checkout.run()
    checkout.logged()
    checkout.run("--again", "--only", "model")
    assert [line.split()[0] for line in checkout.logged()] == ["model"]


def test_a_simulated_suite_follows_newer_rows_of_what_it_is_built_from(checkout):
    checkout.run()
    checkout.run("--only", "speed", "--again")
    checkout.logged()
    checkout.run()
    assert [line.split()[0] for line in checkout.logged()] == ["model"]
    checkout.suite("speed", (checkout.root / "suites" / "speed.py").read_text().replace("(1, 2, 3)", "(1, 2, 3, 4)"))
    checkout.run()  # within one run: the fourth case is new, so the model is built anew
    assert [line.split()[0] for line in checkout.logged()] == ["speed", "model"]
    checkout.run()
    assert checkout.logged() == []


def test_only_takes_what_a_suite_needs_along(checkout):
    checkout.suite("other", SILENT.format(name="other"))
    checkout.run("--only", "model")
    assert [line.split()[0] for line in checkout.logged()] == ["speed", "speed", "speed", "model"]


def test_an_unknown_suite_is_a_usage_error_with_the_nearest_names(checkout):
    done = checkout.run("--only", "sped")
    assert done.exit_code == 2
    assert "no suite 'sped'; nearest: speed" in " ".join(done.output.split())
    assert checkout.logged() == []


def test_an_unknown_profile_is_a_usage_error(checkout):
    done = checkout.run("--profile", "quick")
    assert done.exit_code == 2
    assert "known: smoke, full" in " ".join(done.output.split())


def test_dry_run_shows_the_plan_and_does_nothing(checkout):
    checkout.run("--only", "speed")
    checkout.logged()
    (checkout.results / "claims.csv").unlink()
    done = checkout.run("--dry-run")
    assert done.exit_code == 0
    lines = {line.split()[1]: line.split() for line in done.output.splitlines() if line.startswith("│")}
    assert lines["speed"][3:9:2] == ["3", "3", "0"]
    assert lines["model"][3:9:2] == ["1", "0", "1"]
    assert lines["speed"][9], lines["all"][9] == ("0:00:00", "0:00:01")
    assert checkout.logged() == []
    assert not (checkout.results / "claims.csv").exists()


SILENT = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "{name}", (), (), ("x",)
    def cases(profile, machine): return [Case({{"x": 1}})]
    def measure(case, machine, inputs): return [exactly(1.0)]
    def evidence(rows): return []
    def draw(rows): return []
"""

FAILING = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "failing", (), (), ("x",)
    def cases(profile, machine): return [Case({"x": x}) for x in (1, 2, 3)]
    def measure(case, machine, inputs):
        if case.key["x"] == 2:
            raise RuntimeError("out of memory:\\n tried to allocate")
        return [exactly(1.0)]
    def evidence(rows): return []
    def draw(rows): return []
"""


def test_a_failing_case_is_one_line_and_the_others_go_on(checkout):
    checkout.suite("failing", FAILING)
    done = checkout.run()
    assert done.exit_code == 1
    assert "failing: failed (x=2): RuntimeError: out of memory: tried to allocate" in done.output
    assert "Traceback" not in done.output
    assert Store(checkout.results).rows("failing")["x"].tolist() == [1, 3]
    assert len(Store(checkout.results).rows("speed")) == 3
    assert (checkout.results / "claims.csv").exists()
    assert Store(checkout.results).runs(HERE)[0]["end"]["status"] == "failed"
    assert "Traceback" in checkout.run("--debug").output


def test_a_skipped_case_tells_its_reason_once(checkout):
    checkout.suite("skipping", FAILING.replace("failing", "skipping").replace("RuntimeError", "CaseSkipped"))
    text = FAILING.replace("failing", "skipping").replace("RuntimeError", "CaseSkipped").replace("== 2", ">= 2")
    checkout.suite("skipping", text)
    done = checkout.run()
    assert done.exit_code == 0
    assert done.output.count("skipping: 2 skipped: out of memory") == 1
    assert Store(checkout.results).rows("skipping")["x"].tolist() == [1]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "    def draw(rows): return []",
            "    def draw(rows): raise ValueError('no such column')",
            "broken: not drawn: ValueError",
        ),
        ("    def cases(", "    def cases(oops, ", "broken: cases cannot be listed: TypeError"),
        ("    NAME, ", "    import nonsense_module\n    NAME, ", "broken: cannot be loaded: ModuleNotFoundError"),
        (
            "    def evidence(rows): return []",
            "",
            "broken: cannot be loaded: TypeError: suites/broken.py lacks evidence",
        ),
        ("(), (), ", "(), ('speed', 'absent'), ", "absent: no such suite, but broken needs it"),
    ],
)
def test_a_broken_suite_is_one_line_and_the_others_go_on(checkout, old, new, told):
    body = SILENT.format(name="broken")
    assert old in body
    checkout.suite("broken", body.replace(old, new))
    done = checkout.run()
    assert done.exit_code == 1
    assert told in done.output
    assert len(Store(checkout.results).rows("speed")) == 3
    assert (checkout.results / "claims.csv").exists()


def test_suites_that_need_each_other_are_an_error(checkout):
    checkout.suite("a", SILENT.format(name="a").replace("(), (), ", "(), ('b',), "))
    checkout.suite("b", SILENT.format(name="b").replace("(), (), ", "(), ('a',), "))
    done = checkout.run()
    assert done.exit_code == 1
    assert "circle: a -> b -> a" in str(done.exception)


def test_no_measure_draws_and_judges_recorded_rows(checkout):
    checkout.run("--profile", "full")
    figures = {p: p.read_bytes() for p in checkout.figures.iterdir()}
    for path in figures:
        path.unlink()
    checkout.logged()
    assert checkout.run("--no-measure").exit_code == 0
    assert checkout.logged() == []
    assert {p: p.read_bytes() for p in checkout.figures.iterdir()} == figures  # byte for byte


def test_simulated_suites_run_for_another_device(checkout):
    checkout.run("--profile", "full", "--only", "speed")
    (checkout.results / HERE).rename(checkout.results / "acme-9000-x8")
    checkout.logged()
    done = checkout.run("--profile", "full", "--device", "acme-9000-x8")
    assert done.exit_code == 0, done.output
    assert checkout.logged() == ["model after ['speed'] on acme-9000-x8"]
    row = Store(checkout.results).rows("model", "acme-9000-x8", "full").iloc[0]
    assert row["source"] == Store(checkout.results).rows("speed", "acme-9000-x8", "full")["run_id"].iloc[0]
    assert claims(checkout)["T1"]["device"] == "acme-9000-x8"
    assert checkout.run("--device", "no-such").exit_code == 2
    assert checkout.run("--device", "acme-9000-x8", "--only", "speed").exit_code == 2


def test_the_readme_section_follows_the_claims(checkout):
    from repro.report import tables

    readme = checkout.root / "README.md"
    readme.write_text(f"before\n{tables.START}\nold\n{tables.END}\nafter\n")
    checkout.run("--profile", "full")
    text = readme.read_text()
    assert text.startswith(
        f"before\n{tables.START}\nmeasured: 1 exceeded; simulated: 1 reproduced; not run: 16 of 18.\n"
    )
    assert text.endswith(f"{tables.END}\nafter\n")
    assert "old" not in text


SLOW = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "slow", (), (), ("x",)
    def cases(profile, machine): return [Case({"x": x}) for x in range(4)]
    def measure(case, machine, inputs):
        import os, signal
        LOG(f"slow {case.key['x']}")
        if case.key["x"] == 2 and not os.path.exists("resumed"):
            os.kill(os.getpid(), signal.SIGNAL)
            while True:
                pass
        return [exactly(1.0)]
    def evidence(rows): return []
    def draw(rows): return []
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGKILL", -signal.SIGKILL)])
def test_what_is_measured_survives_an_interrupt_and_a_kill(checkout, name, code):
    checkout.suite("slow", SLOW.replace("signal.SIGNAL", f"signal.{name}"))
    program = (
        # A shell starts its background jobs, and what they start, with SIGINT ignored.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import typer, suites; suites.__path__ = [{str(checkout.root / 'suites')!r}]\n"
        "from repro.all import main; typer.run(main)"
    )
    command = [sys.executable, "-c", program, "--only", "slow", "--results", str(checkout.results)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    first = subprocess.run(command, cwd=checkout.root, env=environment, capture_output=True, text=True, timeout=120)
    assert first.returncode == code, first.stderr
    store = Store(checkout.results)
    assert store.rows("slow")["x"].tolist() == [0, 1]
    assert checkout.logged() == ["slow 0", "slow 1", "slow 2"]
    if name == "SIGINT":
        assert "The same command goes on from there" in first.stdout
        assert len(first.stdout.strip().splitlines()) <= 2
        assert store.runs(HERE)[0]["end"]["status"] == "interrupted"
    else:
        assert store.runs(HERE)[0]["end"] is None

    (checkout.root / "resumed").touch()
    second = subprocess.run(command, cwd=checkout.root, env=environment, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0, second.stdout + second.stderr
    assert checkout.logged() == ["slow 2", "slow 3"]
    assert sorted(store.rows("slow")["x"]) == [0, 1, 2, 3]


def test_no_measure_on_this_checkout_works_without_pytorch(tmp_path):
    """The bar is the committed results: every suite here is drawn and judged, and torch stays unimported."""
    program = (
        "import sys, typer\n"
        "from repro.all import main\n"
        "try:\n    typer.run(main)\n"
        "finally:\n    print('torch imported:', 'torch' in sys.modules)"
    )
    results = tmp_path / "results"
    shutil.copytree(ROOT / "results", results, ignore=shutil.ignore_patterns("samples"))
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-measure", "--results", str(results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch imported: False" in done.stdout
    for name in ("claims.csv", "claims_by_device.csv"):  # what the committed rows say now
        assert (results / name).read_text() == (ROOT / "results" / name).read_text(), (
            "run python -m repro.all --no-measure"
        )


def test_dry_run_on_this_checkout_works_without_pytorch():
    program = (
        "import sys, typer\nfrom repro.all import main\n"
        "try:\n    typer.run(main)\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "False"


def test_run_records_here_are_one_line_a_run(checkout):
    checkout.run()
    lines = (checkout.results / HERE / "runs.jsonl").read_text().splitlines()
    assert [json.loads(line)["device"] for line in lines] == [HERE]


KEEPING = """
    NAME, CLAIMS, NEEDS, PARAMETERS = "keeping", (), (), ("x",)
    def cases(profile, machine): return [Case({"x": x}) for x in (1, 2)]
    def measure(case, machine, inputs):
        LOG(f"keeping {case.key['x']}")
        return [exactly(1.0)]
    def forget(case, machine): LOG(f"forget {case.key['x']}")
    def evidence(rows): return []
    def draw(rows): return []
"""


def test_a_throttled_case_is_repeated_and_marked_where_it_persists(checkout, monkeypatch):
    from repro import runner
    from repro.measure.throttle import Reading, Watch

    heat = iter([0, 10**12, 2 * 10**12, 3 * 10**12, *[3 * 10**12] * 4])  # the first case twice, the second never
    watch = Watch(lambda: [Reading((), {"thermal": next(heat)})], sleep=lambda seconds: None)
    monkeypatch.setattr(runner, "throttle_watch", lambda machine: watch)
    checkout.suite("keeping", KEEPING)
    done = checkout.run("--only", "keeping")
    assert done.exit_code == 0, done.output
    assert "keeping: throttled twice, kept and marked (x=1): thermal" in " ".join(done.output.split())
    assert checkout.logged() == ["keeping 1", "forget 1", "keeping 1", "keeping 2"]
    rows = Store(checkout.results).rows("keeping")
    assert rows[rows["metric"] == "throttled"][["x", "unit", "value"]].to_numpy().tolist() == [[1, "flag", 1.0]]
    assert len(rows) == 3
    (run,) = Store(checkout.results).runs(HERE)
    assert run["end"]["clocks"]["throttled"] == [{"suite": "keeping", "case": {"x": 1}, "reasons": ["thermal"]}]


def test_a_busy_host_is_told_once_and_recorded(checkout, monkeypatch):
    from repro import runner

    loads = iter([0.5, 4096.0])
    monkeypatch.setattr(runner, "load_average", lambda: next(loads))
    checkout.suite("keeping", KEEPING)
    done = checkout.run("--only", "keeping")
    assert done.exit_code == 0, done.output
    assert " ".join(done.output.split()).count("The host was busy (load 4096 on ") == 1
    (run,) = Store(checkout.results).runs(HERE)
    assert run["end"]["clocks"]["largest_load"] == 4096.0


def test_more_gpus_than_there_are_is_wrong_usage(checkout):
    refused = checkout.run("--gpus", "99")
    assert refused.exit_code == 2
    assert "gpus=99" in refused.output and checkout.logged() == []


def test_a_budget_of_minutes_begins_only_what_fits_and_says_what_it_left_out(checkout):
    slow = (checkout.root / "suites" / "speed.py").read_text()
    checkout.suite("speed", slow.replace("seconds=2.0", "seconds=2.0 if n < 2 else 2e4"))
    done = checkout.run("--minutes", "60")
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in checkout.logged()] == [["speed", "1"], ["model", "after"]]
    told = done.output
    assert "speed: left out for want of time: 2 cases, 11:06:40 by estimate, the first of them (tokens=2)" in told
    run = Store(checkout.results).runs(HERE)[-1]
    assert (run["end"]["status"], run["end"]["cases"]) == ("finished", {"measured": 2, "left out": 2})
    assert (checkout.figures / "report.html").exists()


def test_a_dry_run_says_what_a_budget_would_leave_out(checkout):
    done = checkout.run("--minutes", "0.08", "--dry-run")  # 4.8 s
    assert "speed: left out for want of time: 1 case, 0:00:02 by estimate, the first of them (tokens=3)" in done.output
    assert "model: left out" in done.output, "1 s, and 0.8 s are left"
    for wrong in ("-1", "nan", "inf"):
        assert checkout.run("--minutes", wrong).exit_code == 2


def test_a_plan_for_gpus_that_are_not_here(checkout):
    done = checkout.run("--gpus", "8", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "8 GPUs are not visible here: a plan for as many H200s" in done.output
    assert "smoke on nvidia-h200-x8" in done.output and not checkout.results.exists()
    both = ("--gpus", "16", "--nnodes", "2", "--rendezvous", "head:29500", "--node-rank", "1", "--dry-run")
    assert "smoke on nvidia-h200-x16" in checkout.run(*both).output
    for wrong in (["--gpus", "8"], ["--gpus", "2000", "--dry-run"], ["--gpus", "15", *both[2:]]):
        assert checkout.run(*wrong).exit_code == 2, wrong
