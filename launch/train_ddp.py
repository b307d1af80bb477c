#!/usr/bin/env python3
"""Train a small model on all ranks, with gradients compressed or not, on data that needs no download.

    mpirun -n 4 python launch/train_ddp.py --codec zfp --rate 8                  # a conv net, scikit-learn's digits
    mpirun -n 4 python launch/train_ddp.py --task text --codec minmax --bits 4   # a small GPT, Python's own library
    mpirun -n 4 python launch/train_ddp.py --task cifar10 --data FOLDER          # CIFAR-10, binary version, unpacked
    mpirun -n 4 python launch/train_ddp.py --checkpoint FOLDER --resume          # go on where FOLDER's last one ends

With the same seed, ranks and options, two runs print the same losses, also when one of them was interrupted and
resumed. One line an epoch: loss (nats) and accuracy on what was not trained on, the median step, megabytes that a rank
sent a step, and the compression ratio of what it sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.errors import CompcollError
from compcoll.torch.account import Account
from osu_like_bench.cli import chosen_codec, codec_options
from osu_like_bench.errors import UsageError
from osu_like_bench.report import Progress
from osu_like_bench.training import checkpoint
from osu_like_bench.training.processes import Place, share_cores, start
from osu_like_bench.training.tasks import TASKS, judge, loss_of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    text, _, rest = (__doc__ or "").partition("\n\n")
    top = argparse.ArgumentParser(
        "train_ddp.py", description=text, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    task = top.add_argument_group("training")
    task.add_argument("--task", choices=list(TASKS), default="digits", help="what to learn (default: %(default)s)")
    task.add_argument("--data", type=Path, metavar="FOLDER", help="where the task's data are, if it needs any")
    task.add_argument("--epochs", type=int, help="passes over the data (default: the task's)")
    task.add_argument("--batch", type=int, help="examples of a rank in a step (default: the task's)")
    task.add_argument("--seed", type=int, default=0, help="of the model and of the examples' order (default: 0)")
    task.add_argument("--threads", type=int, help="threads of a rank (default: its share of the node's cores)")
    sums = top.add_argument_group("gradients")
    sums.add_argument("--backend", default="gloo", help="PyTorch's backend (default: %(default)s)")
    codec_options(sums)
    sums.add_argument(
        "--algorithm",
        default="ring",
        help="compcoll's, for compressed gradients (default: %(default)s; auto: what is fastest, compressed or not)",
    )
    sums.add_argument("--no-feedback", action="store_true", help="forget what compression loses")
    sums.add_argument("--exclude", nargs="*", metavar="NAME", help="exact parameters: kinds, and patterns of names")
    keep = top.add_argument_group("results")
    keep.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="write one at the end of each epoch")
    keep.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="and after so many steps")
    keep.add_argument("--stop-after", type=int, metavar="STEPS", help="end early, as if interrupted")
    keep.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    keep.add_argument("--json", type=Path, metavar="FILE", help="write what was printed as JSON")
    return top


class Training:
    """One run on this rank."""

    def __init__(self, arguments: argparse.Namespace, place: Place) -> None:
        self.arguments, self.place = arguments, place
        self.task = TASKS[arguments.task](arguments.data)
        self.batch = arguments.batch or self.task.batch
        self.epochs = arguments.epochs or self.task.epochs
        self.steps = self.task.steps(self.batch, place.size)
        if not self.steps:
            raise UsageError(f"{place.size} ranks with batches of {self.batch} need more examples than there are")
        torch.manual_seed(arguments.seed)
        self.model = DistributedDataParallel(self.task.model(), gradient_as_bucket_view=True)
        self.optimizer = self.task.optimizer(self.model.parameters())
        codec = chosen_codec(arguments)
        self.compression = None
        if codec is not None:
            exclude = {} if arguments.exclude is None else {"exclude": arguments.exclude}
            self.compression = compcoll.torch.compress(
                self.model, codec, algorithm=arguments.algorithm, feedback=not arguments.no_feedback, **exclude
            )
        self.settle_buckets()
        self.step = 0
        self.stopped = False
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def settle_buckets(self) -> None:
        """DDP orders its buckets anew after the first backward pass, and sums depend on the order: have that over, so
        that a resumed run's first step is like any other.
        """
        for _ in range(2):
            examples = self.task.train
            loss: Tensor = loss_of(self.model(examples.inputs[:1]), examples.targets[:1])
            loss.backward()
        if self.compression is not None:
            self.compression.reset()

    def run(self, progress: Progress) -> list[dict[str, Any]]:
        """Train, and print a line for each epoch."""
        progress.print(
            f"# {self.task.name}: {sum(p.numel() for p in self.model.parameters())} parameters, "
            f"{self.place.size} ranks, {self.arguments.backend}, "
            f"{self.compression or 'no compression'}",
            f"{'# Epoch':<9}{'Step':>7}{'Loss':>10}{'Accuracy':>11}{'ms a step':>11}{'MB a step':>11}{'Ratio':>8}",
        )
        lines = []
        for epoch in range(self.step // self.steps, self.epochs):
            seconds = self.train(epoch, progress)
            if self.stopped:
                break
            lines.append(self.line(epoch, seconds))
            progress.print(_text(lines[-1]))
            self.save()
        return lines

    def train(self, epoch: int, progress: Progress) -> list[float]:
        """The steps of an epoch that are still to be done; seconds of each."""
        if self.compression is not None:
            self.compression.account = Account()
        seconds = []
        self.model.train()
        batches = self.task.batches(
            self.batch,
            self.place.rank,
            self.place.size,
            seed=self.arguments.seed,
            epoch=epoch,
            first=self.step - epoch * self.steps,
        )
        for examples in batches:
            started = time.perf_counter()
            self.set_rate()
            self.optimizer.zero_grad()
            loss: Tensor = loss_of(self.model(examples.inputs), examples.targets)
            loss.backward()
            self.optimizer.step()
            seconds.append(time.perf_counter() - started)
            self.step += 1
            progress.step(f"epoch {epoch + 1}")
            if self.step == self.arguments.stop_after:
                self.stopped = True
                break
            if self.arguments.checkpoint_every and self.step % self.arguments.checkpoint_every == 0:
                self.save()
        return seconds

    def set_rate(self) -> None:
        """The learning rate rises over the first twentieth of all steps, and falls in a line to zero."""
        part = self.step / (self.steps * self.epochs)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * min((part + 1e-3) / 0.05, (1 - part) / 0.95)

    def line(self, epoch: int, seconds: list[float]) -> dict[str, Any]:
        """What an epoch has come to."""
        self.model.eval()
        sums = judge(self.model.module, self.task.test, self.place.rank, self.place.size)
        dist.all_reduce(sums)
        loss, right, count = sums.tolist()
        line = {
            "epoch": epoch + 1,
            "step": self.step,
            "loss": loss / count,
            "accuracy": right / count,
            "step_seconds": statistics.median(seconds) if seconds else None,
        }
        if self.compression is not None and seconds:
            account = self.compression.account
            line |= {
                "wire_nbytes": account.wire_nbytes / len(seconds),
                "ratio": account.ratio,
                "calls": dict(account.calls),
            }
        return line

    def save(self) -> None:
        """Write a checkpoint, if one is wanted."""
        if self.arguments.checkpoint is None:
            return
        common = {
            "step": self.step,
            "settings": self.settings(),
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        own = {} if self.compression is None else self.compression.state_dict()
        checkpoint.save(self.arguments.checkpoint, self.step, common, own)

    def resume(self) -> bool:
        """Go on from the last checkpoint; whether there was one."""
        found = checkpoint.load(self.arguments.checkpoint)
        if found is None:
            return False
        common, own = found
        if common["settings"] != self.settings():
            raise UsageError(f"the checkpoint is of {common['settings']}, but these are {self.settings()}")
        self.step = common["step"]
        self.model.module.load_state_dict(common["model"])
        self.optimizer.load_state_dict(common["optimizer"])
        if self.compression is not None and all(own):
            self.compression.load_state_dict(own)
        return True

    def settings(self) -> dict[str, Any]:
        """What must be the same for a run to be continued."""
        return {"task": self.task.name, "seed": self.arguments.seed, "examples a step": self.batch * self.place.size}


def _text(line: dict[str, Any]) -> str:
    step, wire, ratio = line["step_seconds"], line.get("wire_nbytes"), line.get("ratio")
    return (
        f"{line['epoch']:<9}{line['step']:>7}{line['loss']:>10.4f}{line['accuracy']:>11.4f}"
        + (f"{step * 1e3:>11.2f}" if step is not None else f"{'-':>11}")
        + (f"{wire / 1e6:>11.3f}" if wire is not None else f"{'-':>11}")
        + (f"{ratio:>8.2f}" if ratio is not None else f"{'-':>8}")
    )


def main() -> int:
    """Train; status 2 if the arguments were wrong."""
    top = parser()
    arguments = top.parse_args()
    place = start(arguments.backend)
    try:
        if arguments.resume and arguments.checkpoint is None:
            raise UsageError("--resume needs --checkpoint FOLDER")
        share_cores(place, arguments.threads)
        training = Training(arguments, place)
        if arguments.resume and training.resume() and place.rank == 0:
            print(f"# resumed after step {training.step}")
        progress = Progress(training.steps * training.epochs - training.step, quiet=place.rank != 0)
        try:
            lines = training.run(progress)
        finally:
            progress.close()
    except (UsageError, CompcollError) as error:
        if place.rank == 0:
            print(f"{top.prog}: error: {error}", file=sys.stderr)
        dist.destroy_process_group()
        return 2
    if arguments.json is not None and place.rank == 0:
        arguments.json.write_text(json.dumps({"settings": training.settings(), "epochs": lines}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
