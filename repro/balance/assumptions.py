"""What AdaptiveLoad (arXiv 2605.17923) leaves open, what is assumed instead, and why.

Fixed before anything was simulated with them. Verdicts use these values and no others; suite `sensitivity` varies the
ones that decide the outcome, and shows where the paper's figures would hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.balance.types import Protocols, Sync
from repro.corpus.mixes import TOKEN_BUDGET

MODEL = "wan-14b"
CORPUS = "wan-uniform"
WORST_CORPUS = "worst-case"
SYNC: Sync = "micro_batch"
PROTOCOL: Protocols = "as_published"
MEMORY_RISE = 1.227
M_MEM = round(MEMORY_RISE * TOKEN_BUDGET)
M_COMP = 1.0
M_COMP_LOOSE = 1.5
BASELINE = ("equal_token", "eager")
ADAPTIVELOAD = ("dual_constraint", "fused")
BUS_BANDWIDTH = 260e9
OVERLAP = 1.0


@dataclass(frozen=True)
class Assumption:
    """open: what the paper does not state. choice: what is assumed. reason: why. varied: where else it is tried."""

    open: str
    choice: str
    reason: str
    varied: str = ""


ASSUMPTIONS: tuple[Assumption, ...] = (
    Assumption(
        "bucket shapes and shares",
        f"{CORPUS}: Wan 2.1's 480p and 720p buckets, each equally often under {TOKEN_BUDGET:,}-token micro-batches",
        "the paper trains Wan 2.1 and states 48,000 tokens as its longest sequence; a uniform draw needs no more facts",
        "sensitivity: all named corpora",
    ),
    Assumption(
        "model size and GPU",
        f"{MODEL} on the device whose rows are used",
        "the paper's tokens/s are 457 TFLOP/s for a 14B model with full checkpointing, a Hopper-class GPU's rate; a "
        "1.3B model on any such GPU would be several times faster",
        "sensitivity: 1.3B and 14B",
    ),
    Assumption(
        "the baseline's token budget",
        f"{TOKEN_BUDGET:,} tokens a micro-batch",
        "the paper's longest trainable sequence under the baseline: the budget cannot be smaller, memory held no more",
    ),
    Assumption(
        "M_mem",
        f"(a) {MEMORY_RISE} x the baseline's budget, {M_MEM:,} tokens",
        "the paper's own rise of peak VRAM, since activations grow with tokens; (b), what measured memory says fits on "
        "the device, and the M_mem at which the paper's gain would hold stand in the notes",
        "sensitivity: 1 to 3 x the budget",
    ),
    Assumption(
        "M_comp and p",
        "p: power law fitted to this device's step times; M_comp: B * S^p of the longest bucket's baseline batch",
        "steps that meet it cannot be shorter than the baseline's: with a lower bound the others' batches shrink for "
        "nothing, with a higher one the law says that they outlast it",
        f"sensitivity: 0.5 to 3 x that; {M_COMP_LOOSE} x in notes, since one exponent overstates mid-length batches",
    ),
    Assumption(
        "whether ranks draw buckets independently",
        "each rank draws its own micro-batch",
        "the imbalance that the paper measures across ranks does not exist where all draw the same bucket",
        "every suite: equal_token_same_bucket, dual_constraint_same_bucket",
    ),
    Assumption(
        "micro-batches a step, and samples a step",
        "one micro-batch a step and rank, whatever samples a step that gives; rows and notes say how many",
        "the paper mentions no gradient accumulation and compares tokens/s, not steps; larger batches mean fewer "
        "optimizer steps an epoch, which tokens/s does not show",
        "throughput: 1, 4 and 8 with samples a step matched",
    ),
    Assumption(
        "where ranks meet",
        "in every micro-batch: full sharding, with its all-gathers in every layer",
        "the paper fits its cost on the live FSDP path",
        "throughput: both",
    ),
    Assumption(
        "communication",
        f"bf16 parameters gathered twice, fp32 gradients reduced, {BUS_BANDWIDTH / 1e9:.0f} GB/s bus bandwidth at any "
        "number of ranks, hidden under compute",
        "measured between two H200s on NVLink; a step of 48,000 tokens computes for several times longer than even a "
        "five times slower network would need, and full sharding prefetches the next layer",
    ),
    Assumption(
        "the worst sequence mix",
        f"{WORST_CORPUS}: images and the longest clips only, one baseline micro-batch in six a clip",
        "the two-bucket mix under which equal-token ranks wait longest for each other; floor: tokens/s of an epoch",
        "throughput: the slowest 5% of steps stand in the note",
    ),
    Assumption(
        "which AdaLN the imbalance and memory claims ran with",
        "eager on both sides, so that the batch policy alone is judged",
        "the paper credits them to batching; T1, T2 and T3 compare all of AdaptiveLoad with all of the baseline",
        "throughput, memory_use: both AdaLNs",
    ),
)
