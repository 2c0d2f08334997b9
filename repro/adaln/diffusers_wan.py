"""Puts the fused op into a Diffusers `WanTransformer3DModel`, in place, and takes it out again.

    with accelerate(model):            or            handle = accelerate(model)
        ...                                          handle.undo()

Diffusers writes norm, modulation and gate out inside `forward`, so there is no module to exchange. What is exchanged is
`forward` itself, on each block and on the model: the installed source is parsed, the few statements below are replaced
by calls of the op, and everything around them stays as Diffusers has it. Statements are compared as syntax trees; a
source that lacks one of them, or has it twice, is refused. They are those of Diffusers 0.33 to 0.42
(src/diffusers/models/transformers/transformer_wan.py).

Parameters, their names and `state_dict` stay as they are.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from repro.adaln.api import gated_residual_layer_norm_modulate, layer_norm_modulate

KNOWN_VERSIONS = "0.33 to 0.42"

_BLOCK = (
    (
        "norm_hidden_states = (self.norm1(hidden_states.float()) * (1 + scale_msa) + shift_msa).type_as(hidden_states)",
        "norm_hidden_states = _norm(hidden_states, shift_msa, scale_msa, self.norm1)",
    ),
    (
        "hidden_states = (hidden_states.float() + attn_output * gate_msa).type_as(hidden_states)\n"
        "norm_hidden_states = self.norm2(hidden_states.float()).type_as(hidden_states)",
        "hidden_states, norm_hidden_states = _gated_affine_norm(hidden_states, attn_output, gate_msa, self.norm2)",
    ),
    (
        "hidden_states = hidden_states + attn_output\n"
        "norm_hidden_states = (self.norm3(hidden_states.float()) * (1 + c_scale_msa) + c_shift_msa)"
        ".type_as(hidden_states)",
        "hidden_states, norm_hidden_states = _residual_norm("
        "hidden_states, attn_output, c_shift_msa, c_scale_msa, self.norm3)",
    ),
)
"""(statements in a row, what replaces them) of a block's forward. The last gated residual, which no norm follows within
the block, stays."""

_MODEL = (
    (
        "hidden_states = (self.norm_out(hidden_states.float()) * (1 + scale) + shift).type_as(hidden_states)",
        "hidden_states = _norm(hidden_states, shift, scale, self.norm_out)",
    ),
)
"""The same of the model's forward."""


class Accelerated:
    """What `accelerate` did to a model. Leaving it as a context manager undoes it."""

    def __init__(self, model: nn.Module, swapped: list[tuple[nn.Module, types.MethodType]]) -> None:
        self.model = model
        self._swapped = swapped

    def undo(self) -> None:
        """Give the model its own code back; nothing where that has been done already.

        Raises RuntimeError where somebody replaced a forward in the meantime: that has to be undone first.
        """
        for module, forward in self._swapped:
            if module.__dict__.get("forward") is not forward:
                raise RuntimeError(f"forward of {_name(type(module))} was replaced after accelerate: undo that first")
        for module, _ in self._swapped:
            del module.forward
        self._swapped = []

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        self.undo()


def accelerate(model: nn.Module) -> Accelerated:
    """Swap norm-modulate and gated residual of a Diffusers Wan transformer for the fused op, in place.

    Every block's two modulated norms, its residual after self-attention with the affine norm of the cross-attention,
    its residual after the cross-attention with the modulated norm of the FFN, and the output norm. Outputs and
    gradients stay the same within the dtype's rounding; per-sample and per-token time embeddings, gradient
    checkpointing and torch.compile of blocks work. Call it before compiling, wrapping or hooking the model.

    Returns a handle whose `undo()`, or whose end as a context manager, restores the model. A model that is accelerated
    already stays so, and the handle of the second call undoes nothing.

    Raises TypeError for a model that is no Wan transformer, RuntimeError where the installed Diffusers' forward is not
    one of those known, ValueError where a module is hooked, compiled or its forward replaced.
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model is compiled already (torch.compile): accelerate before that")
    blocks, norm_out = getattr(model, "blocks", None), getattr(model, "norm_out", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks) or not isinstance(norm_out, nn.Module):
        raise TypeError(f"accelerate needs a Diffusers WanTransformer3DModel, got {_name(type(model))}")
    targets: list[tuple[nn.Module, tuple[tuple[str, str], ...], tuple[str, ...]]]
    targets = [(block, _BLOCK, ("norm1", "norm2", "norm3")) for block in blocks]
    targets.append((model, _MODEL, ("norm_out",)))
    swapped = []
    for module, statements, norms in targets:
        rewritten = _rewritten(type(module).forward, statements)
        if getattr(module.__dict__.get("forward"), "__func__", None) is not rewritten:
            _check_unhooked(module, norms)
            swapped.append((module, types.MethodType(rewritten, module)))
    # Only now, when all of the model is known: a model is swapped as a whole or not at all.
    for module, forward in swapped:
        module.forward = forward  # type: ignore[method-assign]
    return Accelerated(model, swapped)


def _check_unhooked(module: nn.Module, norms: tuple[str, ...]) -> None:
    """Refuse what would be passed by: a replaced forward, norms of another kind, hooks on norms no longer called."""
    if "forward" in module.__dict__:
        raise ValueError(f"forward of {_name(type(module))} has been replaced (by hooks?): accelerate before that")
    for name in norms:
        norm = getattr(module, name, None)
        kinds = (nn.LayerNorm, nn.Identity) if name == "norm2" else (nn.LayerNorm,)
        if not isinstance(norm, kinds):
            raise _unknown(_name(type(module)), f"its {name} is {type(norm).__name__}, not {kinds[0].__name__}")
        affine = getattr(norm, "weight", None) is not None
        if isinstance(norm, nn.LayerNorm) and affine != (name == "norm2"):
            raise _unknown(_name(type(module)), f"its {name} has {'' if affine else 'no '}weights")
        if "forward" in norm.__dict__ or norm._forward_hooks or norm._forward_pre_hooks:
            raise ValueError(
                f"{name} of {_name(type(module))} has hooks, which the fused op would pass by: remove them"
            )


@functools.cache
def _rewritten(forward: Callable[..., Any], statements: tuple[tuple[str, str], ...]) -> Callable[..., Any]:
    """A class's forward with its statements replaced, defined in the module that it comes from."""
    name, forward = _name(forward), inspect.unwrap(forward)
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError) as e:
        raise _unknown(name, f"its source cannot be read ({e})") from e
    tree = ast.parse(source)
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or forward.__code__.co_freevars:
        raise _unknown(name, "it is no plain method")
    for old, new in statements:
        _replace(name, definition, ast.parse(old).body, ast.parse(new).body)
    # A factory around it, so that the helpers come as closure variables and the module's globals stay its own.
    helpers = {"_norm": _norm, "_gated_affine_norm": _gated_affine_norm, "_residual_norm": _residual_norm}
    factory = ast.parse(f"def factory({', '.join(helpers)}):\n    return {definition.name}").body[0]
    assert isinstance(factory, ast.FunctionDef)
    ast.increment_lineno(tree, forward.__code__.co_firstlineno - 1)  # tracebacks show Diffusers' lines
    factory.body.insert(0, definition)
    module = ast.fix_missing_locations(ast.Module([factory], []))
    flags = forward.__code__.co_flags & annotations.compiler_flag
    code = compile(module, inspect.getsourcefile(forward) or "<forward>", "exec", flags, dont_inherit=True)
    scope: dict[str, Any] = {}
    exec(code, forward.__globals__, scope)
    return scope["factory"](**helpers)


