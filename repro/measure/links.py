"""How GPUs are linked, as NVML (nvidia-ml-py) tells it: NVLink and PCIe. Without PyTorch.

A fact that a GPU or its driver does not tell is left out: a GPU has no NVLink, a container hides a query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ACTIVE = 1  # nvmlEnableState_t in nvml.h


def of_gpu(uuid: str) -> dict[str, float]:
    """Links of the GPU with this NVML uuid.

    nvlinks: links that are up. nvlink_version. nvlink_speed: GB/s of one link in one direction, as NVML counts.
    pcie_generation and pcie_width: of the slot as it is now; an idle GPU may have turned them down. Empty where NVML
    cannot be asked.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # of whatever kind: no library, no permission, a MIG instance, which has no links
        return {}
    up = _links_up(nvml, gpu)
    found: dict[str, float | None] = {
        "nvlinks": None if up is None else len(up),
        "nvlink_version": _ask(lambda: nvml.nvmlDeviceGetNvLinkVersion(gpu, up[0])) if up else None,
        "nvlink_speed": _ask(lambda: _speed(nvml, gpu)) if up else None,
        "pcie_generation": _ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        "pcie_width": _ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def reach_by_nvlink(uuid: str, other: str) -> bool | None:
    """Whether two GPUs of this machine read each other's memory over NVLink; None where NVML does not say."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        pair = [nvml.nvmlDeviceGetHandleByUUID(u) for u in (uuid, other)]
        status = nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return bool(status == nvml.NVML_P2P_STATUS_OK)
    except Exception:  # as above
        return None


def _ask(query: Callable[[], Any]) -> float | None:
    try:
        return float(query())
    except Exception:  # one query that is refused must leave the others standing
        return None


def _links_up(nvml: Any, gpu: Any) -> list[int] | None:
    """Numbers of the NVLinks that are up; None where NVML knows of none."""
    found, known = [], False
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            up = nvml.nvmlDeviceGetNvLinkState(gpu, link) == _ACTIVE
        except nvml.NVMLError:
            continue
        known = True
        found += [link] if up else []
    return found if known else None


def _speed(nvml: Any, gpu: Any) -> float:
    """GB/s of a link; the field counts MB/s."""
    (value,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    if value.nvmlReturn != nvml.NVML_SUCCESS or value.value.uiVal <= 0:
        raise LookupError("NVML does not tell the links' speed")
    return float(value.value.uiVal) / 1e3
