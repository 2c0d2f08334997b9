"""One model over many ranks: PyTorch's FSDP2, activation checkpointing and per-block compilation, set up in one place.

Parameters are sharded over all ranks, block by block (`torch.distributed.fsdp.fully_shard`). The master copy keeps the
dtype that the model comes in (fp32 for training), blocks compute in `compute` and gradients are reduced in fp32.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from repro.balance.types import Sync
from repro.wan.waiting import WaitClock

Checkpointing = Literal["none", "selective", "full"]
Compute = Literal["bf16", "master"]

_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""Outputs that `selective` keeps: attention is the one cost that grows with S^2, its output only with S."""

PATIENCE_SECONDS = 600.0
"""How long a rank waits for others in any one exchange, unless asked otherwise; NCCL's own default."""
_MANY = 1 << 20

T = TypeVar("T")


class WorldError(ValueError):
    """The ranks that were started do not fit this machine or this run; the message is what the user reads."""


class Stranded(WorldError):
    """This rank cannot go on while the others, amid a pass, wait for it: it has to end, and they with it."""


@dataclass(frozen=True)
class World:
    """This process among the ranks. mesh: all ranks in one dimension. patience: seconds, as of `join`."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    patience: float

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0


@dataclass(frozen=True)
class Parallelism:
    """How the model is laid over the ranks.

    sync: `micro_batch` reshards parameters after every forward and backward, so that ranks meet in every layer of
    every micro-batch; `step` keeps them gathered and gradients whole until the step's last micro-batch, where ranks
    meet once, at the price of memory for a whole copy of both. checkpointing: activations recomputed in the backward
    pass, per block: none, all but attention outputs (`selective`), or all (`full`). compile: each block, for any
    shape. compute: bf16, or `master`, the dtype that the parameters are kept in (tests; CPUs).
    """

    sync: Sync = "micro_batch"
    checkpointing: Checkpointing = "full"
    compile: bool = False
    compute: Compute = "bf16"

    def __post_init__(self) -> None:
        for name, known in (("sync", Sync), ("checkpointing", Checkpointing), ("compute", Compute)):
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} must be one of {', '.join(get_args(known))}, got {getattr(self, name)!r}")


def join(device_type: str | None = None, store: dist.Store | None = None, patience: float = PATIENCE_SECONDS) -> World:
    """Join the ranks that torchrun started, or be the only one without it.

    device_type: "cuda" or "cpu"; None for GPUs where there are any. GPUs talk through NCCL, CPUs (and everything small
    that lives on the host) through gloo. store: where ranks meet, if not where the environment says; their numbers are
    the environment's RANK and WORLD_SIZE. patience: seconds that a rank waits for others, here and in every exchange.

    Raises WorldError where more ranks were started on this machine than it has GPUs, for another kind of device, and
    where not all ranks come in time.
    """
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise WorldError(f"--device must be cuda or cpu, got {kind!r}")
    local, on_this_host = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if kind == "cuda":
        if on_this_host > torch.cuda.device_count():
            raise WorldError(
                f"{on_this_host} ranks were started here, this machine has {torch.cuda.device_count()} GPUs: start "
                "torchrun with a smaller --nproc-per-node, or with --device cpu"
            )
        torch.cuda.set_device(local)
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        try:
            _meet(backend, store, timedelta(seconds=patience))
        except dist.DistError as error:
            reason = str(error).splitlines()[0][:300]
            raise WorldError(f"the other ranks did not come within {patience:g} s: {reason}") from error
    size = dist.get_world_size()
    return World(dist.get_rank(), size, device, init_device_mesh(kind, (size,)), patience)


def _meet(backend: str, store: dist.Store | None, timeout: timedelta) -> None:
    if store is not None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)


def agree(world: World, what: str, value: str) -> None:
    """Compare `value` over the ranks. Raises WorldError, on all of them, where it differs."""
    values: list[str | None] = [None] * world.size
    dist.all_gather_object(values, value)
    different = sorted({str(v) for v in values})
    if len(different) > 1:
        raise WorldError(f"ranks differ in their {what} ({', '.join(different)}): run the same program and data on all")


def on_first(world: World, work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T | None:
    """Have the first rank do what only one may do; its value there, None on the others.

    Where `work` raises OSError or ValueError there, all ranks raise: the first that error, the others WorldError.
    """
    value: T | None = None
    failure: OSError | ValueError | None = None
    if world.is_first:
        try:
            value = work()
        except (OSError, ValueError) as error:
            failure = error
    told = [str(failure) if failure is not None else None]
    dist.broadcast_object_list(told, src=0, group=group)
    if failure is not None:
        raise failure
    if told[0] is not None:
        raise WorldError(told[0])
    return value


def leave() -> None:
    """Leave the ranks; safe to call where none were joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def parallelize(model: nn.Module, settings: Parallelism, world: World, clock: WaitClock) -> None:
    """Checkpoint, compile and shard `model` in place; its transformer blocks are `model.blocks`, an nn.ModuleList.

    Where `model.master_modules` names children, these compute in the master copy's dtype whatever `compute` says.
    clock: gets its marks around the places where blocks wait for other ranks.
    On the meta device nothing is allocated: parameters become sharded meta tensors, for `to_empty` to make real.
    Raises TypeError for a model without such blocks.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        raise TypeError(f"{type(model).__name__} needs an nn.ModuleList `blocks` to be sharded block by block")
    bf16 = settings.compute == "bf16"
    # Inputs are not cast: timesteps and modulation stay fp32, and the model casts where its formulas say so.
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32 if bf16 else None,
        cast_forward_inputs=False,
    )
    shard = partial(fully_shard, mesh=world.mesh, reshard_after_forward=settings.sync == "micro_batch")
    for i, block in enumerate(blocks):
        if settings.checkpointing != "none":
            context: dict[str, Any] = {"context_fn": _keep_attention} if settings.checkpointing == "selective" else {}
            # No dropout anywhere, so the recomputation needs no random state.
            block = checkpoint_wrapper(block, preserve_rng_state=False, **context)
            blocks[i] = block
        if settings.compile:
            # The forward alone, so that FSDP's hooks around it stay outside the compiled graph. All shapes share two
            # versions, for one sample and for more.
            block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True)
    clock.before_sharding(list(blocks))
    for block in blocks:
        shard(block, mp_policy=precision)
    for name in getattr(model, "master_modules", ()):
        shard(model.get_submodule(name), mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    shard(model, mp_policy=precision)
    clock.after_sharding(list(blocks))


@contextlib.contextmanager
def any_number_of_shapes() -> Iterator[None]:
    """Let Dynamo compile once for each shape that comes.

    Whatever is compiled here is compiled whole (`fullgraph`): past its limit, 8 versions of a function, Dynamo would
    refuse to go on, and a corpus has more shapes than that.
    """
    if "torch._dynamo" not in sys.modules:  # imported, slowly, by the first call of torch.compile
        yield
        return
    with torch._dynamo.config.patch(recompile_limit=_MANY, accumulated_recompile_limit=_MANY):
        yield


def prepare_micro_batch(model: nn.Module, settings: Parallelism, last: bool) -> None:
    """Tell FSDP what the coming backward pass does with gradients and gathered parameters."""
    assert isinstance(model, FSDPModule)
    if settings.sync == "step":
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def _keep_attention() -> Any:
    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
