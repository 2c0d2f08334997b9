"""How fast LayerNorm-modulate runs: the fused op against the discrete kernels, and all of them against the memory.

Columns as in every kernel suite: impl (eager, wan: formulas of `repro.adaln.reference`; compile: eager through Inductor
with static shapes; fused, dtile: `repro.adaln.layer_norm_modulate`, which differ in the backward; stream: plain kernels
that only move the bytes), form (per_sample), pass, dtype, batch, tokens, dim. Metrics: see `repro.measure.kernel_rows`.

The necessary traffic (x and y forward; dy, x and dx backward) is what any implementation has to move. On a CPU small
cases stay in its caches, so that their ceiling may pass 100%; on a GPU a bandwidth more than 3% above that of the
fastest large stream is a broken measurement and raises.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from repro.measure.stats import seed_text
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _kernel_figures

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.kernel_rows import Bench
    from repro.measure.machine import Machine

NAME = "kernel_speed"
CLAIMS = ("K1", "K2")
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("impl", "form", "pass", "dtype", "batch", "tokens", "dim")

IMPLS = ("stream", "eager", "wan", "compile", "fused", "dtile")
"""Order of measuring within a shape: what the others are compared with comes first."""
DTYPES = ("bf16", "fp32")
TOKENS = (64_000, 65_536, 32_768, 16_384, 8_192, 4_096, 2_048, 1_024)
DIMS = (5_120, 1_536)
"""Widths of Wan 2.1 14B and 1.3B; with 64,000 tokens first, a run cut short still answers K1 and K2."""
TEXT_STREAM = (8, 512)
"""Batch and tokens of the text stream of an MMDiT: many short samples."""
CLAIMED = {"form": "per_sample", "dtype": "bf16", "batch": 1, "tokens": 64_000, "dim": 5_120}
"""The cell that K1 and K2 are judged on."""

PAPER = {"forward": ("paper: 3.21x to 3.39x", 3.21), "backward": ("paper: up to 1.42x", 1.42)}
"""Speedups of AdaptiveLoad (arXiv 2605.17923); it does not state the dtype."""

Shape = tuple[int, int, int]
"""batch, tokens, dim"""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Shapes one after the other, all implementations and both passes of a shape together."""
    grid = [(shape, dtype) for shape, dtype in product(_shapes(profile, machine), DTYPES) if _fits(shape, machine)]
    return [
        _case(impl, direction, dtype, shape, profile, machine)
        for (shape, dtype), impl, direction in product(grid, IMPLS, ("forward", "backward"))
        if _measurable(impl, direction, profile, machine)
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Check and time one implementation. Ratios are formed with eager and streams measured in this process.

    Raises CaseSkipped where the compiled kernels are missing or memory runs out,
    `repro.measure.kernel_rows.HarnessError` for a bandwidth far above its stream's,
    `repro.measure.verify.WrongResultError` for a wrong result.
    """
    from repro.measure import kernel_rows

    impl, direction, problem = kernel_rows.parse(case)
    if machine.has_gpu:
        kernel_rows.require_kernels(impl)
    seed = seed_text(NAME, case.key)
    return kernel_rows.without_memory_error(lambda: _bench(machine).rows(impl, direction, problem, seed), case)


def forget(case: Case, machine: Machine) -> None:
    """Drop the case's times, which others in this process are compared with."""
    from repro.measure import kernel_rows

    _bench(machine).forget(*kernel_rows.parse(case))


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """K1 from fused's forward, K2 from dtile's backward; what else was measured on that cell stands in the note."""
    cell = _select(rows, **CLAIMED)
    found = []
    two_kernels = "; dtile is the row kernel's dx, then the paper's reduction over (d_tile, n_tile)"
    for claim, direction, impl, remark in (("K1", "forward", "fused", ""), ("K2", "backward", "dtile", two_kernels)):
        own = _select(cell, **{"pass": direction})
        speedup = _select(own, impl=impl, metric="speedup")
        time = _select(own, metric="time").set_index("impl")["value"]
        if speedup.empty or not {"eager", impl} <= set(time.index):
            continue
        row = speedup.iloc[0]
        others = [
            f"{i} {time['eager'] / time[i]:.2f}x" for i in IMPLS if i in time and i not in ("stream", "eager", impl)
        ]
        ceiling = _select(own, metric="ceiling").set_index("impl")["value"]
        small = _select(rows, **{**CLAIMED, "tokens": min(TOKENS), "pass": direction, "metric": "time_called"})
        called = small.set_index("impl")["value"]
        shown = [f"{i} {ceiling[i]:.0f}%" for i in IMPLS if i in ceiling and i in ("eager", "fused", "dtile")]
        found.append(
            Evidence(
                claim,
                float(row["value"]),
                float(row["ci_low"]),
                float(row["ci_high"]),
                "measured",
                baseline=float(time["eager"]),
                treated=float(time[impl]),
                note=f"device us, eager against {impl}, {direction}, bf16, B=1, N=64,000, D=5120; others over eager: "
                f"{', '.join(others) or 'not measured'}; of the ceiling: {', '.join(shown) or 'not measured'}; "
                f"{_slower_cells(rows, direction)}; called from Python at N={min(TOKENS):,}: "
                f"{', '.join(f'{i} {called[i]:.0f} us' for i in ('eager', impl) if i in called) or 'not measured'}. "
                "The interval is that of one run" + remark,
            )
        )
    return found


def _slower_cells(rows: pd.DataFrame, direction: str) -> str:
    """In how many cells of a pass another implementation takes less device time than fused, and where most.

    Of what the run of the claimed one measured: other rows may be of older kernels, of another day and machine.
    """
    run = _select(rows, suite=NAME, impl="fused", metric="time", **CLAIMED, **{"pass": direction})["run_id"].iloc[-1:]
    own = _select(rows, suite=NAME, metric="time", **{"pass": direction})
    own = own[own["run_id"].isin(run)]
    wide = own.pivot_table(index=["dtype", "batch", "tokens", "dim"], columns="impl", values="value")
    wide = wide[wide["fused"].notna()] if "fused" in wide else wide.iloc[:0]
    if wide.empty:
        return "fused not measured"
    peers = wide.drop(columns=["fused", "stream"], errors="ignore")
    slower = wide["fused"] / peers.min(axis=1)
    behind = slower[slower > 1].sort_values(ascending=False)
    missing = {str(name): int(count) for name, count in peers.isna().sum().items() if count}
    without = f" ({', '.join(f'{name} not measured in {count}' for name, count in missing.items())})" if missing else ""
    if behind.empty:
        return f"fused is the fastest in all {len(wide)} cells{without}"
    dtype, batch, tokens, dim = behind.index[0]
    return (
        f"another is faster than fused in {len(behind)} of {len(wide)} cells{without}, most at {dtype}, D={dim:,}, "
        f"B={batch}, N={tokens:,}: {peers.loc[behind.index[0]].idxmin()} by {100 * (behind.iloc[0] - 1):.0f}%"
    )


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: speedup over eager, % of the ceiling and time as called, against the number of tokens."""
    return _kernel_figures.draw(rows[rows["suite"] == NAME], PAPER, CLAIMS, DTYPES)


def _bench(machine: Machine) -> Bench:
    from repro.measure import kernel_rows

    return kernel_rows.bench(NAME, "cuda" if machine.has_gpu else "cpu", 0.25 if machine.has_gpu else 0.05)


def _shapes(profile: Profile, machine: Machine) -> list[Shape]:
    if profile == "smoke":
        return [(1, n, 1_536) for n in (8_192, 1_024)] if machine.has_gpu else [(1, n, 256) for n in (1_024, 256)]
    if not machine.has_gpu:
        return [(1, n, 1_536) for n in (8_192, 4_096, 1_024)]
    return [(1, n, d) for n, d in product(TOKENS, DIMS)] + [(*TEXT_STREAM, d) for d in DIMS]


def _measurable(impl: str, direction: str, profile: Profile, machine: Machine) -> bool:
    if impl == "dtile":  # its forward is fused's; without kernels its backward is fused's as well
        return direction == "backward" and machine.has_gpu
    # Compiling takes longer than a smoke run should, and on a CPU needs a C++ compiler.
    return impl != "compile" or (profile == "full" and machine.has_gpu)


def _fits(shape: Shape, machine: Machine) -> bool:
    batch, tokens, dim = shape
    # Wan's formula in the backward: a dozen float32 tensors of x's size, and the float64 reference.
    return machine.memory_bytes is None or 100 * batch * tokens * dim < machine.memory_bytes


def _case(impl: str, direction: str, dtype: str, shape: Shape, profile: Profile, machine: Machine) -> Case:
    batch, tokens, dim = shape
    elements = batch * tokens * dim
    if machine.has_gpu:
        # 30 samples of both times at eager's rate of some 600 GB/s, the checks, and two compilations for `compile`.
        seconds = 0.3 + elements * 2e-9 + (3.0 if (impl, direction) == ("compile", "forward") else 0.0)
    else:
        seconds = 0.15 + elements * 4e-7
    values = (impl, "per_sample", direction, dtype, batch, tokens, dim)
    return Case(dict(zip(PARAMETERS, values, strict=True)), seconds)


def _select(rows: pd.DataFrame, **values: object) -> pd.DataFrame:
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows
