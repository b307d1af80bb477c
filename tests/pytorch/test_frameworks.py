"""The recipes of docs/frameworks.md for Accelerate, Trainer and Lightning, as they stand there, under launchers that it
names. The oracle is PyTorch in one process, which trains on the batches that the ranks took.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed
from without_mpi4py import make_python

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
SECONDS = 200

# Two bits lose much: without the residuals of before the bits differ, which is looked at, too.
CODEC = 'codec="minmax", bits=2, algorithm="direct"'

COMMON = """
import os, sys, torch
import torch.distributed as dist
os.chdir(sys.argv[1])
torch.set_num_threads(1)
RANKS, SAMPLES, BATCH, EPOCHS, RATE = 2, 64, 4, 3, 0.05

class Samples(torch.utils.data.Dataset):
    "Noisy images of four classes; `taken` has the numbers of those that this rank took, in their order."

    def __init__(self, form):
        generator = torch.Generator().manual_seed(2)
        classes = torch.randn(4, 64, generator=generator)
        self.labels = torch.arange(SAMPLES) % 4
        self.images = 0.3 * classes[self.labels] + torch.randn(SAMPLES, 64, generator=generator)
        self.form, self.taken = form, []

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        self.taken.append(number)
        return self.form(self.images[number], self.labels[number])

def network(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))

def told(network):
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()])

def loss_of(network, numbers):
    return torch.nn.functional.cross_entropy(network(samples.images[numbers]), samples.labels[numbers])

def final_loss(network):
    with torch.no_grad():
        return loss_of(network, torch.arange(SAMPLES)).item()

def trained_alone(seed, taken):
    "The loss of one process that takes in each step what all ranks took."
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(0, len(taken[0]), BATCH):
        optimizer.zero_grad()
        loss_of(model, [number for own in taken for number in own[step : step + BATCH]]).backward()
        optimizer.step()
    return final_loss(model)

