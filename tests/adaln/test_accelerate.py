"""`accelerate` on a tiny Diffusers Wan model: same results and gradients, undone exactly, unknown models refused."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models.transformers import transformer_wan  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from repro.adaln import accelerate, diffusers_wan  # noqa: E402

PER_SAMPLE = torch.tensor([10, 500])
PER_TOKEN = 15 * torch.arange(2 * 32).view(2, 32)
"""Timesteps of two samples of 2 x 4 x 4 tokens: one a sample (Wan 2.1), one a token (Wan 2.2 TI2V)."""


def wan(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 48, "num_layers": 2}
    channels = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 32, "rope_max_seq_len": 32}
    model = diffusers.WanTransformer3DModel(**sizes, **channels, **config)
    with torch.no_grad():
        for block in model.blocks:
            if isinstance(block.norm2, nn.LayerNorm):  # as after some training, not ones and zeros
                block.norm2.weight.normal_(1, 0.3)
                block.norm2.bias.normal_(0, 0.3)
    return model.to(dtype)


def results(model: Any, timestep: Tensor) -> dict[str, Tensor]:
    """Output and gradients of all parameters and of the latents, by name."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 2, 8, 8, generator=generator).to(model.dtype).requires_grad_()
    text = torch.randn(2, 7, 16, generator=generator).to(model.dtype)
    model.zero_grad()
    (y,) = model(latents, timestep, text, return_dict=False)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    assert latents.grad is not None
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "latents": latents.grad, **gradients}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert found.keys() == wanted.keys()
    norm = torch.linalg.vector_norm
    return max(float(norm(found[n].double() - w.double()) / norm(w.double())) for n, w in wanted.items())


@pytest.mark.parametrize("timestep", [PER_SAMPLE, PER_TOKEN, PER_SAMPLE[:1]], ids=["sample", "token", "one for all"])
@pytest.mark.parametrize("cross_attn_norm", [True, False])
def test_outputs_and_gradients_stay(timestep: Tensor, cross_attn_norm: bool) -> None:
    model = wan(cross_attn_norm=cross_attn_norm)
    before = results(model, timestep)
    with accelerate(model):
        # float32 sums in another order
        assert distance(results(model, timestep), before) <= 1e-5
    assert distance(results(model, timestep), before) == 0


@pytest.mark.parametrize("timestep", [PER_SAMPLE, PER_TOKEN], ids=["sample", "token"])
def test_in_bfloat16_it_is_as_near_to_float32_as_before(timestep: Tensor) -> None:
    model = wan(torch.bfloat16)
    exact = results(copy.deepcopy(model).float(), timestep)
    before = distance(results(model, timestep), exact)
    with accelerate(model):
        after = distance(results(model, timestep), exact)
    # Which roundings fall where differs a little, in the least exact of some fifty tensors.
    assert 0 < after <= 1.25 * before


def test_every_norm_and_residual_goes_through_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        op = getattr(diffusers_wan, name)
        return lambda *args: (calls.append(name), op(*args))[1]

    for name in ("layer_norm_modulate", "gated_residual_layer_norm_modulate"):
        monkeypatch.setattr(diffusers_wan, name, counted(name))
    model = wan()
    accelerate(model)
    results(model, PER_SAMPLE)
    block = ["layer_norm_modulate", "gated_residual_layer_norm_modulate", "gated_residual_layer_norm_modulate"]
    assert calls == [*block, *block, "layer_norm_modulate"]


def test_parameters_stay_where_they_are() -> None:
    model = wan()
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in model.state_dict().items()}
    handle = accelerate(model)
    assert {name: (t.data_ptr(), t.shape) for name, t in model.state_dict().items()} == before
    assert isinstance(model.blocks[0], transformer_wan.WanTransformerBlock)
    handle.undo()
    assert not any("forward" in module.__dict__ for module in model.modules())
    handle.undo()  # nothing left to undo


def test_a_second_call_changes_nothing() -> None:
    model = wan()
    with accelerate(model) as same:
        assert same is model
        forward = model.blocks[0].forward
        with accelerate(model):
            assert model.blocks[0].forward is forward
        assert model.blocks[0].forward is forward, "the outer one ends it"
    assert "forward" not in model.blocks[0].__dict__


