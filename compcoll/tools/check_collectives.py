"""Collectives with a codec, on a few ranks in this process: their results against those without loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..codecs.sparse import Sparsifier
from ..collectives import choose
from ..communicator import Communicator
from ..feedback import ErrorFeedback
from ..transports.loopback import Loopback
from .check_coder import HOST, Array, Found, Promises, Trial, relative, same

_WORLDS = ((2, 2), (3, 3), (4, 2))
"""Ranks, and ranks on a node."""

_LONG = 600_000
"""Values of which each of two ranks has more than one segment."""


class Ranks:
    """Ranks in this process, whose collectives run with one codec.

    Parameters
    ----------
    trial : Trial
        The codec and the element type.
    size, per_node : int
        Ranks, and ranks on a node.
    """

    def __init__(self, trial: Trial, size: int, per_node: int) -> None:
        self.trial, self.size, self.nodes = trial, size, -(-size // per_node)
        self.world = Loopback(size, per_node, seed=0)
        self.comms = [Communicator(transport, codec=trial.codec) for transport in self.world.transports]

    def run(
        self, collective: str, algorithm: str, inputs: Sequence[Array], feedback: Sequence[Any] = ()
    ) -> list[Array]:
        """All ranks' results."""
        more: list[dict[str, Any]] = [{"feedback": each} for each in feedback] or [{} for _ in inputs]
        return self.world.run(
            getattr(comm, f"i{collective}")(x, algorithm=algorithm, **how)
            for comm, x, how in zip(self.comms, inputs, more, strict=True)
        )

    def algorithms(self, collective: str) -> list[str]:
        """The names of those that take the codec, and need no MPI."""
        names = [name for name in choose.NAMES[collective] if name not in choose.BY_MPI]
        if collective == "allreduce":
            names = [name for name in names if (name in choose.SPARSE) == self.trial.sparse]
        return names

    def allowed(self, collective: str, algorithm: str, x: Array) -> float:
        """The relative error that a result may have: twice what losses such as encoding x has add up to at worst."""
        trial, rounding = self.trial, (self.size + 2) * self.trial.rounding
        if trial.codec.additive:
            told = trial.codec.sum_error(self.size)
            return np.inf if told is None else 2 * told + rounding
        once = max(trial.once(x), trial.once(x[: x.size // self.size]))  # of buffers and of chunks
        record = ALGORITHMS[algorithm]
        growth = record.growth(collective, self.size, self.nodes, once)
        levels = record.encodings(collective, self.size, self.nodes).levels
        return 2 * once * max(growth.independent, growth.alike) * (1 + once) ** levels + rounding


def _worlds(trial: Trial) -> list[Ranks]:
    """Two, three and four ranks, these on two nodes; one of them for all types but one."""
    return [Ranks(trial, *world) for world in (_WORLDS if trial.dtype == "float32" else _WORLDS[1:2])]


def _allreduce(trial: Trial) -> Found:
    for ranks in _worlds(trial):
        inputs = [trial.normals(trial.n, seed) for seed in range(ranks.size)]
        for algorithm in ranks.algorithms("allreduce"):
            feedback = [trial.feedback(trial.n) for _ in inputs] if trial.sparse else []
            yield from _compared(ranks, "allreduce", algorithm, inputs, feedback)


def _long_buffers(trial: Trial) -> Found:
    if trial.dtype == "float32" and not trial.sparse:
        ranks = Ranks(trial, 2, 2)
        inputs = [trial.normals(_LONG, seed) for seed in range(ranks.size)]
        for algorithm in ranks.algorithms("allreduce")[:1]:
            yield from _compared(ranks, "allreduce", algorithm, inputs)


def _other_collectives(trial: Trial) -> Found:
    for ranks in [] if trial.codec.additive else _worlds(trial)[-1:]:
        for collective in choose.NAMES:
            n = [ranks.size * trial.n] * ranks.size
            if collective == "allgatherv":
                n = [trial.n + 5 * rank for rank in range(ranks.size)]
            inputs = [trial.normals(length, seed) for seed, length in enumerate(n)]
            for algorithm in ranks.algorithms(collective) if collective != "allreduce" else ():
                yield from _compared(ranks, collective, algorithm, inputs)


def _compared(
    ranks: Ranks, collective: str, algorithm: str, inputs: Sequence[Array], feedback: Sequence[Any] = ()
) -> Found:
    """Compare the results of a collective with the exact ones, and with each other where all ranks' are alike."""
    before = [x.tobytes() for x in inputs]
    results = ranks.run(collective, algorithm, inputs, feedback)
    case = f"{collective} of {inputs[0].size} values by {algorithm} on {ranks.size} ranks"
    alike = collective not in ("reduce_scatter", "alltoall")
    if alike and any(not same(result, results[0]) for result in results):
        yield f"{case}: ranks have different bits: how.decoded must hold what others decode"
    if any(x.tobytes() != content for x, content in zip(inputs, before, strict=True)):
        yield f"{case}: the input changed"
    if ranks.trial.sparse and collective == "allreduce":  # what is not sent stays in feedback
        return
    allowed = ranks.allowed(collective, algorithm, inputs[0])
    exact = _exact(collective, [x.astype(np.float64) for x in inputs])
    error = max(relative(result, right) for result, right in zip(results, exact, strict=True))
    if not error <= allowed:
        yield f"{case}: the relative error is {error:.2g}; going by one encoding it should be below {allowed:.2g}"


def _exact(collective: str, inputs: Sequence[Array]) -> Sequence[Array]:
    """All ranks' results of a collective without loss."""
    ranks = len(inputs)
    if collective == "alltoall":
        return [np.concatenate(parts) for parts in zip(*(np.split(x, ranks) for x in inputs), strict=True)]
    if collective == "reduce_scatter":
        return np.split(np.sum(inputs, axis=0), ranks)
    if collective == "allreduce":
        return [np.sum(inputs, axis=0)] * ranks
    return [inputs[0] if collective == "bcast" else np.concatenate(inputs)] * ranks


def _error_feedback(trial: Trial) -> Found:
    codec = trial.codec
    if trial.dtype != "float32" or not codec.feedback_converges(trial.dtype):
        return
    if isinstance(codec, Sparsifier) and codec.state is not ErrorFeedback:  # which keeps more than losses
        return
    for ranks in _worlds(trial):
        summands = codec.summands(HOST, trial.dtype, ranks.size)
        if summands is not None and not summands.feedback:
            return
        inputs = [trial.normals(trial.n, seed) for seed in range(ranks.size)]
        exact, largest = np.sum(inputs, axis=0, dtype=np.float64), float(np.sum(np.abs(inputs), axis=0).max())
        for algorithm in ranks.algorithms("allreduce"):
            kept = [ErrorFeedback() for _ in inputs]
            total = sum(ranks.run("allreduce", algorithm, inputs, kept)[0].astype(np.float64) for _ in range(2))
            off = total + sum(each.residual for each in kept if each.residual is not None) - 2 * exact
            if not float(np.abs(off).max()) <= 64 * trial.rounding * largest:
                case = f"two allreduces by {algorithm} on {ranks.size} ranks"
                yield f"{case}: results and residuals add up to {np.abs(off).max():.2g} off the exact sum"


PROMISES: Promises = {
    "allreduce": _allreduce,
    "long buffers": _long_buffers,
    "error feedback": _error_feedback,
    "other collectives": _other_collectives,
}
"""What holds of collectives, by name."""
