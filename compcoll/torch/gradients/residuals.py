"""Residuals of a model's gradients: storage, loss-scale units, and undoing of skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ..buffers import Array, copy_of, put
from ..job_queue import JobQueue
from ..loss_scale import LossScale
from ..streams import JobStreams

RESIDUAL = "residual"
_POWERS = {"variance": 2}
"""Feedback arrays that scale with a power of the loss scale other than 1, and that power."""

Kept = dict[str, dict[str, Array]]
"""Feedback arrays by kind (``"residual"`` …) and parameter name."""


def adopt(known: dict[str, Array], whole: Array, parts: Iterable[tuple[str, int, int]]) -> None:
    """Move parameters' arrays into parts of another array.

    Parameters
    ----------
    known : dict
        Arrays by parameter name. Replaced by views of ``whole``.
    whole : array
        The target, split along its last axis.
    parts : iterable of tuple
        Name, begin and end of each part.
    """
    for name, begin, end in parts:
        part = whole[..., begin:end]
        if name in known:
            put(known[name], part)
        known[name] = part


class Residuals:
    """The residuals and other feedback arrays of a model's gradients, multiplied by the loss scale.

    A GradScaler skips a step in which a gradient overflows. All ranks have the same means, so either all ranks or none
    skip the step. Before the next backward pass, the changes of a skipped step are undone.

    Parameters
    ----------
    jobs : JobQueue
        Runs the jobs that change the arrays.
    streams : JobStreams
        Streams of these jobs.
    parameters : iterable of Tensor
        Parameters whose gradients are scaled.
    kinds : sequence of str
        Names of the feedback arrays.

    Attributes
    ----------
    arrays : Kept
        Arrays of the compressed parameters.
    carried : dict of dict
        Unscaled residuals of parameters that are frozen or exact now, by kind and name. Later states include them.
    scale : LossScale
        The loss scale.
    """

    def __init__(self, jobs: JobQueue, streams: JobStreams, parameters: Iterable[Tensor], kinds: Sequence[str]) -> None:
        self._jobs, self._streams = jobs, streams
        self.scale = LossScale(parameters)
        self.arrays: Kept = {kind: {} for kind in kinds}
        self.carried: dict[str, dict[str, Tensor]] = {}
        self._finite: list[Tensor] = []
        self._copies: dict[tuple[str, str], Array] = {}
        self._remembered: set[tuple[str, str]] = set()

    def unit(self, kind: str) -> float:
        """Return the factor by which the loss scale enlarges the arrays of a kind."""
        return self.scale.unit ** _POWERS.get(kind, 1)

    def begin(self) -> None:
        """Begin a backward pass: undo the last step if it was skipped, and rescale all arrays to the current scale."""
        self.settle()
        if (ratio := self.scale.begin()) == 1.0:
            return

        def multiply() -> None:
            for kind, arrays in self.arrays.items():
                for array in arrays.values():
                    array *= ratio ** _POWERS.get(kind, 1)

        self._run(multiply)

    def remember(self, names: Iterable[str], kinds: Iterable[str]) -> None:
        """Save copies of some parameters' arrays before a step's first backward pass changes them."""
        for kind in kinds:
            for name in self.arrays[kind].keys() & names:
                key, array = (kind, name), self.arrays[kind][name]
                if key in self._remembered:
                    continue
                if key in self._copies:
                    put(array, self._copies[key])
                else:
                    self._copies[key] = copy_of(array)
                self._remembered.add(key)

    def watch(self, finite: Tensor) -> None:
        """Record a one-element tensor: whether all means of a bucket are finite, the same on all ranks."""
        self._finite.append(finite)

    def settle(self) -> None:
        """Restore the arrays from before the last step if any of its means is not finite."""
        if not self._finite:
            return

        def restore() -> None:
            if not all(map(bool, self._finite)):
                for kind, name in self._remembered:
                    put(self._copies[kind, name], self.arrays[kind][name])

        self._run(restore)
        if self.scale.ended:
            self._finite.clear()
            self._remembered.clear()

    def restart(self, carried: Mapping[str, Mapping[str, Tensor]], *, loaded: bool) -> None:
        """Discard all arrays. If a state is loaded, the caller then stores its arrays."""
        self.scale.restart(loaded=loaded)
        self.arrays.update({kind: {} for kind in self.arrays})
        self.carried = {kind: dict(tensors) for kind, tensors in carried.items()}
        for remembered in (self._finite, self._copies, self._remembered):
            remembered.clear()

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job on all arrays after the jobs before it."""
        arrays = (array for arrays in self.arrays.values() for array in arrays.values() if isinstance(array, Tensor))
        self._jobs.run(job, self._streams.order(*arrays, *self._finite))