def compared(whole, taken, resumed, forgetful, calls):
    everywhere = [torch.empty_like(told(whole)) for _ in range(RANKS)]
    dist.all_gather(everywhere, told(whole))
    assert torch.equal(*everywhere), "ranks differ"

    every = [None] * RANKS
    dist.all_gather_object(every, taken)
    first = [own[: SAMPLES // RANKS] for own in every]
    assert sorted(sum(first, [])) == list(range(SAMPLES)), f"in the first epoch the ranks took {first}"
    assert [len(own) for own in every] == [EPOCHS * SAMPLES // RANKS] * RANKS

    alone = [trained_alone(seed, every) for seed in range(1, 7)]
    noise, loss = max(alone) - min(alone), final_loss(whole)
    assert noise < 0.2 * (final_loss(network()) - alone[0]), "a training says nothing"
    assert abs(loss - alone[0]) < noise, f"{loss} with compression, {alone} without"

    assert torch.equal(told(whole), told(resumed)), (told(whole) - told(resumed)).abs().max()
    assert not torch.equal(told(whole), told(forgetful)), "nothing is lost that a state must hold"
    assert any("direct, MinMax" in call for call in calls), calls
    print("trained", dist.get_rank(), dist.get_backend(), "mpi4py.MPI" in sys.modules, flush=True)
    dist.destroy_process_group()
"""

# Each recipe becomes the body of a function, with these lines of the test's own.
ACCELERATE = """
samples = Samples(lambda image, label: (image, label))

def train(first, last, forget=False):
    model, data = network(), torch.utils.data.DataLoader(samples, batch_size=BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    def epochs():
        if first:
            accelerator.load_state("kept")
        for epoch in range(first, last):
            for x, y in data:
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
            if (first, epoch) == (0, EPOCHS - 2):
                accelerator.save_state("kept")
    {recipe}
    calls = compression.stats.calls
    compression.free()
    return model.module, calls

whole, calls = train(0, EPOCHS)
taken = samples.taken[:]
compared(whole, taken, train(EPOCHS - 1, EPOCHS)[0], train(EPOCHS - 1, EPOCHS, forget=True)[0], calls)
"""

TRAINER = """
class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x, labels):
        outputs = self.network(x)
        return torch.nn.functional.cross_entropy(outputs, labels), outputs

samples = Samples(lambda image, label: {{"x": image, "labels": label}})
more = dict(
    num_train_epochs=EPOCHS, per_device_train_batch_size=BATCH, save_strategy="epoch", report_to=[], max_grad_norm=0.0,
    logging_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=RATE, lr_scheduler_type="constant",
)
checkpoint = f"kept/checkpoint-{{(EPOCHS - 1) * SAMPLES // BATCH // RANKS}}"

def train(resume, forget=False):
    model = Classifier()
    {recipe}
    calls = compressed.compression.stats.calls
    compressed.compression.free()
    return trainer.model.network, calls

whole, calls = train(False)
taken = samples.taken[:]
compared(whole, taken, train(checkpoint)[0], train(checkpoint, forget=True)[0], calls)
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
        return torch.optim.SGD(self.parameters(), lr=RATE)

samples = Samples(lambda image, label: (image, label))

def train(epochs, path=None, forget=False):
    data, module = torch.utils.data.DataLoader(samples, batch_size=BATCH), Classifier()
    more = dict(max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=False)
    {recipe}
    calls = compressed.compression.stats.calls
    if epochs == EPOCHS - 1:
        trainer.save_checkpoint("kept.ckpt", weights_only=False)
    compressed.compression.free()
    return module.network, calls

whole, calls = train(EPOCHS)
taken = samples.taken[:]
train(EPOCHS - 1)
compared(whole, taken, train(EPOCHS, "kept.ckpt")[0], train(EPOCHS, "kept.ckpt", forget=True)[0], calls)
"""

SCRIPTS = {"accelerate": ACCELERATE, "transformers": TRAINER, "lightning": LIGHTNING}

FORGET = "if forget:\n    compcoll.torch.GatheredState.load_state_dict = lambda self, state: None\n"
CHANGES = {
    "accelerate": [("...\n", "epochs()\n")],
    "transformers": [
        ("use_cpu=True)", "use_cpu=True, **more)"),
        ("resume_from_checkpoint=False)", "resume_from_checkpoint=resume)"),
    ],
    "lightning": [
        ("callbacks=[compressed]", "callbacks=[compressed], **more"),
        ("data)", "data, ckpt_path=path)"),
    ],
}


def script(framework: str) -> str:
    """The block of the page that imports the framework, with the test's settings, in a program."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if re.search(rf"^(from|import) {framework}\b", block, re.MULTILINE)]
    begin = "import compcoll.torch\n"
    (compress,) = re.findall(r"compress\(.*?\)", block)
    for written, here in [
        (compress, f"{compress[:-1]}, {CODEC})"),
        (begin, f"{begin}{FORGET}"),
        *CHANGES[framework],
    ]:
        assert block.count(written) == 1, written
        block = block.replace(written, here)
    return COMMON + SCRIPTS[framework].format(recipe=block.replace("\n", "\n    "))


def started(python: str | Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command and all processes that it starts, under no other launcher."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    process = subprocess.Popen(
        [python, *words],
        # Where output is buffered, the lines of two ranks do not mix.
        env=environ
        | {"OMP_NUM_THREADS": "1", "COMPCOLL_PROFILE": "defaults", "PYTHONUNBUFFERED": "", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"not ended after {SECONDS} s:\n{process.communicate()[0]}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def assert_trained(returncode: int, output: str) -> None:
    """Check that both ranks passed `compared`, and that rank 0 printed the compression ratio."""
    assert returncode == 0 and sorted(re.findall(r"^trained (\d) gloo", output, re.M)) == ["0", "1"], output
    ratios = [float(line) for line in output.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert ratios and min(ratios) > 8, output


pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]
RUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]


def need(framework: str) -> None:
    if find_spec("torch") is None or find_spec(framework) is None:
        pytest.skip(f"no {framework} here: make test-all installs it beside PyTorch")


@pytest.mark.parametrize(
    ("framework", "launcher"),
    [("accelerate", [*LAUNCH, "--multi_gpu"]), ("transformers", RUN), ("lightning", RUN)],
)
def test_recipe(framework: str, launcher: list[str], tmp_path: Path) -> None:
    need(framework)
    program = tmp_path / "train.py"
    program.write_text(script(framework))
    done = started(sys.executable, *launcher, program, tmp_path)
    assert_trained(done.returncode, done.stdout)


def test_lightning_without_mpi_starts_its_ranks(tmp_path: Path) -> None:
    need("lightning")
    program = tmp_path / "train.py"
    program.write_text(script("lightning"))
    done = started(make_python(tmp_path / "environment"), program, tmp_path)
    assert_trained(done.returncode, done.stdout)
    assert "True" not in done.stdout, "MPI was there"


@pytest.mark.only_on("openmpi")  # where make test-all installs them
def test_lightning_under_mpirun(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    need("lightning")
    program = tmp_path / "train.py"
    program.write_text(script("lightning"))
    done = mpirun(2, program, tmp_path, timeout=SECONDS)
    assert_trained(done.returncode, "\n".join(rank.stdout for rank in done.ranks))


@pytest.mark.parametrize(("launcher", "cpu"), [([*LAUNCH, "--cpu"], True), (RUN, False)])
def test_one_process_of_accelerate(launcher: list[str], cpu: bool, tmp_path: Path) -> None:
    need("accelerate")
    program = tmp_path / "train.py"
    program.write_text(script("accelerate").replace("cpu=True", f"cpu={cpu}"))
    done = started(sys.executable, *launcher, program, tmp_path)
    said = re.findall(r"InvalidArgument: (.*)", done.stdout)[0]
    assert "Accelerate runs one process only" in said and "torchrun --nproc-per-node 2" in said
    assert "accelerate launch --multi_gpu --num_processes 2" in said and "Accelerator(cpu=True)" in said
