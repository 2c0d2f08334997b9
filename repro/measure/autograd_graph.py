"""What a chain of operations costs the framework: nodes in the autograd graph, launches on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from repro.measure import cuda_driver, timing


def nodes(outputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Names of the autograd nodes between outputs and leaves, each node once, outputs' first.

    The leaves' own gradient accumulators are left out: they are there whatever the chain.
    """
    todo = [t.grad_fn for t in outputs]
    found: dict[torch.autograd.graph.Node, str] = {}
    while todo:
        node = todo.pop()
        if node is not None and node not in found and not node.name().endswith("AccumulateGrad"):
            found[node] = node.name()
            todo.extend(following for following, _ in node.next_functions)
    return tuple(found.values())


def launches(call: Callable[[], object], device: torch.device) -> int:
    """Kernels, copies and fills that a call puts on a CUDA device, counted in its captured graph.

    Exact, and independent of profilers, which not every machine permits. Call it inside `timing.work_stream(device)`.
    Raises RuntimeError where the call cannot be captured.
    """
    for _ in range(timing.WARM_UP):
        call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
        kept = call()
    count = sum(cuda_driver.graph_work(graph.raw_cuda_graph()).values())
    del kept
    graph.reset()
    return count
