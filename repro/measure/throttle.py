"""Whether a GPU was slowed down while something was measured, and what then happens: once more after a pause.

Two things are read before and after a measurement and never during it, so that watching costs the measurement nothing:
the counters of how long violations kept clocks down (nvmlDeviceGetViolationStatus), and the reasons that hold at that
moment (nvmlDeviceGetCurrentClocksThrottleReasons). Heat, the board's limits and a power brake count as throttling.
A GPU at its power limit does not: that is its rated speed, and no pause changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

METRIC = "throttled"
"""Of a row that marks its case: measured while a GPU was slowed down, twice. The run record has the reasons."""

PAUSE_SECONDS = 20.0
"""To cool down before a throttled measurement is repeated."""
LIMIT = 0.01
"""Share of the time from which on a violation counts: a median over the samples does not see less."""

REASON_BITS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of nvmlClocksEventReasons (nvml.h), formerly called throttle reasons."""
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})

POLICIES = {0: "power", 1: "thermal", 3: "board_limit", 5: "reliability"}
"""nvmlPerfPolicyType (nvml.h) whose violations are counted, in ns since the driver was loaded."""
VIOLATIONS = frozenset({"thermal", "board_limit", "reliability"})


@dataclass(frozen=True)
class Reading:
    """What one GPU says at one moment; None where it does not say it.

    reasons: names of REASON_BITS that hold. violations_ns: nanoseconds by name of POLICIES.
    """

    reasons: tuple[str, ...] | None
    violations_ns: Mapping[str, int] | None


def told(rows: pd.DataFrame) -> str:
    """For notes and captions: how many cases of these rows are marked; empty where none is."""
    count = int((rows["metric"] == METRIC).sum())
    return "" if not count else f"{count} case{'s' * (count > 1)} measured while the GPU was throttled"


def reason_names(mask: int) -> list[str]:
    """Names of the bits that are set."""
    return [name for bit, name in REASON_BITS.items() if mask & bit]


def violations_ns(nvml: Any, board: Any) -> dict[str, int]:
    """Counters of a board, those that it has. Raises as NVML where it has none."""
    found, error = {}, None
    for policy, name in POLICIES.items():
        try:
            found[name] = int(nvml.nvmlDeviceGetViolationStatus(board, policy).violationTime)
        except Exception as e:  # one counter that is missing must leave the others standing
            error = e
    if error is not None and not found:
        raise error
    return found


def causes(before: Sequence[Reading], after: Sequence[Reading], seconds: float) -> list[str]:
    """Why GPUs were slowed down between two readings `seconds` apart, sorted; empty where they were not.

    A counter that ran backwards (the driver was loaded anew) or that is missing says nothing.
    """
    found: set[str] = set()
    for old, new in zip(before, after, strict=False):
        found |= SLOWDOWNS & set(new.reasons or ())
        for name in VIOLATIONS & set(old.violations_ns or ()) & set(new.violations_ns or ()):
            held = (new.violations_ns or {})[name] - (old.violations_ns or {})[name]
            if held > LIMIT * 1e9 * seconds:
                found.add(name)
    return sorted(found)


@dataclass
class Watch:
    """Measures, and measures once more after a pause where a GPU was slowed down meanwhile.

    read: what the GPUs used say now; empty without GPUs, and nothing is then ever repeated.
    """

    read: Callable[[], Sequence[Reading]]
    pause: float = PAUSE_SECONDS
    sleep: Callable[[float], object] = field(default=time.sleep, repr=False)

    def measure(self, call: Callable[[], T], again: Callable[[], object] = lambda: None) -> tuple[T, list[str]]:
        """The call's result, the second's where the first was throttled, and why the one that is returned was.

        again: called before the second, to drop what was kept of the first.
        """
        result, why = self._once(call)
        if why:
            self.sleep(self.pause)
            again()
            result, why = self._once(call)
        return result, why

    def _once(self, call: Callable[[], T]) -> tuple[T, list[str]]:
        before, start = self.read(), time.perf_counter()
        result = call()
        return result, causes(before, self.read(), time.perf_counter() - start)
