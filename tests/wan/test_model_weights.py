"""Weights to and from Diffusers' format, on disk and in memory."""

import json

import pytest
import torch

from repro.wan.config import WanConfig
from repro.wan.convert import diffusers_config, from_diffusers, load_diffusers, read_config, to_diffusers
from repro.wan.model import WanModel

diffusers = pytest.importorskip("diffusers", reason="folders are written by diffusers, which is not installed")


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(**diffusers_config(WanConfig.preset("tiny")))


def saved(theirs, folder, shard="1GB"):
    theirs.save_pretrained(folder, max_shard_size=shard)
    return folder


def test_names_map_both_ways():
    state = WanModel(WanConfig.preset("tiny")).state_dict()
    there = to_diffusers(state)
    assert there.keys() != state.keys()
    back = from_diffusers(there)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state)
    with pytest.raises(KeyError, match="img_emb"):
        to_diffusers({"img_emb.proj.weight": torch.zeros(1)})


def test_wrappers_in_names_do_not_matter():
    wrapped = {"blocks.1._checkpoint_wrapped_module._orig_mod.norm3.weight": torch.zeros(1)}
    assert list(to_diffusers(wrapped)) == ["blocks.1.norm2.weight"]


@pytest.mark.parametrize("shard", ["1GB", "600KB"], ids=["one file", "index"])
def test_folder_of_safetensors(theirs, tmp_path, shard):
    folder = saved(theirs, tmp_path, shard)
    assert (folder / "diffusion_pytorch_model.safetensors.index.json").exists() == (shard == "600KB")
    config = read_config(folder)
    assert config == WanConfig.preset("tiny")
    model = WanModel(config)
    load_diffusers(model, folder)
    want = from_diffusers(theirs.state_dict())
    for name, p in model.named_parameters():
        assert torch.equal(p, want[name]), name


def test_weights_are_cast_to_the_parameters(theirs, tmp_path):
    model = WanModel(WanConfig.preset("tiny")).bfloat16()
    load_diffusers(model, saved(theirs, tmp_path))
    assert torch.equal(model.head.head.weight, theirs.proj_out.weight.bfloat16())


def test_another_models_weights_change_nothing(theirs, tmp_path):
    model = WanModel(WanConfig.preset("tiny", layers=3))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    folder = saved(theirs, tmp_path)
    with pytest.raises(ValueError, match=r"config\.json is of another model: num_layers 2 \(here 3\)"):
        load_diffusers(model, folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"another model: blocks.2.* is missing.*and \d+ more"):
        load_diffusers(model, folder)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_incomplete_folders_are_refused(theirs, tmp_path):
    model = WanModel(WanConfig.preset("tiny"))
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        read_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"lacks diffusion_pytorch_model\.safetensors"):
        load_diffusers(model, tmp_path)
    folder = saved(theirs, tmp_path, "600KB")
    part = sorted(folder.glob("*.safetensors"))[1]
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read"):
        load_diffusers(model, folder)
    part.unlink()
    with pytest.raises(FileNotFoundError, match=part.name):
        load_diffusers(model, folder)


def test_other_kinds_of_model_are_refused(theirs, tmp_path):
    folder = saved(theirs, tmp_path)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"in_channels": 36}))
    with pytest.raises(ValueError, match="in_channels must be 16"):
        read_config(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="num_attention_heads"):
        read_config(folder)
