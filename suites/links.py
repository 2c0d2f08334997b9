"""What connects the GPUs: bandwidth of the trainer's collectives by message size, of every pair, and what NVML knows.

Read it before other measurements on several GPUs: a pair or a size that is slow here explains a slow step there, and
where ranks compute anything wrong nothing is timed at all (`repro.wan.probing_links`).

Columns: operation (all_reduce, all_gather, reduce_scatter, send_recv, facts), backend (nccl between GPUs, gloo between
CPUs), ranks, bytes (of the whole result of an all-gather, of the whole input of a reduce-scatter; 0 for facts).
Metrics: time (us, of a call on the slowest rank) and bus_bandwidth (GB/s: bytes / time, times 2 (R - 1) / R for an
all-reduce and (R - 1) / R for the others, so that it does not depend on the number of ranks R; NVIDIA's nccl-tests,
PERFORMANCE.md); of send_recv bandwidth_A_B (GB/s from rank A to rank B, all other ranks idle). Of facts, for rank R:
nvlinks_of_R, nvlink_version_of_R, nvlink_speed_of_R (GB/s of a link in one direction), pcie_generation_of_R,
pcie_width_of_R, and nvlink_between_A_B (1 where both reach each other over NVLink). What NVML does not tell is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from repro.measure.stats import exact, measured, median_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "links"
CLAIMS: tuple[str, ...] = ()
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("operation", "backend", "ranks", "bytes")

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
SIZES: tuple[int, ...] = tuple(1 << n for n in (16, 20, 24, 27, 29))
SMOKE_SIZES: tuple[int, ...] = (1 << 12, 1 << 20)
PAIR_SIZE, SMOKE_PAIR_SIZE = 1 << 26, 1 << 16
REPEATS, PAIR_REPEATS, SMOKE_REPEATS = 30, 10, 5

_UNITS = {"nvlink_speed": "GB/s"}


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Facts, then every pair, then each collective from small to large; one GPU is linked to none."""
    if machine.gpu_count == 1 or (profile == "full" and not machine.has_gpu):
        return []  # between processes of one machine there are no links to speak of
    ranks = machine.gpu_count or 2
    sizes, pair_size, seconds = (SIZES, PAIR_SIZE, 1.0) if profile == "full" else (SMOKE_SIZES, SMOKE_PAIR_SIZE, 0.3)
    backend = "nccl" if machine.has_gpu else "gloo"
    cells = [("facts", 0)] if machine.has_gpu else []
    cells += [("send_recv", pair_size), *((operation, size) for operation in COLLECTIVES for size in sizes)]
    # the first case starts the ranks; two of them make one pair, eight 28, one after the other
    found = [Case(dict(zip(PARAMETERS, (o, backend, ranks, n), strict=True)), seconds) for o, n in cells]
    starts = 15.0 if machine.has_gpu else 3.0
    pairs = ranks * (ranks - 1) / 2
    extra = {0: starts, int(machine.has_gpu): 0.1 * pairs + (0.0 if machine.has_gpu else starts)}
    return [Case(c.key, c.seconds + extra.get(i, 0.0)) for i, c in enumerate(found)]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """One operation at one size. Raises RuntimeError where a rank computed something wrong."""
    from repro.wan import launch

    key, few = case.key, not machine.has_gpu or int(case.key["bytes"]) < min(SIZES)
    operation, size = str(key["operation"]), int(key["bytes"])
    ranks = launch.ranks(int(key["ranks"]), "cuda" if machine.has_gpu else "cpu")
    limit = 60 + 10 * case.seconds
    if operation == "facts":
        return _facts(ranks.ask("repro.wan.probing_links:facts", {}, limit))
    asked: dict[str, Any] = {"size": size, "calls": _calls(size), "repeats": SMOKE_REPEATS if few else REPEATS}
    if operation == "send_recv":
        asked["repeats"] = SMOKE_REPEATS if few else PAIR_REPEATS
        answer = ranks.ask("repro.wan.probing_links:pairs", asked, limit)
    else:
        answer = ranks.ask("repro.wan.probing_links:collective", {"operation": operation, **asked}, limit)
    if not answer["right"]:
        raise RuntimeError(f"{operation} of {size} bytes on {key['ranks']} ranks gave a wrong result: nothing is timed")
    seed = seed_text(NAME, key)
    if operation == "send_recv":
        return [
            measured(f"bandwidth_{a}_{b}", "GB/s", median_interval(s, f"{seed}/{a}/{b}").map(lambda t: size / t / 1e9))
            for a, b, s in answer["seconds"]
        ]
    seconds = np.array(answer["seconds"])
    interval = median_interval(seconds, seed)
    moved = size * bus_factor(operation, int(key["ranks"]))
    return [
        measured("time", "us", interval.map(lambda t: 1e6 * t), 1e6 * seconds),
        measured("bus_bandwidth", "GB/s", interval.map(lambda t: moved / t / 1e9)),
    ]


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """It answers no claim of the paper's."""
    return []


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device bandwidth by size and of every pair; then all devices."""
    own = rows[rows["suite"] == NAME]
    figures = [f for device, table in own.groupby("device", sort=True) for f in _draw_device(str(device), table)]
    return figures + _draw_devices(own)


def bus_factor(operation: str, ranks: int) -> float:
    """Bytes that the busiest link carries for each byte of the message, in an algorithm that wastes nothing."""
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _calls(size: int) -> int:
    """Calls a sample: at small sizes many, since a call is shorter than what starts and ends a sample."""
    return 20 if size <= 1 << 20 else 5


def _facts(answer: dict[str, Any]) -> list[Measurement]:
    found = [
        exact(f"{name}_of_{rank}", _UNITS.get(name, ""), value)
        for rank, facts in enumerate(answer["gpus"])
        for name, value in facts.items()
    ]
    found += [exact(f"nvlink_between_{a}_{b}", "", yes) for a, b, yes in answer["nvlink"]]
    if not found:
        raise CaseSkipped("NVML tells nothing about links here")
    return found


def _collectives(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["metric"] == "bus_bandwidth") & table["operation"].isin(COLLECTIVES)]


def _draw_device(device: str, table: pd.DataFrame) -> list[Figure]:
    from repro.report import style

    speeds = _collectives(table)
    between = table[table["metric"].str.startswith("bandwidth_")]
    if speeds.empty:
        return []
    figure, (axes,) = style.subplots(1, 1 if between.empty else 2, 2.6)
    for operation, color, marker in zip(COLLECTIVES, (style.BLUE, style.ORANGE, style.GREEN), "osD", strict=True):
        own = speeds[speeds["operation"] == operation]
        if len(own):
            look: Any = {"color": color, "marker": marker, "markerfacecolor": color}
            ends: Any = {"low": own["ci_low"], "high": own["ci_high"]}
            style.series(axes[0], own["bytes"].astype(int), own["value"], operation, **ends, **look)
    axes[0].set_xscale("log", base=2)
    sizes = sorted({int(n) for n in speeds["bytes"]})
    axes[0].set_xticks(
        sizes, [f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB" for n in sizes], rotation=45, ha="right"
    )
    axes[0].minorticks_off()
    axes[0].set_yscale("log")
    style.log_ticks(axes[0].yaxis)
    axes[0].set(xlabel="size of the message", ylabel="bus bandwidth, GB/s", title="collectives")
    if len(between):
        _draw_pairs(axes[1], between)
    style.legend(figure, ["measured"], axes=[axes[0]])
    ranks, backend = int(table["ranks"].max()), table["backend"].iloc[0]
    caption = (
        f"Links between {ranks} ranks on {device}, {backend}: bus bandwidth of the collectives that training uses by "
        "size of the message, and what one rank sends to another while the others are idle. Bars are 95% intervals."
    )
    return [Figure(f"links-{device}", figure, caption)]


def _draw_pairs(ax: Any, between: pd.DataFrame) -> None:
    """A square for each pair, its bandwidth in colour and, where there is room, in figures."""
    from repro.report import style

    pairs = between["metric"].str.extract(r"bandwidth_(\d+)_(\d+)").astype(int).to_numpy()
    ranks = int(pairs.max()) + 1
    grid = np.full((ranks, ranks), np.nan)
    grid[pairs[:, 0], pairs[:, 1]] = between["value"].to_numpy(float)
    top = float(np.nanmax(grid))
    image = ax.imshow(grid, cmap="viridis", vmin=0, vmax=top)
    if ranks <= 4:
        for (a, b), value in np.ndenumerate(grid):
            if np.isfinite(value):
                ink = "white" if value < 0.6 * top else "black"
                ax.text(b, a, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=style.SMALLEST)
    ax.figure.colorbar(image, ax=ax, label="GB/s", pad=0.02)
    places = range(0, ranks, 1 if ranks <= 8 else 4)
    ax.set_xticks(places, places)
    ax.set_yticks(places, places)
    ax.grid(visible=False)
    ax.set(xlabel="to rank", ylabel="from rank", title="one rank to another")


def _draw_devices(own: pd.DataFrame) -> list[Figure]:
    """The largest message of each collective, and the slowest pair, on all devices."""
    import pandas as pd

    from repro.report import devices

    speeds = _collectives(own)
    if not devices.several(speeds):
        return []
    largest = speeds.loc[speeds.astype({"bytes": int}).groupby(["device", "operation"])["bytes"].idxmax()]
    between = own[own["metric"].str.startswith("bandwidth_")]
    slowest = between.loc[between.groupby("device")["value"].idxmin()].assign(operation="slowest pair")
    shown = pd.concat([largest, slowest])
    shown = shown.assign(row=shown["operation"].str.replace("_", " "))
    caption = "Links of each device: bus bandwidth of the largest message measured, and of the slowest pair of ranks."
    return [Figure("links-devices", devices.dots({"GB/s": shown}), caption)]
