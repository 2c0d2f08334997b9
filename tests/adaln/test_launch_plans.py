"""Which launch each chip gets, worked out on the host from the chip's limits: needs nvcc, no GPU.

Limits: tables "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide (shared memory), and
NVIDIA's architecture papers (multiprocessors of A100, A40, L40, H200, B200 and RTX PRO 6000).
"""

from __future__ import annotations

import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from repro.adaln import build
from tests.adaln.test_op_sanitizer import LONG

KIB = 1024


class Chip(NamedTuple):
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    bulk: int  # bulk copies, clusters, programmatic dependent launch


CHIPS = {
    "sm_80": Chip(108, 163 * KIB, 164 * KIB, 0),
    "sm_86": Chip(84, 99 * KIB, 100 * KIB, 0),
    "sm_89": Chip(142, 99 * KIB, 100 * KIB, 0),
    "sm_90": Chip(132, 227 * KIB, 228 * KIB, 1),
    "sm_100": Chip(148, 227 * KIB, 228 * KIB, 1),
    "sm_120": Chip(188, 99 * KIB, 100 * KIB, 1),
}
TYPES = {"bf16": (2, 2), "fp32": (4, 4), "fp32-bf16": (4, 2)}
"""Bytes of an element of x, and of y."""
BARRIERS = 128
"""Bytes ahead of a ring of rows in shared memory."""
DIMS = (64, 256, 1536, 3072, 4840, 5120, 8192, 12288, 16384, 20000)
"""Of 4,840 two rings of six float32 operands are all that a block of 227 KiB may have."""
WAN = (1536, 3072, 5120)
SIZES = ((1, 1), (1, 1024), (1, 4096), (1, 64_000), (8, 4096), (21, 1560), (1000, 7))
RESERVED = KIB
"""Bytes of shared memory that the driver takes of every block."""
OWN = KIB
"""Bytes that the kernel's own arrays take at most: 2 x 32 warps x 2 R floats."""


class Question(NamedTuple):
    types: str
    form: str
    residual: int
    batch: int
    rows: int
    dim: int
    chip: str


class Plan(NamedTuple):
    forward: int
    fits: int
    threads: int
    stages: int
    cluster: int
    blocks: int
    partials: int
    shared: int
    rows: int
    keep: int


