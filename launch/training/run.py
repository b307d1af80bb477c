"""A training run on the ranks of a process group: what `train_ddp.py` does."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.codecs import Codec
from compcoll.sparse import Sparsifier, VarianceFeedback, warmup_density
from compcoll.tools.arguments import chosen_codec
from compcoll.torch.optimizers.adam import CompressedAdam
from compcoll.torch.optimizers.diloco import DiLoCo
from compcoll.torch.training_stats import TrainingStats
from osu_like_bench import UsageError
from osu_like_bench.report import Column, Progress, Table
from osu_like_bench.training.processes import Place

from . import checkpoint
from .muon import MuonAndAdamW
from .tasks import TASKS, Examples, Task, judge, loss_of, share

COMPRESSED = ("onebit-adam", "zero-one-adam")
OPTIMIZERS = ("adamw", "muon", *COMPRESSED)
"""The optimizers of ``--optimizer``."""
_EXAMPLES = "examples a step"
LOW_RANK = {"acpsgd": compcoll.torch.ACPSGD, "powersgd": compcoll.torch.PowerSGD}


def _scaled(name: str, scale: float) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda line: None if line.get(name) is None else scale * line[name]


TABLE = Table(
    Column("# Epoch", "epoch", -9),
    Column("Step", "step", 7),
    Column("Loss", "loss", 10, ".4f"),
    Column("Accuracy", "accuracy", 11, ".4f"),
    Column("ms a step", _scaled("step_seconds", 1e3), 11, ".2f"),
    Column("MB a step", _scaled("wire_nbytes", 1e-6), 11, ".3f"),
    Column("Ratio", "ratio", 8, ".2f"),
)


class Training:
    """One run on this rank.

    Parameters
    ----------
    arguments : argparse.Namespace
        Of `train_ddp.py`.
    place : Place
        This rank, as it was launched.

    Attributes
    ----------
    examples, batch : int
        Examples of a step, of all ranks and of this one.
    """

    def __init__(self, arguments: argparse.Namespace, place: Place) -> None:
        self.arguments, self.place = arguments, place
        self.task = TASKS[arguments.task](arguments.data)
        self.found = checkpoint.load(arguments.checkpoint) if arguments.resume else None
        self.examples = (arguments.batch or self.task.batch) * place.size
        if self.found is not None:
            self.examples = self.found[0]["settings"][_EXAMPLES]
        self.batch = share(self.examples, place.rank, place.size)
        self.epochs = arguments.epochs or self.task.epochs
        self.steps = self.task.steps(self.examples)
        if not self.steps or self.examples < place.size:
            raise UsageError(
                f"{place.size} ranks with {self.examples} examples a step: there must be one for each rank, and there "
                f"are {len(self.task.train.inputs)}"
            )
        self.last = arguments.steps or self.steps * self.epochs
        torch.manual_seed(arguments.seed)
        self.module = self.task.model()
        self.parameters = sum(parameter.numel() for parameter in self.module.parameters())
        check(arguments)
        self.optimizer: Any = self.uncompressed_optimizer()
        self.compression: Any = None
        self.codec = chosen_codec(arguments)
        self.by_samples = isinstance(self.codec, Sparsifier) and issubclass(self.codec.state, VarianceFeedback)
        if arguments.algorithm is None and not self.own_gradients:
            sparse = arguments.dgc is not None or isinstance(self.codec, Sparsifier)
            arguments.algorithm = "sparse_ring" if sparse else "ring"
        self.model = self.connect()
        self.step = 0
        self.first = 0
        self.stopped = False
        self.lines: list[dict[str, Any]] = []
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    @property
    def standing(self) -> tuple[int, int]:
        """The number of this rank, and of all ranks."""
        return self.place.rank, self.place.size

    @property
    def own_gradients(self) -> bool:
        """Whether each rank steps by its own gradients, and something else is averaged."""
        arguments = self.arguments
        return arguments.optimizer in COMPRESSED or arguments.diloco is not None

    @property
    def weight(self) -> float:
        """Factor of this rank's loss, with which the mean over the ranks is the mean over all examples of a step."""
        return 1.0 if self.own_gradients else self.batch * self.place.size / self.examples

    def uncompressed_optimizer(self) -> torch.optim.Optimizer | MuonAndAdamW:
        """Make the optimizer that the arguments name, or AdamW in place of a compressed Adam."""
        arguments, parameters = self.arguments, self.module.parameters()
        if arguments.sgd is not None:
            momentum = 0.9 if arguments.momentum is None else arguments.momentum
            return torch.optim.SGD(parameters, lr=arguments.sgd, momentum=momentum)
        if arguments.optimizer == "muon":
            return MuonAndAdamW(self.module, self.task.rate, self.task.decay)
        if arguments.optimizer is not None:
            return torch.optim.AdamW(parameters, lr=self.task.rate, weight_decay=self.task.decay)
        return self.task.optimizer(parameters)

    @property
    def library(self) -> str:
        """What carries gradients between ranks."""
        return str(self.arguments.backend)

    def connect(self) -> nn.Module:
        """Wrap the model such that back-propagation averages gradients, with the chosen compression."""
        model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        arguments, codec = self.arguments, self.codec
        exclude = {} if arguments.exclude is None else {"exclude": arguments.exclude}
        common = {"algorithm": arguments.algorithm, "feedback": not arguments.no_feedback, **exclude}
        if arguments.diloco is not None:
            self.compression = local_steps(arguments, model, self.optimizer, codec)
            return model
        if arguments.optimizer in COMPRESSED:
            exact = arguments.exact_steps or max(self.last // 5, 1)
            self.compression = compressed_adam(arguments, model, self.task, codec, exact)
            self.optimizer = self.compression
            return model
        if arguments.dgc is not None:
            if codec is not None or arguments.low_rank is not None:
                raise UsageError("--dgc is a method of its own: neither --codec nor --low-rank goes with it")
            options = {"clip": arguments.clip, "algorithm": arguments.algorithm, **exclude}
            self.compression = compcoll.torch.DGC(model, self.optimizer, arguments.dgc, **options)
        elif arguments.low_rank is not None:
            options = {"exact_steps": arguments.exact_steps, "reuse": not arguments.no_reuse, "seed": arguments.seed}
            self.compression = LOW_RANK[arguments.low_rank](model, arguments.rank, codec=codec, **options, **common)
        elif codec is not None:
            self.compression = compcoll.torch.compress(model, codec, **common)
        if self.compression is None:
            self.settle_buckets(model)
        return model

    def average(self) -> None:
        """Average gradients after back-propagation, if that did not."""

    def total(self, sums: Tensor) -> Tensor:
        """Add up a tensor over the ranks."""
        dist.all_reduce(sums)
        return sums

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def settle_buckets(self, model: nn.Module) -> None:
        """Run two backward passes, after which DDP keeps the order of its buckets.

        Sums depend on that order, so a resumed run's first step would differ otherwise. Compressions keep the order in
        their states.
        """
        for _ in range(2):
            self.back_propagate(model, Examples(*(rows[: self.batch] for rows in self.task.train)))

    def back_propagate(self, model: nn.Module, examples: Examples) -> None:
        """Compute the gradients of this rank's examples."""
        weight = self.weight

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return weight * loss_of(logits, targets)

        if self.by_samples:
            self.compression.backward(loss, *examples, micro_batches=self.arguments.micro_batches)
        else:
            loss(model(examples.inputs), examples.targets).backward()

    def run(self, progress: Progress) -> None:
        """Train, and print a line for each epoch."""
        progress.print(
            f"# {self.task.name}: {self.parameters} parameters, "
            f"{self.place.size} ranks, {self.library}, "
            f"{self.compression or 'no compression'}",
            TABLE.head(),
        )
        self.first = self.step // self.steps
        self.go_on(progress)

    def go_on(self, progress: Progress) -> None:
        """Train the epochs that have no line yet."""
        for epoch in range(self.first + len(self.lines), -(-self.last // self.steps)):
            seconds = self.train(epoch, progress)
            if self.stopped:
                break
            if self.step == self.last and isinstance(self.compression, DiLoCo):
                self.compression.synchronize()
            self.lines.append(self.line(epoch, seconds))
            progress.print(TABLE.row(self.lines[-1]))
            self.save()

    def train(self, epoch: int, progress: Progress) -> list[float]:
        """Train the remaining steps of an epoch, and return the seconds of each."""
        if self.compression is not None:
            self.compression.stats = TrainingStats()
        seconds = []
        self.model.train()
        order = {"seed": self.arguments.seed, "epoch": epoch, "first": self.step - epoch * self.steps}
        for examples in self.task.batches(self.examples, self.place.rank, self.place.size, **order):
            started = time.perf_counter()
            self.set_rate()
            self.optimizer.zero_grad()
            self.back_propagate(self.model, examples)
            self.average()
            self.optimizer.step()
            self.step += 1
            self.finished()
            seconds.append(time.perf_counter() - started)
            progress.step(f"epoch {epoch + 1}")
            self.stopped = self.step == self.arguments.stop_after
            if self.stopped or self.step == self.last:
                break
            if self.arguments.checkpoint_every and self.step % self.arguments.checkpoint_every == 0:
                self.save()
        return seconds

    def finished(self) -> None:
        """Run after each step; `ElasticTraining` keeps a copy of the state."""

    def set_rate(self) -> None:
        """Set the learning rate, which rises over the first twentieth of all steps and then falls linearly to zero,
        and DGC's density.
        """
        if self.arguments.dgc is not None:
            warmup, stages = self.arguments.warmup * self.steps, 5
            stage = int((stages - 1) * self.step / warmup) if self.step < warmup else stages
            self.compression.density = warmup_density(stage, self.arguments.dgc, stages)
        part = self.step / self.last
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * min((part + 1e-3) / 0.05, (1 - part) / 0.95)

    def line(self, epoch: int, seconds: list[float]) -> dict[str, Any]:
        """Return an epoch's line: loss, accuracy, the median step, and what a step sent."""
        self.model.eval()
        loss, right, count = self.total(judge(self.module, self.task.test, *self.standing)).tolist()
        line = {
            "epoch": epoch + 1,
            "step": self.step,
            "loss": loss / count,
            "accuracy": right / count,
            "step_seconds": statistics.median(seconds) if seconds else None,
        }
        if self.compression is not None and seconds:
            stats = self.compression.stats
            line |= {"wire_nbytes": stats.wire_nbytes / len(seconds), "ratio": stats.ratio}
            line["calls"] = dict(stats.calls)
            if stats.steps:
                line["peak_step_nbytes"] = stats.peak_step_nbytes
        return line

    def save(self) -> None:
        """Write a checkpoint, if the arguments ask for it."""
        if self.arguments.checkpoint is None:
            return
        common = {
            "step": self.step,
            "settings": self.settings(),
            "model": self.module.state_dict(),
            "optimizer": {} if self.own_gradients else self.optimizer.state_dict(),
        }
        own = {} if self.compression is None else self.compression.state_dict()
        checkpoint.save(self.arguments.checkpoint, self.step, common, own, self.standing, self.barrier)

    def resume(self) -> bool:
        """Go on from the last checkpoint, and return whether there was one.

        If the number of ranks has changed, they share the examples of a step anew, so that steps are the same.
        """
        if self.found is None:
            return False
        common, own = self.found
        self.found = None
        if common["settings"] != self.settings():
            raise UsageError(f"the checkpoint is of {common['settings']}, but these are {self.settings()}")
        self.step = common["step"]
        self.module.load_state_dict(common["model"])
        if not self.own_gradients:
            self.optimizer.load_state_dict(common["optimizer"])
        if self.compression is not None and all(own):
            self.compression.load_state_dict(own)
        return True

    def record(self) -> dict[str, Any]:
        """Return what ``--json`` writes."""
        exact = getattr(self.compression, "exact", {})
        held = sum(parameter.numel() for name, parameter in self.module.named_parameters() if exact.get(name))
        about = {"settings": self.settings(), "parameters": self.parameters, "exact_parameters": held}
        return about | {"epochs": self.lines}

    def settings(self) -> dict[str, Any]:
        """Return what must be the same for a run to be continued."""
        return {"task": self.task.name, "seed": self.arguments.seed, _EXAMPLES: self.examples}


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
    if diloco and arguments.optimizer == "muon":
        raise UsageError("--diloco goes with one optimizer of all parameters, not --optimizer muon, which is two")
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
        "gradient_codec": arguments.gradient_codec,
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
