"""PyTorch's all_reduce by backend: ``python -m osu_like_bench.backends -m 4:32M --compare mpi4py,inline,async,gloo``.

``inline`` and ``async`` are compcoll's backend: a call that blocks, and one that is waited for afterwards. They and
``mpi4py`` need MPI's launcher; gloo alone takes ranks that know RANK, WORLD_SIZE and MASTER_ADDR, too, such as those of
torchrun or of ``netlab run --mpi none``. So do those that compress over gloo: ``group`` and ``group_direct``
(compcoll's all_reduce with ZFP at rate 8, by ``auto`` and by ``direct``), ``fp16`` and ``fp8`` (PyTorch's hook, and
torchft's steps). ``gloo_again`` is gloo once more: how far apart two equal contenders are. Needs torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from . import group_contenders
from .machine import describe
from .sizes import parse_ranges, sweeps
from .timing import Limits, Seconds, measure
from .training.processes import leave

CONTENDERS = ("mpi4py", "inline", "async", "gloo")
GLOO = ("gloo", "gloo_again")
OVER_GLOO = (*GLOO, *group_contenders.CONTENDERS)
"""What needs no MPI."""

_ERROR = 0.25
"""Of sums that are compressed, by what such sums of normal values are in the mean: what is left out shows."""


def _slowest(seconds: Seconds) -> Seconds:
    of_all = torch.from_numpy(seconds)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return seconds


def _calls(names: list[str]) -> dict[str, Callable[[Tensor], Any]]:
    """Find what each contender does with a tensor."""
    calls: dict[str, Callable[[Tensor], Any]] = {}
    for name in names:
        if name == "mpi4py":
            from mpi4py import MPI

            comm = MPI.COMM_WORLD.Dup()
            # PyTorch's is in place, too.
            calls[name] = lambda x, comm=comm: comm.Allreduce(MPI.IN_PLACE, x.numpy())  # type: ignore[misc]
        elif name in group_contenders.CONTENDERS:
            calls[name] = group_contenders.CONTENDERS[name]
        elif name in GLOO:
            group = dist.group.WORLD if set(names) <= set(OVER_GLOO) else dist.new_group(backend="gloo")
            calls[name] = lambda x, group=group: dist.all_reduce(x, group=group)  # type: ignore[misc]
        elif name == "inline":
            calls[name] = dist.all_reduce
        elif name == "async":
            calls[name] = lambda x: dist.all_reduce(x, async_op=True).wait()
        else:
            raise SystemExit(f"there is no contender {name!r}: {', '.join(dict.fromkeys((*CONTENDERS, *OVER_GLOO)))}")
    return calls


def _check(name: str, call: Callable[[Tensor], Any], x: Tensor, rank: int, size: int) -> None:
    """End the program if a sum is wrong: not that of whole numbers, or with a codec too far off, or not everybody's."""
    if name not in group_contenders.CONTENDERS:
        call(x.fill_(rank + 1.0))
        right = bool(np.all(x.numpy() == size * (size + 1) / 2))
    else:
        every = [torch.randn(x.numel(), generator=torch.Generator().manual_seed(r)) for r in range(size)]
        exact = torch.stack(every).double().sum(0)
        call(x.copy_(every[rank]))
        everybody = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(everybody, x)
        right = bool((x - exact).norm() <= _ERROR * (size * x.numel()) ** 0.5) and all(
            torch.equal(x, each) for each in everybody
        )
    if not right:
        raise SystemExit(f"{name}: wrong sum of {4 * x.numel()} bytes on rank {rank}")


def build_parser() -> argparse.ArgumentParser:
    """Make the command line's parser."""
    parser = argparse.ArgumentParser(prog="python -m osu_like_bench.backends", description=main.__doc__)
    parser.add_argument(
        "-m",
        "--message-size",
        type=parse_ranges,
        required=True,
        metavar="SIZES",
        help="bytes: MIN:MAX, or some with commas",
    )
    parser.add_argument("--compare", default=",".join(CONTENDERS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("-x", "--warmup", type=int, default=2, help="rounds before the clock runs")
    parser.add_argument("-i", "--iterations", type=int, default=100, help="timed rounds at most")
    parser.add_argument("--time-cap", type=float, default=1.0, metavar="S", help="seconds for each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there, too")
    return parser


def main() -> None:
    """Time all_reduce of float32 values, contenders in turns; wrong sums end the program with an error."""
    arguments = build_parser().parse_args()
    names = arguments.compare.split(",")
    dist.init_process_group("gloo" if set(names) <= set(OVER_GLOO) else "compcoll")
    calls, rank, size = _calls(names), dist.get_rank(), dist.get_world_size()
    results: list[dict[str, Any]] = []
    for nbytes in sweeps(arguments.message_size, 4):
        x = torch.empty(nbytes // 4)
        ran = {}
        for name, call in calls.items():
            _check(name, call, x, rank, size)
            ran[name] = group_contenders.ran() if name.startswith("group") else ""
        x.zero_()
        limits = Limits(arguments.warmup, arguments.iterations, arguments.time_cap)
        runs = [lambda call=call, x=x: call(x) for call in calls.values()]
        for name, times in zip(names, measure(runs, limits, barrier=dist.barrier, slowest=_slowest), strict=True):
            taken = {f"{field}_us": 1e6 * value for field, value in asdict(times).items() if field != "iterations"}
            about = {"contender": name, "size": nbytes, "ranks": size, "iterations": times.iterations}
            results.append(about | {"ran": ran[name]} | taken)
        if rank == 0:
            medians = "  ".join(f"{r['contender']} {r['median_us']:.2f}" for r in results[-len(names) :])
            print(f"{nbytes:<10d} {medians} us", flush=True)
    if rank == 0 and arguments.json is not None:
        run = describe() | {"torch": torch.__version__, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"kind": "backends", "run": run, "results": results}, indent=1) + "\n")
    leave()


if __name__ == "__main__":
    main()
