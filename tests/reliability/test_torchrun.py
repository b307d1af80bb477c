"""Ranks that are killed under torchrun, as docs/reliability.md tells it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import output_of, run_ranks

torch = pytest.importorskip("torch", "2.12")

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parents[1] / "launch"
sys.path.insert(0, str(HERE))
import restarts  # noqa: E402
from survivors import DIES, EVERY, LAST, RATE, SIZE, gradient  # noqa: E402

SECONDS = 120.0


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.timeout(4 * restarts.SECONDS)
def test_nothing_is_lost_but_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    restarts.scenario(tmp_path)
    kept = torch.load(tmp_path / "kept.pt")
    given, sizes, states = kept["given"].numpy(), kept["sizes"], kept["compression"]["ranks"]
    one, both = restarts.RANKS, 2 * restarts.RANKS
    assert [size for at, size in enumerate(sizes) if not at or size != sizes[at - 1]] == [both, one, both]
    means = [np.mean([restarts.gradient(step, rank) for rank in range(size)], 0) for step, size in enumerate(sizes)]
    lacking = sum(state["residuals"]["weights"].double().numpy() for state in states)
    assert np.abs(lacking).max() > 0.1
    np.testing.assert_allclose(given + lacking, np.sum(means, 0), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.timeout(4 * restarts.SECONDS)
def test_train_ddp_goes_on_with_the_same_steps_on_fewer_ranks(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    steps, kept = 80, tmp_path / "kept"
    often = ["--checkpoint", kept, "--checkpoint-every", "5", "--resume"]
    program = [LAUNCH / "train_ddp.py", "--steps", str(steps), "--batch", "4", "--threads", "1", *often]
    with restarts.Agents(tmp_path, *program) as agents:
        agents.start()
        agents.start()
        agents.wait_for(lambda: list(kept.glob("step-*[05]/rank-1.pt")))
        agents.kill_node()
        assert agents.wait() == [0, -signal.SIGKILL], agents.output()
        assert re.search("# resumed after step .*1 ranks", agents.output(), re.DOTALL), agents.output()
    found = torch.load(kept / f"step-{steps:09d}" / "common.pt")
    for name, values in trained(steps, found["settings"]["examples a step"]).items():
        np.testing.assert_allclose(found["model"][name], values, rtol=0, atol=1e-3)
    again = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *program]
    done = subprocess.run(again, capture_output=True, text=True, timeout=restarts.SECONDS)
    assert done.returncode == 0 and "# resumed after step 80" in done.stdout, done.stdout + done.stderr


def trained(steps: int, examples: int) -> dict[str, torch.Tensor]:
    """Train the same model in this process, by PyTorch alone."""
    tasks = importlib.import_module("training.tasks")
    task = tasks.TASKS["digits"](None)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    (rate,) = (group["lr"] for group in optimizer.param_groups)
    for step, (inputs, targets) in enumerate(task.batches(examples, 0, 1, seed=0, epoch=0)):
        if step == steps:
            break
        part = step / steps
        optimizer.param_groups[0]["lr"] = rate * min((part + 1e-3) / 0.05, (1 - part) / 0.95)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return dict(model.state_dict())


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
    environments = [os.environ | variables | {"RANK": str(rank)} for rank in range(3)]
    status = run_ranks([[sys.executable, HERE / "survivors.py", tmp_path]] * 3, tmp_path, SECONDS, environments)
    assert status == [0, 0, -9], output_of(tmp_path, 3)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0]["ranks"] == found[1]["ranks"] == [0, 1]
    assert max(each["seconds"] for each in found) < 20  # their time-out is half an hour
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    np.testing.assert_allclose(found[0]["weights"], local_steps(), rtol=1e-5, atol=1e-5)


def local_steps() -> np.ndarray:
    """DiLoCo with its paper's outer optimizer: SGD with a rate of 0.7 and Nesterov's momentum of 0.9."""
    outer, momentum = np.zeros(SIZE), np.zeros(SIZE)
    for first in range(0, LAST, EVERY):
        ranks = 3 if first + EVERY <= DIES else 2
        steps = range(first, min(first + EVERY, LAST))
        changes = [RATE * sum(gradient(step, rank) for step in steps) for rank in range(ranks)]
        mean = np.mean(changes, axis=0)
        momentum = 0.9 * momentum + mean
        outer -= 0.7 * (mean + 0.9 * momentum)
    return outer
