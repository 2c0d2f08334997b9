"""Bytes that autograd keeps, counted exactly; nodes and launches; chains around the op."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from repro.adaln import get_impl  # noqa: E402
from repro.measure import activations, autograd_graph, memory, timing  # noqa: E402

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
B, N, D = 2, 64, 96


def test_a_storage_counts_once_however_often_it_is_saved() -> None:
    x = torch.randn(10, 10, requires_grad=True)
    saved = memory.saved_by_autograd(lambda: (x * x) * x.view(-1)[:100].view(10, 10).sin())
    # x (saved five times, also through a view), x * x and sin(x)
    assert saved.bytes == 3 * 400
    assert sorted(size for *_, size in saved.tensors) == [400, 400, 400]


def test_a_view_counts_with_its_whole_storage() -> None:
    table = torch.randn(6, 8)
    x = torch.randn(8, requires_grad=True)
    saved = memory.saved_by_autograd(lambda: x * table[2])
    assert saved.bytes == 6 * 8 * 4 and saved.tensors == (((8,), torch.float32, 6 * 8 * 4),)
    assert memory.saved_by_autograd(lambda: x * table[2], exclude=[table]).bytes == 0


def test_freed_storages_are_not_mistaken_for_new_ones() -> None:
    x = torch.randn(100, requires_grad=True)

    def forward() -> None:
        for _ in range(5):
            x.exp()  # saves its result, which is freed at once, with its address

    assert memory.saved_by_autograd(forward).bytes == 5 * 400


def test_meta_tensors_are_counted_without_memory() -> None:
    x = torch.empty(1 << 20, 1 << 10, device="meta", requires_grad=True)
    # exp keeps its result, which is also what sin keeps; cos keeps that of sin
    assert memory.saved_by_autograd(lambda: x.exp().sin().cos()).bytes == 2 * x.numel() * 4


@pytest.mark.parametrize(
    ("chain", "impl", "bytes_per_element"),
    [
        # x and the normalized row in float32; in the dtype of x; x alone. What the linears keep comes on top: their
        # common input once, or under autocast a rounded copy for each of the three.
        ("op", "wan", 8),
        ("op", "eager", 4),
        ("op", "fused", 2),
        ("qkv", "wan", 10),
        ("qkv", "eager", 6),
        ("qkv", "fused", 4),
        ("official", "wan", 14),
        ("official", "fused", 6),
    ],
)
def test_what_each_formula_keeps(chain: str, impl: str, bytes_per_element: int) -> None:
    saved = activations.make_chain(chain, impl, B, N, D, torch.bfloat16, CPU).saved().bytes
    rest = saved - bytes_per_element * B * N * D
    # two statistics a row, and 1 + scale
    assert 0 <= rest <= 8 * B * N + 4 * B * D


def test_a_block_keeps_two_ops_worth_less_with_the_fused_op() -> None:
    wan, fused = (
        activations.make_chain("block", impl, B, N, D, torch.bfloat16, CPU).saved().bytes for impl in ("wan", "fused")
    )
    # 6 bytes an element for either norm, less what is small: 1 + scale of two norms
    assert wan - fused == pytest.approx(2 * 6 * B * N * D, abs=2 * 4 * B * D + 2 * 8 * B * N)


def test_unknown_chains_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="chain must be one of"):
        activations.make_chain("head", "eager", B, N, D, torch.bfloat16, CPU)
    with pytest.raises(ValueError, match="dim must be one of"):
        activations.make_chain("block", "eager", B, N, 64, torch.bfloat16, CPU)


def test_peaks_need_the_cuda_allocator() -> None:
    with pytest.raises(ValueError, match="CUDA allocator"):
        memory.peak_allocated(lambda: None, CPU)


def test_nodes_are_counted_once_and_without_the_accumulators() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    # Add of Mul and Exp, Mul of Exp and Exp: three nodes
    assert sorted(autograd_graph.nodes((y * y + y,))) == ["AddBackward0", "ExpBackward0", "MulBackward0"]
    assert autograd_graph.nodes((x,)) == () == autograd_graph.nodes((torch.ones(1),))


def test_the_fused_op_adds_one_node() -> None:
    for shape in ((1, D), (D,)):
        x = torch.randn(2, 5, D, requires_grad=True)
        shift, scale = (torch.randn(2, *shape, requires_grad=True) for _ in range(2))
        assert len(autograd_graph.nodes((get_impl("fused")(x, shift, scale),))) == 1


@pytest.mark.gpu
def test_launches_are_counted() -> None:
    x = torch.randn(100, device=CUDA)
    with timing.work_stream(CUDA):
        assert autograd_graph.launches(lambda: (x * 2, x + 1), CUDA) == 2
        assert autograd_graph.launches(lambda: x.clone(), CUDA) == 1


@pytest.mark.gpu
def test_peak_counts_what_is_alive_at_once() -> None:
    x = torch.randn(1 << 20, device=CUDA)

    def three_then_one() -> None:
        a, b = x + 1, x + 2
        del a
        (b * 2).sum()

    # b and its double are alive together, or a and b: two tensors of 4 MiB; the sum takes a few blocks of 512 bytes.
    assert memory.peak_allocated(three_then_one, CUDA) == pytest.approx(2 * 4 * x.numel(), abs=1 << 16)


@pytest.mark.gpu
def test_the_fused_op_lowers_the_peak() -> None:
    wan, fused = (
        activations.make_chain("op", impl, 1, 4096, 1536, torch.bfloat16, CUDA).peak(CUDA) for impl in ("wan", "fused")
    )
    assert fused < wan
