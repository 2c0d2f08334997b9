"""The GPUs that CUDA programs see in this process, asked of the CUDA driver itself, without PyTorch.

The driver applies CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and MIG exactly as a program will experience them, and it
is there in containers that lack NVML. No context is made, so no GPU memory is taken; but a process that forks after
this call cannot use CUDA in the child, as after `torch.cuda.is_available()`.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass

# CUdevice_attribute in cuda.h
_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76

_WORK_NODES = {0: "kernel", 1: "memcpy", 2: "memset"}
"""CUgraphNodeType in cuda.h: the nodes that put work on the device."""


@dataclass(frozen=True)
class Gpu:
    """A visible GPU or MIG instance. uuid: as NVML writes it (`GPU-...`, `MIG-...`). memory_bytes: total."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]
    sm_count: int
    memory_bytes: int


def visible_gpus() -> list[Gpu]:
    """GPUs in the order in which CUDA numbers them.

    Raises OSError where there is no CUDA driver library, RuntimeError where the driver refuses (its message says why:
    no device, a driver that does not match the kernel module, ...).
    """
    driver = ctypes.CDLL("libcuda.so.1")
    _check(driver, driver.cuInit(0))
    count = ctypes.c_int()
    _check(driver, driver.cuDeviceGetCount(ctypes.byref(count)))
    return [_gpu(driver, ordinal) for ordinal in range(count.value)]


def graph_work(graph: int) -> dict[str, int]:
    """Numbers of kernels, copies and fills ("kernel", "memcpy", "memset") in a captured graph (a cudaGraph_t).

    Raises as `visible_gpus`.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    _check(driver, driver.cuGraphGetNodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    _check(driver, driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)))
    found = dict.fromkeys(_WORK_NODES.values(), 0)
    for node in nodes[: count.value]:
        kind = ctypes.c_int()
        _check(driver, driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value in _WORK_NODES:
            found[_WORK_NODES[kind.value]] += 1
    return found


def _gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    device = ctypes.c_int()
    _check(driver, driver.cuDeviceGet(ctypes.byref(device), ordinal))
    name = ctypes.create_string_buffer(256)
    _check(driver, driver.cuDeviceGetName(name, len(name), device))
    memory = ctypes.c_size_t()
    _check(driver, driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    raw = (ctypes.c_ubyte * 16)()
    _check(driver, driver.cuDeviceGetUuid_v2(ctypes.byref(raw), device))
    text = name.value.decode(errors="replace")
    # The driver gives bare bytes; a MIG instance is told by its name ("... MIG 1g.5gb").
    prefix = "MIG" if " MIG " in text else "GPU"

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(driver, driver.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    return Gpu(
        name=text,
        uuid=f"{prefix}-{uuid.UUID(bytes=bytes(raw))}",
        compute_capability=(attribute(_COMPUTE_CAPABILITY_MAJOR), attribute(_COMPUTE_CAPABILITY_MINOR)),
        sm_count=attribute(_MULTIPROCESSOR_COUNT),
        memory_bytes=memory.value,
    )


def _check(driver: ctypes.CDLL, status: int) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'unknown').decode()}")
