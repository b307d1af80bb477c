"""Training without averaged gradients: compressed Adams average momenta, and local steps average parameters."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from torch import nn

import compcoll.torch
from compcoll.codecs import Codec
from compcoll.torch.optimizers.adam import CompressedAdam
from compcoll.torch.optimizers.diloco import DiLoCo
from osu_like_bench.ddp import codec_of
from osu_like_bench.errors import UsageError

from .tasks import Task

COMPRESSED = ("onebit-adam", "zero-one-adam")
OPTIMIZERS = ("adamw", *COMPRESSED)
"""The optimizers of ``--optimizer``."""


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together, with a `UsageError`."""
    own, diloco = arguments.optimizer in COMPRESSED, arguments.diloco is not None
    other = [name for name, given in (("--dgc", arguments.dgc), ("--low-rank", arguments.low_rank)) if given]
    other += ["--elastic"] * arguments.elastic
    if arguments.sgd is not None and arguments.optimizer is not None:
        raise UsageError("--sgd and --optimizer name two optimizers: give one")
    if (own or diloco) and other:
        what = f"--optimizer {arguments.optimizer}" if own else "--diloco"
        raise UsageError(f"{what} averages no gradients: leave out {', '.join(other)}")
    if own and diloco:
        raise UsageError(f"--diloco goes with an optimizer that averages nothing itself, not {arguments.optimizer}")
    if arguments.gradient_codec is not None and not own:
        raise UsageError(f"--gradient-codec goes with --optimizer {' or '.join(COMPRESSED)}")
    outer = arguments.streaming != 1 or arguments.delay or arguments.outer_rate is not None
    if not diloco and (outer or arguments.sparse_loco is not None):
        raise UsageError("--streaming, --delay, --sparse-loco and --outer-rate go with --diloco H")


def compressed_adam(
    arguments: argparse.Namespace, model: nn.Module, task: Task, codec: Codec | None, exact_steps: int
) -> CompressedAdam:
    """Make a compressed Adam, by a codec or by one bit, whose first steps are exact and measure the variance."""
    options: dict[str, Any] = {
        "weight_decay": task.decay,
        "codec": "onebit" if codec is None else codec,
        "algorithm": arguments.algorithm,
        "gradient_codec": None if arguments.gradient_codec is None else codec_of(arguments.gradient_codec),
    }
    if arguments.optimizer == "onebit-adam":
        return compcoll.torch.OneBitAdam(model, task.rate, warmup=exact_steps, **options)
    return compcoll.torch.ZeroOneAdam(
        *(model, task.rate),
        freeze=exact_steps,
        variance_updates=max(exact_steps // 2, 1),
        local_steps=2 * exact_steps,
        local_limit=4,
        **options,
    )


def local_steps(
    arguments: argparse.Namespace, model: nn.Module, inner: torch.optim.Optimizer, codec: Codec | None
) -> DiLoCo:
    """Let each rank take steps of its own, and average parameters now and then."""
    when = {"every": arguments.diloco, "warmup": arguments.exact_steps}
    when |= {"fragments": arguments.streaming, "delay": arguments.delay}
    if arguments.sparse_loco is not None:
        if codec is not None:
            raise UsageError("--sparse-loco is a method of its own: no --codec goes with it")
        rate = 1.0 if arguments.outer_rate is None else arguments.outer_rate
        return compcoll.torch.SparseLoCo(model, inner, density=arguments.sparse_loco, lr=rate, **when)
    rate = 0.7 if arguments.outer_rate is None else arguments.outer_rate
    outer = partial(torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True)
    how = {"codec": codec, "feedback": not arguments.no_feedback, "algorithm": arguments.algorithm}
    return compcoll.torch.DiLoCo(model, inner, outer, **when, **how)
