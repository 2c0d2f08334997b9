"""Mutation check: break one line, and see whether a test notices. Writes tests/mutations.csv.

    python -m tests.faults.mutate                    all, a few minutes; exits with 1 where more than one is missed
    python -m tests.faults.mutate repro/claims.py    those of one file, shown only

Each is applied to a copy of the checkout; the working tree is never touched. The tests named beside it are those that
a reader would expect to notice, so that the check takes minutes and not hours.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "mutations.csv"
COLUMNS = ("file", "change", "caught_by")
ALLOWED_MISSED = 1
WORKERS = 2


@dataclass(frozen=True)
class Mutation:
    """One line of `file` broken: `old`, which stands there once, becomes `new`. tests: that should notice."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def change(self) -> str:
        """For the table."""
        return f"{self.old} -> {self.new or '(removed)'}"

    def apply(self, root: Path) -> str:
        """Break the file; returns what it was. Raises ValueError where `old` does not stand there exactly once."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times {self.old!r}, want 1: bring it up to date")
        path.write_text(text.replace(self.old, self.new))
        return text


_COMPOSITE, _OP_TESTS = "repro/adaln/composite.py", "tests/adaln"
_BALANCE = "tests/balance"
_STATS = "tests/measure/test_stats.py tests/faults/test_recorded_numbers.py"
_EPOCHS = "tests/suites/test_throughput_measured.py"
_VERDICTS = "tests/claims"
_RECORDS = "tests/records tests/faults/test_results_folder.py"

MUTATIONS = (
    # the op
    Mutation(_COMPOSITE, "y.copy_(centred * rstd * (1 + scale", "y.copy_(centred * rstd * (scale", _OP_TESTS),
    Mutation(_COMPOSITE, "centred = centred - correction", "centred = centred", _OP_TESTS),
    Mutation(
        _COMPOSITE, "g.mean(-1, keepdim=True) - normalized * along", "g.mean(-1, keepdim=True) - along", _OP_TESTS
    ),
    Mutation(_COMPOSITE, "(dscale, dy * normalized)]", "(dscale, g * normalized)]", _OP_TESTS),
    Mutation(_COMPOSITE, "total = total + dh.to(mean.dtype)", "pass", _OP_TESTS),
    Mutation("repro/adaln/form.py", "if frames >= 1 and rows % frames == 0", "if frames >= 1", _OP_TESTS),
    # policies
    Mutation(
        "repro/balance/policies.py",
        "np.minimum(self.m_mem // tokens, compute)",
        "np.maximum(self.m_mem // tokens, compute)",
        _BALANCE,
    ),
    Mutation(
        "repro/balance/policies.py",
        "(tokens + tokens**2 / self.quadratic)",
        "(tokens + tokens / self.quadratic)",
        _BALANCE,
    ),
    Mutation("repro/balance/policies.py", "target * (1 + 1e-9)", "target * 1.2", _BALANCE),
    Mutation("repro/balance/policies.py", "number // ranks * ranks", "number", _BALANCE),
    Mutation(
        "repro/balance/assign.py",
        "heapreplace(heap, (load + seconds[item], rank",
        "heapreplace(heap, (load + 1, rank",
        _BALANCE,
    ),
    Mutation("repro/balance/limits.py", "m_mem // longest", "1", _BALANCE),
    # schedule and sampler
    Mutation(
        "repro/balance/schedule.py",
        '1.0 / int(self.samples_of_step[step]) if weighting == "sample"',
        '1.0 / (real * b) if weighting == "sample"',
        _BALANCE,
    ),
    Mutation(
        "repro/balance/schedule.py",
        "default_rng([seed, epoch]).permutation",
        "default_rng([seed]).permutation",
        _BALANCE,
    ),
    Mutation("repro/balance/sampler.py", 'if here != state.get("schedule"):', "if False:", _BALANCE),
    Mutation("repro/balance/sampler.py", "step + (slot == len(own))", "step + (slot == 1)", _BALANCE),
    # the simulator
    Mutation(
        "repro/balance/metrics.py",
        "else seconds.max(axis=2)",
        "else seconds.mean(axis=2)",
        f"{_BALANCE} tests/faults/test_simulator.py",
    ),
    Mutation(
        "repro/balance/simulate.py",
        "(ranks - 1) / ranks * moved",
        "moved",
        f"{_BALANCE} tests/faults/test_simulator.py",
    ),
    Mutation("repro/balance/campaign.py", "Communication(2 * n, 4 * n,", "Communication(2 * n, 2 * n,", _BALANCE),
    # statistics
    Mutation("repro/measure/stats.py", "tail = (1 - CONFIDENCE) / 2", "tail = 1 - CONFIDENCE", _STATS),
    Mutation("repro/measure/stats.py", "np.median(values[picks], axis=1)", "np.mean(values[picks], axis=1)", _STATS),
    Mutation("repro/measure/stats.py", "for name in sorted(key)", "for name in key", _STATS),
    Mutation(
        "repro/measure/verify.py",
        "divisor[i : i + step]\n        ).max()",
        "divisor[i : i + step]\n        ).mean()",
        "tests/measure/test_verify.py",
    ),
    Mutation("repro/compare_judge.py", "drift)) and p < SIGNIFICANCE:", "drift)):", "tests/compare/test_judge.py"),
    Mutation("suites/_epoch_claims.py", "float(np.hypot(*halves))", "max(halves)", _EPOCHS),
    Mutation("suites/_epochs.py", "| absent).all(axis=(1, 2)))", "| absent).any(axis=(1, 2)))", _EPOCHS),
    # verdicts
    Mutation(
        "repro/claims.py", "if low >= p - margin and low > none:", "if high >= p - margin and low > none:", _VERDICTS
    ),
    Mutation("repro/claims.py", "if high <= none:", "if high < none:", _VERDICTS),
    Mutation(
        "repro/claims.py",
        "math.nextafter(self.limit, math.inf) if self.strictly",
        "self.limit if self.strictly",
        _VERDICTS,
    ),
    Mutation(
        "repro/verdicts.py", 'other_needs(suite)], device, "full")', 'other_needs(suite)], device, "smoke")', _VERDICTS
    ),
    # checkpoints
    Mutation(
        "repro/wan/checkpointing.py",
        "        _set_random_state(self.world.rank, random)\n",
        "",
        "tests/wan/test_checkpoint.py",
    ),
    # records
    Mutation("repro/records/store.py", "max(newest.get(key, run), run)", "run", _RECORDS),
    Mutation("repro/records/counts.py", "len(found.get(at, ())) >= count.metrics", "True", _RECORDS),
    Mutation("repro/records/files.py", "            f.truncate(size)\n", "            pass\n", _RECORDS),
    Mutation("repro/records/schema.py", "if (text := cell(value))", "if (text := cell(value)) is not None", _RECORDS),
)


@contextmanager
def copy() -> Iterator[Path]:
    """A copy of the checkout as it stands, without what git ignores."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        root = Path(folder)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        yield root


