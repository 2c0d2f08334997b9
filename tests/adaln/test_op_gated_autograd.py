"""The gated operator under autograd, torch.library's checks, autocast, checkpointing and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from repro.adaln import gated_residual_layer_norm_modulate, ops
from tests.adaln import op_cases
from tests.adaln.op_cases import FORMS, GatedInputs, GatedResults, assert_same_bits, differentiate_gated

SHAPE = (2, 6, 24)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, poisoned_memory):
    return request.getfixturevalue("cuda") if request.param == "cuda" else "cpu"


@pytest.fixture(params=[True, False], ids=["gate", "plain"])
def gated(request):
    return request.param


@pytest.fixture(params=FORMS)
def inputs(request, device, gated):
    return op_cases.make_gated(SHAPE, device, form=request.param, gated=gated)


def _leaves(inputs: GatedInputs):
    return [None if t is None else t.detach().requires_grad_() for t in inputs[:5]]


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_opcheck_forward(inputs, out_dtype):
    torch.library.opcheck(ops.gated_forward_op, (*_leaves(inputs), 1e-6, out_dtype))


@pytest.mark.parametrize("with_dh", [True, False])
def test_opcheck_backward(inputs, with_dh):
    h, _, statistics = ops.gated_forward_op(*inputs[:5], 1e-6, None)
    branch = None if inputs.gate is None else inputs.branch
    dh = inputs.dh if with_dh else None
    arguments = (inputs.dy, dh, h, branch, inputs.gate, inputs.scale, statistics, torch.float16)
    torch.library.opcheck(ops.gated_backward_op, arguments)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form, gated):
    inputs = op_cases.make_gated((2, 4, 5), form=form, gated=gated)
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in inputs[:5]]
    assert torch.autograd.gradcheck(gated_residual_layer_norm_modulate, leaves)


def test_one_autograd_node(inputs):
    """h and y come from one node, which leads straight to the inputs."""
    leaves = _leaves(inputs)
    h, y = gated_residual_layer_norm_modulate(*leaves)
    assert h.grad_fn == y.grad_fn
    reached = [edge.variable.data_ptr() for edge, _ in y.grad_fn.next_functions if edge is not None]
    assert reached == [leaf.data_ptr() for leaf in leaves if leaf is not None]


def test_saved(inputs):
    """h and scale, 8 bytes a row, and with a gate branch and gate; x is not needed again."""
    saved = []
    leaves = _leaves(inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        h, _ = gated_residual_layer_norm_modulate(*leaves)
    _, branch, gate, _, scale = leaves
    kept = [h, scale, *([] if gate is None else [branch, gate])]
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in saved}
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in kept) + 8 * 2 * 6


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_one_operator_each_way(inputs):
    with _Operators() as operators:
        differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    assert [op for op in operators.seen if op is not torch.ops.aten.detach.default] == [
        ops.gated_forward_op,
        ops.gated_backward_op,
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(inputs, mode):
    leaves = _leaves(inputs)
    with mode():
        without = gated_residual_layer_norm_modulate(*leaves)
    for a, b in zip(without, gated_residual_layer_norm_modulate(*leaves), strict=True):
        assert not a.requires_grad and torch.equal(a, b)


@pytest.mark.parametrize("output", [0, 1])
def test_double_backward_is_refused(inputs, output):
    leaves = _leaves(inputs)
    out = gated_residual_layer_norm_modulate(*leaves)[output]
    (dx,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"does not support double backward.*get_impl\('eager'\)"):
        dx.square().sum().backward()


def test_forward_mode_is_refused(inputs):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.x, torch.ones_like(inputs.x))
        with pytest.raises(NotImplementedError, match="jvp"):
            gated_residual_layer_norm_modulate(dual, *inputs[1:5])


def test_autocast_does_not_cast(device, inputs):
    plain = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    with torch.autocast(device, torch.bfloat16):
        under = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    assert under.h.dtype == under.y.dtype == torch.float32
    assert_same_bits(under, plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(inputs, use_reentrant):
    plain = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    leaves = _leaves(inputs)
    h, y = checkpoint(gated_residual_layer_norm_modulate, *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward((h, y), (inputs.dh, inputs.dy))
    got = GatedResults(h.detach(), y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves))
    assert_same_bits(got, plain)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_compile_fullgraph(device, form, gated, dynamic):
    """One graph, the same bits. Inductor where it has Triton; on CPU its C++ compiler is not worth half a minute."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    torch._dynamo.reset()
    compiled = torch.compile(gated_residual_layer_norm_modulate, fullgraph=True, dynamic=dynamic, backend=backend)
    for rows in (6, 8):
        inputs = op_cases.make_gated((2, rows, 24), device, form=form, gated=gated)
        want = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
        assert_same_bits(differentiate_gated(compiled, inputs), want)


@pytest.mark.parametrize("absent", ["dh", "dy"])
def test_compile_with_one_output_unused(device, gated, absent):
    inputs = op_cases.make_gated(SHAPE, device, gated=gated)._replace(**{absent: None})
    torch._dynamo.reset()
    compiled = torch.compile(gated_residual_layer_norm_modulate, fullgraph=True, backend="aot_eager")
    want = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    for name, a, b in zip(GatedResults._fields, differentiate_gated(compiled, inputs), want, strict=True):
        # AOTAutograd fills in zeros for what is absent: a sum with zeros may be ordered differently.
        assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6), name
