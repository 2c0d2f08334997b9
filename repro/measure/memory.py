"""Activation memory: exactly what autograd saves, and the allocator's peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """What autograd keeps from a forward for its backward.

    bytes: total of the distinct storages. tensors: (shape, dtype, bytes of its storage) of each, in order of saving;
    a storage saved more than once, or through several views, stands once.
    """

    bytes: int
    tensors: tuple[tuple[tuple[int, ...], torch.dtype, int], ...]


def saved_by_autograd(forward: Callable[[], object], exclude: Iterable[Tensor] = ()) -> Saved:
    """Run `forward` and count what its autograd graph saves, through saved-tensor hooks. Any device, `meta` included.

    exclude: tensors whose storages are not counted, such as parameters, which exist anyway. Activations that go into
    the forward count where they are saved: they could have been freed otherwise.
    """
    ignored = [t.untyped_storage() for t in exclude]
    ignored_ids = {s._cdata for s in ignored}
    # Storages are held here until the end: an address that is freed could be reused and would be counted as known.
    found: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in ignored_ids:
            found.setdefault(storage._cdata, (storage, tensor.detach()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    tensors = tuple((tuple(t.shape), t.dtype, s.nbytes()) for s, t in found.values())
    del result
    return Saved(sum(size for *_, size in tensors), tensors)


def peak_allocated(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that were allocated at once while `run` went on, above those allocated before it.

    As PyTorch's CUDA allocator counts them (rounded to 512 bytes a tensor; memory of other libraries is not seen).
    Run it twice and take the second figure where the first call has workspaces to make.

    Raises ValueError on a device without such an allocator.
    """
    if device.type != "cuda":
        raise ValueError(f"peaks are counted by the CUDA allocator only, got device {device}")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
