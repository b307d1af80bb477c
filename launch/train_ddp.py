#!/usr/bin/env python3
"""Train a small model on all ranks, with or without compression of gradients. Most tasks need no download.

    mpirun -n 4 python launch/train_ddp.py --codec int8                          # a conv net, scikit-learn's digits
    torchrun --nproc-per-node 4 launch/train_ddp.py --codec int8                 # the same without MPI
    mpirun -n 4 python launch/train_ddp.py --task text --codec minmax:bits=4     # a small GPT, Python's own library
    mpirun -n 4 python launch/train_ddp.py --low-rank acpsgd --rank 4            # low-rank factors
    mpirun -n 4 python launch/train_ddp.py --dgc 0.001 --warmup 4
    mpirun -n 4 python launch/train_ddp.py --task text --optimizer onebit-adam   # AdamW's momentum in one bit
    mpirun -n 4 python launch/train_ddp.py --task text --diloco 50 --codec minmax:bits=4   # local steps
    mpirun -n 4 python launch/train_ddp.py --codec variance --alpha 1.5
    mpirun -n 4 python launch/train_ddp.py --task cifar10 --data FOLDER          # CIFAR-10, binary version, unpacked
    mpirun -n 4 python launch/train_ddp.py --checkpoint FOLDER --resume          # continue from the last checkpoint
    mpirun --with-ft ulfm -n 4 python launch/train_ddp.py --elastic              # continue without ranks that die

With the same seed, ranks and options, two runs print the same losses, even if one was interrupted and resumed. The
program prints one line per epoch: loss (nats) and accuracy on the test data, the median step's milliseconds, and the
megabytes that a rank sends per step with their compression ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
from training.elastic import ElasticTraining
from training.run import LOW_RANK, OPTIMIZERS, Training
from training.tasks import TASKS

from compcoll.codecs.registry import list_codecs
from compcoll.errors import CompcollError
from compcoll.tools.arguments import add_codec_options
from osu_like_bench import UsageError
from osu_like_bench.report import Progress
from osu_like_bench.training.processes import give_up, leave, place, share_cores, start


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    text, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("train_ddp.py", description=text, epilog=rest, formatter_class=raw)
    add = top.add_argument_group("training").add_argument
    add("--task", choices=list(TASKS), default="digits", help="what to learn (default: %(default)s)")
    add("--data", type=Path, metavar="FOLDER", help="the task's data, if it needs any")
    add("--epochs", type=int, help="passes over the data (default: the task's)")
    add("--steps", type=int, help="number of steps, at whose end the learning rate is zero")
    add("--sgd", type=float, metavar="RATE", help="learn by SGD with momentum instead")
    add("--momentum", type=float, help="of --sgd (default: 0.9)")
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        help="learn by AdamW, by Muon, or by an optimizer that compresses its momentum",
    )
    add("--batch", type=int, help="examples of a rank in a step (default: the task's; --resume: as before)")
    add("--seed", type=int, default=0, help="of the model and of the examples' order (default: 0)")
    add("--threads", type=int, help="threads of a rank (default: its share of the node's cores)")
    sums = top.add_argument_group("gradients")
    add = sums.add_argument
    elastic = "continue when ranks die (mpirun --with-ft ulfm): average over MPI, after back-propagation"
    add("--elastic", action="store_true", help=elastic)
    add("--backend", default="gloo", help="PyTorch's backend (default: %(default)s)")
    add_codec_options(sums, f"what to compress with: {', '.join(list_codecs())}")
    algorithm = "for compressed gradients (default: ring, or sparse_ring; auto: the fastest, compressed or not)"
    add("--algorithm", help=algorithm)
    add("--dgc", type=float, metavar="DENSITY", help="Deep Gradient Compression, down to this density")
    warmup = "dgc: epochs in which the density falls, in four steps (default: 0; the paper: 4)"
    add("--warmup", type=float, default=0, metavar="EPOCHS", help=warmup)
    add("--clip", type=float, metavar="NORM", help="dgc: largest norm of each parameter's gradient")
    micro = "variance, hybrid: gradients of N parts of a batch instead of single samples"
    add("--micro-batches", type=int, metavar="N", help=micro)
    add("--low-rank", choices=list(LOW_RANK), help="send low-rank factors; a codec compresses those")
    add("--rank", type=int, default=4, help="columns of the factors (default: %(default)s)")
    exact = (
        "first steps that are not compressed: without factors, local steps, or a compressed Adam's constant variance "
        "(default for Adam: a fifth of all)"
    )
    add("--exact-steps", type=int, default=0, metavar="STEPS", help=exact)
    own = "the codec of a compressed Adam's gradients, such as qsgd:bits=4"
    add("--gradient-codec", metavar="NAME[:OPTION=VALUE,…]", help=own)
    add("--diloco", type=int, metavar="H", help="local steps: average every H steps; a codec compresses that average")
    add("--streaming", type=int, default=1, metavar="F", help="diloco: average F fragments of the model in turn")
    add("--delay", type=int, default=0, metavar="STEPS", help="diloco: steps that an average may take")
    add("--outer-rate", type=float, metavar="RATE", help="diloco: rate of outer steps (default: 0.7, sparse: 1)")
    add("--sparse-loco", type=float, metavar="DENSITY", help="diloco: send the largest elements")
    add("--no-reuse", action="store_true", help="start each step from random factors")
    add("--no-feedback", action="store_true", help="drop the residuals of compression")
    add("--exclude", nargs="*", metavar="NAME", help="parameters not to compress: kinds, and patterns of names")
    add = top.add_argument_group("results").add_argument
    add("--checkpoint", type=Path, metavar="FOLDER", help="write a checkpoint there at the end of each epoch")
    add("--checkpoint-every", type=int, metavar="STEPS", help="also write one every STEPS steps")
    add("--stop-after", type=int, metavar="STEPS", help="end early, as if interrupted")
    add("--resume", action="store_true", help="continue from the last checkpoint, if there is one")
    add("--gradients", type=Path, metavar="FILE.npy", help="write the last step's mean gradients")
    add("--json", type=Path, metavar="FILE", help="write the printed results as JSON")
    return top


def main() -> int:
    """Train; return the exit status, which is 2 if the arguments are wrong."""
    top = parser()
    arguments = top.parse_args()
    standing = place() if arguments.elastic else start(arguments.backend)
    try:
        if arguments.resume and arguments.checkpoint is None:
            raise UsageError("--resume needs --checkpoint FOLDER")
        if arguments.momentum is not None and (arguments.sgd is None or not 0 <= arguments.momentum < 1):
            raise UsageError(f"--momentum {arguments.momentum:g}: it goes with --sgd RATE, from 0 to below 1")
        share_cores(standing, arguments.threads)
        training = ElasticTraining(arguments, standing) if arguments.elastic else Training(arguments, standing)
        if arguments.resume and training.resume() and standing.rank == 0:
            print(f"# resumed after step {training.step}")
        with Progress(training.last - training.step, quiet=standing.rank != 0) as progress:
            training.run(progress)
    except (UsageError, CompcollError) as error:
        if standing.rank == 0:
            print(f"{top.prog}: error: {error}", file=sys.stderr)
        if arguments.elastic:
            return 2
        give_up(2)
    if arguments.gradients is not None and training.standing[0] == 0:
        gradients = [p.grad.flatten() for p in training.module.parameters() if p.grad is not None]
        np.save(arguments.gradients, torch.cat(gradients).numpy())
    if arguments.json is not None and training.standing[0] == 0:
        arguments.json.write_text(json.dumps(training.record(), indent=1) + "\n")
    if training.standing[1] < standing.size:
        # Open MPI 5.0's MPI_Finalize sometimes waits for ranks that have died.
        sys.stdout.flush()
        os._exit(0)
    if not arguments.elastic:
        leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
