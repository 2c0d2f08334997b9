"""How the op behaves under autograd, torch.library's checks, autocast, checkpointing and the compiler."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from repro.adaln import get_impl, layer_norm_modulate, ops
from tests.adaln import op_cases
from tests.adaln.op_cases import Results, assert_same_bits, differentiate, exact

FORMS = {"BD": ((2, 5, 24), (2, 24)), "B1D": ((2, 5, 24), (2, 1, 24)), "D": ((5, 24), (24,)), "1D": ((5, 24), (1, 24))}


def _leaves(device, x_shape, modulation_shape, dtype=torch.float32, scale_dtype=None):
    generator = torch.Generator().manual_seed(0)
    shapes = ((x_shape, dtype), (modulation_shape, dtype), (modulation_shape, scale_dtype or dtype))
    return [torch.randn(s, generator=generator).to(device, d).requires_grad_() for s, d in shapes]


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_opcheck_forward(device, impl, form, out_dtype):
    x, shift, scale = _leaves(device, *form)
    torch.library.opcheck(ops.forward_op, (x, shift, scale, 1e-6, out_dtype, impl))


def test_opcheck_backward(device, impl, form):
    x, shift, scale = (t.detach() for t in _leaves(device, *form, scale_dtype=torch.bfloat16))
    _, statistics = ops.forward_op(x, shift, scale, 1e-6, None, impl)
    torch.library.opcheck(ops.backward_op, (torch.randn_like(x), x, scale, statistics, torch.float16, impl))


def test_statistics(device, impl):
    """mean and rstd are float32, rows in the order of x, and not differentiable."""
    x, shift, scale = _leaves(device, (3, 4, 16), (3, 16), torch.bfloat16)
    y, statistics = ops.forward_op(x, shift, scale, 1e-6, None, impl)
    x_rows = x.detach().double().view(12, 16)
    assert statistics.dtype == torch.float32 and statistics.shape == (2, 12)
    assert y.requires_grad and not statistics.requires_grad
    mean, rstd = statistics
    torch.testing.assert_close(mean.double(), x_rows.mean(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rstd.double(), (x_rows.var(-1, correction=0) + 1e-6).rsqrt(), rtol=1e-5, atol=0)


def test_gradcheck(form):
    inputs = [t.detach().double().requires_grad_() for t in _leaves("cpu", *form)]
    assert torch.autograd.gradcheck(layer_norm_modulate, inputs)


def test_one_autograd_node(device, impl, form):
    """The paper's 5 to 8 nodes become one: y's node leads straight to the three inputs, views included."""
    x, shift, scale = leaves = _leaves(device, *form)
    y = layer_norm_modulate(x, shift, scale, impl=impl)  # a Python node is only whole while its output lives
    inputs = [edge for edge, _ in y.grad_fn.next_functions if edge is not None]
    assert [edge.variable.data_ptr() for edge in inputs] == [leaf.data_ptr() for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes(device, impl, dtype):
    """x and scale themselves (no copies, no float32 version) and 8 bytes a row."""
    saved = []
    x = torch.randn(2, 50, 64, dtype=dtype, device=device).requires_grad_()
    table = torch.randn(2, 6, 64, device=device).requires_grad_()
    shift, scale, *_ = table.chunk(6, dim=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer_norm_modulate(x, shift, scale, impl=impl)
    assert sum(t.numel() * t.element_size() for t in saved) == x.nbytes + 2 * 64 * 4 + 8 * 2 * 50
    assert {x.data_ptr(), scale.data_ptr()} <= {t.data_ptr() for t in saved} and len(saved) == 3


@pytest.mark.parametrize("wanted", range(3))
def test_only_some_inputs_need_gradients(device, impl, wanted):
    inputs = op_cases.make((2, 5, 24), device)
    leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs[:3])]
    layer_norm_modulate(*leaves, impl=impl).backward(inputs.dy)
    full = differentiate(layer_norm_modulate, inputs, impl=impl)
    for i, leaf in enumerate(leaves):
        assert torch.equal(leaf.grad, full[1 + i]) if i == wanted else leaf.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(device, impl, mode):
    x, shift, scale = _leaves(device, *FORMS["BD"])
    with mode():
        y = layer_norm_modulate(x, shift, scale, impl=impl)
    assert not y.requires_grad and torch.equal(y, layer_norm_modulate(x, shift, scale, impl=impl))


def test_vmap_runs_samples_one_by_one(device, impl):
    """There is no batching rule: right, if slow. What would differentiate through it is refused."""
    x, shift, scale = (t.detach() for t in _leaves(device, (3, 2, 5, 24), (3, 2, 24)))
    alone = torch.stack([layer_norm_modulate(*sample, impl=impl) for sample in zip(x, shift, scale, strict=True)])
    assert torch.equal(torch.vmap(lambda *a: layer_norm_modulate(*a, impl=impl))(x, shift, scale), alone)
    with pytest.raises(RuntimeError, match=r"functorch transforms \(vmap"):
        torch.func.grad(lambda t: layer_norm_modulate(t, shift[0], scale[0], impl=impl).sum())(x[0])


def test_implementations_are_copied_and_pickled(device, impl):
    """As members of a model are."""
    inputs = op_cases.make((2, 5, 24), device)
    function = get_impl(impl)
    want = differentiate(function, inputs)
    for other in (copy.deepcopy(function), pickle.loads(pickle.dumps(function))):
        assert_same_bits(differentiate(other, inputs), want)


def test_double_backward_is_refused(device, impl):
    x, shift, scale = _leaves(device, *FORMS["BD"])
    (dx,) = torch.autograd.grad(layer_norm_modulate(x, shift, scale, impl=impl).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not support double backward.*get_impl\('eager'\)"):
        dx.square().sum().backward()


def test_autocast_does_not_cast(device, impl):
    inputs = op_cases.make((2, 5, 24), device)
    plain = differentiate(layer_norm_modulate, inputs, impl=impl)
    with torch.autocast(device, torch.bfloat16):
        under = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert under.y.dtype == torch.float32
    assert_same_bits(under, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, impl, use_reentrant):
    inputs = op_cases.make((2, 5, 24), device)
    plain = differentiate(layer_norm_modulate, inputs, impl=impl)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    y = checkpoint(lambda *a: layer_norm_modulate(*a, impl=impl), *leaves, use_reentrant=use_reentrant)
    y.backward(inputs.dy)
    assert_same_bits(Results(y.detach(), *(leaf.grad for leaf in leaves)), plain)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(device, impl, dynamic):
    """One graph, the same bits. Inductor where it has Triton; on CPU its C++ compiler is not worth half a minute."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: layer_norm_modulate(*args, impl=impl), fullgraph=True, dynamic=dynamic, backend=backend
    )
    for rows in (5, 7):
        inputs = op_cases.make((2, rows, 24), device)
        assert_same_bits(differentiate(compiled, inputs), differentiate(layer_norm_modulate, inputs, impl=impl))