def caught_by(mutation: Mutation, root: Path) -> str:
    """The first test that fails with the mutation, empty where none does. `root` is as before afterwards."""
    before = mutation.apply(root)
    try:
        return first_failure(mutation.tests, root)
    finally:
        (root / mutation.file).write_text(before)


def first_failure(tests: str, root: Path) -> str:
    """Name of the first of these tests that fails in a copy, empty where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{tests}: pytest exited with {done.returncode}: {done.stdout[-500:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found.group(1).split("[")[0] if found else ""


def require_passing(mutations: Sequence[Mutation]) -> None:
    """Raise RuntimeError where a test fails without any mutation: it would seem to catch them all."""
    with copy() as root:
        failed = first_failure(" ".join(sorted({t for m in mutations for t in m.tests.split()})), root)
    if failed:
        raise RuntimeError(f"{failed} fails as it is: mend it first")


def check(mutations: tuple[Mutation, ...]) -> list[tuple[str, str, str]]:
    """Rows of the table, in the mutations' order."""

    def some(own: tuple[Mutation, ...]) -> list[tuple[str, str, str]]:
        rows = []
        with copy() as root:
            for m in own:
                rows.append((m.file, " ".join(m.change.split()), caught_by(m, root)))
                print(f"{m.file}: {rows[-1][1]}: {rows[-1][2] or 'MISSED'}", flush=True)
        return rows

    with ThreadPoolExecutor(WORKERS) as pool:
        parts = list(pool.map(some, [mutations[i::WORKERS] for i in range(WORKERS)]))
    order = [" ".join(m.change.split()) for m in mutations]
    return sorted((row for part in parts for row in part), key=lambda row: order.index(row[1]))


def main(files: list[str]) -> int:
    """Exit code."""
    chosen = tuple(m for m in MUTATIONS if not files or m.file in files)
    require_passing(chosen)
    rows = check(chosen)
    missed = sum(not caught for *_, caught in rows)
    print(f"{len(rows) - missed} of {len(rows)} caught")
    if not files:
        with TABLE.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    return int(missed > ALLOWED_MISSED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
