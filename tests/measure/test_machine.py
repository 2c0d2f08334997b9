"""Machine facts: the fixed slug rule, and a record that never fails and never guesses."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from repro.measure import cuda_driver, machine
from repro.measure.machine import device_slug, read_clocks, read_machine

H200 = cuda_driver.Gpu("NVIDIA H200", "GPU-0", (9, 0), 132, 150 << 30)
SLICE = cuda_driver.Gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG-0", (8, 0), 14, 5 << 30)


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        (("NVIDIA H200", 1), "nvidia-h200"),
        (("NVIDIA H200", 2), "nvidia-h200-x2"),
        (("NVIDIA GeForce RTX 4090", 1), "nvidia-geforce-rtx-4090"),
        (("Tesla V100-SXM2-16GB", 8), "tesla-v100-sxm2-16gb-x8"),
        (("NVIDIA A100-SXM4-40GB", 1, "1g.5gb"), "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        (("NVIDIA H200", 1, None, 500.0, 700.0), "nvidia-h200-500w"),
        (("NVIDIA H200", 4, None, 500.0, 700.0), "nvidia-h200-x4-500w"),
        (("NVIDIA H200", 1, None, 700.0, 700.0), "nvidia-h200"),
        (("NVIDIA H200", 1, None, 700.0, None), "nvidia-h200"),
        (("cpu x86_64 2c", 0), "cpu-x86-64-2c"),
    ],
)
def test_slug_rule(arguments: tuple[Any, ...], slug: str) -> None:
    assert device_slug(*arguments) == slug


def test_slug_needs_a_name() -> None:
    with pytest.raises(ValueError, match="letter or a digit"):
        device_slug(" - ", 1)


class FakeNvml:
    """Answers what `pynvml` would; `broken` names functions that raise."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self,
        broken: tuple[str, ...] = (),
        limit_w: float = 700.0,
        error: type[Exception] = PermissionError,
        **others: Any,
    ) -> None:
        self.broken, self.limit_w, self.error, self.others = broken, limit_w, error, others
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": None,
            "nvmlDeviceGetHandleByUUID": lambda uuid: f"handle {uuid}",
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: f"board of {handle}",
            "nvmlSystemGetDriverVersion": b"580.159.03",
            "nvmlSystemGetCudaDriverVersion": 13000,
            "nvmlDeviceGetPowerManagementLimit": 1000 * self.limit_w,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetClockInfo": 1755,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x40,
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetPowerUsage": 123_000,
            "nvmlDeviceGetViolationStatus": lambda board, policy: SimpleNamespace(violationTime=10 * policy),
            **self.others,
        }
        if name not in answers:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            self.asked += [a for a in arguments if isinstance(a, str)]
            if name in self.broken:
                raise self.error(f"{name} is not permitted")
            value = answers[name]
            return value(*arguments) if callable(value) else value

        return answer


def install(
    monkeypatch: pytest.MonkeyPatch, gpus: list[cuda_driver.Gpu], nvml: Any, torch_cuda: str | None = "13.0"
) -> None:
    monkeypatch.setattr(cuda_driver, "visible_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def version() -> str:
        if torch_cuda is None:
            raise LookupError("this PyTorch was built without CUDA")
        return torch_cuda

    monkeypatch.setattr(machine, "_torch_cuda", version)


def test_gpu_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # where it is unset, that is told as unavailable too
    install(monkeypatch, [H200, H200], FakeNvml())
    m = read_machine()
    assert (m.slug, m.name, m.gpu_count, m.compute_capability, m.sm_count) == (
        "nvidia-h200",
        "NVIDIA H200",
        1,
        (9, 0),
        132,
    )
    assert m.memory_bytes == 150 << 30 and m.has_gpu
    r = m.record
    assert (r["driver"], r["cuda_driver"], r["power_limit_w"]) == ("580.159.03", "13.0", 700.0)
    assert r["throttle_reasons"] == [["sw_power_cap", "hw_thermal_slowdown"]]
    assert r["sm_clock_mhz"] == [1755] and set(r["unavailable"]) == {"mig_profile"}
    assert r["violations_ns"] == [{"power": 0, "thermal": 10, "board_limit": 30, "reliability": 50}]
    json.dumps(r)


def test_gpus_used_decide_the_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [H200, H200], FakeNvml())
    two = read_machine(2)
    assert (two.slug, two.gpu_count, len(two.record["sm_clock_mhz"])) == ("nvidia-h200-x2", 2, 2)
    assert read_machine(0).slug.startswith("cpu-")
    with pytest.raises(ValueError, match="gpus=3, but 2 visible"):
        read_machine(3)
    with pytest.raises(ValueError, match="at least 0"):
        read_machine(-1)


