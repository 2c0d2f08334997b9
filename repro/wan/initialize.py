"""Initial weights of a Wan model, the same whatever the number of ranks.

Rules of Wan-Video/Wan2.1, wan/modules/model.py (`init_weights`): Xavier-uniform matrices and zero biases; text and time
embeddings normal with deviation 0.02; norms one and zero; modulation tables randn / sqrt(dim); the head zero, so that
an untrained model predicts zero.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter of `model`, each from a generator seeded by `seed` and the parameter's name.

    A sharded parameter is made whole, one at a time, on every rank, which keeps its own part: no communication, and
    the weights of a run on 8 ranks are those of a run on 1. CPU and CUDA generators differ from each other.
    Raises ValueError for a parameter still on the meta device or one that no rule covers.
    """
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device: call to_empty(device=...) before reset_parameters")
        whole = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        fill(clean_name(name), whole, torch.Generator(parameter.device).manual_seed(_seed(seed, clean_name(name))))
        assign(parameter, whole)


def clean_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile insert into it."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into a parameter or into this rank's part of a sharded one."""
    if isinstance(parameter, DTensor):
        part = distribute_tensor(
            whole.to(parameter.dtype), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.copy_(part)
    else:
        parameter.copy_(whole)


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill `tensor` by the rule for the parameter `name`. Raises ValueError where there is none."""
    *_, module, leaf = f".{name}".split(".")
    if leaf == "bias" or name == "head.head.weight":
        tensor.zero_()
    elif leaf == "modulation":
        tensor.normal_(generator=generator).div_(math.sqrt(tensor.shape[-1]))
    elif leaf == "weight" and module.startswith("norm"):
        tensor.fill_(1)
    elif leaf == "weight" and name.startswith(("text_embedding.", "time_embedding.")):
        tensor.normal_(std=0.02, generator=generator)
    elif leaf == "weight" and tensor.dim() >= 2:
        nn.init.xavier_uniform_(tensor.flatten(1), generator=generator)
    else:
        raise ValueError(f"no rule to initialise {name} of shape {list(tensor.shape)}")


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
