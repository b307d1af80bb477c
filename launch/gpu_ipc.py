"""Compare two ways to exchange wires between ranks that share a GPU: by CUDA IPC, and through pinned memory.

    launch/mpirun -n 2 python launch/gpu_ipc.py --json ipc.json

NCCL refuses ranks that share a GPU. Each allreduce is timed alternately in both ways, and both must give the same bits.
The exit status is 1 if the bits differ, or if CUDA IPC is not available; the output says why.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from compcoll import Communicator
from osu_like_bench.timing import Limits, measure

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
CODECS: tuple[dict[str, Any], ...] = ({"codec": "zfp", "rate": 8}, {"codec": None})
ALGORITHMS = "direct", "ring"

_WARM_UP, _TIMES = 4, 15


def pair(make: Callable[[], Communicator], x: Any) -> tuple[Communicator, Communicator]:
    """Return a communicator that uses CUDA IPC if possible, and a communicator that uses pinned memory."""
    shared, staged = make(), make()
    staged._on_gpu(x)._gpu_group.known = True  # skips the search for NCCL and CUDA IPC
    return shared, staged


def compare(
    ways: Sequence[Communicator],
    upload: Callable[[np.ndarray], Any],
    download: Callable[[Any], np.ndarray],
    sizes: Sequence[int] = SIZES,
    times: int = _TIMES,
) -> list[dict[str, Any]]:
    """Time allreduces by both communicators, alternately.

    Parameters
    ----------
    ways : sequence of Communicator
        The two communicators of `pair`.
    upload, download : callable
        Copy an array to the GPU; copy it back, after waiting for the work that computes it.
    sizes : sequence of int
        Bytes of a buffer.
    times : int
        Number of timed repetitions.
    """
    results: list[dict[str, Any]] = []
    for size in sizes:
        values = np.random.default_rng([size, ways[0].rank]).standard_normal(size // 4).astype(np.float32)
        x = upload(values)
        for codec, algorithm in product(CODECS, ALGORITHMS):
            calls = [partial(way.allreduce, x, algorithm=algorithm, **codec) for way in ways]
            one, other = (download(call()).view(np.uint32) for call in calls)
            # Downloading one element waits for the whole result.
            runs = [lambda call=call: download(call()[:1]) for call in calls]  # type: ignore[misc]
            for way, took in zip(ways, measure(runs, Limits(_WARM_UP, times, math.inf)), strict=True):
                stats = way.stats
                assert stats is not None
                results.append(
                    {
                        "size": size,
                        "codec": str(codec["codec"]),
                        "algorithm": algorithm,
                        "gpu_transport": stats.gpu_transport,
                        "median_us": took.median * 1e6,
                        "wrong": int(np.count_nonzero(one != other)),
                    }
                )
    return results


def main() -> int:
    """Compare both ways; print the results and write them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="a file for the results")
    arguments = parser.parse_args()
    import cupy

    ways = pair(Communicator, cupy.zeros(1, cupy.float32))
    results = compare(ways, cupy.asarray, cupy.asnumpy)
    gpu = ways[0]._gpu
    assert gpu is not None
    why = gpu._gpu_group.why
    for way in ways:
        way.free()
    shared = {result["gpu_transport"] for result in results} == {"CUDA IPC", ""}
    if ways[0].rank == 0:
        for result in results:
            way = result["gpu_transport"] or "pinned memory"
            print("{size:>10} {codec:<6}{algorithm:<8}{median_us:>10.1f} us {wrong:>4} wrong  ".format(**result) + way)
        print("why not NCCL:" if shared else "why no memory is shared:", why)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump({"results": results}, file)
    return 0 if shared and not any(result["wrong"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