def test_lowered_power_limit_and_mig_show_in_the_slug(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [H200], FakeNvml(limit_w=500))
    assert read_machine().slug == "nvidia-h200-500w"
    nvml = FakeNvml()
    install(monkeypatch, [SLICE], nvml)
    m = read_machine()
    assert (m.slug, m.record["mig_profile"], m.sm_count) == ("nvidia-a100-sxm4-40gb-mig-1g-5gb", "1g.5gb", 14)
    assert "board of handle MIG-0" in nvml.asked, "power and clocks are the board's"


@pytest.mark.parametrize(
    "broken", ["nvmlDeviceGetPowerManagementLimit", "nvmlSystemGetDriverVersion", "nvmlDeviceGetClockInfo"]
)
def test_a_query_that_fails_costs_its_own_facts_only(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    install(monkeypatch, [H200], FakeNvml(broken=(broken,)))
    r = read_machine().record
    lost = {name for name, reason in r["unavailable"].items() if broken in reason}
    assert lost and all(r[name] in (None, [None]) for name in lost)
    assert r["max_sm_clock_mhz"] == 1980 and r["temperature_c"] == [41]


class NotSupported(Exception):
    """As NVML's own under WSL and for MIG instances."""


class NoLibrary(Exception):
    """As NVML's own where libnvidia-ml is missing, or the driver not loaded."""


NVML_FACTS = {
    "driver", "cuda_driver", "power_limit_w", "default_power_limit_w", "max_sm_clock_mhz", "max_memory_clock_mhz",
    "sm_clock_mhz", "memory_clock_mhz", "throttle_reasons", "violations_ns", "temperature_c", "power_w",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nvml", "told"),
    [
        (None, "pynvml"),  # the package is missing
        (FakeNvml(("nvmlInit",), error=NoLibrary), "NoLibrary: nvmlInit"),
        (FakeNvml(("nvmlDeviceGetHandleByUUID",)), "PermissionError: nvmlDeviceGetHandleByUUID"),
    ],
)
def test_without_nvml_every_fact_of_it_says_why_and_the_rest_stands(
    monkeypatch: pytest.MonkeyPatch, nvml: Any, told: str
) -> None:
    install(monkeypatch, [H200], nvml)
    m = read_machine()
    assert (m.slug, m.sm_count, m.memory_bytes) == ("nvidia-h200", 132, 150 << 30)
    for name in NVML_FACTS:
        assert m.record[name] in (None, [None]) and told in m.record["unavailable"][name], name
    clocks = read_clocks(1)
    assert clocks["sm_clock_mhz"] == [None] and told in clocks["unavailable"]["sm_clock_mhz"]
    assert machine.throttle_watch(m).measure(lambda: 7) == (7, []), "what cannot be read accuses nobody"


def test_under_wsl_what_is_unsupported_is_told_field_by_field(monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = ("nvmlDeviceGetPowerManagementDefaultLimit", "nvmlDeviceGetClockInfo", "nvmlDeviceGetViolationStatus",
                   "nvmlDeviceGetCurrentClocksThrottleReasons")  # fmt: skip
    install(monkeypatch, [H200], FakeNvml(unsupported, error=NotSupported))
    r = read_machine().record
    lost = {"default_power_limit_w", "sm_clock_mhz", "memory_clock_mhz", "violations_ns", "throttle_reasons"}
    assert {n for n in NVML_FACTS if r[n] in (None, [None])} == lost
    assert all("NotSupported" in r["unavailable"][n] for n in lost)
    assert r["temperature_c"] == [41]


def test_a_mig_instance_without_its_boards_clocks_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ("nvmlDeviceGetDeviceHandleFromMigDeviceHandle",)
    install(monkeypatch, [SLICE], FakeNvml(broken, error=NotSupported))
    m = read_machine()
    assert (m.slug, m.sm_count, m.memory_bytes) == ("nvidia-a100-sxm4-40gb-mig-1g-5gb", 14, 5 << 30)
    assert all(broken[0] in m.record["unavailable"][n] for n in ("power_limit_w", "sm_clock_mhz", "violations_ns"))


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ({"nvmlDeviceGetPowerManagementLimit": 0xFFFFFFFF}, "power_limit_w"),
        ({"nvmlDeviceGetPowerManagementLimit": 0}, "power_limit_w"),
        ({"nvmlDeviceGetMaxClockInfo": 0xFFFFFFFF}, "max_sm_clock_mhz"),
    ],
)
def test_an_answer_that_stands_for_none_is_none(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], name: str
) -> None:
    install(monkeypatch, [H200], FakeNvml(**answer))
    m = read_machine()
    assert m.slug == "nvidia-h200"
    assert m.record[name] is None and "NVML answers" in m.record["unavailable"][name]