QUESTIONS = [
    Question(types, form, residual, batch, rows, dim, chip)
    for types, form, residual, (batch, rows), dim, chip in product(
        TYPES, ("per_sample", "per_token"), (0, 1), SIZES, DIMS, CHIPS
    )
]
WATCHED = [
    Question(types, form, residual, *shape, "sm_90")
    for types, (form, residual), shape in product(
        ("bf16", "fp32"), (("per_sample", 0), ("per_sample", 1), ("per_token", 0)), LONG
    )
]
"""What compute-sanitizer sees of many rows."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[Question, Plan]:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc on PATH")
    program = tmp_path_factory.mktemp("plans") / "plans"
    source = Path(__file__).with_name("launch_plans.cu")
    built = subprocess.run(
        [nvcc, "-std=c++17", "-O0", "-I", build.sources(), "-o", program, source], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    questions = [*QUESTIONS, *WATCHED]
    asked = "".join(f"{' '.join(map(str, (*q[:-1], *CHIPS[q.chip])))}\n" for q in questions)
    lines = subprocess.run([program], input=asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(zip(questions, (Plan(*map(int, line.split())) for line in lines), strict=True))


def bytes_of_a_row(q: Question) -> int:
    """Over the operands that are read: x and dy, dh and branch, scale and gate in float32."""
    modulations = 4 * (1 + q.residual) if q.form == "per_token" else 0
    return q.dim * (sum(TYPES[q.types]) * (1 + q.residual) + modulations)


def test_a_launch_stays_within_the_chip(plans: dict[Question, Plan]) -> None:
    for q, plan in plans.items():
        if not plan.fits:
            continue
        chip = CHIPS[q.chip]
        assert 32 <= plan.threads <= 1024 and plan.threads % 32 == 0, (q, plan)
        assert plan.shared + (OWN if chip.bulk else 0) <= chip.shared_per_block, (q, plan)
        if chip.bulk:
            assert plan.shared == BARRIERS + plan.stages * plan.rows * bytes_of_a_row(q), (q, plan)
            room = chip.multiprocessors * chip.shared_per_multiprocessor
            assert q.batch > 1 or plan.blocks * (plan.shared + RESERVED) <= room, (q, plan, "more than one wave")
        assert plan.blocks >= 1 and plan.blocks == plan.partials * plan.cluster, (q, plan)
        assert plan.blocks <= max(-(-q.rows // plan.rows), plan.cluster), (q, plan, "blocks without a row")
        assert q.batch > 1 or plan.blocks <= 16 * chip.multiprocessors, (q, plan, "more than one wave")


def test_partial_sums_are_a_fraction_of_the_rows(plans: dict[Question, Plan]) -> None:
    """Two float32 rows a block, where the rows themselves are read twice and written once."""
    for q, plan in plans.items():
        if plan.fits and q.form == "per_sample" and q.batch == 1 and q.rows >= 1024:
            assert plan.partials <= 0.6 * q.rows, (q, plan)
    narrow = Question("bf16", "per_sample", 0, 1, 1024, 256, "sm_90")
    assert plans[narrow].partials == 264, "two blocks on each of 132 multiprocessors, four rows a block or less"
    assert plans[narrow._replace(rows=4096)].partials == 1056, "eight blocks of four rows on each"


def test_the_sanitizer_sees_every_ring_come_round(plans: dict[Question, Plan]) -> None:
    """A stage is filled again for the group after the next `stages`, or one earlier where rows are read twice."""
    layouts = set()
    for q in WATCHED:
        plan = plans[q]
        assert -(-q.rows // plan.rows) // plan.blocks >= plan.stages + plan.keep, (q, plan)
        layouts.add((plan.rows, plan.keep, plan.cluster > 1))
    assert {(rows, keep) for rows, keep, _ in layouts} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert {clusters for *_, clusters in layouts} == {False, True}


def test_a_ring_of_rows_only_where_bulk_copies_are(plans: dict[Question, Plan]) -> None:
    """Elsewhere threads load for themselves: no shared memory is asked for, and no cluster."""
    for q, plan in plans.items():
        if plan.fits and CHIPS[q.chip].bulk:
            assert 2 <= plan.stages <= 16 and plan.shared > 0 and plan.cluster in (1, 2, 4, 8), (q, plan)
        elif plan.fits:
            assert (plan.stages, plan.cluster, plan.shared) == (0, 1, 0), (q, plan)


def test_forwards_need_no_limit(plans: dict[Question, Plan]) -> None:
    for q, plan in plans.items():
        assert plan.forward == plans[q._replace(chip="sm_90")].forward, (q, plan)
        assert plan.forward or q.dim > 16_384, (q, plan)


def test_the_models_widths_take_the_row_kernels(plans: dict[Question, Plan]) -> None:
    """Where a ring does not fit, scalar kernels or a residual added by itself take over: in the widest forms only."""
    left_out = {q for q, plan in plans.items() if q.dim in WAN and not plan.fits}
    assert {q.chip for q in left_out if q.types == "bf16" and q.form == "per_sample"} == set(), "on no chip"
    assert {q.chip for q in left_out if not q.residual} <= {"sm_120"}
    elsewhere = {(q.types, q.form, q.dim) for q in left_out if q.chip != "sm_120"}
    assert elsewhere <= {("fp32", "per_token", 5120)}, "two stages of six float32 rows are 240 KiB"


def test_what_fits_without_bulk_copies_fits_by_width_alone(plans: dict[Question, Plan]) -> None:
    for q, plan in plans.items():
        if not CHIPS[q.chip].bulk:
            assert plan.fits == plans[q._replace(chip="sm_80", batch=1, rows=64_000)].fits, (q, plan)


def test_less_shared_memory_means_fewer_rows_in_flight_not_none(plans: dict[Question, Plan]) -> None:
    """sm_120 has 99 KiB a block where sm_100 has 227: rings get shorter, groups smaller."""
    shorter = 0
    for q, small in plans.items():
        if q.chip == "sm_120" and small.fits:
            large = plans[q._replace(chip="sm_100")]
            assert large.fits and small.stages * small.rows <= large.stages * large.rows, (q, small, large)
            shorter += small.stages * small.rows < large.stages * large.rows
    assert shorter
