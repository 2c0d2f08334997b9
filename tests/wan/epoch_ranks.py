"""What test_probing_epoch.py has a rank do."""

from __future__ import annotations

from typing import Any

import torch

from repro.wan import probing, probing_epoch
from repro.wan.parallel import join

SHAPES = [(1, 32, 32), (5, 32, 32)]
STEPS = [[[[k, [k], [1.0]]]] for k in (0, 1, 0, 1)]
"""Four optimizer steps of one micro-batch on one rank: bucket, sample ids, weights."""


def solo_passes_among_steps() -> None:
    """They come between the steps, and the weights after the epoch keep every bit that they have without them."""
    world = join("cpu")
    said: list[str] = []

    def heard(name: str, function: Any) -> Any:
        def told(*args: Any) -> Any:
            said.append(name)
            return function(*args)

        return told

    probing_epoch.step = heard("step", probing_epoch.step)
    probing_epoch._pass = heard("pass", probing_epoch._pass)

    def weights(counts: tuple[int, int]) -> list[torch.Tensor]:
        probing.free()
        said.clear()
        answer = probing_epoch.epoch(
            world,
            setting={"model": "tiny", "layers": 1, "adaln": "fused"},
            shapes=SHAPES,
            bucket_of=[0, 1],
            solo=[(k, 1, count) for k, count in enumerate(counts)],
            steps=STEPS,
        )
        assert [len(passes) for passes in answer["passes"]] == list(counts)
        assert all(seconds > 0 for passes in answer["passes"] for seconds in passes)
        assert probing_epoch._kept is not None
        return [p.detach().clone() for p in probing_epoch._kept.engine.model.parameters()]

    with_them = weights((3, 1))
    assert said[-8:] == ["step", "pass"] * 4, said
    without = weights((0, 0))
    assert said[-4:] == ["step"] * 4, said
    assert all(torch.equal(a, b) for a, b in zip(with_them, without, strict=True)), "a solo pass reached an update"
