"""Weights to and from Diffusers' format.

Diffusers (huggingface/diffusers, transformer_wan.py) keeps the official code's structure under other names; the trap is
that its `norm2` is the affine norm before cross-attention, which the official code, and this one, call `norm3`.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.balance.models import LATENT_CHANNELS, MODELS, PATCH, TEXT_WIDTH, TIME_FREQUENCIES, ModelSize
from repro.wan.block import EPS
from repro.wan.config import WanConfig
from repro.wan.initialize import assign, clean_name
from repro.wan.model import WanModel

# (ours, theirs); {} stands for a block's number. A name is replaced up to the next dot or its end.
_NAMES = (
    ("patch_embedding", "patch_embedding"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    *(
        (f"blocks.{{}}.{ours}.{a}", f"blocks.{{}}.{theirs}.{b}")
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for a, b in (
            ("q", "to_q"),
            ("k", "to_k"),
            ("v", "to_v"),
            ("o", "to_out.0"),
            ("norm_q", "norm_q"),
            ("norm_k", "norm_k"),
        )
    ),
    ("blocks.{}.norm3", "blocks.{}.norm2"),
    ("blocks.{}.ffn.0", "blocks.{}.ffn.net.0.proj"),
    ("blocks.{}.ffn.2", "blocks.{}.ffn.net.2"),
    ("blocks.{}.modulation", "blocks.{}.scale_shift_table"),
    ("head.modulation", "scale_shift_table"),
    ("head.head", "proj_out"),
)
_TO = dict(_NAMES)
_FROM = {theirs: ours for ours, theirs in _NAMES}

_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, as safetensors names them."""
_MOST = 1 << 20
"""Sizes of a model lie below."""


def to_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A `WanModel`'s state dict under Diffusers' names; the tensors are shared. Raises KeyError for a foreign name."""
    return {_rename(clean_name(name), _TO): tensor for name, tensor in state.items()}


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_diffusers`."""
    return {_rename(name, _FROM): tensor for name, tensor in state.items()}


def diffusers_config(config: WanConfig) -> dict[str, Any]:
    """Arguments of `diffusers.WanTransformer3DModel` that make the same model."""
    size = config.size
    return {
        "num_attention_heads": size.heads,
        "attention_head_dim": config.head_dim,
        "ffn_dim": size.ffn,
        "num_layers": size.layers,
    } | _fixed()


def read_config(folder: str | Path) -> WanConfig:
    """Sizes of the model in a Diffusers folder (its config.json), named after a preset where one fits.

    Raises FileNotFoundError without a config.json, ValueError for one that cannot be read or is not of a Wan 2.1
    text-to-video model.
    """
    path = Path(folder) / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {folder} must be a Diffusers-format folder (a pipeline keeps it in `transformer`)"
        )
    told = _json(path)
    for key, wanted in _fixed().items():
        got = told.get(key, wanted)
        if (tuple(got) if isinstance(got, list) else got) != wanted:
            raise ValueError(f"{path}: {key} must be {wanted} for a Wan 2.1 text-to-video model, got {got}")
    names = ("num_attention_heads", "attention_head_dim", "ffn_dim", "num_layers")
    for name in names:
        if name not in told:
            raise ValueError(f"{path} does not give {name!r}, so it is not a Wan transformer's")
        if type(told[name]) is not int or not 0 < told[name] < _MOST:
            raise ValueError(f"{path}: {name} must be a whole number in 1..{_MOST - 1}, got {told[name]!r:.80}")
    heads, width, ffn, layers = (told[name] for name in names)
    name = next((m.name for m in MODELS.values() if (m.dim, m.ffn, m.heads) == (heads * width, ffn, heads)), "custom")
    return WanConfig(ModelSize(name, dim=heads * width, ffn=ffn, heads=heads, layers=layers))


