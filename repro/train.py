"""The reference trainer.

    torchrun --nproc-per-node 8 -m repro.train --model wan-1.3b --data shards/ --steps 1000 --out runs/first
    python -m repro.train --model tiny --corpus tiny --m-mem 256 --steps 20 --out runs/tiny     # one process, any CPU

The same command goes on where an interrupted run stopped; Ctrl-C, SIGTERM or SIGUSR1 stops it after the step under
way, saved; a second one at once.
Exit codes of a rank: 0 done or stopped so, 1 a loss was not finite, memory ran out, a checkpoint or the log could not
be written or other ranks were lost, 2 nothing to train with, 130 interrupted before training began or twice. One line
says why; --debug shows more.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, cast

import torch
import typer

from repro.balance.types import Protocols, Sync, Weighting
from repro.corpus import mixes
from repro.names import unknown
from repro.wan import batching
from repro.wan.batching import MODES
from repro.wan.config import WanConfig
from repro.wan.engine import NonFiniteLoss, OnNonFinite, OptimizerSettings
from repro.wan.lost import RanksLost, meeting, say_last
from repro.wan.objective import Draw, FlowMatching
from repro.wan.parallel import PATIENCE_SECONDS, Checkpointing, Compute, Parallelism, Stranded, join, leave
from repro.wan.run import Batching, Run, prepared
from repro.wan.samples import SampleSource
from repro.wan.shards import ShardedSamples
from repro.wan.synthetic import SyntheticSamples
from repro.wan.trainer import Length, StopSignals

ROOT = Path(__file__).resolve().parents[1]
GOES_ON, GOES_BACK = "the same command goes on", "the same command begins again where this one did"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(context_settings={"max_content_width": 100})
def main(
    model: Annotated[str, typer.Option(help="tiny, wan-1.3b or wan-14b")] = "wan-1.3b",
    layers: Annotated[int | None, typer.Option(min=1, max=1000, help="another depth than the model's")] = None,
    init: Annotated[Path | None, typer.Option(help="folder of Diffusers weights; else random")] = None,
    data: Annotated[Path | None, typer.Option(help="folder of samples by repro.wan.make_corpus")] = None,
    corpus: Annotated[str, typer.Option(help="mix of made-up samples")] = ("wan-uniform"),
    samples: Annotated[int, typer.Option(min=1, max=10**8, help="of the made-up corpus")] = 100_000,
    mode: Annotated[str, typer.Option(help="the paper's baseline, adaptiveload; balanced")] = "balanced",
    policy: Annotated[str | None, typer.Option(help="batch policy, if not the mode's")] = None,
    adaln: Annotated[str | None, typer.Option(help="AdaLN implementation, if not the mode's")] = None,
    m_mem: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="tokens a micro-batch; else calibrated, 48,000")
    ] = None,
    calibrate: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="measure shapes first; fit costs and limits")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="equal-token's, M_comp follows; else M_mem")
    ] = None,
    m_comp: Annotated[float | None, typer.Option(min=1, help="of the dual constraint; else from costs")] = None,
    p: Annotated[float | None, typer.Option(min=0.1, help="exponent of the dual constraint; else from costs")] = None,
    costs: Annotated[str | None, typer.Option(help="device whose step times to use, if not this one's")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, max=4096, help="a step and rank; above 1: matched")] = 1,
    protocol: Annotated[str | None, typer.Option(help="as_published (the paper's) or matched; else the mode's")] = None,
    weighting: Annotated[str, typer.Option(help="sample (exact), batch_mean")] = "sample",
    sync: Annotated[str, typer.Option(help="micro_batch (sharded) or step: ranks meet")] = "micro_batch",
    checkpointing: Annotated[str, typer.Option(help="none, selective, full")] = "full",
    compile_blocks: Annotated[bool, typer.Option("--compile", help="each transformer block")] = False,
    compute: Annotated[str | None, typer.Option(help="bf16 or master (fp32); else bf16 on GPUs")] = None,
    lr: Annotated[float, typer.Option(help="after warm-up")] = 1e-4,
    warmup: Annotated[int, typer.Option(min=0, help="steps of linear warm-up")] = 100,
    clip: Annotated[float, typer.Option(help="norm of the gradient")] = 1.0,
    weight_decay: Annotated[float, typer.Option(min=0, help="of AdamW")] = 0.01,
    on_nonfinite: Annotated[str, typer.Option(help="loss or gradient: stop, or skip the update")] = "stop",
    draw: Annotated[str, typer.Option(help="of noise levels: logit_normal or uniform")] = "logit_normal",
    shift: Annotated[float, typer.Option(help="of noise levels towards noise")] = 3.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of weights, order, noise")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps of the whole run")] = 1000,
    save_every: Annotated[int, typer.Option(min=0, help="steps between checkpoints; 0 for none")] = 500,
    keep: Annotated[int, typer.Option(min=1, help="checkpoints")] = 2,
    out: Annotated[Path, typer.Option(help="folder of the run: checkpoints, steps.csv")] = Path("runs/wan"),
    log_every: Annotated[int, typer.Option(min=1, help="steps between lines without a terminal")] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write its event files too")] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="refuse to run on any other number")] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=10**6, help="seconds to wait for other ranks")
    ] = PATIENCE_SECONDS,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; else GPUs where there are any")] = None,
    results: Annotated[Path, typer.Option(help="folder of results", show_default=False)] = ROOT / "results",
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
) -> None:
    """Train Wan 2.1 on clips of mixed lengths, under any batch policy, on any number of ranks.

    Exit codes: 0 done, or stopped by Ctrl-C, SIGTERM, SIGUSR1, saved, 1 a loss not finite, memory or disk full, ranks
    lost, 2 nothing to train with, 130 interrupted before it trained, or twice.

    \b
    torchrun --nproc-per-node 8 -m repro.train --model wan-1.3b --data shards/ --out runs/first
    torchrun --nproc-per-node 8 -m repro.train --mode baseline --adaln fused --sync step
    python -m repro.train --model tiny --corpus tiny --m-mem 256 --steps 20 --out runs/tiny
    """  # noqa: D301 - click reads the backspace: keep these lines
    running, code = False, 0
    try:
        if mode not in MODES:
            raise ValueError(unknown("mode", mode, MODES))
        run = Run(
            config=WanConfig.preset(model, layers),
            adaln=MODES[mode].adaln if adaln is None else adaln,
            source=_source(data, corpus, samples, seed),
            flow=FlowMatching(cast(Draw, draw), shift, seed=seed),
            batching=Batching(
                MODES[mode].policy if policy is None else policy,
                m_mem=m_mem,
                token_budget=token_budget,
                m_comp=m_comp,
                p=p,
                micro_batches=micro_batches,
                protocol=MODES[mode].protocol_of(micro_batches) if protocol is None else cast(Protocols, protocol),
                weighting=cast(Weighting, weighting),
                calibrate=calibrate,
                costs=costs,
                results=results,
            ),
            parallelism=Parallelism(
                cast(Sync, sync),
                cast(Checkpointing, checkpointing),
                compile_blocks,
                cast(Compute, compute or ("bf16" if device != "cpu" and torch.cuda.is_available() else "master")),
            ),
            optimizer=OptimizerSettings(
                lr=lr, weight_decay=weight_decay, warmup=warmup, clip=clip, on_nonfinite=cast(OnNonFinite, on_nonfinite)
            ),
            length=Length(steps, save_every),
            out=out,
            seed=seed,
            init=init,
            keep=keep,
            ranks=ranks,
            log_every=log_every,
            tensorboard=tensorboard,
        )
        world = join(device, patience=timeout)
        with meeting(world), prepared(run, world) as (trainer, log):
            running = True
            with StopSignals(_finishing(save_every > 0)) as signals:
                stopped = trainer.run(log, lambda: signals.asked is not None)
        if log is not None:
            log.say([log.summary()])
        if stopped and log is not None:
            how = f"saved; {GOES_ON}" if save_every else f"not saved; {GOES_BACK}"
            log.say([f"stopped by {signals.asked or 'another rank'} after {trainer.step} steps, {how}"])
    except Exception as error:
        code, running = _told(error, running, debug)
    except KeyboardInterrupt:
        code = 130
        typer.echo(f"interrupted; {GOES_ON if save_every else GOES_BACK}", err=True)
    if not (running and code):
        leave()
    elif _among_others():
        # Others may be waiting for this rank: neither it nor what it runs at exit may wait for them.
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)


def _finishing(saved: bool) -> str:
    """What happens before a run stops, for who sent the signal."""
    patience = ", if there is time: torchrun kills its ranks after 30 s" if _among_others() else ""
    return f"the step under way is finished{' and saved' if saved else ''} first{patience}"


def _among_others() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def _told(error: Exception, running: bool, debug: bool) -> tuple[int, bool]:
    """Say what went wrong: exit code, and whether other ranks, amid a pass, may be waiting for this one."""
    what = ""
    if isinstance(error, NonFiniteLoss):  # on all ranks alike
        code, amid = 1, False
    elif isinstance(error, Stranded):
        code, amid = 2, True
    elif isinstance(error, RanksLost):
        code, amid = 1, True
    elif isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error):
        code, amid, what = 1, True, "out of memory, give a smaller --m-mem: "
    elif isinstance(error, ValueError):
        code, amid = 2, running
    elif isinstance(error, OSError):
        code, amid = (1, True) if running else (2, False)
    else:  # a defect, of which others must hear too
        if not _among_others():
            raise error
        code, amid, debug = 1, True, True
    told = what + " ".join(str(error).split())
    if debug:
        traceback.print_exception(error)
    if amid and _among_others() and not isinstance(error, RanksLost):
        say_last(int(os.environ["RANK"]), told)
    if amid or int(os.environ.get("LOCAL_RANK", 0)) == 0:  # else once on each machine
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        typer.echo(f"error: {rank}{told}", err=True)
    return code, amid


def _source(data: Path | None, corpus: str, samples: int, seed: int) -> SampleSource:
    """Encoded samples on disk, or made-up ones. Raises ValueError for an unknown corpus, and as `ShardedSamples`."""
    if data is not None:
        return ShardedSamples(data)
    if corpus == "tiny":
        return SyntheticSamples(batching.tiny_corpus(samples), seed)
    if corpus not in mixes.names():
        raise ValueError(unknown("corpus", corpus, ["tiny", *mixes.names()]))
    return SyntheticSamples(mixes.named(corpus, samples), seed)


if __name__ == "__main__":
    app(prog_name="python -m repro.train")
