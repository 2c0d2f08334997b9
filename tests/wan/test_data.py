"""Where samples come from: made up, or from shards; by id, whatever the micro-batch; broken data is refused early."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan import synthetic
from repro.wan.config import WanConfig
from repro.wan.model import WanModel
from repro.wan.objective import FlowMatching
from repro.wan.samples import DataError, FlowLosses, pad_prompt, word_embeddings
from repro.wan.shards import ShardedSamples, ShardWriter
from repro.wan.synthetic import PROMPT_WORDS, SyntheticSamples

SHAPES = (Shape(1, 32, 48), Shape(5, 32, 32), Shape(9, 48, 80))


def corpus(samples=30):
    bucket = (np.arange(samples) * 7 % 3).astype(np.int32)
    return Corpus("small", "test", SHAPES, np.array([Tokenizer().tokens(s) for s in SHAPES]), bucket)


def ids_of(made, bucket):
    return np.flatnonzero(made.bucket_of == bucket).tolist()


class TestSynthetic:
    @settings(derandomize=True, max_examples=15, deadline=None)
    @given(bucket=st.integers(0, 2), data=st.data())
    def test_a_sample_does_not_depend_on_its_micro_batch(self, bucket, data):
        source = SyntheticSamples(corpus())
        ids = data.draw(st.lists(st.sampled_from(ids_of(source.corpus, bucket)), min_size=1, max_size=5, unique=True))
        together = source.fetch(SHAPES[bucket], ids, "cpu")
        for place, i in enumerate(ids):
            alone = source.fetch(SHAPES[bucket], [i], "cpu")
            assert torch.equal(together.latents[place], alone.latents[0])
            assert torch.equal(together.text[place], alone.text[0])

    def test_shapes_scale_and_prompts(self):
        source = SyntheticSamples(corpus(300))
        samples = source.fetch(SHAPES[2], ids_of(source.corpus, 2), "cpu")
        assert samples.latents.shape == (100, 16, 3, 6, 10)
        # Cells of 32 elements share most of their variance: 100 * 16 * 8 of them hold about 1/110 of it back.
        assert samples.latents.var().item() == pytest.approx(1.0, abs=0.05)
        assert samples.text.shape == (100, 512, 4096)
        words = samples.text.any(-1)
        lengths = words.sum(1)
        assert PROMPT_WORDS[0] <= lengths.min() < lengths.max() <= PROMPT_WORDS[1]
        assert torch.equal(words, torch.arange(512) < lengths[:, None]), "zero exactly after the end"

    def test_prompts_have_the_length_drawn(self, monkeypatch):
        monkeypatch.setattr(synthetic, "PROMPT_WORDS", (5, 5))
        text = SyntheticSamples(corpus()).fetch(SHAPES[0], [0], "cpu").text[0]
        assert text.any(-1).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]

    def test_latents_can_be_told_from_noise(self):
        latents = SyntheticSamples(corpus()).fetch(SHAPES[1], [1], "cpu").latents[0]
        neighbours = torch.corrcoef(torch.stack((latents[..., 0, 0].flatten(), latents[..., 1, 1].flatten())))[0, 1]
        assert neighbours > 0.5

    def test_seeds_make_other_samples(self):
        a, b = (SyntheticSamples(corpus(), seed).fetch(SHAPES[0], [0], "cpu") for seed in (0, 1))
        assert not (a.latents == b.latents).any()
        assert not torch.equal(a.text, b.text)

    def test_wrong_ids_and_shapes_are_refused(self):
        source = SyntheticSamples(corpus())
        with pytest.raises(DataError, match=r"sample 1 of small is 5x32x32, asked for as 1x32x48"):
            source.fetch(SHAPES[0], [0, 1], "cpu")
        with pytest.raises(DataError, match="end at 29, got 30"):
            source.fetch(SHAPES[0], [30], "cpu")


def write(folder, shard_bytes=200_000):
    """Nine samples of three shapes, largest first, over several shards; returns what was written."""
    rng = np.random.default_rng(0)
    written = []
    with ShardWriter(folder, "made", "test", shard_bytes) as writer:
        for i in range(9):
            shape = SHAPES[(2 + i) % 3]
            latents = rng.standard_normal((16, *Tokenizer().latent(shape))).astype(np.float16)
            text = rng.standard_normal((3 + i, 4096)).astype(np.float16)
            assert writer.add(shape, latents, text, {"caption": f"number {i}"}) == i
            written.append((shape, latents, text))
    return written


class TestShards:
    def test_samples_come_back_by_id(self, tmp_path):
        written = write(tmp_path)
        assert len(list(tmp_path.glob("*.tar"))) > 2
        source = ShardedSamples(tmp_path)
        made = source.corpus
        assert made.shapes == SHAPES, "buckets ordered by tokens, whatever the order on disk"
        assert made.tokens.tolist() == [6, 8, 45]
        for bucket, shape in enumerate(made.shapes):
            ids = ids_of(made, bucket)[::-1]
            samples = source.fetch(shape, ids, "cpu")
            for place, i in enumerate(ids):
                assert written[i][0] == shape
                assert np.array_equal(samples.latents[place].numpy(), written[i][1])
                words = len(written[i][2])
                assert np.array_equal(samples.text[place, :words].numpy(), written[i][2])
                assert not samples.text[place, words:].any()
        assert source.read(4)["facts"] == {"shape": str(written[4][0]), "caption": "number 4"}

    def test_wids_reads_the_same_index(self, tmp_path, capsys):
        from wids.wids import ShardListDataset

        written = write(tmp_path / "data")
        index = json.loads((tmp_path / "data" / "index.json").read_text())
        shards = [s | {"url": str(tmp_path / "data" / s["url"])} for s in index["shardlist"]]
        theirs = ShardListDataset(shards, cache_dir=str(tmp_path / "data"), transformations=[])
        assert len(theirs) == 9
        assert np.array_equal(np.load(theirs[5][".latents.npy"]), written[5][1])

    def test_the_same_samples_make_the_same_bytes(self, tmp_path):
        write(tmp_path / "a"), write(tmp_path / "b")
        for path in (tmp_path / "a").iterdir():
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

    def test_missing_and_broken_shards_are_found_at_once(self, tmp_path):
        write(tmp_path)
        shard = sorted(tmp_path.glob("*.tar"))[1]
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-512])
        with pytest.raises(DataError, match=rf"{shard.name} has \d+ bytes, its index says {len(whole)}"):
            ShardedSamples(tmp_path)
        broken = bytearray(whole)
        broken[len(whole) // 2] ^= 1
        shard.write_bytes(bytes(broken))
        with pytest.raises(DataError, match=f"{shard.name} is corrupt"):
            ShardedSamples(tmp_path)
        ShardedSamples(tmp_path, verify=False)
        shard.unlink()
        with pytest.raises(FileNotFoundError, match=f"{shard.name} is missing"):
            ShardedSamples(tmp_path, verify=False)

    def test_damage_that_was_not_verified_names_sample_and_shard(self, tmp_path):
        write(tmp_path)
        shard = sorted(tmp_path.glob("*.tar"))[0]
        data = shard.read_bytes()
        shard.write_bytes(data.replace(b"\x93NUMPY", b"\x93NUMBY", 1))
        with pytest.raises(DataError, match=rf"sample 0 cannot be read from .*{shard.name}"):
            ShardedSamples(tmp_path, verify=False).fetch(SHAPES[2], [0], "cpu")

    def test_an_interrupted_making_leaves_no_corpus(self, tmp_path):
        with pytest.raises(RuntimeError, match="power cut"), ShardWriter(tmp_path, "made", "test") as writer:
            writer.add(SHAPES[0], np.zeros((16, 1, 4, 6)), np.zeros((1, 4096)))
            raise RuntimeError("power cut")
        with pytest.raises(FileNotFoundError, match="interrupted"):
            ShardedSamples(tmp_path)

    def test_foreign_indexes_and_full_folders_are_refused(self, tmp_path):
        write(tmp_path)
        with pytest.raises(FileExistsError, match="already holds a corpus"):
            ShardWriter(tmp_path, "made", "test")
        for text, message in (("{", "not an index"), ("[]", "not an index"), ('{"version": 9, "shardlist": []}', "9")):
            (tmp_path / "index.json").write_text(text)
            with pytest.raises(DataError, match=message):
                ShardedSamples(tmp_path)

    def test_what_float16_cannot_hold_is_refused(self, tmp_path):
        shape, text = Shape(1, 32, 32), np.zeros((1, 4096))
        with ShardWriter(tmp_path, "made", "test") as writer:
            for value in (1e6, np.nan):
                with pytest.raises(DataError, match=r"sample 0: latents.npy has values that are not finite in float16"):
                    writer.add(shape, np.full((16, 1, 4, 4), value), text)
            assert writer.add(shape, np.ones((16, 1, 4, 4)), text) == 0

    def test_samples_of_another_shape_are_refused(self, tmp_path):
        with ShardWriter(tmp_path, "made", "test") as writer:
            with pytest.raises(DataError, match=r"latents must be \[16, 2, 4, 4\] for 5x32x32"):
                writer.add(SHAPES[1], np.zeros((16, 1, 4, 4)), np.zeros((1, 4096)))
            with pytest.raises(DataError, match=r"text must be \[L, 4096\]"):
                writer.add(SHAPES[1], np.zeros((16, 2, 4, 4)), np.zeros(4096))
            writer.add(SHAPES[1], np.zeros((16, 2, 4, 4)), np.zeros((1, 4096)))
        with pytest.raises(DataError, match="sample 0 in"):
            ShardedSamples(tmp_path).fetch(SHAPES[0], [0], "cpu")


def test_prompts():
    a = word_embeddings(["a", "red", "fox", "a"])
    assert torch.equal(a[0], a[3])
    assert not (a[0] == a[1]).any()
    padded = pad_prompt(a)
    assert padded.shape == (512, 4096)
    assert torch.equal(padded[:4], a)
    assert not padded[4:].any()
    assert torch.equal(pad_prompt(a.repeat(200, 1)), a.repeat(128, 1))


def test_losses_of_a_sample_are_the_same_in_any_micro_batch():
    source = SyntheticSamples(corpus())
    losses = FlowLosses(source, FlowMatching(), torch.device("cpu"))
    model = WanModel(WanConfig.preset("tiny", layers=1), "eager").double()
    with torch.no_grad():
        model.head.head.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        ids = ids_of(source.corpus, 1)[:3]
        together = losses(model, MicroBatch(SHAPES[1], tuple(ids), (0.2,) * 3), epoch=1)
        for place, i in enumerate(ids):
            alone = losses(model, MicroBatch(SHAPES[1], (i,), (0.2,)), epoch=1)
            # float64 throughout: matrix products of another batch size sum in another order.
            torch.testing.assert_close(alone, together[place : place + 1], rtol=1e-13, atol=0)
        assert not (losses(model, MicroBatch(SHAPES[1], tuple(ids), (0.2,) * 3), epoch=2) == together).any()
