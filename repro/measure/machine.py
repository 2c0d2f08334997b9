"""Facts about the machine that rows are measured on, read without PyTorch.

Which GPUs there are is the CUDA driver's word; power, clocks and the rest come from NVML (nvidia-ml-py). A fact that
cannot be read is None, and `record["unavailable"]` says why: NVML may be missing from a container, a field
unsupported by a GPU, a query not permitted. Nothing is guessed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from repro.measure import cuda_driver, throttle

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
    "violations_ns",
    "temperature_c",
    "power_w",
)

_NOT_AVAILABLE = frozenset({0xFFFFFFFF, 0xFFFFFFFF / 1000, 0xFFFFFFFFFFFFFFFF})
"""NVML_VALUE_NOT_AVAILABLE (nvml.h) as the widths and units that are read here show it."""

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


def h200s(count: int) -> Machine:
    """A machine with so many of the GPUs that estimates are made for: for plans of what is not here."""
    name = "NVIDIA H200"
    return Machine(device_slug(name, count), name, count, (9, 0), 132, 141 * 10**9, 1, {})


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
    if power_limit_w is not None and default_power_limit_w is not None and power_limit_w < default_power_limit_w - 0.5:
        slug += f"-{power_limit_w:.0f}w"
    return slug


def read_machine(gpus: int | None = None, nodes: int = 1) -> Machine:
    """Read the machine's facts.

    gpus: GPUs that will be used. None means what a single-process suite uses: one GPU where a CUDA driver answers,
    else the CPU. 0 asks for the CPU. nodes: machines alike that share the GPUs evenly; facts are this one's, and
    `Machine.gpu_count` and the slug are of all together.

    Raises ValueError where `gpus` is negative, more than the visible GPUs or no multiple of `nodes`, or where several
    nodes are not told how many GPUs they have.
    """
    if gpus is not None and gpus < 0:
        raise ValueError(f"gpus must be at least 0, got {gpus}")
    if nodes > 1 and (gpus is None or gpus % nodes):
        raise ValueError(f"gpus must be told for {nodes} nodes, a multiple of that on all together, got {gpus}")
    gpus = None if gpus is None else gpus // nodes
    facts = _Facts()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    facts.record["cores"] = cores
    _read_host(facts)
    visible = [] if gpus == 0 else _visible(facts)
    if gpus is not None and gpus > len(visible):
        why = facts.unavailable.get("gpu_count", "CUDA_VISIBLE_DEVICES decides which are visible")
        raise ValueError(f"gpus={gpus}, but {len(visible)} visible here ({why})")
    if gpus is None and facts.record["torch_cuda"] is None:
        facts.unavailable.setdefault("gpu_count", facts.unavailable["torch_cuda"])
        visible = []
    used = visible[: 1 if gpus is None else gpus]
    facts.record["gpu_count"] = len(used) * nodes
    if not used:
        reason = facts.unavailable.get("gpu_count", "no GPU asked for" if gpus == 0 else "no visible GPU")
        facts.record.update(dict.fromkeys(_GPU_FACTS))
        facts.unavailable.update(dict.fromkeys(_GPU_FACTS, reason))
        name = f"cpu {platform.machine() or 'unknown'} {cores}c"
        memory = facts.record["host_memory_bytes"]
        return Machine(device_slug(name, 0), name, 0, None, None, memory, cores, facts.finish())
    gpu = used[0]
    _read_gpu(facts, gpu)
    facts.record.update(_dynamic(used, facts.unavailable))
    mig = facts.record["mig_profile"]
    limits = facts.record["power_limit_w"], facts.record["default_power_limit_w"]
    slug = device_slug(_MIG.sub("", gpu.name), len(used) * nodes, mig, *limits)
    return Machine(
        slug, gpu.name, len(used) * nodes, gpu.compute_capability, gpu.sm_count, gpu.memory_bytes, cores, facts.finish()
    )


def read_clocks(gpus: int = 1) -> dict[str, Any]:
    """Load of the host; clocks, throttle reasons, temperature and power of the first `gpus` visible GPUs, read now.

    Read again after a run, so that the record shows what the GPU did under load. Facts that cannot be read are None
    with the reason under "unavailable", as in `Machine.record`.
    """
    facts = _Facts()
    facts.read("load_average", load_average)
    facts.record.update(_dynamic(_visible(facts)[:gpus] if gpus else [], facts.unavailable))
    return facts.finish()


def throttle_watch(machine: Machine) -> throttle.Watch:
    """Watches the GPUs used while cases are measured; without GPUs it never repeats any."""

    def read() -> list[throttle.Reading]:
        found = _dynamic(_visible(_Facts())[: machine.gpu_count], {}, ("throttle_reasons", "violations_ns"))
        return [
            throttle.Reading(None if reasons is None else tuple(reasons), counters)
            for reasons, counters in zip(*found.values(), strict=True)
        ]

    return throttle.Watch(read if machine.has_gpu else list)


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
    except Exception as e:  # one failing query, of whatever kind, must leave the other facts standing
        unavailable[name] = f"{type(e).__name__}: {e}"
        return None
    if isinstance(value, int | float) and value in _NOT_AVAILABLE:
        unavailable[name] = f"NVML answers {value:g}, which stands for not available"
        return None
    return value.decode() if isinstance(value, bytes) else value


def _read_host(facts: _Facts) -> None:
    facts.record["python"] = platform.python_version()
    facts.record["platform"] = platform.platform()
    facts.read("cpu_name", _cpu_name)
    facts.read("host_memory_bytes", _host_memory)
    facts.read("load_average", load_average)
    facts.read("omp_num_threads", _omp_num_threads)
    facts.read("torch", lambda: importlib.metadata.version("torch"))
    facts.read("torch_cuda", _torch_cuda)


def _cpu_name() -> str:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if not found:
        raise LookupError("/proc/cpuinfo has no model name")
    return found.group(1).strip()


def _host_memory() -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    if not found:
        raise LookupError("/proc/meminfo has no MemTotal")
    return int(found.group(1)) * 1024


def load_average() -> float:
    """Processes that ran or waited to run, mean over the last minute: above `host_cores`, times are a crowd's."""
    return round(os.getloadavg()[0], 2)


