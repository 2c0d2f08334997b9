"""Facts about the machine that rows are measured on, read without PyTorch.

GPU facts come from NVML (nvidia-ml-py). A fact that cannot be read is None, and `record["unavailable"]` says
why: NVML may be missing from a container, a field unsupported by a GPU, a query not permitted. Nothing is guessed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_THROTTLE_BITS = {
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

_GPU_FACTS = (
    "driver",
    "cuda_driver",
    "gpu_name",
    "compute_capability",
    "sm_count",
    "memory_bytes",
    "power_limit_w",
    "default_power_limit_w",
    "max_sm_clock_mhz",
    "max_memory_clock_mhz",
    "mig_profile",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "temperature_c",
    "power_w",
)

_MIG = re.compile(r"\s+MIG\s+(\S+)$")


@dataclass(frozen=True)
class Machine:
    """What a suite may know about the machine.

    slug: folder under results/. name: raw GPU name, or the CPU's description. gpu_count: GPUs *used* (0: CPU).
    memory_bytes: memory of one GPU used, or of the host on a CPU machine. cores: cores this process may run on.
    record: every fact by name, for the run record; None where unknown, with the reason in record["unavailable"].
    """

    slug: str
    name: str
    gpu_count: int
    compute_capability: tuple[int, int] | None
    sm_count: int | None
    memory_bytes: int | None
    cores: int
    record: dict[str, Any] = field(repr=False, compare=False)

    @property
    def has_gpu(self) -> bool:
        """Whether suites measure on a GPU here."""
        return self.gpu_count > 0


def device_slug(
    name: str,
    gpus_used: int,
    mig_profile: str | None = None,
    power_limit_w: float | None = None,
    default_power_limit_w: float | None = None,
) -> str:
    """Name of the folder that holds a device's rows: `nvidia-h200`, `nvidia-h200-x2`, `cpu-x86-64-2c`.

    The name in lower case with runs of other characters turned into one hyphen; `-xK` for K > 1 GPUs used; a MIG
    profile and a power limit below the default appended, because both change what is measured.
    """
    slug = _hyphens(name)
    if not slug:
        raise ValueError(f"device name must hold a letter or a digit, got {name!r}")
    if gpus_used > 1:
        slug += f"-x{gpus_used}"
    if mig_profile:
        slug += f"-mig-{_hyphens(mig_profile)}"
    if (
        power_limit_w is not None
        and default_power_limit_w is not None
        and power_limit_w < default_power_limit_w - 0.5
    ):
        slug += f"-{power_limit_w:.0f}w"
    return slug


def read_machine(gpus: int | None = None) -> Machine:
    """Read the machine's facts.

    gpus: GPUs that will be used. None means what a single-process suite uses: one GPU where a CUDA driver answers,
    else the CPU. 0 asks for the CPU.

    Raises ValueError where `gpus` is negative or more than the visible GPUs.
    """
    if gpus is not None and gpus < 0:
        raise ValueError(f"gpus must be at least 0, got {gpus}")
    facts = _Facts()
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1)
    )
    facts.record["cores"] = cores
    _read_host(facts)
    handles = [] if gpus == 0 else _visible_gpus(facts)
    if gpus is not None and gpus > len(handles):
        why = facts.unavailable.get(
            "gpu_count", "CUDA_VISIBLE_DEVICES decides which are visible"
        )
        raise ValueError(f"gpus={gpus}, but {len(handles)} visible here ({why})")
    used = handles[: 1 if gpus is None else gpus]
    if not used:
        facts.record["gpu_count"] = 0
        reason = facts.unavailable.get(
            "gpu_count", "no GPU asked for" if gpus == 0 else "no visible GPU"
        )
        for fact in _GPU_FACTS:
            facts.record[fact] = None
            facts.unavailable[fact] = reason
        name = f"cpu {platform.machine() or 'unknown'} {cores}c"
        return Machine(
            device_slug(name, 0),
            name,
            0,
            None,
            None,
            facts.record["host_memory_bytes"],
            cores,
            facts.finish(),
        )
    facts.record["gpu_count"] = len(used)
    _read_gpu(facts, used[0])
    facts.record.update(_dynamic(used, facts.unavailable))
    r = facts.record
    raw_name = r["gpu_name"] or "NVIDIA GPU"
    slug = device_slug(
        _MIG.sub("", raw_name),
        len(used),
        r["mig_profile"],
        r["power_limit_w"],
        r["default_power_limit_w"],
    )
    return Machine(
        slug,
        raw_name,
        len(used),
        r["compute_capability"],
        r["sm_count"],
        r["memory_bytes"],
        cores,
        facts.finish(),
    )


def read_clocks(gpus: int = 1) -> dict[str, Any]:
    """Clocks, throttle reasons, temperature and power of the first `gpus` visible GPUs, one entry a GPU, read now.

    Read again after a run, so that the record shows what the GPU did under load. Facts that cannot be read are None
    with the reason under "unavailable", as in `Machine.record`.
    """
    facts = _Facts()
    facts.record.update(_dynamic(_visible_gpus(facts)[:gpus], facts.unavailable))
    return facts.finish()


class _Facts:
    """Facts read so far, with the reason for each that could not be read."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.unavailable: dict[str, str] = {}

    def read(self, name: str, query: Callable[[], Any]) -> Any:
        self.record[name] = _read(name, query, self.unavailable)
        return self.record[name]

    def finish(self) -> dict[str, Any]:
        return {**self.record, "unavailable": self.unavailable}


