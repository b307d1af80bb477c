#!/usr/bin/env python3
"""Measure what local steps and a compressed Adam bring where links are slow: examples a second against DDP on gloo.

    sudo launch/netlab up --hosts 4 --rate 100mbit
    sudo launch/netlab run -n 4 -- python launch/optimizer_speed.py   # 4 hosts, 25 million parameters
    sudo launch/netlab run -n 4 -- python launch/optimizer_speed.py --only ddp onebit-adam

A perceptron, AdamW, one thread a rank; contenders one after the other: DDP, 1-bit Adam after its warm-up, no traffic at
all, and streaming DiLoCo by 4 bits. Of DiLoCo, too: the step while an average is under way, against one while none is.
Takes about four minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from osu_like_bench.training.models import perceptron
from osu_like_bench.training.processes import leave, share_cores, start

_FEATURES, _CLASSES = 64, 10
_NAMES = {
    "ddp": "DDP on gloo",
    "onebit-adam": "1-bit Adam",
    "alone": "no traffic",
    "diloco": "streaming DiLoCo, minmax 4",
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's own, by one kernel: without ``fused`` a step takes seven times as long on a CPU."""
    return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, steps: int) -> list[float]:
    """Train some steps, begun by all ranks at once; the seconds of each."""
    inputs, targets = torch.randn(batch, _FEATURES), torch.randint(_CLASSES, (batch,))
    seconds = []
    dist.barrier()
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    return seconds


def streaming(arguments: argparse.Namespace, model: nn.Module) -> tuple[list[float], str]:
    """Time a round of streaming DiLoCo, and its steps with traffic and without."""
    every, fragments, delay = arguments.every, arguments.fragments, arguments.delay
    inner = adamw(model)
    options = {"every": every, "fragments": fragments, "delay": delay}
    diloco = compcoll.torch.DiLoCo(model, inner, codec="minmax", bits=4, **options)
    timed(model, inner, arguments.batch, every)
    seconds = timed(model, inner, arguments.batch, every)
    turns = [every * (number + 1) // fragments % every for number in range(fragments)]
    # A step begins an average at its end: that travels during those behind it.
    busy = [0 < (step - turn) % every <= delay for step in range(1, every + 1) for turn in [_last(turns, step, every)]]
    with_traffic = [each for each, is_busy in zip(seconds, busy, strict=True) if is_busy]
    without = [each for each, is_busy in zip(seconds, busy, strict=True) if not is_busy]
    diloco.synchronize()
    diloco.free()
    told = "no step is without traffic: a shorter --delay is needed"
    if with_traffic and without:
        ratios = (how(with_traffic) / how(without) for how in (statistics.median, statistics.fmean))
        told = "a step with an average under way takes {:.3f} x one without (median; mean {:.3f} x)".format(*ratios)
    return seconds, told


def _last(turns: list[int], step: int, every: int) -> int:
    """The turn that was the last before a step."""
    return min(turns, key=lambda turn: (step - turn - 1) % every)


def main() -> None:
    top = argparse.ArgumentParser(
        "optimizer_speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--parameters", type=int, default=25_000_000, help="(default: %(default)s)")
    top.add_argument("--batch", type=int, default=1, help="examples of a rank (default: %(default)s)")
    top.add_argument("--only", nargs="+", choices=list(_NAMES), default=list(_NAMES), help="(default: all)")
    top.add_argument("--every", type=int, default=50, help="DiLoCo's H (default: %(default)s)")
    top.add_argument("--fragments", type=int, default=4, help="(default: %(default)s)")
    top.add_argument("--delay", type=int, default=10, help="(default: %(default)s)")
    arguments = top.parse_args()
    place = start("gloo")
    share_cores(place, 1)
    told = ""

    def alone() -> list[float]:
        model = perceptron(arguments.parameters)
        return timed(model, adamw(model), arguments.batch, 2 * arguments.every)[arguments.every :]

    def ddp() -> list[float]:
        model = DistributedDataParallel(perceptron(arguments.parameters))
        return timed(model, adamw(model), arguments.batch, 4)[1:]

    def one_bit() -> list[float]:
        model = perceptron(arguments.parameters)
        optimizer = compcoll.torch.OneBitAdam(model, 1e-3, warmup=1)
        seconds = timed(model, optimizer, arguments.batch, 12)[2:]
        optimizer.free()
        return seconds

    def diloco() -> list[float]:
        nonlocal told
        seconds, told = streaming(arguments, perceptron(arguments.parameters))
        return seconds

    contenders: dict[str, Callable[[], list[float]]] = {
        "ddp": ddp,
        "onebit-adam": one_bit,
        "alone": alone,
        "diloco": diloco,
    }
    rates: dict[str, float] = {}
    for name in (each for each in contenders if each in arguments.only):
        mean = torch.tensor(statistics.fmean(contenders[name]()), dtype=torch.float64)
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        rates[name] = arguments.batch * place.size / float(mean)
        if place.rank == 0:
            of_computing = f", {100 * rates[name] / rates['alone']:.1f} % of no traffic" if "alone" in rates else ""
            against = f", {rates[name] / rates['ddp']:.1f} x DDP" if "ddp" in rates else ""
            print(f"{_NAMES[name]:28}{rates[name]:10.1f} examples/s{of_computing}{against}", flush=True)
    if place.rank == 0 and told:
        print(told, flush=True)
    leave()


if __name__ == "__main__":
    main()