def test_compiled_graph_calls_the_op_once(device):
    """Dynamo sees the op itself, not the composite."""
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    x, shift, scale = _leaves(device, *FORMS["BD"])
    torch.compile(layer_norm_modulate, fullgraph=True, backend=record)(x, shift, scale)
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes if n.op == "call_function" and "getitem" not in n.name] == [
        ops.forward_op
    ]


def test_gradient_of_a_strided_sum_after_the_op(device, impl):
    """What a block does to y: a matrix product, whose gradient reaches the op transposed or expanded."""
    inputs = op_cases.make((2, 5, 24), device)
    weight = torch.randn(24, 3, generator=torch.Generator().manual_seed(2)).to(device)

    def block(function):
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        (function(*leaves).mT.contiguous().mT @ weight).sum(-1).mean(0).sum().backward()
        return [leaf.grad for leaf in leaves]

    got = block(lambda *a: layer_norm_modulate(*a, impl=impl))
    for a, b in zip(got, block(get_impl("eager")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_every_implementation_agrees(device):
    """`compile` is called on a GPU only: see test_compile_fullgraph."""
    inputs = op_cases.make((2, 9, 64), device)
    want = exact(inputs)
    for name in ("eager", "wan", "dtile", "fused", *(["compile"] if device == "cuda" else [])):
        op_cases.assert_close(differentiate(get_impl(name), inputs), want, (2e-6, 1e-5))
        y = get_impl(name)(*inputs[:3], 1e-6, torch.bfloat16)
        assert y.dtype == torch.bfloat16


def test_compile_keeps_a_cache_for_each_caller(monkeypatch):
    """Past Dynamo's limit of recompilations a caller hears of it; other callers' shapes do not count."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, backend="eager", **options))
    torch._dynamo.reset()
    one, other = get_impl("compile"), get_impl("compile")
    # not monkeypatch: to undo a setting that was never set it deletes it, and then Dynamo finds none at all
    with torch._dynamo.config.patch(recompile_limit=3):
        for function in (one, other):
            for rows in (1, 2, 3):
                function(torch.randn(1, rows, 8), torch.randn(1, 8), torch.randn(1, 8))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            one(torch.randn(1, 4, 8), torch.randn(1, 8), torch.randn(1, 8))


def test_unknown_implementation():
    with pytest.raises(ValueError, match=r"name must be one of eager, wan, compile, dtile, fused, got 'triton'"):
        get_impl("triton")


def test_forward_mode_is_refused_not_zero(device, impl):
    """A tangent that silently vanished would be a wrong loss in training that differentiates forwards."""
    x, shift, scale = (t.detach() for t in _leaves(device, *FORMS["BD"]))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="jvp"):
            layer_norm_modulate(dual, shift, scale, impl=impl)
        assert layer_norm_modulate(x, shift, scale, impl=impl).shape == x.shape  # no tangent, nothing lost
    with pytest.raises(RuntimeError, match=r"functorch|jvp"):
        torch.func.jvp(lambda t: layer_norm_modulate(t, shift, scale, impl=impl), (x,), (x,))
