"""Measure training with local steps and with a compressed Adam over slow links, compared with DDP on gloo.

    sudo launch/netlab up --hosts 4 --rate 100mbit
    sudo launch/netlab run -n 4 -- python -m osu_like_bench.pages.optimizer_speed   # 4 hosts, 25 million parameters
    sudo launch/netlab run -n 4 -- python -m osu_like_bench.pages.optimizer_speed --only ddp onebit-adam

The model is a perceptron; each rank has one thread. The contenders take turns: DDP, 1-bit Adam after its warm-up, no
traffic at all (with PyTorch's fused AdamW, which others use, too, and with the AdamW that is not fused), and streaming
DiLoCo with 4 bits. For DiLoCo, steps during an average are also compared with other steps. The program takes about four
minutes. With fewer examples a step (``--batch``), there is less computation to hide passes over memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch

from ..machine import describe, describe_mpi
from ..report import write_json
from ..training.models import perceptron
from ..training.processes import leave, share_cores, start

_FEATURES, _CLASSES = 64, 10
_NAMES = {
    "ddp": "DDP on gloo",
    "onebit-adam": "1-bit Adam",
    "alone": "no traffic",
    "unfused": "no traffic, AdamW not fused",
    "diloco": "streaming DiLoCo, minmax 4",
}


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Make PyTorch's AdamW, with one fused kernel or with a kernel for each operation."""
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)


@dataclass
class Contender:
    """A way to train.

    Attributes
    ----------
    model, optimizer
        The model, and its optimizer.
    steps : int
        Number of timed steps in a turn.
    again : int
        Number of steps before them, which are not timed.
    free : callable
        Frees the contender. Collective.
    seconds : dict
        Seconds of the timed steps, by the step's number.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    again: int = 0
    free: Callable[[], None] = lambda: None
    seconds: dict[int, float] = field(default_factory=dict)
    _done: int = 0

    def turn(self, batch: int, counts: bool) -> None:
        """Train for one turn, which all ranks begin together. With ``counts``, keep the seconds."""
        inputs, targets = torch.randn(batch, _FEATURES), torch.randint(_CLASSES, (batch,))
        dist.barrier()
        for number in range(self.again + self.steps):
            started = time.perf_counter()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(inputs), targets).backward()
            self.optimizer.step()
            self._done += 1
            if counts and number >= self.again:
                self.seconds[self._done] = time.perf_counter() - started


def contender(name: str, arguments: argparse.Namespace) -> Contender:
    """Make the contender of a name in `_NAMES`, with its own model."""
    model: nn.Module = perceptron(arguments.parameters)
    if name == "ddp":
        model = DistributedDataParallel(model)
        return Contender(model, adamw(model), 1)
    if name == "onebit-adam":
        optimizer = compcoll.torch.OneBitAdam(model, 1e-3, warmup=1)
        return Contender(model, optimizer, 4, free=optimizer.free)
    if name == "diloco":
        inner = adamw(model)
        options = {"every": arguments.every, "fragments": arguments.fragments, "delay": arguments.delay}
        diloco = compcoll.torch.DiLoCo(model, inner, codec="minmax", bits=4, **options)

        def free() -> None:
            diloco.synchronize()
            diloco.free()

        # The previous turn's last average has arrived meanwhile. The timed steps begin after it is mixed in.
        return Contender(model, inner, arguments.every, arguments.delay, free)
    fused = name == "alone"
    return Contender(model, adamw(model, fused=fused), arguments.every if fused else 8)


def under_way(arguments: argparse.Namespace, seconds: dict[int, float]) -> dict[str, float]:
    """Return the ratios of streaming DiLoCo's step times, with an average under way, to those without one.

    The result is empty if an average is under way in every step. A shorter delay then helps.
    """
    every, fragments, delay = arguments.every, arguments.fragments, arguments.delay
    turns = [every * (number + 1) // fragments % every for number in range(fragments)]
    with_one: list[float] = []
    without: list[float] = []
    for step, each in seconds.items():
        # An average begins at the end of a step, and is under way during the next steps.
        since = min((step - turn - 1) % every + 1 for turn in turns)
        (with_one if since <= delay else without).append(each)
    if not (with_one and without):
        return {}
    return {
        "under_way_median": statistics.median(with_one) / statistics.median(without),
        "under_way_mean": statistics.fmean(with_one) / statistics.fmean(without),
    }


def lines(rates: dict[str, float], ratios: dict[str, float]) -> Iterator[str]:
    """Yield the lines to print."""
    for name, rate in rates.items():
        of_computing = f", {100 * rate / rates['alone']:.1f} % of no traffic" if "alone" in rates else ""
        against = f", {rate / rates['ddp']:.1f} x DDP" if "ddp" in rates else ""
        yield f"{_NAMES[name]:28}{rate:10.1f} examples/s{of_computing}{against}"
    if ratios:
        yield (
            f"a step with an average under way takes {ratios['under_way_median']:.3f} x one without "
            f"(median; mean {ratios['under_way_mean']:.3f} x)"
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("optimizer_speed", description=__doc__, formatter_class=raw)
    add = top.add_argument
    add("--parameters", type=int, default=25_000_000, help="(default: %(default)s)")
    add("--batch", type=int, default=8, help="examples of a rank (default: %(default)s)")
    add("--only", nargs="+", choices=list(_NAMES), default=list(_NAMES), help="(default: all)")
    add("--rounds", type=int, default=3, help="timed rounds, after one untimed (default: %(default)s)")
    add("--every", type=int, default=50, help="DiLoCo's H (default: %(default)s)")
    add("--fragments", type=int, default=4, help="(default: %(default)s)")
    add("--delay", type=int, default=10, help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    return top


def main() -> None:
    arguments = parser().parse_args()
    place = start("gloo")
    share_cores(place, 1)
    chosen = {name: contender(name, arguments) for name in _NAMES if name in arguments.only}
    for number in range(1 + arguments.rounds):
        for one in chosen.values():
            one.turn(arguments.batch, counts=number > 0)
    means: dict[str, float] = {}
    for name, one in chosen.items():
        mean = torch.tensor(statistics.fmean(one.seconds.values()), dtype=torch.float64)
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        means[name] = float(mean)
    if place.rank == 0:
        rates = {name: arguments.batch * place.size / mean for name, mean in means.items()}
        ratios = under_way(arguments, chosen["diloco"].seconds) if "diloco" in chosen else {}
        print("\n".join(lines(rates, ratios)))
        if arguments.json is not None:
            results = [
                {"contender": name, "ranks": place.size, "mean_ms": 1e3 * mean, "examples_per_second": rates[name]}
                | (ratios if name == "diloco" else {})
                for name, mean in means.items()
            ]
            run = describe() | {"torch": torch.__version__, "mpi": describe_mpi()}
            write_json(arguments.json, {"run": run, "results": results})
    for one in chosen.values():
        one.free()
    leave()


if __name__ == "__main__":
    main()
