"""Tasks that need no download: images of digits, the text of Python's library, CIFAR-10 from a folder."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from osu_like_bench import UsageError
from osu_like_bench.training.models import GPT, convolutional


class Examples(NamedTuple):
    """Inputs and targets, one example a row."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Task:
    """A model and what it learns.

    Attributes
    ----------
    model : callable
        Makes the model from torch's random numbers.
    train, test : Examples
        To learn from, and to measure loss and accuracy with.
    optimizer : callable
        Makes the optimizer of some parameters.
    rate, decay : float
        Learning rate and weight decay of AdamW, and of its compressed kin.
    batch : int
        Examples of a rank in a step.
    epochs : int
        Passes over all training examples.
    """

    name: str
    model: Callable[[], nn.Module]
    train: Examples
    test: Examples
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    rate: float
    decay: float
    batch: int
    epochs: int

    def steps(self, examples: int) -> int:
        """Return the steps of an epoch; the examples that do not fill a last one are left out."""
        return len(self.train.inputs) // examples

    def batches(
        self, examples: int, rank: int, ranks: int, *, seed: int, epoch: int, first: int = 0
    ) -> Iterator[Examples]:
        """Yield a rank's examples of each step of an epoch, from step ``first`` on, in an order by seed and epoch.

        The ``examples`` of a step are the same for any number of ranks.
        """
        order = torch.randperm(len(self.train.inputs), generator=torch.Generator().manual_seed((seed << 20) + epoch))
        for step in range(first, self.steps(examples)):
            rows = order[step * examples :][:examples].tensor_split(ranks)[rank]
            yield Examples(self.train.inputs[rows], self.train.targets[rows])


def share(examples: int, rank: int, ranks: int) -> int:
    """Return how many examples of a step a rank has: the first ranks have one more than the others, if needed."""
    return examples // ranks + (rank < examples % ranks)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def judge(model: nn.Module, examples: Examples, rank: int, ranks: int, *, batch: int = 256) -> Tensor:
    """Return the sums of loss and of right answers, and the number of targets, of this rank's part of the examples."""
    sums = torch.zeros(3, dtype=torch.float64)
    for inputs, targets in zip(
        examples.inputs[rank::ranks].split(batch), examples.targets[rank::ranks].split(batch), strict=True
    ):
        with torch.no_grad():
            logits = model(inputs)
        right = int((logits.argmax(-1) == targets).sum())
        sums += torch.tensor([float(loss_of(logits, targets)) * targets.numel(), right, targets.numel()])
    return sums


def digits(folder: Path | None = None) -> Task:
    """1797 handwritten digits of 8 × 8 pixels; every fifth is for the test."""
    if find_spec("sklearn") is None:
        raise UsageError("task digits takes its images from scikit-learn: pip install scikit-learn, or --task text")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images.astype(np.float32) / 8 - 1).unsqueeze(1)
    targets = torch.from_numpy(data.target.astype(np.int64))
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
    test, train = order[::5], order[torch.arange(len(order)) % 5 != 0]
    return Task(
        "digits",
        lambda: convolutional(1, 10),
        Examples(images[train], targets[train]),
        Examples(images[test], targets[test]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        rate=3e-3,
        decay=1e-2,
        batch=16,
        epochs=8,
    )


_CONTEXT = 128
_TEXT_NBYTES = 2 << 20


def text(folder: Path | None = None) -> Task:
    """The first 2 MiB of Python's standard library, or of a folder's .py and .txt files; a tenth is for the test."""
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    pattern = "*.py" if folder is None else "**/*"
    content = bytearray()
    for path in sorted(root.glob(pattern)):
        if path.suffix in (".py", ".txt") and path.is_file() and len(content) < _TEXT_NBYTES:
            content += path.read_bytes()
    rows = min(len(content), _TEXT_NBYTES) // (_CONTEXT + 1)
    if rows < 100:
        raise UsageError(f"task text found {len(content)} bytes of text in {root}: --data FOLDER with more is needed")
    tokens = torch.frombuffer(content, dtype=torch.uint8)[: rows * (_CONTEXT + 1)].view(rows, -1).long()
    examples = Examples(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    is_test = torch.arange(rows) % 10 == 0
    return Task(
        "text",
        lambda: GPT(_CONTEXT),
        Examples(*(part[~is_test] for part in examples)),
        Examples(*(part[is_test] for part in examples)),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
        rate=1e-3,
        decay=0.1,
        batch=8,
        epochs=1,
    )


_CIFAR_ROW = 1 + 3 * 32 * 32


def cifar10(folder: Path | None = None) -> Task:
    """CIFAR-10 in its binary version: data_batch_1.bin to data_batch_5.bin and test_batch.bin in a folder."""
    names = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
    if folder is None or not all((folder / name).is_file() for part in names.values() for name in part):
        raise UsageError(
            "task cifar10 needs --data FOLDER with data_batch_1.bin … data_batch_5.bin and test_batch.bin: the binary "
            "version of https://www.cs.toronto.edu/~kriz/cifar.html, unpacked"
        )

    def read(part: str) -> Examples:
        rows = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names[part]])
        if rows.size % _CIFAR_ROW:
            raise UsageError(f"{folder}: the {part} files hold no rows of {_CIFAR_ROW} bytes")
        rows = rows.reshape(-1, _CIFAR_ROW)
        images = torch.from_numpy(rows[:, 1:].astype(np.float32) / 64 - 2).view(-1, 3, 32, 32)
        return Examples(images, torch.from_numpy(rows[:, 0].astype(np.int64)))

    return Task(
        "cifar10",
        lambda: convolutional(3, 10, width=64, reductions=3),
        read("train"),
        read("test"),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4),
        rate=1e-3,
        decay=5e-2,
        batch=32,
        epochs=20,
    )


TASKS: Mapping[str, Callable[[Path | None], Task]] = {"digits": digits, "text": text, "cifar10": cifar10}
"""Makers of tasks, by name; each takes the folder of --data, or None."""
