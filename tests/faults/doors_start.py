"""Bad input that a run of `python -m repro.train` starts from: weights (`--init`) and what its calibration measured."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from repro.wan import sweep
from repro.wan.config import WanConfig
from repro.wan.convert import diffusers_config, to_diffusers
from repro.wan.model import WanModel
from tests.faults.cases import Arguments, Case
from tests.faults.doors_train import MADE_UP, TINY, content, halve, pickled_code

WEIGHTS, CALIBRATION = "weights", "calibration.csv"
TENSOR_FILE, CONFIG = "diffusion_pytorch_model.safetensors", "config.json"


def weights(kind: str, name: str, told: str, break_it: Callable[[Path], None]) -> Case:
    """A run that starts from weights, in Diffusers' format, that were broken."""

    def given(folder: Path) -> Arguments:
        (folder / "weights").mkdir()
        for file in Path(_saved_weights().name).iterdir():
            shutil.copy(file, folder / "weights")
        break_it(folder / "weights")
        return [*TINY, *MADE_UP, "--init", folder / "weights"]

    return Case(WEIGHTS, kind, name, given, told)


@functools.cache
def _saved_weights() -> tempfile.TemporaryDirectory[str]:
    """A tiny model's, of one layer."""
    folder = tempfile.TemporaryDirectory(prefix="weights-")
    config = WanConfig.preset("tiny", 1)
    save_file(to_diffusers(WanModel(config).state_dict()), Path(folder.name) / TENSOR_FILE)
    (Path(folder.name) / CONFIG).write_text(json.dumps(diffusers_config(config)))
    return folder


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Write the weights again, changed."""

    def break_it(folder: Path) -> None:
        told = load_file(folder / TENSOR_FILE)
        change(told)
        save_file(told, folder / TENSOR_FILE)

    return break_it


def sizes(**changed: Any) -> Callable[[Path], None]:
    """Change entries of config.json; None removes one."""

    def change(folder: Path) -> None:
        told = json.loads((folder / CONFIG).read_text()) | changed
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in told.items() if v is not None}))

    return change


def in_parts(weight_map: object, copies: int = 0) -> Callable[[Path], None]:
    """An index over files of weights, in place of the one file; copies of it as a.safetensors, b.safetensors."""

    def change(folder: Path) -> None:
        whole = folder / TENSOR_FILE
        for letter in "ab"[:copies]:
            shutil.copy(whole, folder / f"{letter}.safetensors")
        whole.unlink()
        (folder / f"{TENSOR_FILE}.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


def _header(length: int) -> Callable[[Path], None]:
    """A length of the header in front of the file."""
    return lambda d: (d / TENSOR_FILE).write_bytes(length.to_bytes(8, "little") + b"{}") and None


def _fill(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda t: t["proj_out.bias"].fill_(value)


READ = "weights file that cannot be read"
INITIAL = [
    weights("missing", "no file of weights", f"lacks {TENSOR_FILE}", lambda d: (d / TENSOR_FILE).unlink()),
    weights("missing", "a tensor", r"proj_out\.bias is missing", tensors(lambda t: t.pop("proj_out.bias"))),
    weights("missing", "a part", r"lacks c\.safetensors", in_parts({"proj_out.bias": "c.safetensors"})),
    weights("missing", "an entry of config.json", "does not give 'ffn_dim'", sizes(ffn_dim=None)),
    weights("empty", "a file of weights", READ, content(TENSOR_FILE, b"")),
    weights("empty", "no weights", "is missing", tensors(lambda t: t.clear())),
    weights("empty", "an index of no parts", "weight_map", in_parts({})),
    weights("empty", "config.json", r"config\.json is not JSON", content(CONFIG, b"")),
    weights("malformed", "weights", READ, content(TENSOR_FILE, b"what" * 100)),
    weights("malformed", "a pickle", READ, content(TENSOR_FILE, pickled_code())),
    weights("malformed", "an index that is a list", r"index\.json must hold a JSON object",
            content(f"{TENSOR_FILE}.index.json", b"[]")),
    weights("malformed", "an index that is no JSON", r"index\.json is not JSON",
            content(f"{TENSOR_FILE}.index.json", b"what")),
    weights("malformed", "config.json", r"config\.json is not JSON", content(CONFIG, b"what")),
    weights("malformed", "config.json is a list", r"config\.json must hold a JSON object", content(CONFIG, b"[]")),
    weights("truncated", "weights", READ, halve(TENSOR_FILE)),
    weights("truncated", "config.json", r"config\.json is not JSON", halve(CONFIG)),
    weights("not UTF-8", "config.json", r"config\.json is not JSON", content(CONFIG, b"\xff\xfe{}")),
    weights("not UTF-8", "an index", r"index\.json is not JSON", content(f"{TENSOR_FILE}.index.json", b"\xff{}")),
    weights("not UTF-8", "a header", READ, content(TENSOR_FILE, (4).to_bytes(8, "little") + b"{\xff\xfe}")),
    weights("wrong type", "whole numbers", "must be one of F64",
            tensors(lambda t: t.update({"proj_out.bias": torch.zeros(64, dtype=torch.int64)}))),
    weights("wrong type", "a shape", r"proj_out\.bias has shape \[3\]",
            tensors(lambda t: t.update({"proj_out.bias": torch.zeros(3)}))),
    weights("wrong type", "a part that is a number", "weight_map", in_parts({"proj_out.bias": 3})),
    weights("wrong type", "heads in words", "num_attention_heads must be a whole number",
            sizes(num_attention_heads="two")),
    weights("wrong type", "layers that are not whole", "num_layers must be a whole number", sizes(num_layers=1.5)),
    weights("duplicated", "the same weights in two parts", "and so has another file",
            in_parts({"proj_out.bias": "a.safetensors", "proj_out.weight": "b.safetensors"}, copies=2)),
    weights("NaN", "a weight", r"proj_out\.bias has weights that are not finite", tensors(_fill(float("nan")))),
    weights("NaN", "heads", "num_attention_heads must be a whole number", sizes(num_attention_heads=float("nan"))),
    weights("negative", "layers", "num_layers must be a whole number", sizes(num_layers=-1)),
    weights("overflow", "an infinite weight", "not finite", tensors(_fill(float("inf")))),
    weights("overflow", "a width", "ffn_dim must be a whole number", sizes(ffn_dim=10**30)),
    weights("huge", "a header of 10^18 bytes", READ, _header(10**18)),
    weights("huge", "a million layers", "num_layers 1000000", sizes(num_layers=10**6)),
    weights("adversarial", "another model's", "is not of this model",
            tensors(lambda t: t.update({"img_emb.proj.weight": torch.zeros(1)}))),
    weights("adversarial", "other heads, the same shapes", r"num_attention_heads 4 \(here 2\)",
            sizes(num_attention_heads=4, attention_head_dim=24)),
    weights("adversarial", "another kind of model", "in_channels must be 16", sizes(in_channels=36)),
    weights("adversarial", "a part outside the folder", "weight_map", in_parts({"proj_out.bias": "../file"})),
    weights("adversarial", "an index nested 100,000 deep", r"index\.json is not JSON",
            content(f"{TENSOR_FILE}.index.json", b"[" * 100_000)),
]  # fmt: skip


def swept(kind: str, name: str, told: str, text: str | bytes) -> Case:
    """A run that is to go by a record of measured shapes, calibration.csv. {columns} stands for its header."""

    def given(folder: Path) -> Arguments:
        (folder / "run").mkdir()
        put = text if isinstance(text, bytes) else text.replace("{columns}", SWEPT).encode()
        (folder / "run" / "calibration.csv").write_bytes(put)
        return [*TINY, *MADE_UP, "--out", folder / "run", "--calibrate", 0.001]

    return Case(CALIBRATION, kind, name, given, rf"calibration\.csv is no record of a sweep.*{told}")


SWEPT = ",".join(sweep._COLUMNS)
RECORDS = [
    swept("missing", "a column", "", SWEPT.replace(",fits", "") + "\nx,1x32x32,2,4,0.5,-1\n"),
    swept("empty", "a cell", "", "{columns}\nx,1x32x32,,4,0.5,-1,1\n"),
    swept("malformed", "another table", "", "a,b\n1,2\n"),
    swept("malformed", "a shape of two numbers", "", "{columns}\nx,1x32,2,4,0.5,-1,1\n"),
    swept("malformed", "a null", "", "{columns}\nx,1x32x32,2,4,0.5,-1,\0\n"),
    swept("truncated", "in the middle", "", "{columns}\nx,1x32x32,2\nx,1x32x32,2,4,0.5,-1,1\n"),
    swept("not UTF-8", "a row", "", b"\xff\xfe\n"),
    swept("wrong type", "a batch in words", "two", "{columns}\nx,1x32x32,two,4,0.5,-1,1\n"),
    swept("wrong type", "seconds in words", "fast", "{columns}\nx,1x32x32,2,4,fast,-1,1\n"),
    swept("wrong type", "whether it fits, in words", "maybe", "{columns}\nx,1x32x32,2,4,0.5,-1,maybe\n"),
    swept("duplicated", "a shape twice, with two times", "twice",
          "{columns}\nx,1x32x32,2,4,0.5,-1,1\nx,1x32x32,2,4,0.7,-1,1\n"),
    swept("NaN", "a batch", "nan", "{columns}\nx,1x32x32,nan,4,0.5,-1,1\n"),
    swept("negative", "seconds", "-0.5", "{columns}\nx,1x32x32,2,4,-0.5,-1,1\n"),
    swept("negative", "a batch", "-2", "{columns}\nx,1x32x32,-2,4,0.5,-1,1\n"),
    swept("negative", "M_mem", "-4", "{columns}\nx,end,0,-4,0.0,-1,1\n"),
    swept("overflow", "infinite seconds", "inf", "{columns}\nx,1x32x32,2,4,inf,-1,1\n"),
    swept("overflow", "a batch", "9" * 30, "{columns}\nx,1x32x32," + "9" * 30 + ",4,0.5,-1,1\n"),
    swept("huge", "a number of 10,000 digits", "", "{columns}\nx,1x32x32," + "9" * 10_000 + ",4,0.5,-1,1\n"),
    swept("huge", "a cell of a million characters", "", "{columns}\n" + "x" * 10**6 + ",1x32x32,2,4,0.5,-1,1\n"),
    swept("adversarial", "tokens of another shape", "tokens", "{columns}\nx,1x32x32,2,400,0.5,-1,1\n"),
]  # fmt: skip

CASES = [*INITIAL, *RECORDS]
