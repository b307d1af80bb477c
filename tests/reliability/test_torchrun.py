"""Ranks that are killed under torchrun, as docs/reliability.md tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", "2.13")

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from survivors import DIES, EVERY, LAST, RATE, SIZE, gradient  # noqa: E402

SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.timeout(SECONDS + 60)
def test_survivors_of_diloco_go_on_without_a_restart(tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "COMPCOLL_PROFILE": "defaults",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "survivors.py", tmp_path],
            env=os.environ | variables | {"RANK": str(rank)},
            stdout=(tmp_path / f"{rank}.out").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(3)
    ]
    try:
        status = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        output = "\n".join((tmp_path / f"{rank}.out").read_text()[-4000:] for rank in range(3))
        print(output)
    assert status == [0, 0, -9], output
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0]["ranks"] == found[1]["ranks"] == [0, 1]
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    np.testing.assert_allclose(found[0]["weights"], local_steps(), rtol=1e-5, atol=1e-5)


def local_steps() -> np.ndarray:
    """DiLoCo with its paper's outer optimizer: SGD with a rate of 0.7 and Nesterov's momentum of 0.9."""
    outer, momentum = np.zeros(SIZE), np.zeros(SIZE)
    for first in range(0, LAST, EVERY):
        ranks = 3 if first + EVERY <= DIES else 2
        changes = [RATE * sum(gradient(step, rank) for step in range(first, first + EVERY)) for rank in range(ranks)]
        mean = np.mean(changes, axis=0)
        momentum = 0.9 * momentum + mean
        outer -= 0.7 * (mean + 0.9 * momentum)
    return outer