def test_a_copy_is_accelerated_on_its_own() -> None:
    model = wan()
    before = results(model, PER_SAMPLE)
    with accelerate(model):
        copied = copy.deepcopy(model)
    with torch.no_grad():
        model.proj_out.weight.zero_()
    assert copied.blocks[0].forward.__self__ is copied.blocks[0]
    assert distance(results(copied, PER_SAMPLE), before) <= 1e-5


def test_gradient_checkpointing() -> None:
    model = wan().train()
    before = results(model, PER_SAMPLE)
    model.enable_gradient_checkpointing()
    with accelerate(model):
        assert distance(results(model, PER_SAMPLE), before) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("timestep", [PER_SAMPLE, PER_TOKEN], ids=["sample", "token"])
def test_compiled_blocks_have_no_graph_break(timestep: Tensor) -> None:
    model = wan()
    before = results(model, timestep)
    accelerate(model)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    assert distance(results(model, timestep), before) <= 1e-5


def test_tracebacks_show_diffusers_lines() -> None:
    model = wan()
    own = transformer_wan.WanTransformerBlock.forward.__code__
    accelerate(model)
    rewritten = model.blocks[0].forward.__func__.__code__
    assert rewritten.co_filename == own.co_filename and rewritten.co_firstlineno == own.co_firstlineno
    assert model.blocks[0].forward.__func__.__globals__ is vars(transformer_wan)


class OtherBlock(transformer_wan.WanTransformerBlock):
    def forward(self, hidden_states: Any, encoder_hidden_states: Any, temb: Any, rotary_emb: Any) -> Any:
        norm_hidden_states = self.norm1(hidden_states)
        return hidden_states + norm_hidden_states


def test_other_models_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"needs a Diffusers WanTransformer3DModel, got torch\.nn\.modules\.linear\.Linear"
    ):
        accelerate(nn.Linear(2, 2))


def test_an_unknown_block_is_told_by_class_version_and_difference() -> None:
    model = wan()
    model.blocks[1].__class__ = OtherBlock
    with pytest.raises(RuntimeError) as error:
        accelerate(model)
    text = str(error.value)
    assert "OtherBlock.forward" in text and f"(Diffusers {diffusers.__version__})" in text and "\n" not in text
    assert "it lacks `norm_hidden_states = (self.norm1(hidden_states.float()) * (1 + scale_msa) + shift_msa)" in text
    assert not any("forward" in module.__dict__ for module in model.modules()), "as a whole or not at all"


def test_a_block_without_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, hidden_states): return hidden_states", scope)
    model = wan()
    model.blocks[0].__class__ = type("Block", (OtherBlock,), {"forward": scope["forward"]})
    with pytest.raises(RuntimeError, match="its source cannot be read"):
        accelerate(model)


def test_norms_of_another_kind_are_refused() -> None:
    model = wan()
    model.blocks[0].norm1 = nn.RMSNorm(24)
    with pytest.raises(RuntimeError, match="its norm1 is RMSNorm, not LayerNorm"):
        accelerate(model)
    model = wan()
    model.blocks[0].norm3 = nn.LayerNorm(24)
    with pytest.raises(RuntimeError, match="its norm3 has weights"):
        accelerate(model)


def test_what_the_op_would_pass_by_is_refused() -> None:
    model = wan()
    model.blocks[0].norm2.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"norm2 of .*WanTransformerBlock has hooks"):
        accelerate(model)
    model = wan()
    block = model.blocks[1]
    block.forward = types.MethodType(lambda self, *args: args[0], block)
    with pytest.raises(ValueError, match=r"forward of .*WanTransformerBlock has been replaced"):
        accelerate(model)
    with pytest.raises(ValueError, match="compiled already"):
        accelerate(torch.compile(wan()))


def test_undoing_out_of_order_is_refused() -> None:
    model = wan()
    handle = accelerate(model)
    block = model.blocks[1]
    block.forward = types.MethodType(lambda self, *args: args[0], block)
    with pytest.raises(RuntimeError, match="was replaced after accelerate: undo that first"):
        handle.undo()
    assert "forward" in model.blocks[0].__dict__, "nothing was undone"
