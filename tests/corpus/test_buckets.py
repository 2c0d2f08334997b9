"""Bucket grids and the assignment of clips."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.corpus.buckets import ASPECTS, BucketGrid, Fate
from repro.corpus.shapes import Shape


def place(grid: BucketGrid, frames: int, height: int, width: int) -> tuple[Shape | None, Fate]:
    got = grid.assign([frames], [height], [width])
    k = int(got.bucket[0])
    return (grid.shapes[k] if k >= 0 else None), Fate(int(got.fate[0]))


def test_the_named_sizes_of_wan_come_out() -> None:
    grid = BucketGrid()
    assert grid.size(480 * 832, 9 / 16) == (480, 832)
    assert grid.size(480 * 832, 16 / 9) == (832, 480)
    assert grid.size(720 * 1280, 9 / 16) == (720, 1280)
    assert len(grid.shapes) == 6 * 3 * 5


@settings(derandomize=True, max_examples=200)
@given(st.integers(64 * 64, 2160 * 3840), st.floats(0.3, 3.3))
def test_sizes_stay_within_the_area_and_near_the_ratio(area: int, aspect: float) -> None:
    height, width = BucketGrid().size(area, aspect)
    assert height % 16 == width % 16 == 0
    assert 0 < height * width <= area
    # The shorter side moves by up to half a patch of 16; rounded up, the area then cuts the longer side by as much
    # again and by the rest of a whole patch.
    short, long = sorted((height, width))
    bound = 2 * math.log(short / (short - 8.001)) + math.log((long + 16) / long)
    assert abs(math.log(height / width / aspect)) <= bound


def test_sizes_mirror_between_landscape_and_portrait() -> None:
    grid = BucketGrid()
    for area in grid.areas:
        for aspect in ASPECTS:
            assert grid.size(area, aspect) == grid.size(area, 1 / aspect)[::-1]


@pytest.mark.parametrize(
    ("clip", "shape", "fate"),
    [
        ((81, 480, 832), Shape(81, 480, 832), Fate.KEPT),
        ((100, 480, 832), Shape(81, 480, 832), Fate.TRIMMED),
        ((80, 1080, 1920), Shape(65, 720, 1280), Fate.TRIMMED),
        ((81, 1280, 720), Shape(81, 1280, 720), Fate.KEPT),
        ((1, 1000, 1000), Shape(1, 960, 960), Fate.KEPT),
        ((81, 480, 854), Shape(81, 480, 832), Fate.CROPPED),
        ((97, 512, 848), Shape(81, 480, 832), Fate.CROPPED | Fate.TRIMMED),
        ((16, 720, 1280), None, Fate.TOO_SHORT),
        ((81, 120, 160), None, Fate.TOO_SMALL),
        ((81, 720, 2400), None, Fate.TOO_ELONGATED),
        ((10**7, 10_000, 100), None, Fate.TOO_SMALL),
    ],
)
def test_where_a_clip_goes(clip: tuple[int, int, int], shape: Shape | None, fate: Fate) -> None:
    assert place(BucketGrid(), *clip) == (shape, fate)


def test_a_short_clip_becomes_an_image_only_on_request() -> None:
    assert place(BucketGrid(short_clips="image"), 16, 720, 1280) == (Shape(1, 720, 1280), Fate.TRIMMED)
    assert place(BucketGrid(frames=(17, 33)), 1, 720, 1280) == (None, Fate.TOO_SHORT)


def test_preference_between_resolution_and_length_under_a_token_limit() -> None:
    clip = (81, 720, 1280)
    assert place(BucketGrid(max_tokens=48_000, prefer="area"), *clip)[0] == Shape(49, 720, 1280)
    assert place(BucketGrid(max_tokens=48_000, prefer="frames"), *clip)[0] == Shape(81, 480, 832)
    assert place(BucketGrid(prefer="frames"), *clip)[0] == Shape(81, 720, 1280)


def test_a_token_limit_never_turns_a_video_into_an_image() -> None:
    grid = BucketGrid(areas=(720 * 1280,), max_tokens=3_600)
    assert place(grid, 81, 720, 1280) == (None, Fate.TOO_MANY_TOKENS)
    assert place(grid, 1, 720, 1280) == (Shape(1, 720, 1280), Fate.KEPT)


def test_max_upscale_is_the_edge_of_an_area() -> None:
    grid = BucketGrid(max_upscale=1.25)
    assert place(grid, 81, 576, 1024)[0] == Shape(81, 720, 1280)  # exactly 1.25
    assert place(grid, 81, 575, 1024)[0] == Shape(81, 480, 832)


CLIPS = st.lists(
    st.tuples(st.integers(1, 2_000), st.integers(16, 4_000), st.integers(16, 4_000)), min_size=1, max_size=40
)
GRIDS = st.builds(
    BucketGrid,
    frames=st.sampled_from([(1, 17, 33, 49, 65, 81), (17, 33), (1,), (1, 5, 129)]),
    max_tokens=st.sampled_from([None, 4_000, 48_000]),
    prefer=st.sampled_from(["area", "frames"]),
    short_clips=st.sampled_from(["drop", "image"]),
)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(CLIPS, GRIDS)
def test_every_clip_gets_a_bucket_that_it_fills_or_exactly_one_reason(
    clips: list[tuple[int, int, int]], grid: BucketGrid
) -> None:
    frames, height, width = (np.array(v) for v in zip(*clips, strict=True))
    got = grid.assign(frames, height, width)
    for i, (f, h, w) in enumerate(clips):
        fate = Fate(int(got.fate[i]))
        if got.bucket[i] < 0:
            assert fate in (Fate.TOO_SHORT, Fate.TOO_SMALL, Fate.TOO_ELONGATED, Fate.TOO_MANY_TOKENS)
            continue
        shape = grid.shapes[got.bucket[i]]
        assert not fate.dropped
        assert shape.frames <= f and (Fate.TRIMMED in fate) == (shape.frames < f)
        assert max(shape.height / h, shape.width / w) <= grid.max_upscale + 1e-12
        assert got.crop[i] + 1e-6 >= 0 and got.crop[i] <= grid.max_crop
        assert grid.max_tokens is None or grid.tokenizer.tokens(shape) <= grid.max_tokens
        if grid.short_clips == "drop":
            assert (shape.frames == 1) == (f == 1)


@settings(derandomize=True, max_examples=50, deadline=None)
@given(CLIPS, GRIDS)
def test_assignment_does_not_depend_on_the_company(clips: list[tuple[int, int, int]], grid: BucketGrid) -> None:
    frames, height, width = (np.array(v) for v in zip(*clips, strict=True))
    together = grid.assign(frames, height, width)
    alone = [grid.assign([f], [h], [w]) for f, h, w in clips]
    assert together.bucket.tolist() == [int(a.bucket[0]) for a in alone]
    assert together.fate.tolist() == [int(a.fate[0]) for a in alone]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frames": ()}, "frames must be positive and increasing"),
        ({"frames": (33, 17)}, "frames must be positive and increasing"),
        ({"frames": (1, 16)}, "must be 4k\\+1"),
        ({"areas": (0, 100)}, "areas must be positive"),
        ({"areas": (100,)}, "area 100 is too small"),
        ({"max_upscale": 0.5}, "max_upscale >= 1"),
        ({"max_crop": 1.0}, "max_crop < 1"),
        ({"max_tokens": 10}, "no bucket has at most 10 tokens"),
    ],
)
def test_impossible_grids_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketGrid(**arguments)  # type: ignore[arg-type]
