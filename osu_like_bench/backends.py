"""Time PyTorch's all_reduce: ``python -m osu_like_bench.backends -m 4:32M --compare mpi4py,inline,async,gloo``.

``inline`` and ``async`` use compcoll's backend, with a blocking and a nonblocking call. They and ``mpi4py`` need MPI's
launcher. The other contenders use gloo, and also work with RANK, WORLD_SIZE and MASTER_ADDR, as torchrun or
``netlab run --mpi none`` set them: ``gloo``; ``group`` and ``group_direct`` (compcoll's all_reduce with ZFP at rate 8,
by ``auto`` and by ``direct``); ``fp16`` (as PyTorch's hook) and ``fp8`` (the steps of torchft). ``gloo_again`` repeats
gloo, to show how much two equal contenders differ. Needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import compcoll.torch

from .machine import describe
from .parser import argument, parse_ranges, sweeps
from .report import write_json
from .timing import Limits, measure
from .training.processes import Peers, leave

CONTENDERS = ("mpi4py", "inline", "async", "gloo")
GLOO = ("gloo", "gloo_again")

_ROW = 512
_LARGEST = float(torch.finfo(torch.float8_e4m3fn).max)
_ERROR = 0.25
"""Largest relative error (root mean square) of a compressed sum of normal values."""


def _half(x: Tensor) -> None:
    """Add in float16, as PyTorch's fp16_compress_hook does."""
    halves = x.half()
    dist.all_reduce(halves)
    x.copy_(halves)


def _quantized(values: Tensor) -> Tensor:
    """Quantize values to float8 in rows; return the bytes of each row's scale and its numbers."""
    rows = values.view(-1, _ROW)
    scales = rows.abs().amax(1, keepdim=True).clamp_min(1e-12) / _LARGEST
    numbers = (rows / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([scales.view(torch.uint8), numbers], 1)


def _dequantized(rows: Tensor) -> Tensor:
    scales = rows[:, :4].contiguous().view(torch.float32)
    return (rows[:, 4:].contiguous().view(torch.float8_e4m3fn).float() * scales).view(-1)


def _float8(x: Tensor) -> None:
    """Add in float8, with a scale for each row: quantize, all_to_all, add in float32, quantize the sum, all_gather.

    These are the steps of torchft's allreduce_quantized, whose kernels are for GPUs, with PyTorch's operations.
    """
    size = dist.get_world_size()
    padded = torch.nn.functional.pad(x, (0, -x.numel() % (_ROW * size)))
    wire = _quantized(padded)
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire)
    own = torch.stack([_dequantized(part) for part in arrived.chunk(size)]).sum(0)
    summed = _quantized(own)
    every = torch.empty(size * summed.shape[0], summed.shape[1], dtype=torch.uint8)
    dist.all_gather_into_tensor(every, summed)
    x.copy_(_dequantized(every)[: x.numel()])


COMPRESSED: Mapping[str, Callable[[Tensor], Any]] = {
    "group": partial(compcoll.torch.all_reduce, codec="zfp", rate=8),
    "group_direct": partial(compcoll.torch.all_reduce, codec="zfp", rate=8, algorithm="direct"),
    "fp16": _half,
    "fp8": _float8,
}
"""Contenders that add a tensor in place, approximately, over the default process group."""

OVER_GLOO = (*GLOO, *COMPRESSED)
"""Contenders that need no MPI."""


def _call(name: str, over_gloo: bool) -> Callable[[Tensor], Any]:
    """Return a contender's allreduce. The default process group is gloo's if ``over_gloo``, else compcoll's."""
    if name in COMPRESSED:
        return COMPRESSED[name]
    if name in GLOO:
        return partial(dist.all_reduce, group=dist.group.WORLD if over_gloo else dist.new_group(backend="gloo"))
    if name == "inline":
        return dist.all_reduce  # type: ignore[no-any-return]
    if name == "async":
        return lambda x: dist.all_reduce(x, async_op=True).wait()
    if name == "mpi4py":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Dup()
        return lambda x: comm.Allreduce(MPI.IN_PLACE, x.numpy())  # in place, as PyTorch's all_reduce
    raise SystemExit(f"there is no contender {name!r}: {', '.join(dict.fromkeys((*CONTENDERS, *OVER_GLOO)))}")


def _check(name: str, call: Callable[[Tensor], Any], x: Tensor, ranks: Peers) -> None:
    """Exit if a sum is wrong: not exact for whole numbers, or if compressed too far off or different between ranks."""
    rank, size = dist.get_rank(), ranks.size
    if name not in COMPRESSED:
        call(x.fill_(rank + 1.0))
        right = bool((x == size * (size + 1) / 2).all())
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


def _ran(name: str) -> str:
    """Return the algorithm and codec of compcoll's previous call; an empty string for other contenders."""
    stats = compcoll.torch.stats() if name.startswith("group") else None
    return "" if stats is None else stats.algorithm + (f", {stats.codec}" if stats.codec else "")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m osu_like_bench.backends", description=main.__doc__)
    add, sizes = parser.add_argument, argument(parse_ranges)
    add(
        "-m",
        "--message-size",
        type=sizes,
        required=True,
        metavar="SIZES",
        help="bytes: MIN:MAX, or several with commas",
    )
    add("--compare", default=",".join(CONTENDERS), metavar="NAMES", help="default: %(default)s")
    add("-x", "--warmup", type=int, default=2, help="rounds before the timed ones")
    add("-i", "--iterations", type=int, default=100, help="maximum number of timed rounds")
    add("--time-cap", type=float, default=1.0, metavar="S", help="time limit for each size")
    add("--json", type=Path, metavar="FILE", help="also write the times as JSON")
    return parser


def main() -> None:
    """Time all_reduce of float32 values by several contenders alternately. Wrong sums end the program with an error."""
    arguments = build_parser().parse_args()
    names = arguments.compare.split(",")
    over_gloo = set(names) <= set(OVER_GLOO)
    dist.init_process_group("gloo" if over_gloo else "compcoll")
    calls = {name: _call(name, over_gloo) for name in names}
    ranks, first = Peers(), dist.get_rank() == 0
    limits = Limits(arguments.warmup, arguments.iterations, arguments.time_cap)
    results: list[dict[str, Any]] = []
    for nbytes in sweeps(arguments.message_size, 4):
        x = torch.empty(nbytes // 4)
        ran = {}
        for name, call in calls.items():
            _check(name, call, x, ranks)
            ran[name] = _ran(name)
        x.zero_()
        runs = [partial(call, x) for call in calls.values()]
        times = measure(runs, limits, barrier=dist.barrier, slowest=ranks.largest)
        for name, taken in zip(names, times, strict=True):
            about = {"contender": name, "size": nbytes, "ranks": ranks.size, "ran": ran[name]}
            results.append(about | taken.fields())
        if first:
            medians = "  ".join(f"{r['contender']} {r['median_us']:.2f}" for r in results[-len(names) :])
            print(f"{nbytes:<10d} {medians} us", flush=True)
    if first and arguments.json is not None:
        run = describe() | {"torch": torch.__version__, "threads": torch.get_num_threads()}
        write_json(arguments.json, {"kind": "backends", "run": run, "results": results})
    leave()


if __name__ == "__main__":
    main()
