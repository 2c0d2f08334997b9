"""Published statistics of video corpora, typed in as data. Nothing here is measured by this project.

Each constant names its publication; where a figure was read off a plot, it says so.
"""

from __future__ import annotations

OPEN_SORA_1_1_FRAMES_RANGE = (47.7, 510.6)
"""Frames at the outer edges of the histogram below (100 bins of equal width).

Open-Sora 1.1 (hpcaitech/Open-Sora, docs/report_02.md), clip lengths of its pre-training data, truncated to 48..511
frames; counts read off the published histogram, hence approximate.
"""
# fmt: off
OPEN_SORA_1_1_FRAMES_COUNTS = (
    192_446, 302_158, 237_410, 492_805, 354_316, 633_093, 314_748, 377_697, 257_194, 293_165, 372_302, 253_597,
    266_187, 158_273, 239_208, 532_374, 131_294, 196_043, 145_683, 145_683, 151_079, 138_489, 122_302, 107_913,
    111_510, 97_122, 122_302, 79_136, 93_525, 97_122, 57_553, 111_510, 95_323, 61_151, 82_733, 57_553, 62_949,
    53_956, 57_553, 59_352, 57_553, 178_057, 44_964, 95_323, 32_374, 52_158, 50_359, 34_172, 44_964, 26_978,
    44_964, 48_561, 30_575, 39_568, 53_956, 30_575, 26_978, 35_971, 25_179, 30_575, 35_971, 17_985, 30_575,
    17_985, 30_575, 28_776, 17_985, 97_122, 19_784, 21_582, 21_582, 21_582, 26_978, 21_582, 17_985, 16_187,
    28_776, 16_187, 17_985, 19_784, 14_388, 17_985, 16_187, 12_589, 17_985, 14_388, 86_330, 12_589, 14_388,
    14_388, 14_388, 12_589, 41_366, 34_172, 8_992, 14_388, 14_388, 12_589, 12_589, 8_992,
)
# fmt: on
OPEN_SORA_1_1_VIDEOS_TO_IMAGES = (9.7, 2.6)
"""Millions of videos and of images in the same pre-training data (docs/report_02.md)."""

OPEN_SORA_1_2_SECONDS = ((2.0, 5.0, 43.1), (5.0, 10.0, 27.2), (10.0, 15.1, 21.9), (15.1, 16.0, 7.8))
"""(from, to, % of clips) of Open-Sora 1.2, stage 3, about two million clips (hpcaitech/Open-Sora, docs/report_03.md).

Published: under 5 s, 5 to 10, 10 to 15.1, longer. The outer ends are ours: 2 s and 16 s are the shortest and the
longest clips that the report says are trained on.
"""
OPEN_SORA_1_2_RESOLUTION = ((480, 854, 1.0), (720, 1280, 71.1), (1080, 1920, 27.9))
"""(height, width, % of clips) of the same stage: below 720p, 720p to 1080p, above, each as one common size."""

KOALA_36M_MEAN_SECONDS = 17.2
"""Mean clip length of Koala-36M, all 720p (arXiv 2410.08260)."""
PROBED_CLIPS_SIGMA = 0.75
"""Spread of log(seconds) over 212 sample clips that Koala-36M, Panda-70M, Vript and WebVid-10M publish.

Their 5th, 50th and 95th percentiles are 2.5, 8.6 and 29 s: ln(29 / 8.6) / 1.645 = 0.74, ln(8.6 / 2.5) / 1.645 = 0.75.
"""

KNAPFORMER_32 = (
    (8, 4, 256, 1),
    (2, 5, 512, 1),
    (2, 5, 1024, 1),
    (4, 1, 2048, 1),
    (1, 10, 256, 4),
    (3, 1, 512, 4),
    (8, 2, 256, 85),
    (4, 1, 512, 85),
)
"""(GPUs, samples a GPU, square side in pixels, frames) of KnapFormer's simulated mix for 32 GPUs (arXiv 2508.06001)."""

OPEN_SORA_2_0_IMAGES = ((256, 45), (768, 13), (1024, 7))
"""(square side in pixels, batch size) of Open-Sora 2.0's image buckets, stage 1, tuned by hand on H200s
(hpcaitech/Open-Sora, docs/train.md)."""
