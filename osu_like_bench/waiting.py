"""``python -m osu_like_bench.waiting``: measure the CPU time that ranks use while they wait for a late rank.

    mpirun -n 2 python -m osu_like_bench.waiting -m 4,1M --late 1

Rank 0 sleeps before some calls. For each size, the program prints the largest CPU time of another rank in such a call.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from .cases import Ranks
from .parser import argument, at_least, parse_ranges, sweeps
from .report import write_json


def main() -> None:
    """Measure each size and print a line for it."""
    text, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, epilog=rest, formatter_class=raw)
    parser.add_argument("-m", "--message-size", type=argument(parse_ranges), required=True, metavar="MIN:MAX")
    parser.add_argument("--late", type=at_least(0, float), default=1.0, metavar="S", help="delay (default: 1 second)")
    parser.add_argument("-i", "--iterations", type=at_least(1, int), default=3, help="late calls (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    arguments = parser.parse_args()
    ranks = Ranks()
    first = ranks.comm.rank == 0
    results: list[dict[str, Any]] = []
    for nbytes in sweeps(arguments.message_size, 4):
        x = np.ones(nbytes // 4, np.float32)
        out = np.empty_like(x)
        for _ in range(3):
            ranks.compcoll.allreduce(x, out=out)
        used = [_waited(ranks, x, out, arguments.late) for _ in range(arguments.iterations)]
        most = float(ranks.largest(np.array([0.0 if first else max(used)]))[0])
        results.append({"size": nbytes, "ranks": ranks.comm.size, "late_s": arguments.late, "cpu_ms": 1e3 * most})
        if first:
            print(f"{nbytes:<10d} {1e3 * most:.1f} ms of CPU time in {arguments.late:g} s", flush=True)
    if first and arguments.json is not None:
        write_json(arguments.json, {"kind": "waiting", "results": results})


def _waited(ranks: Ranks, x: np.ndarray[Any, Any], out: np.ndarray[Any, Any], late: float) -> float:
    """Return the CPU seconds that this process uses in a call for which rank 0 is late."""
    ranks.comm.Barrier()
    if ranks.comm.rank == 0:
        time.sleep(late)
    before = time.process_time()
    ranks.compcoll.allreduce(x, out=out)
    return time.process_time() - before


if __name__ == "__main__":
    main()