@torch.no_grad()
def load_diffusers(model: WanModel, folder: str | Path) -> None:
    """Fill a `WanModel` with the weights of a Diffusers-format folder, one safetensors file or an index over several.

    The model may be sharded already: tensors are read one at a time, and each rank keeps its part. They are cast to the
    parameters' dtypes. Nothing is written before names and shapes have been compared, and sizes with config.json where
    there is one.

    Raises FileNotFoundError for a missing file, ValueError for weights of another model, weights that are no finite
    floating-point numbers, an unreadable file, and where safetensors is not installed.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ValueError("reading weights needs safetensors: pip install 'adaptiveload-repro[data]'")
    from safetensors import SafetensorError, safe_open

    _check_config(model.config, folder)
    parameters = {clean_name(name): p for name, p in model.named_parameters()}
    files = _files(Path(folder))
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 (not a mapping)
                    part = weights.get_slice(name)
                    if name in shapes:
                        raise ValueError(f"{path} has {name}, and so has another file: fetch the folder again")
                    if part.get_dtype() not in _FLOATS:
                        raise ValueError(f"{path}: {name} must be one of {', '.join(_FLOATS)}, is {part.get_dtype()}")
                    shapes[name] = tuple(part.get_shape())
        _compare(shapes, {_rename(name, _TO): tuple(p.shape) for name, p in parameters.items()}, Path(folder))
        for name, tensor in _tensors(files):
            parameter = parameters[_rename(name, _FROM)]
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{folder}: {name} has weights that are not finite: nothing can be trained from them")
            assign(parameter, tensor.to(parameter.device))
    except SafetensorError as error:
        raise ValueError(f"{folder} has a weights file that cannot be read ({error}): fetch it again") from None


def _check_config(config: WanConfig, folder: str | Path) -> None:
    """Compare a model with a Diffusers folder's config.json, where there is one: shapes do not tell heads apart.

    Raises ValueError where sizes differ, and as `read_config`.
    """
    if not (Path(folder) / _CONFIG).is_file():
        return
    wanted, told = diffusers_config(config), diffusers_config(read_config(folder))
    different = [f"{key} {told[key]} (here {value})" for key, value in wanted.items() if told[key] != value]
    if different:
        raise ValueError(f"{Path(folder) / _CONFIG} is of another model: {', '.join(different)}")


def _tensors(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                yield name, weights.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    """Weight files of a folder, all present."""
    index = folder / f"{_WEIGHTS}.index.json"
    names = [_WEIGHTS]
    if index.is_file():
        told = _json(index).get("weight_map")
        if not isinstance(told, dict) or not told or not all(_is_name(v) for v in told.values()):
            raise ValueError(f"{index} must have a weight_map from names of weights to names of files beside it")
        names = sorted(set(told.values()))
    files = [folder / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: it must be a complete Diffusers-format folder")
    return files


def _is_name(value: object) -> bool:
    """Whether it names a file of the folder itself."""
    return isinstance(value, str) and value not in ("", "..") and not re.search(r"[/\\\0]", value)


def _json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a file that holds none."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({type(error).__name__}: {error}): fetch it again") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path} must hold a JSON object, holds {told!r:.80}")
    return told


def _compare(got: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    problems = [f"{name} is missing" for name in wanted.keys() - got.keys()]
    problems += [f"{name} is not of this model" for name in got.keys() - wanted.keys()]
    problems += [
        f"{name} has shape {list(got[name])}, the model's has {list(wanted[name])}"
        for name in wanted.keys() & got.keys()
        if got[name] != wanted[name]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:3])
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{folder} holds the weights of another model: {shown}{more}")


def _rename(name: str, names: Mapping[str, str]) -> str:
    block = re.match(r"blocks\.(\d+)\.", name)
    generic = name.replace(block[0], "blocks.{}.", 1) if block else name
    stem, _, leaf = generic.rpartition(".")
    found = names.get(generic) or (f"{names[stem]}.{leaf}" if stem in names and leaf in ("weight", "bias") else None)
    if found is None:
        raise KeyError(f"no Wan 2.1 text-to-video model has a parameter {name!r}")
    return found.replace("{}", block[1]) if block else found


def _fixed() -> dict[str, Any]:
    return {
        "patch_size": PATCH,
        "in_channels": LATENT_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": TEXT_WIDTH,
        "freq_dim": TIME_FREQUENCIES,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": EPS,
        "image_dim": None,
        "added_kv_proj_dim": None,
    }
