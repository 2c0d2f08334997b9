"""The Wan model: parity with Diffusers, AdaLN implementations, dtypes, initial weights, bad input."""

import pytest
import torch

from repro.adaln import IMPLS
from repro.balance.models import TEXT_WIDTH, TINY, ModelSize
from repro.wan.config import WanConfig
from repro.wan.convert import diffusers_config, from_diffusers, to_diffusers
from repro.wan.model import WanModel, patchify, sinusoid
from repro.wan.rope import rope_table, rotate

IMAGE, CLIP = (1, 4, 6), (3, 4, 2)
# Head width 44 gives time 16, height and width 14 features: no two axes can be swapped unseen.
SIZES = [TINY, ModelSize("odd", dim=132, ffn=80, heads=3, layers=1)]


def randomized(model, seed=0):
    """Weights such that no parameter is without effect (the head starts at zero, norms at one)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
    return model


def inputs(latent, batch=2, text=7, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(batch, 16, *latent, generator=generator, dtype=dtype)
    timesteps = 1000 * torch.rand(batch, generator=generator, dtype=dtype)
    return latents, timesteps, torch.randn(batch, text, TEXT_WIDTH, generator=generator, dtype=dtype)


def close(got, want, bar):
    """Largest difference against the largest magnitude of the tensor."""
    assert got.shape == want.shape
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error <= bar, f"{error:.2e} > {bar:.0e}"


def differentiated(model, latents, timesteps, text):
    latents, text = latents.clone().requires_grad_(), text.clone().requires_grad_()
    out = model(latents, timesteps, text)
    out = out if isinstance(out, torch.Tensor) else out[0]
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return out.detach(), {"latents": latents.grad, "text": text.grad}, gradients


@pytest.mark.parametrize("latent", [IMAGE, CLIP], ids=["image", "clip"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: s.name)
@pytest.mark.parametrize("adaln", ["eager", "wan", "dtile", "fused"])
def test_parity_with_diffusers(size, latent, adaln):
    diffusers = pytest.importorskip("diffusers", reason="parity is against diffusers, which is not installed")
    config = WanConfig(size)
    ours = randomized(WanModel(config, adaln))
    theirs = diffusers.WanTransformer3DModel(**diffusers_config(config))
    theirs.load_state_dict(to_diffusers(ours.state_dict()))
    latents, timesteps, text = inputs(latent)
    out, of_inputs, of_weights = differentiated(ours, latents, timesteps, text)

    def positional(latents, timesteps, text):
        return theirs(latents, timesteps, text, return_dict=False)

    positional.named_parameters = theirs.named_parameters
    want, want_inputs, want_weights = differentiated(positional, latents, timesteps, text)
    close(out, want, 1e-5)
    for name, gradient in of_inputs.items():
        close(gradient, want_inputs[name], 1e-5)
    want_weights = from_diffusers(want_weights)
    assert of_weights.keys() == want_weights.keys()
    for name, gradient in of_weights.items():
        close(gradient, want_weights[name], 1e-5)


def test_parameters_are_counted_by_the_model_size():
    for name in ("tiny", "wan-1.3b", "wan-14b"):
        config = WanConfig.preset(name)
        with torch.device("meta"):
            model = WanModel(config)
        assert sum(p.numel() for p in model.parameters()) == config.size.parameters


def test_compiled_adaln_agrees():
    model = randomized(WanModel(WanConfig.preset("tiny", layers=1)))
    batch = inputs(CLIP)
    want = model(*batch)
    with pytest.MonkeyPatch.context() as patch:
        # The formula through Dynamo and AOTAutograd; Inductor's kernels are measured, and checked, on GPUs.
        real = torch.compile
        patch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))
        model.use("compile")
        close(model(*batch), want, 1e-5)


def test_float64_is_float64_throughout():
    """A float32 step anywhere would leave errors of 1e-7 between two ways to sum."""
    model = randomized(WanModel(WanConfig.preset("tiny"), "fused").double())
    latents, timesteps, text = inputs(CLIP, batch=3, dtype=torch.float64)
    fused = model(latents, timesteps, text)
    model.use("eager")
    assert fused.dtype == torch.float64
    close(model(latents, timesteps, text), fused, 1e-13)
    close(model(latents[1:2], timesteps[1:2], text[1:2]), fused[1:2], 1e-13)
    close(model.float()(latents, timesteps, text).double(), fused, 1e-5)


@pytest.mark.parametrize("adaln", [i for i in IMPLS if i != "compile"])
def test_bfloat16_weights_keep_the_answer(adaln):
    model = randomized(WanModel(WanConfig.preset("tiny"), adaln))
    batch = inputs(CLIP)
    want = model(*batch)
    got = model.bfloat16()(*batch)
    assert got.dtype == torch.bfloat16
    # Weights and activations of 8 bits through two blocks: a few units of 2^-8 of the largest output.
    close(got.float(), want, 0.05)


def test_autocast_keeps_the_answer():
    model = randomized(WanModel(WanConfig.preset("tiny"), "fused"))
    batch = inputs(CLIP)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(*batch)
    close(got.float(), model(*batch), 0.05)


def test_compiled_rotation_is_the_same():
    rope = rope_table((3, 2, 2), 48)
    x = torch.randn(2, 12, 2, 48, generator=torch.Generator().manual_seed(0)).requires_grad_()
    want = rotate(x, rope)
    (gradient,) = torch.autograd.grad(want.square().sum() + want.sum(), x)
    got = torch.compile(rotate, backend="aot_eager", fullgraph=True)(x, rope)
    close(got, want, 1e-6)
    close(torch.autograd.grad(got.square().sum() + got.sum(), x)[0], gradient, 1e-6)


def test_patches_follow_the_convolutions_weight():
    model = WanModel(WanConfig.preset("tiny", layers=1))
    latents = inputs((3, 4, 6))[0]
    conv = torch.nn.functional.conv3d(
        latents, model.patch_embedding.weight, model.patch_embedding.bias, stride=(1, 2, 2)
    )
    close(model.patch_embedding(latents), conv.flatten(2).transpose(1, 2), 1e-5)
    assert patchify(latents).shape == (2, 18, 64)


def test_sinusoid_at_known_points():
    table = sinusoid(torch.tensor([0.0, 1.0, 500.0], dtype=torch.float64))
    assert table.shape == (3, 256)
    assert table[0].tolist() == [1.0] * 128 + [0.0] * 128
    assert table[1, 0].item() == pytest.approx(0.5403023058681398)
    assert table[2, 128 + 64].item() == pytest.approx(-0.9589242746631385)  # sin(500 * 1e4^(-1/2)) = sin(5)


def test_meta_device_then_real_weights():
    config = WanConfig.preset("tiny")
    with torch.device("meta"):
        model = WanModel(config)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match="to_empty"):
        model.reset_parameters()
    model.to_empty(device="cpu")
    model.reset_parameters(seed=3)
    built = WanModel(config)
    built.reset_parameters(seed=3)
    for (name, a), (_, b) in zip(model.named_parameters(), built.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_initial_weights_follow_wans_rules_and_the_seed():
    model, other = WanModel(WanConfig.preset("tiny")), WanModel(WanConfig.preset("tiny"))
    other.reset_parameters(seed=1)
    q, other_q = (m.blocks[0].self_attn.q.weight for m in (model, other))
    assert not torch.equal(q, other_q)
    assert not torch.equal(q, model.blocks[1].self_attn.q.weight)
    assert q.abs().max().item() == pytest.approx((6 / (2 * TINY.dim)) ** 0.5, rel=1e-2)
    assert model.text_embedding[0].weight.std().item() == pytest.approx(0.02, rel=2e-2)
    assert model.blocks[0].modulation.std().item() == pytest.approx(TINY.dim**-0.5, rel=0.1)
    assert (model.blocks[0].norm3.weight == 1).all()
    assert not model(*inputs(IMAGE)).any(), "an untrained model predicts zero"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t, c: (x[:, :8], t, c), r"latents must have shape \[B, 16, T, H, W\], got \[2, 8,"),
        (lambda x, t, c: (x[..., :3], t, c), r"multiples of the patch"),
        (lambda x, t, c: (x, t[:1], c), r"timesteps must have shape \[2\]"),
        (lambda x, t, c: (x, t, c[..., :100]), r"text must have shape \[2, L, 4096\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    model = WanModel(WanConfig.preset("tiny", layers=1))
    with pytest.raises(ValueError, match=message):
        model(*change(*inputs((1, 4, 4))))


def test_bad_configurations_are_refused():
    with pytest.raises(ValueError, match="no model 'wan-2b'"):
        WanConfig.preset("wan-2b")
    with pytest.raises(ValueError, match="layers"):
        WanConfig.preset("tiny", layers=0)
    with pytest.raises(ValueError, match="at least 6 wide"):
        WanConfig(ModelSize("thin", dim=8, ffn=8, heads=2, layers=1))
    with pytest.raises(ValueError, match="name must be one of"):
        WanModel(WanConfig.preset("tiny"), "triton")
