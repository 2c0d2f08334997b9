"""Python in README and docs/library.md runs as it stands, given the names that it takes as known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from repro.plan import app as planner
from tests.docs.documents import ROOT, blocks

torch = pytest.importorskip("torch")

README, LIBRARY = ROOT / "README.md", ROOT / "docs" / "library.md"


def execute(path: Path, holds: str, **known: Any) -> dict[str, Any]:
    """Run the block that holds a text; returns its names."""
    (block,) = (b for b in blocks(path, "python") if holds in b.text)
    exec(compile(block.text, path.name, "exec"), known)
    return known


def tiny_wan() -> Any:
    transformers = pytest.importorskip("diffusers")
    return transformers.WanTransformer3DModel(num_attention_heads=2, attention_head_dim=12, ffn_dim=48, num_layers=1)


def test_the_readme_s_op_and_model() -> None:
    x, shift, scale = torch.randn(2, 16, 96), torch.randn(2, 96), torch.randn(2, 96)
    transformer = tiny_wan()
    names = execute(README, "accelerate(transformer)", x=x, shift=shift, scale=scale, transformer=transformer)
    wanted = torch.nn.functional.layer_norm(x, (96,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(names["y"], wanted)
    assert "forward" in transformer.blocks[0].__dict__


def test_every_form_of_the_op() -> None:
    names = execute(LIBRARY, "gated_residual_layer_norm_modulate")
    assert names["y"].shape == names["h"].shape == (2, 64, 96) and names["x"].grad is not None


def test_a_model_is_restored() -> None:
    names = execute(LIBRARY, "with accelerate(model)")
    assert "forward" not in names["model"].blocks[0].__dict__


def test_a_loop_with_the_sampler(tmp_path, monkeypatch, capsys) -> None:
    rows = ["0,480,832", "81,480,832", "49,720,1280", "81,48,83", "1,720,1280"]  # one is broken, one has no bucket
    (tmp_path / "clips.csv").write_text("frames,height,width\n" + "\n".join(rows * 200))
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    names = execute(LIBRARY, "ScheduleSampler(", dataset=range(1_000))
    sampler, shown = names["sampler"], capsys.readouterr().out
    assert "600 samples in" in shown and "480x832" in shown
    assert names["state"]["steps"] == sampler.schedule.steps
    for batch, micro_batch in zip(names["loader"], sampler.micro_batches(), strict=True):
        shapes = {rows[n % len(rows)].replace(",", "x") for n in batch.tolist()}
        assert shapes == {str(micro_batch.shape)} and len(batch) == len(micro_batch.sample_ids)
    written = CliRunner().invoke(planner, ["clips.csv", "--write", "plan.yaml"])
    assert written.exit_code == 0, written.output
    names = execute(LIBRARY, "limits.choose(", **names)
    assert names["policy"].schedule(names["corpus"], names["sampler"].layout).steps > 0
    assert set(names["plan"].batch_size) == set(names["corpus"].shapes) and capsys.readouterr().out.startswith("[]\n")
