"""Local steps of a rank of gloo's, some of which are killed in the middle of an average.

    python outer_step.py FOLDER RANK

Ranks 3 and 2 die, one after the other, when they are about to send a message of an outer step; the others make a group
anew among themselves, as torchrun's ranks do, and go on. What each rank saw is in FOLDER, a line of JSON an event.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compcoll.errors import CommunicatorBroken, PeerFailed, PeerTimeout
from compcoll.pending import Pending
from compcoll.torch import DiLoCo
from compcoll.torch.groups.transport import GroupTransport
from compcoll.transports.base import Wire
from osu_like_bench.training.processes import give_up

RANKS, EVERY, LAST = 4, 5, 40
DEATHS = {3: (2, 2), 2: (3, 1)}
"""In which step of its group's second round, and at which message from then on, a rank dies that is its last."""
_SECONDS = timedelta(seconds=60)
_LOST = (PeerFailed, PeerTimeout, CommunicatorBroken)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def back_propagate(model: nn.Module, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    model.zero_grad()
    (model(torch.randn(8, 16, generator=random)) - 1).square().mean().backward()


def outer_of(diloco: DiLoCo) -> dict[str, Any]:
    """What all ranks are to have in common."""
    outer: list[torch.Tensor] = diloco.outer.param_groups[0]["params"]
    values = torch.cat(outer).detach()
    return {"steps": diloco.steps, "outer": zlib.crc32(values.numpy()), "finite": bool(values.isfinite().all())}


def die_at(message: int) -> None:
    """Have this process be killed when it is about to send so many messages from now."""
    send, left = GroupTransport.isend, iter(range(message - 1))

    def isend(self: GroupTransport, wire: Wire, dest: int, tag: int) -> Pending:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(self, wire, dest, tag)

    GroupTransport.isend = isend  # type: ignore[method-assign]


def join(folder: Path, rank: int, ranks: int) -> None:
    store = dist.FileStore(str(folder / f"store-{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_SECONDS)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), RANKS
    written = (folder / f"{rank}.jsonl").open("w", buffering=1)
    join(folder, rank, ranks)
    model, first = model_of(rank), 0
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    diloco = DiLoCo(model, inner, every=EVERY, codec="minmax", bits=4, transport="group")
    while diloco.steps < LAST:
        if ranks == rank + 1 and rank in DEATHS and diloco.steps == first + EVERY + DEATHS[rank][0]:
            die_at(DEATHS[rank][1])
        back_propagate(model, diloco.steps, rank)
        try:
            inner.step()
        except _LOST as error:
            written.write(json.dumps({"lost": type(error).__name__, **outer_of(diloco)}) + "\n")
            dist.destroy_process_group()
            ranks -= 1
            join(folder, rank, ranks)  # who is left is the launcher's to tell: here all of lower numbers
            diloco.group = dist.group.WORLD
            first = diloco.steps // EVERY * EVERY
            written.write(json.dumps({"joined": ranks, **outer_of(diloco)}) + "\n")
            continue
        if diloco.steps % EVERY == 0:
            written.write(json.dumps({"averaged": ranks, **outer_of(diloco)}) + "\n")
    diloco.synchronize()
    written.write(json.dumps({"ended": ranks, **outer_of(diloco)}) + "\n")
    dist.barrier()
    give_up(0)


if __name__ == "__main__":
    main()
