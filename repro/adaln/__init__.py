"""LayerNorm followed by adaptive modulation, y = LN(x) * (1 + scale) + shift, as one differentiable op.

Layers, from the formula outward: `form` (per-sample, per-token and per-frame modulation, told by shapes), `reference`
(plain PyTorch formulas, also in float64), `composite` (the op's arithmetic for any device), `build` (compiles and loads
the CUDA kernels in `csrc/`), `ops` (schemas, fakes, autograd), `validation` (argument checks), `api` (what is imported
from here), `diffusers_wan` (puts it into a Diffusers Wan model).

Names are resolved on first use, so that `repro.adaln.build.build_hash` is read without importing torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from repro.adaln.api import IMPLS, gated_residual_layer_norm_modulate, get_impl, layer_norm_modulate
    from repro.adaln.diffusers_wan import accelerate

__all__ = ["IMPLS", "accelerate", "gated_residual_layer_norm_modulate", "get_impl", "layer_norm_modulate"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from repro.adaln import api, diffusers_wan

    for public in __all__:
        globals()[public] = getattr(diffusers_wan if public == "accelerate" else api, public)
    return globals()[name]
