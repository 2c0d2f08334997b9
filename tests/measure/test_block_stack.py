"""The plain Wan block stack: structure, rotary factors, checkpointing, independence of samples."""

import pytest

torch = pytest.importorskip("torch")

from repro.adaln import get_impl  # noqa: E402
from repro.balance.models import TEXT_TOKENS, TINY, WAN_1_3B, WAN_14B  # noqa: E402
from repro.measure.block_stack import BlockStack  # noqa: E402
from repro.measure.stack_time import measure_stack  # noqa: E402
from repro.wan.rope import rope_table, rotate  # noqa: E402


def inputs(batch, grid, dtype=torch.float32, text=8):
    generator = torch.Generator().manual_seed(0)
    tokens = grid[0] * grid[1] * grid[2]

    def normal(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return (
        normal(batch, tokens, TINY.dim).requires_grad_(),
        normal(batch, 6, TINY.dim, dtype=torch.float32),
        normal(batch, text, TINY.dim),
        rope_table(grid, TINY.dim // TINY.heads),
    )


def stack(layers=2, dtype=torch.float32):
    torch.manual_seed(0)
    return BlockStack(TINY, layers, get_impl("eager"), dtype=dtype)


def test_sizes_are_those_of_wan():
    # Totals of the released checkpoints.
    assert WAN_1_3B.parameters == 1_418_996_800
    assert WAN_14B.parameters == 14_288_491_584
    assert sum(p.numel() for p in stack(1).parameters()) == TINY.block_parameters


def test_flops_agree_with_pytorchs_counter():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter knows matrix products, not the CPU's fused attention.
    x, time, text, rope = inputs(2, (2, 3, 4), text=TEXT_TOKENS)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        stack(1)(x, time, text, rope)
    assert counter.get_total_flops() == float(TINY.forward_flops(2, 24))


def test_rope_turns_each_axis_by_its_own_frequencies():
    head = 128
    table = rope_table((3, 2, 2), head)
    assert table.shape == (12, 1, 64)
    assert torch.allclose(table.abs(), torch.ones_like(table.abs()))
    # 22 frequencies for time, 21 for height and for width; token (t, h, w) has index 4t + 2h + w.
    angle = table[:, 0].angle()
    only_time, only_height, only_width = angle[4], angle[2], angle[1]
    assert only_time[0] == pytest.approx(1.0)
    assert (only_time[22:] == 0).all()
    assert (only_height[:22] == 0).all()
    assert (only_height[43:] == 0).all()
    assert only_height[22] == pytest.approx(1.0)
    assert (only_width[:43] == 0).all()
    assert only_width[44] == pytest.approx(1e4 ** (-2 / 42))


def test_rotation_keeps_only_relative_positions():
    table = rope_table((9, 1, 1), 48)
    q, k = torch.randn(1, 1, 2, 48, generator=torch.Generator().manual_seed(0)).unbind(2)

    def score(i, j):
        return (rotate(q[:, :, None], table[i : i + 1]) * rotate(k[:, :, None], table[j : j + 1])).sum()

    assert score(7, 4) == pytest.approx(score(3, 0).item(), rel=1e-4)
    assert score(7, 4) != pytest.approx(score(4, 7).item(), rel=1e-2)


def by_hand(block, x, time, text, rope):
    """The block's formula for one sample in float64, written out: [S, D] in, [S, D] out."""
    w = {name: p.detach().double() for name, p in block.named_parameters()}

    def linear(name, t):
        return t @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def normalized(t):
        return (t - t.mean(-1, keepdim=True)) / (t.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()

    def rms(name, t):
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def attention(name, x, context, turn):
        q, k, v = (
            t.unflatten(-1, (TINY.heads, -1))
            for t in (
                rms(f"{name}.norm_q", linear(f"{name}.q", x)),
                rms(f"{name}.norm_k", linear(f"{name}.k", context)),
                linear(f"{name}.v", context),
            )
        )
        if turn:
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * rope).flatten(-2) for t in (q, k)
            )
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        return linear(f"{name}.o", torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))

    e = (w["modulation"][0] + time).unbind(0)  # shift, scale, gate of attention, then of the FFN
    h = normalized(x) * (1 + e[1]) + e[0]
    x = x + attention("self_attn", h, h, turn=True) * e[2]
    h = normalized(x) * w["norm3.weight"] + w["norm3.bias"]
    x = x + attention("cross_attn", h, text, turn=False)
    h = linear("ffn.0", normalized(x) * (1 + e[4]) + e[3])
    gelu = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return x + linear("ffn.2", gelu) * e[5]


def test_block_is_wans():
    x, time, text, rope = inputs(2, (2, 3, 4))
    (block,) = stack(1).blocks
    with torch.no_grad():
        for name, p in block.named_parameters():  # norms start at one and zero, which would hide a missing weight
            if "norm" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        y = block(x, time, text, rope)
        for i in range(2):
            expected = by_hand(block, x[i].double(), time[i].double(), text[i].double(), rope.to(torch.complex128))
            # float32 against float64, a dozen operations deep
            torch.testing.assert_close(y[i].double(), expected, rtol=1e-4, atol=1e-4)


def test_checkpointing_changes_no_gradient():
    x, time, text, rope = inputs(2, (2, 3, 4))
    model = stack()
    model(x, time, text, rope).square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    y = plain
    for block in model.blocks:
        y = block(y, time, text, rope)
    y.square().sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_checkpointing_keeps_one_tensor_a_block():
    x, time, text, rope = inputs(1, (2, 3, 4))
    big = []

    def keep(t):
        if t.numel() == x.numel():
            big.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        stack(3)(x, time, text, rope)
    assert len(big) == 3


def test_samples_do_not_see_each_other():
    x, time, text, rope = inputs(3, (2, 3, 4))
    model = stack()
    together = model(x, time, text, rope)
    alone = model(x[1:2], time[1:2], text[1:2], rope)
    # float32: matmuls of another shape may sum in another order.
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-4)


def test_adaln_implementations_agree_in_the_block():
    x, time, text, rope = inputs(2, (2, 3, 4), dtype=torch.float32)
    model = stack()
    outputs = []
    for name in ("eager", "wan", "fused"):
        model.use(get_impl(name))
        outputs.append(model(x, time, text, rope))
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-4, atol=1e-4)


def test_every_sample_is_a_positive_time_and_cpu_has_no_allocator_figures():
    sample = measure_stack(TINY, 1, "eager", 1, 32, torch.device("cpu"), seconds=0.0, repeats=(2, 5))
    assert len(sample.milliseconds) == 2
    assert min(sample.milliseconds) > 0
    assert sample.static_bytes is sample.held_bytes is sample.peak_bytes is None


def test_results_that_are_not_finite_are_refused():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * float("nan")

    from repro.measure import stack_time

    real = get_impl("eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_time, "get_impl", lambda _name: lambda x, h, s: Broken.apply(real(x, h, s)))
        with pytest.raises(FloatingPointError, match="not finite"):
            measure_stack(TINY, 1, "eager", 1, 32, torch.device("cpu"), seconds=0.0, repeats=(1, 1))


@pytest.mark.gpu
def test_memory_of_a_case_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layers, batch, tokens = 3, 2, 256
    sample = measure_stack(TINY, layers, "fused", batch, tokens, torch.device("cuda"), seconds=0.0, repeats=(2, 2))
    assert sample.static_bytes >= layers * TINY.block_parameters * 2
    checkpoints = layers * batch * tokens * TINY.dim * 2
    assert sample.held_bytes >= checkpoints
    assert sample.peak_bytes >= sample.static_bytes + sample.held_bytes
