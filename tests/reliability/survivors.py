"""A rank of the example of docs/reliability.md: rank 2 of three dies before an outer step, the others go on.

    python survivors.py FOLDER

A step's gradient is drawn by its number and rank, whatever the parameters are, so that NumPy can do the same.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from osu_like_bench.training.processes import give_up

SIZE, EVERY, LAST, DIES = 1000, 5, 22, 13
"""Elements, steps of a round, all steps, which are not a multiple of it, and the step in which rank 2 dies."""
RATE = 0.1
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def example() -> str:
    """The example, with this program's steps, and without compression."""
    (text,) = re.findall(r"```python\n(import json\n.*?survivors.*?)```", DOCS.read_text(), re.DOTALL)
    for given, here in (('every=50, codec="minmax", bits=4', f"every={EVERY}, codec=None"), ("60.0", "20.0")):
        assert text.count(given) == 1, given
        text = text.replace(given, here)
    return str(text)


def gradient(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng((step, rank)).normal(size=SIZE)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(SIZE))


def main() -> None:
    torch.set_num_threads(1)
    folder, me = Path(sys.argv[1]), int(os.environ["RANK"])
    model = Line()
    inner = torch.optim.SGD(model.parameters(), RATE)
    died = folder / "died"

    def loss(step: int) -> torch.Tensor:
        if (me, step) == (2, DIES):
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return (model.weights * torch.from_numpy(gradient(step, me)).float()).sum()

    names: dict[str, Any] = {"model": model, "inner": inner, "loss": loss, "steps": LAST}
    exec(compile(example(), str(DOCS), "exec"), names)
    seconds = time.time() - died.stat().st_mtime
    torch.save({"weights": model.weights.detach(), "ranks": names["ranks"], "seconds": seconds}, folder / f"{me}.pt")
    dist.barrier()
    give_up(0)


if __name__ == "__main__":
    main()
