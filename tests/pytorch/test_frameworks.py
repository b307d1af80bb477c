"""The recipes of docs/frameworks.md for Accelerate, Trainer and Lightning, as they stand there, under launchers that it
names. The oracle is PyTorch in one process, which trains on the batches that the ranks took.
"""

from __future__ import annotations

import contextlib
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
from ports import free_ports
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
    with open(f"trained-{dist.get_rank()}", "w") as file:
        print(dist.get_backend(), "mpi4py.MPI" in sys.modules, file=file)
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

def train(resume=None):
    model = Classifier()
    {resumable}
    calls = compressed.compression.stats.calls
    compressed.compression.free()
    return trainer.model.network, calls

def train_again(resume=None):
    model = Classifier()
    {recipe}
    once = compressed.compression.stats.calls.total()
    trainer.train()
    assert compressed.compression.stats.calls.total() > once, compressed.compression.stats
    compressed.compression.free()

whole, calls = train()
taken = samples.taken[:]
resumed, _ = train(checkpoint)
dist.barrier()
if dist.get_rank() == 0:
    os.remove(checkpoint + "/compression.pt")
dist.barrier()
from_before_compression, _ = train(checkpoint)
train_again()
compared(whole, taken, resumed, from_before_compression, calls)
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

options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)

def train(epochs, path=None, forget=False, callbacks=()):
    data, module = torch.utils.data.DataLoader(samples, batch_size=BATCH), Classifier()
    more = dict(max_epochs=epochs, **options)
    {resumable}
    calls = compressed.compression.stats.calls
    if epochs == EPOCHS - 1:
        trainer.save_checkpoint("kept.ckpt", weights_only=False)
    compressed.compression.free()
    return module.network, calls

class Early(lightning.Callback):
    def on_fit_start(self, trainer, module):
        trainer.save_checkpoint("early.ckpt", weights_only=False)

def saved_residuals(path):
    return str(torch.load(path, weights_only=False)["callbacks"])

def train_again(path=None, forget=False, callbacks=()):
    data, module = torch.utils.data.DataLoader(samples, batch_size=BATCH), Classifier()
    more = dict(max_epochs=1, **options)
    {recipe}
    first = compressed.compression
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    assert compressed.compression is not first and compressed.compression.stats.ratio > 1

whole, calls = train(EPOCHS)
taken = samples.taken[:]
train(EPOCHS - 1)
resumed, _ = train(EPOCHS, "kept.ckpt", callbacks=[Early()])
assert saved_residuals("early.ckpt") == saved_residuals("kept.ckpt")
finder = lightning.pytorch.callbacks.LearningRateFinder(num_training_steps=3, update_attr=False)
assert abs(final_loss(train(EPOCHS, callbacks=[finder])[0]) - final_loss(whole)) < 0.05
train_again()
compared(whole, taken, resumed, train(EPOCHS, "kept.ckpt", forget=True)[0], calls)
"""

SCRIPTS = {"accelerate": ACCELERATE, "transformers": TRAINER, "lightning": LIGHTNING}

FORGET = "if forget:\n    compcoll.torch.GatheredState.load_state_dict = lambda self, state: None\n"
CHANGES = {
    "accelerate": [("...\n", "epochs()\n")],
    "transformers": [
        ("use_cpu=True)", "use_cpu=True, **more)"),
        ("train()\nprint", "train(resume_from_checkpoint=resume)\nprint"),
    ],
    "lightning": [
        ("callbacks=[compressed]", "callbacks=[compressed, *callbacks], **more"),
        ("data)\nprint", "data, ckpt_path=path)\nprint"),
    ],
}


def script(framework: str) -> str:
    """The blocks of the page for the framework, with the test's settings, in a program."""
    sections = PAGE.read_text().split("\n## ")
    (section,) = [text for text in sections if re.search(rf"^(from|import) {framework}\b", text, re.MULTILINE)]
    block, *resumable = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    begin = "import compcoll.torch\n"
    (compress,) = re.findall(r"compress\(.*?\)", block)
    changes = [(compress, f"{compress[:-1]}, {CODEC})"), *CHANGES[framework]]
    if "forget" in SCRIPTS[framework]:
        changes += [(begin, f"{begin}{FORGET}")]
    for written, here in changes:
        assert block.count(written) == 1, written
        block = block.replace(written, here)
    parts = {"recipe": block}
    if resumable:
        made = "compressed = Compressed()"
        assert block.count(made) == 1
        parts["resumable"] = block.replace(made, f"{resumable[0]}\ncompressed = Resumable()")
    return COMMON + SCRIPTS[framework].format(**{name: text.replace("\n", "\n    ") for name, text in parts.items()})


