"""Waits that sleep: of a rank that is late, of one that is stopped and goes on, of one that is stopped for too long.

waits.py late | stopped | gone FOLDER TIMEOUT [KIND…]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import compcoll
from compcoll.errors import CompcollError

WORLD = MPI.COMM_WORLD
STOPPED = 60  # seconds, at most
CALLS: dict[str, dict[str, object]] = {
    "handshake": {"n": 1},
    "shared_memory": {"n": 1 << 20, "algorithm": "shared_memory"},
    "recorded": {"n": 1 << 20, "codec": "zfp", "rate": 8, "algorithm": "ring"},
}


def calls(comm: compcoll.Communicator, **more: object) -> dict[str, Callable[[], None]]:
    """A blocking sum of each kind that ends only when all ranks have come; each looks at its result."""

    def call(n: int, **options: object) -> Callable[[], None]:
        x = np.full(n, WORLD.rank + 1.0, np.float32)
        wanted = WORLD.size * (WORLD.size + 1) / 2

        def run() -> None:
            out = comm.allreduce(x, **options)
            assert abs(out[0] - wanted) < 0.1, out[0]
            assert abs(out[-1] - wanted) < 0.1, out[-1]

        return run

    return {name: call(**options, **more) for name, options in CALLS.items()}  # type: ignore[arg-type]


def late() -> None:
    """CPU seconds that rank 0 takes while it waits a second for the last one."""
    comm = compcoll.Communicator()
    taken = {}
    for name, call in calls(comm).items():
        call(), call()
        WORLD.Barrier()
        if WORLD.rank == WORLD.size - 1:
            time.sleep(1.0)
        began = time.process_time()
        call()
        taken[name] = time.process_time() - began
    if WORLD.rank == 0:
        print(json.dumps(taken))
    WORLD.Barrier()


def pauses(wait: str, times: int = 1) -> None:
    """Stops this process so often, from outside, until a wait of the shell's has ended."""
    once = f"sleep 0.07; kill -STOP {os.getpid()}; {wait}; kill -CONT {os.getpid()};"
    subprocess.Popen(["sh", "-c", once * times])


def stopped() -> None:
    """One rank is stopped again and again, wherever it is, and all sums are right."""
    comm = compcoll.Communicator(timeout=20.0)
    for name, call in calls(comm).items():
        if WORLD.rank == WORLD.size - 1:
            pauses("sleep 0.15", 4)
        until, count, going = time.monotonic() + 1.2, 0, np.ones(1)
        while going[0]:
            call()
            count += 1
            going[0] = time.monotonic() < until
            WORLD.Bcast(going)
        if WORLD.rank == 0:
            print(json.dumps({name: count}))


class Delays(threading.Thread):
    """Measures by how much a process that sleeps here is woken too late: what other work on the machine takes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self.start()

    def run(self) -> None:
        while True:
            begun = time.monotonic()
            time.sleep(0.002)
            self.longest = max(self.longest, time.monotonic() - begun - 0.002)


def gone(folder: str, timeout: str, *names: str) -> None:
    """One rank is stopped, wherever it is, until all others have said so, or for long: the seconds that they take, and
    the longest delay of a sleep meanwhile. Who has said so leaves a file in the folder.
    """
    seconds = float(timeout)
    delays = Delays()
    for number, name in enumerate(names or CALLS):
        call = WAITS[name](seconds)
        WORLD.Barrier()
        call(), call()
        WORLD.Barrier()
        if WORLD.rank == WORLD.size - 1:
            said = f'"$(ls "{folder}" | wc -l)" -ge {(number + 1) * (WORLD.size - 1)}'
            pauses(f"for _ in $(seq {20 * STOPPED}); do [ {said} ] && break; sleep 0.05; done")
        until = time.monotonic() + seconds + STOPPED + 30.0
        began = time.monotonic()
        try:
            while time.monotonic() < until:
                began, delays.longest = time.monotonic(), 0.0
                call()
            taken = math.inf
        except (CompcollError, RuntimeError):  # a time-out; of another rank's, where two wait; a future's has its text
            taken = time.monotonic() - began
        if WORLD.rank < WORLD.size - 1:
            Path(folder, f"{number}.{WORLD.rank}").touch()
        told = WORLD.gather((taken, delays.longest))
        if told is not None:
            print(json.dumps({name: told[:-1]}), flush=True)


def blocking(**options: Any) -> Callable[[float], Callable[[], object]]:
    """A blocking allreduce of 4 MiB, in a communicator of its own."""

    def make(timeout: float) -> Callable[[], object]:
        comm, x = compcoll.Communicator(), np.ones(1 << 20, np.float32)
        return lambda: comm.allreduce(x, timeout=timeout, **options)

    return make


def not_blocking(progress: str) -> Callable[[float], Callable[[], object]]:
    def make(timeout: float) -> Callable[[], object]:
        comm, x = compcoll.Communicator(progress=progress), np.ones(1 << 20, np.float32)
        return lambda: comm.iallreduce(x, timeout=timeout, **RING).wait()

    return make


def by_torch(use: str) -> Callable[[float], Callable[[], object]]:
    """An all_reduce of a process group: blocking, asynchronous, or by its future."""

    def make(timeout: float) -> Callable[[], object]:
        import torch
        import torch.distributed as dist

        from compcoll.torch import Options

        if not dist.is_initialized():
            dist.init_process_group("compcoll")
        options = Options(codec=compcoll.get_codec("zfp", rate=8), algorithm="ring")
        group = dist.new_group(pg_options=options)
        group.set_timeout(timedelta(seconds=timeout))
        x = torch.ones(1 << 20)
        if use == "blocking":
            return lambda: dist.all_reduce(x, group=group)
        if use == "future":
            return lambda: dist.all_reduce(x, group=group, async_op=True).get_future().wait()
        return lambda: dist.all_reduce(x, group=group, async_op=True).wait()

    return make


RING = {"codec": "zfp", "rate": 8, "algorithm": "ring"}
WAITS: dict[str, Callable[[float], Callable[[], object]]] = {
    **{name: lambda timeout, name=name: calls(compcoll.Communicator(), timeout=timeout)[name] for name in CALLS},
    "not_blocking": not_blocking("wait"),
    "thread": not_blocking("thread"),
    "not_replayed": blocking(codec="zfp", tolerance=1e-3, algorithm="ring"),
    "recursive_doubling": blocking(codec="zfp", rate=8, algorithm="recursive_doubling"),
    "mpi": blocking(algorithm="native"),
    "torch": by_torch("blocking"),
    "torch_async": by_torch("async"),
    "torch_future": by_torch("future"),
}

if __name__ == "__main__":
    {"late": late, "stopped": stopped, "gone": gone}[sys.argv[1]](*sys.argv[2:])
