"""PyTorch's gloo as a baseline: ``python -m osu_like_bench.gloo -m 16M`` on ranks that know RANK, WORLD_SIZE and
MASTER_ADDR, such as those of torchrun or of ``netlab run --mpi none``. Needs torch; neither MPI nor compcoll.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .sizes import parse_range, sweep
from .timing import Limits, Seconds, measure


def _slowest(seconds: Seconds) -> Seconds:
    of_all = torch.from_numpy(seconds)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    return seconds


def main() -> None:
    """Time all_reduce of float32 values; wrong sums end the program with an error."""
    parser = argparse.ArgumentParser(prog="python -m osu_like_bench.gloo", description=main.__doc__)
    parser.add_argument("-m", "--message-size", type=parse_range, required=True, metavar="MIN:MAX", help="bytes")
    parser.add_argument("-x", "--warmup", type=int, default=2, help="rounds before the clock runs")
    parser.add_argument("-i", "--iterations", type=int, default=100, help="timed rounds at most")
    parser.add_argument("--time-cap", type=float, default=1.0, metavar="S", help="seconds for each size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times there, too")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    results: list[dict[str, Any]] = []
    for nbytes in sweep(arguments.message_size, 4):
        x = torch.full((nbytes // 4,), float(rank + 1))
        dist.all_reduce(x)
        if not np.all(x.numpy() == size * (size + 1) / 2):
            raise SystemExit(f"gloo: wrong sum of {nbytes} bytes on rank {rank}")
        x.zero_()
        limits = Limits(arguments.warmup, arguments.iterations, arguments.time_cap)
        times = measure([lambda: dist.all_reduce(x)], limits, barrier=dist.barrier, slowest=_slowest)[0]  # noqa: B023
        taken = {f"{name}_us": 1e6 * value for name, value in asdict(times).items() if name != "iterations"}
        results.append({"contender": "gloo", "size": nbytes, "ranks": size, "iterations": times.iterations, **taken})
        if rank == 0:
            print(f"{nbytes:<10d} gloo {times.median * 1e6:14.2f} us", flush=True)
    if rank == 0 and arguments.json is not None:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"kind": "gloo", "run": about, "results": results}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
