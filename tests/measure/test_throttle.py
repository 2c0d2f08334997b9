"""What counts as throttling; a throttled measurement is repeated once after a pause, and marked if it persists."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from repro.measure import throttle
from repro.measure.throttle import Reading, Watch, causes


def reading(thermal: int | None = 0, reasons: tuple[str, ...] | None = (), power: int = 0) -> Reading:
    return Reading(reasons, None if thermal is None else {"thermal": thermal, "power": power, "reliability": 0})


CALM = reading()
SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("after", "found"),
    [
        (reading(), []),
        (reading(thermal=SECOND // 2), ["thermal"]),
        (reading(thermal=SECOND // 200), []),  # half a percent of the time
        (reading(power=SECOND, reasons=("sw_power_cap",)), []),  # its rated speed
        (reading(reasons=("gpu_idle", "applications_clocks_setting")), []),
        (reading(reasons=("sw_thermal_slowdown", "hw_slowdown")), ["hw_slowdown", "sw_thermal_slowdown"]),
        (reading(thermal=None, reasons=("hw_power_brake_slowdown",)), ["hw_power_brake_slowdown"]),
        (reading(thermal=None, reasons=None), []),  # nothing can be read: nothing is claimed
        (reading(thermal=-5), []),  # a counter that began anew
    ],
)
def test_heat_and_the_boards_limits_count_and_rated_power_does_not(after: Reading, found: list[str]) -> None:
    assert causes([CALM], [after], seconds=1.0) == found


def test_what_counts_is_the_share_of_the_time() -> None:
    assert causes([CALM], [reading(thermal=SECOND // 50)], seconds=10.0) == []
    assert causes([CALM], [reading(thermal=SECOND // 200)], seconds=0.1) == ["thermal"]


def test_any_of_several_gpus_counts() -> None:
    assert causes([CALM, CALM], [CALM, reading(thermal=SECOND)], 1.0) == ["thermal"]


class Gpu:
    """A GPU whose thermal counter grows by so many ns in each measurement."""

    def __init__(self, *heat: int) -> None:
        self.heat, self.thermal = list(heat), 0
        self.log: list[str] = []

    def read(self) -> list[Reading]:
        return [reading(thermal=self.thermal)]

    def measure(self) -> int:
        self.thermal += self.heat.pop(0)
        self.log.append("measured")
        return len(self.log)

    def watch(self) -> Watch:
        return Watch(self.read, 20.0, lambda seconds: self.log.append(f"slept {seconds:g} s"))


def test_a_calm_measurement_is_taken_once() -> None:
    gpu = Gpu(0)
    assert gpu.watch().measure(gpu.measure) == (1, [])
    assert gpu.log == ["measured"]


def test_a_throttled_one_is_repeated_after_a_pause_and_forgotten() -> None:
    gpu = Gpu(SECOND, 0)
    result, why = gpu.watch().measure(gpu.measure, lambda: gpu.log.append("forgot"))
    assert gpu.log == ["measured", "slept 20 s", "forgot", "measured"]
    assert (result, why) == (4, [])


def test_throttling_that_persists_is_kept_with_its_reason() -> None:
    gpu = Gpu(SECOND, SECOND)
    assert gpu.watch().measure(gpu.measure) == (3, ["thermal"])
    assert gpu.log.count("measured") == 2


def test_without_gpus_nothing_is_ever_repeated() -> None:
    assert Watch(list).measure(lambda: 7) == (7, [])


def test_an_exception_of_the_measurement_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        Watch(lambda: [CALM]).measure(lambda: 1 / 0)


def test_counters_that_a_board_lacks_leave_the_others() -> None:
    class Nvml:
        @staticmethod
        def nvmlDeviceGetViolationStatus(board: str, policy: int) -> SimpleNamespace:
            if policy == 3:
                raise RuntimeError("Not Supported")
            return SimpleNamespace(violationTime=100 + policy)

    assert throttle.violations_ns(Nvml, "board") == {"power": 100, "thermal": 101, "reliability": 105}
    Nvml.nvmlDeviceGetViolationStatus = staticmethod(lambda board, policy: 1 / 0)  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        throttle.violations_ns(Nvml, "board")
