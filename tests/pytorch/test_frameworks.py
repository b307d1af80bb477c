"""The recipes of docs/torch.md for Accelerate, Trainer and Lightning, as they stand there: training on CPUs over our
process group with compressed gradients, which goes on from the framework's own checkpoint with the same bits.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed

PAGE = Path(__file__).parents[2] / "docs" / "torch.md"

# Two bits lose much: without the losses of before the bits differ, which is looked at, too.
CODEC = 'codec="minmax", bits=2, algorithm="ring"'

COMMON = """
import os, sys, torch
os.chdir(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(2)
samples = [(torch.randn(64), i % 4) for i in range(32)]

def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))

def told(network):
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])

def compared(whole, resumed, forgetful, calls):
    import torch.distributed as dist

    everywhere = [torch.empty_like(whole) for _ in range(2)]
    dist.all_gather(everywhere, whole)
    assert torch.equal(*everywhere), "ranks differ"
    assert torch.equal(whole, resumed), (whole - resumed).abs().max()
    assert not torch.equal(whole, forgetful), "nothing is lost that a state must hold"
    assert any("ring, MinMax" in call for call in calls), calls
    print("trained", dist.get_backend(), flush=True)
    dist.destroy_process_group()
"""

# Each recipe becomes the body of a function, with these lines of the test's own.
ACCELERATE = """
def train(first, last, forget=False):
    model, data = network(), torch.utils.data.DataLoader(samples, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {recipe}
    assert (accelerator.num_processes, accelerator.process_index) == (2, dist.get_rank())
    if first:
        accelerator.load_state("kept")
    for epoch in range(first, last):
        for x, y in data:
            optimizer.zero_grad()
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        if (first, epoch) == (0, 1):
            accelerator.save_state("kept")
    calls = compression.stats.calls
    compression.free()
    return told(model), calls

whole, calls = train(0, 3)
compared(whole, train(2, 3)[0], train(2, 3, forget=True)[0], calls)
"""

TRAINER = """
class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels):
        outputs = self.network(x)
        return torch.nn.functional.cross_entropy(outputs, labels), outputs

samples = [{{"x": x, "labels": y}} for x, y in samples]
more = dict(
    num_train_epochs=3, per_device_train_batch_size=4, save_strategy="epoch", report_to=[], logging_strategy="no",
    disable_tqdm=True, max_grad_norm=0.0,
)

def train(resume, forget=False):
    model = Classifier()
    {recipe}
    compression = next(c for c in trainer.callback_handler.callbacks if hasattr(c, "compression")).compression
    calls = compression.stats.calls
    compression.free()
    return told(trainer.model), calls

whole, calls = train(False)
compared(whole, train("kept/checkpoint-8")[0], train("kept/checkpoint-8", forget=True)[0], calls)
"""

LIGHTNING = """
import lightning

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, number):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def train(epochs, path=None, forget=False):
    data, module = torch.utils.data.DataLoader(samples, batch_size=4), Classifier()
    more = dict(max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False)
    {recipe}
    compression = trainer.callbacks[0].compression
    calls = compression.stats.calls
    if epochs == 2:
        trainer.save_checkpoint("kept.ckpt", weights_only=False)
    compression.free()
    return told(module), calls

whole, calls = train(3)
train(2)
compared(whole, train(3, "kept.ckpt")[0], train(3, "kept.ckpt", forget=True)[0], calls)
"""

SCRIPTS = {"accelerate": ACCELERATE, "transformers": TRAINER, "lightning": LIGHTNING}

FORGET = "if forget:\n    compcoll.torch.GatheredState.load_state_dict = lambda self, state: None\n"
CHANGES = {
    "accelerate": [],
    "transformers": [
        ("use_cpu=True)", "use_cpu=True, **more)"),
        ("resume_from_checkpoint=False)", "resume_from_checkpoint=resume)"),
    ],
    "lightning": [
        ("callbacks=[Compressed()],", "callbacks=[Compressed()], **more,"),
        ("data)", "data, ckpt_path=path)"),
    ],
}


def recipe(framework: str) -> str:
    """The block of the page that imports the framework, with the test's settings, as part of a function."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if re.search(rf"^(from|import) {framework}\b", block, re.MULTILINE)]
    begin = 'dist.init_process_group("compcoll")'
    (compress,) = re.findall(r"compress\(.*?\)", block)
    for told, here in [
        (compress, f"{compress[:-1]}, {CODEC})"),
        (begin, f"{FORGET}if not dist.is_initialized():\n    {begin}"),
        *CHANGES[framework],
    ]:
        assert block.count(told) == 1, told
        block = block.replace(told, here)
    return block.replace("\n", "\n    ")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.only_on("openmpi")  # where make test-all installs them
@pytest.mark.parametrize("framework", SCRIPTS)
def test_recipe(framework: str, mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    python = mpi.prefix / "bin" / "python"
    if subprocess.run([python, "-c", f"import torch, {framework}"], capture_output=True, timeout=120).returncode:
        pytest.skip(f"no {framework} in the environment for {mpi.name}: make test-all installs it beside PyTorch")
    script = tmp_path / "train.py"
    script.write_text(COMMON + SCRIPTS[framework].format(recipe=recipe(framework)))
    done = mpirun(2, script, tmp_path, timeout=250)
    assert all("trained compcoll" in rank.stdout for rank in done.ranks), done.report