def host_cores() -> int:
    """Cores of the host, this process's and others': the load average is that of the host too."""
    return os.cpu_count() or 1


def _omp_num_threads() -> int:
    """What the user told OpenMP, and with it PyTorch: on a CPU, times depend on it."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    if not text:
        raise LookupError("OMP_NUM_THREADS is not set: PyTorch uses every core")
    return int(text)


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


def _visible(facts: _Facts) -> list[cuda_driver.Gpu]:
    try:
        return cuda_driver.visible_gpus()
    except (OSError, AttributeError, RuntimeError) as e:  # no driver, one too old for a function used, or a refusal
        facts.unavailable["gpu_count"] = f"{type(e).__name__}: {e}"
        return []


def _handles(gpu: cuda_driver.Gpu) -> tuple[Any, Any]:
    """NVML handles of the GPU (or MIG instance) and of its board: clocks and power belong to the board."""
    import pynvml as nvml

    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if gpu.uuid.startswith("MIG-") else handle
    return handle, board


def _read_gpu(facts: _Facts, gpu: cuda_driver.Gpu) -> None:
    facts.record.update(
        gpu_name=gpu.name,
        compute_capability=gpu.compute_capability,
        sm_count=gpu.sm_count,
        memory_bytes=gpu.memory_bytes,
    )
    mig = _MIG.search(gpu.name)
    facts.record["mig_profile"] = mig.group(1) if mig else None
    if not mig:
        facts.unavailable["mig_profile"] = "not a MIG instance"

    def nvml_fact(name: str, query: Callable[[Any, Any], Any]) -> None:
        def read() -> Any:
            import pynvml as nvml

            return query(nvml, _handles(gpu)[1])

        facts.read(name, read)

    nvml_fact("driver", lambda nvml, _: nvml.nvmlSystemGetDriverVersion())
    nvml_fact("cuda_driver", lambda nvml, _: _cuda_version(nvml.nvmlSystemGetCudaDriverVersion()))
    nvml_fact("power_limit_w", lambda nvml, board: _watts(nvml.nvmlDeviceGetPowerManagementLimit(board)))
    nvml_fact("default_power_limit_w", lambda nvml, board: _watts(nvml.nvmlDeviceGetPowerManagementDefaultLimit(board)))
    nvml_fact("max_sm_clock_mhz", lambda nvml, board: nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_SM))
    nvml_fact("max_memory_clock_mhz", lambda nvml, board: nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_MEM))


def _watts(milliwatts: int) -> float:
    if milliwatts <= 0:
        raise LookupError(f"NVML answers {milliwatts} mW, which is no limit")
    return milliwatts / 1000


def _cuda_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


_DYNAMIC: dict[str, Callable[[Any, Any], Any]] = {
    "sm_clock_mhz": lambda nvml, board: nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, board: nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_MEM),
    "throttle_reasons": lambda nvml, board: throttle.reason_names(
        nvml.nvmlDeviceGetCurrentClocksThrottleReasons(board)
    ),
    "violations_ns": throttle.violations_ns,
    "temperature_c": lambda nvml, board: nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU),
    "power_w": lambda nvml, board: nvml.nvmlDeviceGetPowerUsage(board) / 1000,
}


def _dynamic(
    gpus: list[cuda_driver.Gpu], unavailable: dict[str, str], names: Iterable[str] = tuple(_DYNAMIC)
) -> dict[str, list[Any]]:
    """Facts that change while a run goes on, one entry a GPU."""

    def read(name: str, gpu: cuda_driver.Gpu) -> Any:
        import pynvml as nvml

        return _DYNAMIC[name](nvml, _handles(gpu)[1])

    return {name: [_read(name, partial(read, name, gpu), unavailable) for gpu in gpus] for name in names}


def _hyphens(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
