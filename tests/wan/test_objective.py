"""Flow matching: draws that belong to the sample alone, their distributions, the path, per-sample losses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from repro.wan import draws
from repro.wan.objective import FlowMatching, squared_errors


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=9, unique=True),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 7), st.integers(1, 9)),
    data=st.data(),
)
def test_a_samples_draw_is_its_own(ids, shape, data):
    """Alone, or in any batch in any order: the same bits."""
    flow = FlowMatching(seed=data.draw(st.integers(0, 5)))
    order = data.draw(st.permutations(range(len(ids))))
    mixed = [ids[i] for i in order]
    noise, sigma = flow.noise(mixed, shape), flow.sigma(mixed)
    for place, i in enumerate(order):
        assert torch.equal(noise[place], flow.noise([ids[i]], shape)[0])
        assert torch.equal(sigma[place], flow.sigma([ids[i]])[0])


def test_seed_epoch_and_id_all_matter():
    base, shape = FlowMatching(seed=1), (4, 5)
    noise, sigma = base.noise([7], shape), base.sigma([7])
    for flow, i, epoch in ((FlowMatching(seed=2), 7, 0), (base, 8, 0), (base, 7, 1)):
        assert not (flow.noise([i], shape, epoch) == noise).any()
        assert flow.sigma([i], epoch) != sigma
    assert torch.equal(noise, FlowMatching(seed=1).noise([7], shape))


def test_draws_are_pinned():
    """Resuming with a newer release must not change the noise: these are SplitMix64's outputs for seed 0."""
    bits = draws._bits(torch.zeros(1, dtype=torch.int64), 3)[0].tolist()
    assert [b % 2**64 for b in bits] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_normals_are_normal_and_independent():
    z = FlowMatching().noise(range(64), (16, 3, 11)).double().numpy()  # an odd count: pairs are cut
    flat = z.ravel()
    # p-values of fixed draws; a wrong distribution at n = 33,792 gives 1e-10 and less.
    assert stats.kstest(flat, "norm").pvalue > 1e-3
    assert abs(stats.kurtosis(flat)) < 5 * (24 / flat.size) ** 0.5
    rows = z.reshape(64, -1)
    correlation = np.corrcoef(rows)[np.triu_indices(64, 1)]
    assert abs(correlation).max() < 6 / rows.shape[1] ** 0.5
    neighbours = np.corrcoef(rows[:, :-1].ravel(), rows[:, 1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / flat.size**0.5


@pytest.mark.parametrize(
    ("flow", "cdf"),
    [
        (FlowMatching("uniform", shift=1.0), lambda s: s),
        (FlowMatching("uniform", shift=5.0), lambda s: s / (5 - 4 * s)),
        (
            FlowMatching("logit_normal", shift=1.0, mean=-0.5, std=2.0),
            lambda s: stats.norm.cdf(np.log(s / (1 - s)), -0.5, 2),
        ),
        (FlowMatching("logit_normal", shift=3.0), lambda s: stats.norm.cdf(np.log(s / (3 * (1 - s))))),
    ],
)
def test_sigma_has_the_distribution_asked_for(flow, cdf):
    sigma = flow.sigma(range(4000)).numpy()
    assert 0 < sigma.min() < sigma.max() < 1
    assert stats.kstest(sigma, cdf).pvalue > 1e-3


def test_the_path_runs_straight_from_latents_to_noise():
    flow = FlowMatching(seed=3)
    latents = torch.randn(3, 16, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = flow.ask(latents, [4, 5, 6], epoch=2)
    sigma = flow.sigma([4, 5, 6], epoch=2).view(3, 1, 1, 1, 1)
    assert torch.equal(q.timesteps, 1000 * sigma.flatten())
    # Along the velocity, from the noisy point back to the latents and on to the noise.
    torch.testing.assert_close(q.noisy - sigma * q.target, latents)
    torch.testing.assert_close(
        (q.noisy + (1 - sigma) * q.target).float(), flow.noise([4, 5, 6], latents.shape[1:], epoch=2)
    )


def test_bfloat16_latents_get_a_float32_question():
    q = FlowMatching().ask(torch.zeros(2, 16, 1, 2, 2, dtype=torch.bfloat16), [0, 1])
    assert {q.noisy.dtype, q.target.dtype, q.timesteps.dtype} == {torch.float32}


def test_losses_are_per_sample_whatever_the_batch():
    flow, generator = FlowMatching(), torch.Generator().manual_seed(0)
    latents = torch.randn(3, 16, 1, 4, 4, generator=generator)
    text = torch.zeros(3, 1, 4096)

    def model(noisy, timesteps, text):
        return noisy * (timesteps / 1000).view(-1, 1, 1, 1, 1)

    together = flow.losses(model, latents, text, [2, 0, 1])
    assert together.shape == (3,)
    for i, sample in enumerate([2, 0, 1]):
        alone = flow.losses(model, latents[i : i + 1], text[i : i + 1], [sample])
        torch.testing.assert_close(together[i : i + 1], alone)
    q = flow.ask(latents, [2, 0, 1])
    by_hand = ((model(q.noisy, q.timesteps, text) - q.target) ** 2)[1].mean()
    torch.testing.assert_close(together[1], by_hand)


def test_low_precision_predictions_are_judged_in_float32():
    prediction = torch.full((1, 1, 1, 64, 64), 1.0, dtype=torch.bfloat16)
    loss = squared_errors(prediction, torch.full((1, 1, 1, 64, 64), 1.001))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("bad", [{"draw": "cosine"}, {"shift": 0.0}, {"std": float("inf")}])
def test_bad_settings_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        FlowMatching(**bad)


def test_every_sample_needs_an_id():
    with pytest.raises(ValueError, match="each of the 2 samples, got 1"):
        FlowMatching().ask(torch.zeros(2, 16, 1, 2, 2), [0])