def started(folder: Path, *words: str | Path) -> tuple[int, str]:
    """Run a command outside of any launcher. Return its exit status and all ranks' output."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "SLURM_"))}
    environ |= {"OMP_NUM_THREADS": "1", "COMPCOLL_PROFILE": "defaults", "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"MASTER_PORT": str(free_ports(1)[0])}  # of Lightning; torchrun sets its own
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(words, env=environ, stdout=file, stderr=file, start_new_session=True)
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"not ended after {SECONDS} s:\n{output.read_text()}")
    return process.returncode, output.read_text()


def assert_trained(folder: Path, status: int, output: str, mpi: bool) -> None:
    """Check that both ranks passed `compared`, and that the compression ratio was printed."""
    assert status == 0, output
    assert [(folder / f"trained-{rank}").read_text() for rank in (0, 1)] == [f"gloo {mpi}\n"] * 2, output
    ratios = [float(line) for line in output.splitlines() if re.fullmatch(r"\d+\.\d+", line)]
    assert ratios and min(ratios) > 8, output


pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 60)]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
LAUNCH = ["-m", "accelerate.commands.launch", "--num_processes", "2"]


@pytest.fixture
def program(framework: str, tmp_path: Path) -> Path:
    """The recipe of a framework as a program, whose argument is the folder for its files."""
    if find_spec("torch") is None or find_spec(framework) is None:
        pytest.skip(f"no {framework} here: make test-all installs it beside PyTorch")
    path = tmp_path / "train.py"
    path.write_text(script(framework))
    return path


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_torchrun(framework: str, program: Path, tmp_path: Path) -> None:
    # Lightning asks mpi4py for its number of ranks only where torchrun did not start it.
    assert_trained(tmp_path, *started(tmp_path, sys.executable, *TORCHRUN, program, tmp_path), mpi=False)


@pytest.mark.parametrize("framework", ["accelerate"])
def test_launcher_of_accelerate(framework: str, program: Path, tmp_path: Path) -> None:
    port = str(free_ports(1)[0])
    words = [sys.executable, *LAUNCH, "--multi_gpu", "--main_process_port", port, program, tmp_path]
    assert_trained(tmp_path, *started(tmp_path, *words), mpi=False)


@pytest.mark.parametrize("framework", ["lightning"])
def test_launcher_of_lightning_without_mpi4py(framework: str, program: Path, tmp_path: Path) -> None:
    python = make_python(tmp_path / "environment")
    assert_trained(tmp_path, *started(tmp_path, python, program, tmp_path), mpi=False)


@pytest.mark.only_on("openmpi")  # where make test-all installs the frameworks
@pytest.mark.parametrize("framework", ["lightning"])
def test_mpirun(framework: str, program: Path, mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    done = mpirun(2, program, tmp_path, timeout=SECONDS)
    assert_trained(tmp_path, done.returncode, "\n".join(rank.stdout for rank in done.ranks), mpi=True)


@pytest.mark.parametrize("framework", ["accelerate"])
@pytest.mark.parametrize(("launcher", "cpu"), [([*LAUNCH, "--cpu"], True), (TORCHRUN, False)])
def test_one_process_of_accelerate(
    framework: str, launcher: list[str], cpu: bool, program: Path, tmp_path: Path
) -> None:
    program.write_text(program.read_text().replace("cpu=True", f"cpu={cpu}"))
    status, output = started(tmp_path, sys.executable, *launcher, program, tmp_path)
    assert status != 0, output
    (said,) = set(re.findall(r"InvalidArgument: (.*)", output))
    assert "Accelerate runs one process only" in said and "torchrun --nproc-per-node 2" in said
    assert "accelerate launch --multi_gpu --num_processes 2" in said and "Accelerator(cpu=True)" in said