def _replace(name: str, definition: ast.FunctionDef, old: list[ast.stmt], new: list[ast.stmt]) -> None:
    """Replace the statements `old`, which have to stand once among the definition's own."""
    wanted = [ast.dump(statement) for statement in old]
    found = [
        i
        for i in range(len(definition.body))
        if [ast.dump(statement) for statement in definition.body[i : i + len(old)]] == wanted
    ]
    if len(found) != 1:
        where = "lacks" if not found else "repeats"
        raise _unknown(name, f"it {where} `{'; '.join(map(ast.unparse, old))}`")
    (at,) = found
    for statement in new:
        for node in ast.walk(statement):
            ast.copy_location(node, definition.body[at])
    definition.body[at : at + len(old)] = new


def _norm(x: Tensor, shift: Tensor, scale: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LN(x) * (1 + scale) + shift in x's dtype; x [B, N, D], modulation [B, 1, D] or [B, N, D] (or of one sample)."""
    return layer_norm_modulate(x, _for_samples(shift, x), _for_samples(scale, x), norm.eps)


def _residual_norm(
    x: Tensor, branch: Tensor, shift: Tensor, scale: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    """h = x + branch, and `_norm` of h."""
    if torch.promote_types(x.dtype, branch.dtype) != x.dtype:  # the sum is wider than x
        return x + branch, _norm(x + branch, shift, scale, norm)
    return gated_residual_layer_norm_modulate(x, branch, None, _for_samples(shift, x), _for_samples(scale, x), norm.eps)


def _gated_affine_norm(x: Tensor, branch: Tensor, gate: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """h = x + gate * branch in x's dtype, and its affine norm: a modulation with scale = weight - 1, shift = bias."""
    if not isinstance(norm, nn.LayerNorm):  # a model without norms before its cross-attention
        h = (x.float() + branch * gate).type_as(x)
        return h, norm(h.float()).type_as(h)
    batch, tokens, dim = x.shape
    scale = (norm.weight.float() - 1).expand(batch, 1, dim)
    shift = (norm.weight.new_zeros(dim) if norm.bias is None else norm.bias).expand(batch, 1, dim)
    if gate.shape[1] == tokens != 1:
        # A gate for each token but one weight for all: fused, the weight's gradient would be written token by token.
        h = (x.float() + branch * gate).type_as(x)
        return h, layer_norm_modulate(h, shift, scale, norm.eps)
    return gated_residual_layer_norm_modulate(x, branch, _for_samples(gate, x), shift, scale, norm.eps)


def _for_samples(modulation: Tensor, x: Tensor) -> Tensor:
    """The modulation for each sample of x, where one serves all."""
    return modulation if modulation.shape[0] == x.shape[0] else modulation.expand(x.shape[0], -1, -1)


def _unknown(name: str, difference: str) -> RuntimeError:
    try:
        version = f"Diffusers {importlib.metadata.version('diffusers')}"
    except importlib.metadata.PackageNotFoundError:
        version = "Diffusers is not installed"
    return RuntimeError(
        f"accelerate does not know {name} ({version}): {difference}; known are the Wan blocks of Diffusers "
        f"{KNOWN_VERSIONS}"
    )


def _name(named: type | Callable[..., Any]) -> str:
    return f"{named.__module__}.{named.__qualname__}"
