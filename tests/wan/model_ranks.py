"""What each rank does in `test_model_sharded`."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from repro.wan.config import WanConfig
from repro.wan.convert import load_diffusers
from repro.wan.model import WanModel


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


def same(sharded: WanModel, whole: WanModel) -> None:
    for (name, part), (_, all_of_it) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert part.to_local().numel() < all_of_it.numel() or all_of_it.shape[0] == 1, name
        assert torch.equal(part.full_tensor(), all_of_it), name
