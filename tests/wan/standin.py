"""A small transformer with what the engine asks of a model, and losses seeded by sample: quick, and free of Wan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.balance.models import ModelSize
from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer

SIZE = ModelSize("stand-in", dim=16, ffn=16, heads=1, layers=2)
SHAPES = (Shape(1, 32, 32), Shape(5, 32, 48), Shape(9, 48, 64))
DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.modulation = nn.Parameter(torch.randn(1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(F.layer_norm(x, (DIM,)) * self.modulation).chunk(3, dim=-1))
        return x + self.out(F.gelu(F.scaled_dot_product_attention(q, k, v).squeeze(1)))


class StandIn(nn.Module):
    """[B, S, 16] -> [B, S, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()  # a linear's output is a view, of which FSDP warns


def make(dtype: torch.dtype = torch.float64) -> StandIn:
    torch.manual_seed(1)
    return StandIn().to(dtype)  # on the CPU: sharding moves it


def corpus(samples: int) -> Corpus:
    tokens = torch.tensor([Tokenizer().tokens(s) for s in SHAPES]).numpy()
    bucket = torch.randint(len(SHAPES), (samples,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    return Corpus("small", "test", SHAPES, tokens, bucket.numpy())


def losses(model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
    """[B]: squared error against a target that, as the input, follows from sample id and epoch."""
    parameter = next(model.parameters())
    tokens = Tokenizer().tokens(micro_batch.shape)
    pairs = [
        torch.randn(2, tokens, DIM, generator=torch.Generator().manual_seed(1000 * epoch + i), dtype=torch.float64)
        for i in micro_batch.sample_ids
    ]
    x, target = torch.stack(pairs).to(parameter.device, parameter.dtype).unbind(1)
    return (model(x) - target).square().mean(dim=(1, 2))
