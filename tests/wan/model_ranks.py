"""What each rank does in `test_model_sharded`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from repro.wan.config import WanConfig
from repro.wan.convert import load_diffusers
from repro.wan.model import WanModel
from repro.wan.parallel import Parallelism, join, parallelize
from repro.wan.waiting import WaitClock


def sharded_weights(folder: str) -> None:
    """Built on the meta device, sharded, then given memory and values: those of a whole model, in parts."""
    config = WanConfig.preset("tiny")
    with torch.device("meta"):
        model = WanModel(config)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    whole = WanModel(config)
    model.reset_parameters(seed=5)
    whole.reset_parameters(seed=5)
    same(model, whole)
    load_diffusers(model, folder)
    load_diffusers(whole, folder)
    same(model, whole)


def time_in_fp32() -> None:
    """Under bf16 compute blocks get the time embedding that fp32 gives, to the last bit; all else is bf16."""
    world, config = join("cpu"), WanConfig.preset("tiny", layers=1)
    whole, model = WanModel(config), WanModel(config)
    seen, expected = {}, []
    model.blocks[0].register_forward_pre_hook(lambda m, args: seen.update(time=args[1], x=args[0], text=args[2]))
    whole.blocks[0].register_forward_pre_hook(lambda m, args: expected.append(args[1]))
    parallelize(model, Parallelism(checkpointing="none", compute="bf16"), world, WaitClock(world.device))
    sample = (torch.randn(2, 16, 1, 4, 4), torch.tensor([3.7, 961.3]), torch.randn(2, 512, 4096))
    whole(*sample)
    model(*sample).float().square().mean().backward()
    assert seen["time"].dtype == torch.float32 and torch.equal(seen["time"], expected[0])
    assert seen["x"].dtype == seen["text"].dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.time_projection.parameters())


def same(sharded: WanModel, whole: WanModel) -> None:
    for (name, part), (_, all_of_it) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert part.to_local().numel() < all_of_it.numel() or all_of_it.shape[0] == 1, name
        assert torch.equal(part.full_tensor(), all_of_it), name
