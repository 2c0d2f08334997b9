"""A model that never exists whole has the weights of one that does."""

import json

from repro.wan.config import WanConfig
from repro.wan.convert import diffusers_config, to_diffusers
from repro.wan.model import WanModel
from tests.wan import model_ranks, ranks


def test_weights_do_not_depend_on_sharding(tmp_path):
    from safetensors.torch import save_file

    config = WanConfig.preset("tiny")
    model = WanModel(config)
    model.reset_parameters(seed=6)
    save_file(to_diffusers(model.state_dict()), tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(diffusers_config(config)))
    ranks.run(model_ranks.sharded_weights, 2, str(tmp_path))


def test_the_time_embedding_stays_in_fp32():
    ranks.run(model_ranks.time_in_fp32, 2)