def _read(name: str, query: Callable[[], Any], unavailable: dict[str, str]) -> Any:
    try:
        value = query()
    except Exception as e:  # noqa: BLE001 - one failing query, of whatever kind, must leave the other facts standing
        unavailable[name] = f"{type(e).__name__}: {e}"
        return None
    return value.decode() if isinstance(value, bytes) else value


def _read_host(facts: _Facts) -> None:
    facts.record["python"] = platform.python_version()
    facts.record["platform"] = platform.platform()
    facts.read("cpu_name", _cpu_name)
    facts.read("host_memory_bytes", _host_memory)
    facts.read("torch", lambda: importlib.metadata.version("torch"))
    facts.read("torch_cuda", _torch_cuda)


def _cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if not found:
        raise LookupError("/proc/cpuinfo has no model name")
    return found.group(1).strip()


def _host_memory() -> int:
    found = re.search(
        r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE
    )
    if not found:
        raise LookupError("/proc/meminfo has no MemTotal")
    return int(found.group(1)) * 1024


def _torch_cuda() -> str:
    """CUDA version that PyTorch was built with, from its version.py, which is read and not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("torch is not installed")
    text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    if not found:
        raise LookupError("this PyTorch was built without CUDA")
    return found.group(1)


def _visible_gpus(facts: _Facts) -> list[Any]:
    """NVML handles of the GPUs (or MIG instances) that CUDA programs see, in NVML's order unless the user chose one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if chosen is None:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        else:
            handles = []
            for entry in (e.strip() for e in chosen.split(",")):
                # CUDA's own rule: the first invalid entry ends the list.
                if not entry or (
                    entry.lstrip("-").isdigit() and not 0 <= int(entry) < count
                ):
                    break
                by_index = entry.isdigit()
                get = (
                    pynvml.nvmlDeviceGetHandleByIndex
                    if by_index
                    else pynvml.nvmlDeviceGetHandleByUUID
                )
                handles.append(get(int(entry) if by_index else entry))
        return [_first_mig(pynvml, h) for h in handles]
    except Exception as e:  # noqa: BLE001 - no driver, library or permission: a CPU machine, with the reason
        facts.unavailable["gpu_count"] = f"{type(e).__name__}: {e}"
        return []


def _first_mig(nvml: Any, handle: Any) -> Any:
    """`handle`, or its first MIG instance where MIG is on: that is the one that CUDA uses."""
    try:
        if (
            nvml.nvmlDeviceIsMigDeviceHandle(handle)
            or nvml.nvmlDeviceGetMigMode(handle)[0] == 0
        ):
            return handle
        return nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    except nvml.NVMLError:  # GPUs without MIG answer "not supported"
        return handle


def _parent(nvml: Any, handle: Any) -> Any:
    """The physical GPU of a MIG handle (power and clocks belong to it), or `handle` itself."""
    try:
        if nvml.nvmlDeviceIsMigDeviceHandle(handle):
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    except nvml.NVMLError:
        pass
    return handle


def _read_gpu(facts: _Facts, handle: Any) -> None:
    import pynvml as nvml

    board = _parent(nvml, handle)
    facts.read("driver", nvml.nvmlSystemGetDriverVersion)
    facts.read(
        "cuda_driver", lambda: _cuda_version(nvml.nvmlSystemGetCudaDriverVersion())
    )
    name = facts.read("gpu_name", lambda: nvml.nvmlDeviceGetName(handle))
    facts.read(
        "compute_capability",
        lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(board)),
    )
    facts.read(
        "sm_count",
        lambda: int(nvml.nvmlDeviceGetAttributes_v2(handle).multiprocessorCount),
    )
    facts.read("memory_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
    facts.read(
        "power_limit_w", lambda: nvml.nvmlDeviceGetPowerManagementLimit(board) / 1000
    )
    facts.read(
        "default_power_limit_w",
        lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(board) / 1000,
    )
    facts.read(
        "max_sm_clock_mhz",
        lambda: int(nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_SM)),
    )
    facts.read(
        "max_memory_clock_mhz",
        lambda: int(nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_MEM)),
    )
    mig = _MIG.search(name or "")
    facts.record["mig_profile"] = mig.group(1) if mig else None
    if not mig:
        facts.unavailable["mig_profile"] = "not a MIG instance"


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _dynamic(handles: list[Any], unavailable: dict[str, str]) -> dict[str, list[Any]]:
    """Facts that change while a run goes on, one entry a GPU."""
    facts: dict[str, list[Any]] = {
        "sm_clock_mhz": [],
        "memory_clock_mhz": [],
        "throttle_reasons": [],
        "temperature_c": [],
        "power_w": [],
    }
    if not handles:
        return facts
    import pynvml as nvml

    for handle in (_parent(nvml, h) for h in handles):
        queries: dict[str, Callable[[Any], Any]] = {
            "sm_clock_mhz": lambda h: int(
                nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)
            ),
            "memory_clock_mhz": lambda h: int(
                nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM)
            ),
            "throttle_reasons": lambda h: _throttle_names(
                nvml.nvmlDeviceGetCurrentClocksThrottleReasons(h)
            ),
            "temperature_c": lambda h: int(
                nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)
            ),
            "power_w": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
        }
        for name, query in queries.items():
            facts[name].append(_read(name, lambda q=query, h=handle: q(h), unavailable))  # type: ignore[misc]
    return facts


def _throttle_names(mask: int) -> list[str]:
    return [name for bit, name in _THROTTLE_BITS.items() if mask & bit]


def _hyphens(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
