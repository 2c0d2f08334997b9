"""The fused op against everyone else's kernels, shape by shape, in one run: who is faster, and how far from the memory.

Columns as in every kernel suite. impl: stream, eager, wan, compile, fused as in `kernel_speed`; cudnn (adaptive
LayerNorm of cuDNN's graph API), liger, quack (LayerNorm with weight = 1 + scale and bias = shift, at B = 1 only; see
`repro.measure.peers`); unfused (form gated: the gated residual compiled, then the fused norm). form: per_sample;
gated (h = x + gate * branch, y = norm-modulate of h, both returned); per_token. dtype fp32-bf16: x and h in float32,
branch and y in bf16. A peer that is not installed, or does not run here, is skipped with its reason.

Metrics: see `repro.measure.kernel_rows`; beside them, of fused only, over_best_peer (time of the fastest of the other
implementations over fused's, both of the same process).

The order puts large inputs of the models' widths first, so that a run cut short has the cells that matter most.
`compile` costs seconds for each shape, and `wan` runs far behind: both are measured on a part of the grid.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from repro.measure.stats import measured, ratio_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.kernel_rows import Bench
    from repro.measure.machine import Machine

T = TypeVar("T")

NAME = "peers"
CLAIMS: tuple[str, ...] = ()
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("impl", "form", "pass", "dtype", "batch", "tokens", "dim")

IMPLS = ("stream", "eager", "wan", "compile", "cudnn", "liger", "quack", "fused")
"""Order of measuring within a cell: fused last, when all that it is compared with is there."""
FORM_IMPLS = {
    "gated": ("stream", "eager", "wan", "compile", "unfused", "fused"),
    "per_token": ("stream", "eager", "wan", "compile", "fused"),
}
ONE_SAMPLE = ("liger", "quack")

LARGE = (64_000, 32_768, 65_536, 131_072)
SMALL = (16_384, 8_192, 4_096, 2_048, 1_024)
DIMS = (5_120, 1_536, 3_072)
"""Widths of Wan 2.1 14B and 1.3B, and of Wan 2.2 TI2V-5B."""
DTYPES = ("bf16", "fp32")
BATCHED = (8, (16_384, 4_096, 1_024))
"""Samples, and tokens of each."""
FORM_TOKENS = (32_768, 64_000)

COMPILED = {"bf16": (8_192, 64_000), "fp32": (1_024, 8_192, 64_000, 131_072)}
"""Tokens at which `compile` is measured: it comes near only in fp32."""
WAN_TOKENS = (8_192, 64_000)

SECONDS = 0.05
"""About how long each of the two times is measured; the 30 samples that it takes at least last longer mostly."""

Cell = tuple[str, str, int, int, int]
"""form, dtype, batch, tokens, dim"""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Cell after cell, all implementations and both passes of a cell together."""
    return [
        _case(impl, direction, cell, machine)
        for cell in _cells(profile, machine)
        for impl, direction in product(_impls(cell, machine), ("forward", "backward"))
    ]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Check and time one implementation; for fused, also what else of its cell this process has not measured.

    Raises CaseSkipped where an implementation is not available or memory runs out,
    `repro.measure.kernel_rows.HarnessError` for a bandwidth far above its stream's,
    `repro.measure.verify.WrongResultError` for a wrong result.
    """
    from repro.measure import kernel_rows

    if machine.has_gpu:
        kernel_rows.require_kernels(str(case.key["impl"]))
    return kernel_rows.without_memory_error(lambda: _measure(case, machine), case)


def forget(case: Case, machine: Machine) -> None:
    """Drop the case's times, which others in this process are compared with."""
    from repro.measure import kernel_rows

    _bench(machine).forget(*kernel_rows.parse(case))


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """No claim of the paper is about these peers."""
    return []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device and dtype with several sizes: % of the ceiling of every implementation; then all devices."""
    own = rows[(rows["suite"] == NAME) & (rows["form"] == "per_sample") & (rows["batch"] == 1)]
    ceiling = own[own["metric"] == "ceiling"]
    figures = [
        _draw(table, str(device), str(dtype))
        for (device, dtype), table in ceiling.groupby(["device", "dtype"], sort=True)
        if table["tokens"].nunique() > 1
    ]
    fused = own[(own["impl"] == "fused") & (own["dtype"] == DTYPES[0])]
    return figures + _draw_devices(fused[fused["metric"] == "over_best_peer"])


def _measure(case: Case, machine: Machine) -> list[Measurement]:
    import torch

    from repro.measure import kernel_rows, verify

    impl, direction, problem = kernel_rows.parse(case)
    bench = _bench(machine)
    seed = seed_text(NAME, case.key)
    rows = _attempt(impl, lambda: bench.rows(impl, direction, problem, seed))
    if impl != "fused":
        return rows
    fused = bench.times("fused", direction, problem).device.samples_us
    cell = (str(case.key["form"]), str(case.key["dtype"]), problem.batch, problem.tokens, problem.dim)
    found: dict[str, tuple[float, ...]] = {}
    for other in _impls(cell, machine):
        if other not in ("stream", "fused"):
            # Whoever is not there, wrong, too large or faster than memory is told by a case of its own.
            with contextlib.suppress(
                CaseSkipped, verify.WrongResultError, kernel_rows.HarnessError, torch.OutOfMemoryError
            ):
                _attempt(other, functools.partial(bench.rows, other, direction, problem, seed))
                found[other] = bench.times(other, direction, problem).device.samples_us
    unfused = found.pop("unfused", None)
    if unfused is not None:
        rows.append(measured("over_unfused", "x", ratio_interval(unfused, fused, seed)))
    best = min(found.values(), key=statistics.median)
    rows.append(measured("over_best_peer", "x", ratio_interval(best, fused, seed)))
    return rows


def _bench(machine: Machine) -> Bench:
    from repro.measure import kernel_rows

    return kernel_rows.bench(NAME, "cuda" if machine.has_gpu else "cpu", SECONDS)


def _attempt(impl: str, measure: Callable[[], T]) -> T:
    """measure(), where whatever goes wrong inside of a peer, but for wrong results, skips it with the reason."""
    import torch

    from repro.measure import kernel_rows, peers, verify

    try:
        return measure()
    except peers.PeerUnavailable as e:
        raise CaseSkipped(str(e)) from e
    except (verify.WrongResultError, kernel_rows.HarnessError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        if impl not in peers.NAMES:
            raise
        raise CaseSkipped(f"{impl} fails: {' '.join(f'{type(e).__name__}: {e}'.split())[:200]}") from e


def _cells(profile: Profile, machine: Machine) -> list[Cell]:
    if profile == "smoke":
        tokens, dim = (4_096, 1_536) if machine.has_gpu else (256, 256)
        cells: list[Cell] = [("per_sample", dtype, 1, tokens, dim) for dtype in DTYPES]
        return [*cells, *((form, "bf16", 1, tokens, dim) for form in FORM_IMPLS if machine.has_gpu)]
    if not machine.has_gpu:
        return []  # the peers need one
    cells = [("per_sample", dtype, 1, n, d) for d, n, dtype in product(DIMS[:2], LARGE[:2], DTYPES)]
    cells += [("gated", dtype, 1, n, d) for n, d, dtype in product(FORM_TOKENS, DIMS[:2], ("bf16", "fp32-bf16"))]
    cells += [("per_sample", dtype, 1, n, DIMS[2]) for n, dtype in product(LARGE[:2], DTYPES)]
    cells += [("per_sample", dtype, 1, n, d) for n, d, dtype in product((*LARGE[2:], *SMALL), DIMS, DTYPES)]
    cells += [("per_sample", dtype, BATCHED[0], n, d) for n, d, dtype in product(BATCHED[1], DIMS, DTYPES)]
    cells += [("per_token", "bf16", 1, n, d) for n, d in product(FORM_TOKENS[:1], DIMS[:2])]
    return [cell for cell in cells if _fits(cell, machine)]


def _impls(cell: Cell, machine: Machine) -> list[str]:
    """What is measured in a cell, in order."""
    form, dtype, batch, tokens, _ = cell

    def wanted(impl: str) -> bool:
        if impl in ("cudnn", *ONE_SAMPLE):
            return machine.has_gpu and (batch == 1 or impl not in ONE_SAMPLE)
        if form != "per_sample":
            return impl != "compile" or (machine.has_gpu and tokens in FORM_TOKENS)
        if impl == "compile":
            return machine.has_gpu and batch == 1 and tokens in COMPILED[dtype]
        return impl != "wan" or (batch == 1 and tokens in WAN_TOKENS)

    return [impl for impl in FORM_IMPLS.get(form, IMPLS) if wanted(impl)]


def _fits(cell: Cell, machine: Machine) -> bool:
    _, _, batch, tokens, dim = cell
    # As in kernel_speed: a dozen float32 tensors of x's size, and the float64 reference.
    return machine.memory_bytes is None or 100 * batch * tokens * dim < machine.memory_bytes


def _case(impl: str, direction: str, cell: Cell, machine: Machine) -> Case:
    form, dtype, batch, tokens, dim = cell
    elements = batch * tokens * dim
    if machine.has_gpu:
        seconds = 0.2 + elements * (5e-9 if impl == "wan" else 1.5e-9)
        seconds += 3.0 if (impl, direction) in (("compile", "forward"), ("unfused", "forward")) else 0.0
    else:
        seconds = 0.1 + elements * 4e-7
    values = (impl, form, direction, dtype, batch, tokens, dim)
    return Case(dict(zip(PARAMETERS, values, strict=True)), seconds)


def _draw(table: pd.DataFrame, device: str, dtype: str) -> Figure:
    from repro.report import style

    dims, passes = sorted(table["dim"].unique(), reverse=True), ("forward", "backward")
    figure, axes = style.subplots(len(dims), len(passes), sharex="col", sharey=True)
    for (i, dim), (j, direction) in product(enumerate(dims), enumerate(passes)):
        ax, cell = axes[i, j], table[(table["dim"] == dim) & (table["pass"] == direction)]
        tokens = sorted(cell["tokens"].unique())
        for impl in style.ordered(list(cell["impl"])):
            own = cell[cell["impl"] == impl].set_index("tokens")
            # What was left out on purpose (compile, wan) is joined; a cell that was refused or skipped is too.
            own = own.reindex([n for n in tokens if n in own.index]).reset_index()
            style.series(ax, own["tokens"], own["value"], impl, low=own["ci_low"], high=own["ci_high"])
        style.token_axis(ax, tokens, "tokens N" if i == len(dims) - 1 else "")
        ax.axhline(100, color="black", linewidth=0.8)
        ax.set_ylim(0, max(112.0, 1.05 * float(table["ci_high"].max())))
        ax.set_title(f"{direction}, {dtype}, D={dim:,}")
        if j == 0:
            ax.set_ylabel("% of the large stream")
    style.legend(figure, table["kind"])
    caption = (
        f"{device}, {dtype}, B=1, device time with a cold cache: bandwidth of the necessary traffic as % of the "
        "fastest large stream with the same mix of reads and writes; bars are 95% intervals. Liger and quack are "
        "LayerNorms with weight = 1 + scale. Versions of the packages stand in the run record."
    )
    return Figure(f"peers{'' if dtype == 'bf16' else '_' + dtype}-{device}", figure, caption)


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """The fused op over the best of the others on all devices, at the widest model that several measured."""
    from repro.report import devices

    on = table.groupby("dim")["device"].nunique()
    if not (on > 1).any():
        return []
    dim = on.index[on > 1].max()
    own = table[table["dim"] == dim]
    panels = {f"{d}, {DTYPES[0]}, D={dim:,}": own[own["pass"] == d] for d in ("forward", "backward")}
    figure = devices.lines(panels, "time of the best other / fused's", x="tokens N")
    caption = "The fastest other implementation's device time over the fused op's, B=1: above 1 the fused op is faster."
    return [Figure("peers-devices", figure, caption)]
