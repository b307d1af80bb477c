"""Ranks under torchrun that are killed and come back, and the seconds from a kill to the next step.

    python restarts.py        print the table of docs/internals/reliability.md

Two of torchrun's agents with two ranks each stand for two nodes. A rank is killed, then a whole node, then a node
joins. The ranks run this file too: they average gradients that NumPy knows, and count what the optimizer was given.
"""

from __future__ import annotations

import time

STARTED = time.time()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402

SHAPE, EVERY = (64, 64), 4
"""The parameter's shape, and steps between two checkpoints."""
RANKS = 2
"""Ranks of a node."""
SECONDS = 120.0


def gradient(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng((step, rank)).normal(size=SHAPE)


class Agents:
    """Agents of torchrun, each with some ranks, on up to two nodes."""

    def __init__(self, folder: Path, *program: str | Path, ranks: int = 1) -> None:
        self.folder, self.program, self.ranks = folder, program, ranks
        self.running: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("localhost", 0)) as free:
            self.port = free.getsockname()[1]

    def start(self) -> None:
        # The first agent has the store, and must live.
        first = "false" if self.running else "true"
        quick = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={first}"
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--rdzv-conf", quick]
        counts = ["--nnodes", "1:2", "--nproc-per-node", str(self.ranks), "--max-restarts", "9"]
        variables = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "COMPCOLL_PROFILE": "defaults",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *counts, *self.program]
        with (self.folder / f"{len(self.running)}.out").open("w") as output:
            self.running.append(
                subprocess.Popen(
                    command, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
                )
            )

    def kill_node(self) -> None:
        """Kill the newest agent with all its ranks."""
        for child in children(self.running[-1].pid):
            os.kill(child, signal.SIGKILL)
        self.running[-1].kill()
        self.running[-1].wait()

    def kill_rank(self) -> None:
        """Kill one of the newest agent's ranks."""
        os.kill(children(self.running[-1].pid)[0], signal.SIGKILL)

    def wait_for(self, what: Callable[[], Any]) -> Any:
        """Poll until something is true; show all output if it does not become true in time."""
        end = time.monotonic() + SECONDS
        while not (found := what()):
            over = all(agent.poll() is not None for agent in self.running)
            assert time.monotonic() < end and not over, self.output()
            time.sleep(0.02)
        return found

    def wait(self) -> list[int]:
        try:
            return [agent.wait(SECONDS) for agent in self.running]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.output()) from None

    def output(self) -> str:
        return "\n".join((self.folder / f"{at}.out").read_text()[-6000:] for at in range(len(self.running)))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.running:
            if agent.poll() is None:
                for child in children(agent.pid):
                    os.kill(child, signal.SIGKILL)
                agent.kill()
                agent.wait()


def children(process: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def scenario(folder: Path) -> dict[str, dict[str, float]]:
    """Kill ranks and nodes, start others; return the seconds from each event to the next step, in parts."""
    found = {}
    with Agents(folder, Path(__file__), folder, ranks=RANKS) as agents:

        def steps(size: int, after: float = 0.0) -> list[dict[str, Any]]:
            log = folder / "log.jsonl"
            lines = log.read_text().splitlines() if log.exists() else []
            events = [json.loads(line) for line in lines]
            return [each for each in events if each["size"] == size and each["started"] > after]

        def settled(size: int, after: float = 0.0) -> None:
            """Wait until these ranks have written a checkpoint and gone on."""
            agents.wait_for(lambda: len(steps(size, after)) > 2 * EVERY)

        def measure(event: str, size: int, act: Callable[[], None]) -> None:
            at = time.time()
            act()
            settled(size, at)
            first = steps(size, at)[0]
            found[event] = {
                "torchrun": first["started"] - at,
                "PyTorch": first["wrapped"] - first["started"],
                "compcoll": first["ended"] - first["wrapped"],
            }

        agents.start()
        agents.start()
        settled(2 * RANKS)
        measure("one of four ranks is killed, both nodes go on", 2 * RANKS, agents.kill_rank)
        measure("a node is killed, the other goes on", RANKS, agents.kill_node)
        measure("a node joins", 2 * RANKS, agents.start)
        (folder / "end").touch()
        status = agents.wait()
        assert status == [0, -signal.SIGKILL, 0], agents.output()
    return found


def train(folder: Path) -> None:
    """Run one rank until the folder has a file ``end``."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import compcoll.torch

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(SHAPE))

        def forward(self, factors: torch.Tensor) -> torch.Tensor:
            return (self.weights * factors).sum()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Line())
    wrapped = time.time()
    compression = compcoll.torch.compress(model, "minmax", bits=2, algorithm="ring", exclude=[])
    state = compcoll.torch.GatheredState(compression)
    given, sizes = torch.zeros(SHAPE, dtype=torch.float64), list[int]()
    kept = folder / "kept.pt"
    if kept.exists():
        found = torch.load(kept, weights_only=True)
        state.load_state_dict(found["compression"])
        given, sizes = found["given"], found["sizes"]
    ends = torch.zeros(1)
    while not ends:
        model.zero_grad()
        model(torch.from_numpy(gradient(len(sizes), rank)).float()).backward()
        mean = model.module.weights.grad
        assert mean is not None
        given += mean
        sizes.append(size)
        if rank == 0:
            with (folder / "log.jsonl").open("a") as log:
                event = {"step": len(sizes), "size": size, "started": STARTED, "wrapped": wrapped, "ended": time.time()}
                log.write(json.dumps(event) + "\n")
            ends += (folder / "end").exists()
        dist.broadcast(ends, 0)
        if ends or len(sizes) % EVERY == 0:
            gathered = state.state_dict()
            if rank == 0:
                torch.save({"compression": gathered, "given": given, "sizes": sizes}, folder / "unfinished.pt")
                (folder / "unfinished.pt").rename(kept)
        time.sleep(0.02)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = scenario(Path(folder))
    print("| event | torchrun: new processes | PyTorch: import, group, DDP | compcoll: first step | sum |")
    print("|---|---|---|---|---|")
    for event, parts in found.items():
        print(f"| {event} | {' | '.join(f'{seconds:.1f}' for seconds in [*parts.values(), sum(parts.values())])} |")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