def test_idle_clocks_are_told_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = {"nvmlDeviceGetClockInfo": 210, "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1}
    install(monkeypatch, [H200], FakeNvml(**idle))
    r = read_machine().record
    assert (r["sm_clock_mhz"], r["throttle_reasons"], r["max_sm_clock_mhz"]) == ([210], [["gpu_idle"]], 1980)
    assert machine.throttle_watch(read_machine()).measure(lambda: 7) == (7, [])


def test_the_watch_sees_heat_on_the_gpus_used(monkeypatch: pytest.MonkeyPatch) -> None:
    heat = iter(range(100))
    grows = {"nvmlDeviceGetViolationStatus": lambda board, policy: SimpleNamespace(violationTime=10**12 * next(heat)),
             "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1}  # fmt: skip
    install(monkeypatch, [H200, H200], FakeNvml(**grows))
    watch = machine.throttle_watch(read_machine(2))
    watch.sleep = lambda seconds: None
    assert watch.measure(lambda: 7) == (7, ["board_limit", "reliability", "thermal"])


def test_load_is_recorded_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (3.14159, 1.0, 1.0))
    assert read_machine(0).record["load_average"] == 3.14
    assert read_clocks(0)["load_average"] == 3.14

    def unknown() -> None:
        raise OSError("no load here")

    monkeypatch.setattr("os.getloadavg", unknown)
    assert read_machine(0).record["unavailable"]["load_average"] == "OSError: no load here"


def test_pytorch_without_cuda_means_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [H200], FakeNvml(), torch_cuda=None)
    m = read_machine()
    assert m.gpu_count == 0 and m.slug.startswith("cpu-") and "without CUDA" in m.record["unavailable"]["gpu_name"]


@pytest.mark.parametrize("error", [OSError("libcuda.so.1: no such file"), RuntimeError("CUDA driver error 100")])
def test_no_driver_means_cpu_with_the_reason(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse() -> list[cuda_driver.Gpu]:
        raise error

    monkeypatch.setattr(cuda_driver, "visible_gpus", refuse)
    m = read_machine()
    assert m.gpu_count == 0 and m.compute_capability is None
    assert str(error) in m.record["unavailable"]["gpu_count"] or "without CUDA" in m.record["unavailable"]["gpu_count"]
    assert m.cores >= 1 and m.record["cores"] == m.cores
    assert read_clocks()["unavailable"]["gpu_count"].endswith(str(error))
    json.dumps(m.record)


def test_every_missing_fact_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, nvml in (([H200], FakeNvml()), ([H200], None), ([], None)):
        install(monkeypatch, gpus, nvml)
        r = read_machine().record
        missing = {name for name, value in r.items() if value is None}
        assert missing <= set(r["unavailable"])


def test_reads_without_pytorch() -> None:
    code = (
        "import sys; from repro.measure.machine import read_machine; read_machine(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.gpu
def test_driver_and_pytorch_agree() -> None:
    import torch

    gpus, properties = cuda_driver.visible_gpus(), torch.cuda.get_device_properties(0)
    assert len(gpus) == torch.cuda.device_count()
    seen = gpus[0]
    assert (seen.name, seen.sm_count) == (properties.name, properties.multi_processor_count)
    assert seen.compute_capability == (properties.major, properties.minor)
    assert seen.uuid.removeprefix("GPU-").removeprefix("MIG-") == str(properties.uuid)


def test_driver_errors_carry_the_drivers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def text(status: int, out: Any) -> int:
        out._obj.value = b"no CUDA-capable device is detected"
        return 0

    library = SimpleNamespace(cuInit=lambda flags: 100, cuGetErrorString=text)
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    with pytest.raises(RuntimeError, match="error 100: no CUDA-capable device"):
        cuda_driver.visible_gpus()
