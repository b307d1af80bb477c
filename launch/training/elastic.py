"""Training that goes on when ranks die: by a communicator that shrinks, where a process group of PyTorch's cannot."""

from __future__ import annotations

import argparse
import copy
import zlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from compcoll import Communicator, ErrorFeedback
from compcoll.codecs import Codec
from compcoll.errors import CommunicatorBroken, PeerFailed, PeerTimeout
from compcoll.torch.gradients.bucket import Bucket, Feedback, Kept
from compcoll.torch.policy import KINDS, SMALLEST, codec_by_name, exact_parameters
from compcoll.torch.states import residuals_of, state_of
from compcoll.torch.training_stats import TrainingStats
from osu_like_bench import UsageError
from osu_like_bench.report import Progress
from osu_like_bench.training.processes import Place

from .run import Training

_LOST = (PeerFailed, PeerTimeout, CommunicatorBroken)


class Averaging:
    """Averages all gradients of a model after back-propagation, with the residuals of `compcoll.torch.compress`.

    Parameters
    ----------
    module : torch.nn.Module
        On the CPU.
    codec : Codec or None
        For gradients that are compressed.
    arguments : argparse.Namespace
        Of `train_ddp.py`.
    communicator : Communicator
        Of the ranks; may be replaced by one of fewer ranks.
    """

    def __init__(
        self, module: nn.Module, codec: Codec | None, arguments: argparse.Namespace, communicator: Communicator
    ) -> None:
        self.communicator = communicator
        self.stats = TrainingStats()
        self._codec, self._algorithm = codec, arguments.algorithm
        exact = exact_parameters(module, KINDS if arguments.exclude is None else arguments.exclude, SMALLEST)
        self._codecs = codec_by_name(codec, module, exact)
        self._parameters = dict(module.named_parameters())
        self._feedback: Feedback = False if arguments.no_feedback else ErrorFeedback
        self._kept: Kept = {"residual": {}}
        self._gradients = torch.empty(sum(parameter.numel() for parameter in module.parameters()))
        self._bucket = self._laid_out()

    def _laid_out(self) -> Bucket:
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        return Bucket(
            *(tuple(self._parameters), sizes, self._gradients, self.communicator, self._codecs),
            *(True, self._feedback, self._kept),
        )

    def average(self) -> None:
        """Replace the gradients by their mean over the ranks. Collective."""
        parameters = self._parameters.values()
        torch.cat([parameter.grad.view(-1) for parameter in parameters], out=self._gradients)
        self._bucket.average(self._gradients, self.communicator, self._algorithm, self.stats)
        means = self._gradients.split([parameter.numel() for parameter in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Copy this rank's residuals, as `GradientCompression.state_dict` does."""
        shaped = {name: kept.reshape(self._parameters[name].shape) for name, kept in self._kept["residual"].items()}
        return state_of(self.communicator.rank, self.communicator.size, shaped)

    def load_state_dict(self, states: Any) -> None:
        """Restore the residuals of an earlier run, or those before a step that did not end."""
        shapes = {name: self._parameters[name].shape for name, codec in self._codecs.items() if codec is not None}
        restored = residuals_of(states, self.communicator.rank, self.communicator.size, shapes)
        if self._feedback:
            self._kept = {"residual": {name: kept.reshape(-1).numpy() for name, kept in restored.items()}}
            self._bucket = self._laid_out()

    def __repr__(self) -> str:
        return f"{self._codec or 'no compression'}, algorithm={self._algorithm!r}, elastic"


class ElasticTraining(Training):
    """One run on this rank, in which other ranks may die at any moment.

    Every rank keeps its own examples: those of dead ranks are left out, and the mean is over the ranks that are left. A
    step in which a rank dies may have ended on some ranks, and not on others. So all ranks go back to the last step
    that has ended everywhere, with the parameters, optimizer state and residuals of then.

    Attributes
    ----------
    alive : list of int
        The numbers that the present ranks had in the beginning.
    deaths : list of dict
        For each time that ranks died: the step after which the others went on, and the numbers of the dead.
    """

    def __init__(self, arguments: argparse.Namespace, place: Place) -> None:
        from compcoll.transports.mpi import check_recovery  # starts MPI

        check_recovery()
        if arguments.low_rank is not None or arguments.dgc is not None:
            raise UsageError("--elastic averages by a codec or exactly: --low-rank and --dgc need a process group")
        self.communicator = Communicator()
        self.alive = list(range(place.size))
        self.deaths: list[dict[str, Any]] = []
        self.checksums: list[int] = []
        super().__init__(arguments, place)
        # Survivors differ by one step at most: a step ends nowhere before all have begun it.
        self._kept: deque[tuple[int, dict[str, Any]]] = deque(maxlen=2)
        self._recovering = False

    @property
    def standing(self) -> tuple[int, int]:
        return self.communicator.rank, self.communicator.size

    @property
    def library(self) -> str:
        return "MPI"

    def connect(self) -> nn.Module:
        if self.by_samples:
            raise UsageError(f"--elastic gives codecs no second moments, which {self.codec} needs")
        values = parameters_to_vector(self.module.parameters()).detach()
        self.communicator.bcast(values.numpy(), 0, out=values.numpy(), codec=None)
        vector_to_parameters(values, self.module.parameters())
        self.compression = Averaging(self.module, self.codec, self.arguments, self.communicator)
        return self.module

    def average(self) -> None:
        self.compression.average()

    def total(self, sums: Tensor) -> Tensor:
        return torch.from_numpy(self.communicator.allreduce(sums.numpy()))

    def barrier(self) -> None:
        self.communicator.allreduce(np.zeros(1))

    def finished(self) -> None:
        parts = copy.deepcopy({"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()})
        self._kept.append((self.step, parts | {"compression": self.compression.state_dict()}))

    def go_on(self, progress: Progress) -> None:
        self.finished()
        while not self._attempt(progress):
            pass

    def _attempt(self, progress: Progress) -> bool:
        """Train to the end; return False if a rank died, and the others are ready to go on."""
        try:
            if self._recovering:
                self._agree(progress)
            super().go_on(progress)
            self.checksums = self._compare()
            return True
        except _LOST as error:
            failure = error
        before = self.communicator.size
        self.communicator = self.communicator.shrink()
        if self.communicator.size == before:
            raise failure  # nobody has died
        self._recovering = True
        return False

    def _agree(self, progress: Progress) -> None:
        """Go back to the last step that has ended on all ranks."""
        communicator = self.communicator
        step, lines = communicator.allreduce(np.array([self.step, len(self.lines)]), op="min").tolist()
        alive = communicator.allgather(np.array([self.place.rank])).ravel().tolist()
        state = next(state for at, state in self._kept if at == step)
        self.compression.communicator = communicator
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        standing = {"rank": communicator.rank, "size": communicator.size}
        self.compression.load_state_dict(state["compression"] | standing)
        self.step = step
        self._kept = deque([(step, state)], maxlen=2)
        del self.lines[lines:]
        self._compare()
        progress.quiet = communicator.rank != 0
        self.deaths.append({"step": step, "ranks": sorted(set(self.alive) - set(alive))})
        self.alive = alive
        self._recovering = False
        progress.print(f"# {_listed(self.deaths[-1]['ranks'])} died: {_listed(alive)} went on after step {step}")
        self.save()

    def _compare(self) -> list[int]:
        """Return the checksums of all ranks' parameters; raise an error if they differ."""
        own = zlib.crc32(parameters_to_vector(self.module.parameters()).detach().numpy())
        checksums: list[int] = self.communicator.allgather(np.array([own])).ravel().tolist()
        if len(set(checksums)) > 1:
            raise RuntimeError(f"the ranks' parameters differ, their checksums are {checksums}: do not go on with them")
        return checksums

    def record(self) -> dict[str, Any]:
        return super().record() | {"alive": self.alive, "deaths": self.deaths, "checksums": self.checksums}


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
