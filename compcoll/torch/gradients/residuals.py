"""Residuals of a model's gradients: where they are kept, their unit, and how a step that is skipped is undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from ..arrays import Array, GPUArrays, HostArrays
from ..job_queue import JobQueue
from ..loss_scale import LossScale

RESIDUAL = "residual"
_POWERS = {"variance": 2}
"""The power of the loss's scale by which arrays that feedback keeps are larger, where it is not 1."""

Kept = dict[str, dict[str, Array]]
"""Arrays that feedback keeps of parameters, by its name of the array (``"residual"`` …) and that of the parameter."""


def adopt(
    known: dict[str, Array], whole: Array, parts: Iterable[tuple[str, int, int]], place: HostArrays | GPUArrays
) -> None:
    """Move what is kept of some parameters into parts of other memory.

    Parameters
    ----------
    known : dict
        By name; from now on views of that memory.
    whole : array
        The memory: its last axis is cut.
    parts : iterable of tuple
        Name, begin and end of each.
    place : HostArrays or GPUArrays
        Where the memory is.
    """
    for name, begin, end in parts:
        part = whole[..., begin:end]
        if name in known:
            place.put(known[name], part)
        known[name] = part


class Residuals:
    """The residuals of a model's gradients, and other arrays of its feedback, in units of the loss's scale.

    A GradScaler skips a step in which a gradient overflows. All ranks have the same means, so all skip the step or none
    does. What a skipped step changed is undone before the next backward pass.

    Parameters
    ----------
    place : HostArrays or GPUArrays
        Where the arrays are.
    jobs : JobQueue
        Runs jobs on them.
    parameters : iterable of Tensor
        Those whose gradients are scaled.
    kinds : sequence of str
        The names of the arrays.

    Attributes
    ----------
    arrays : Kept
        The arrays of parameters that were compressed.
    carried : dict of dict
        By kind and name: residuals without a scale of parameters that are frozen or exact now, which later states hold.
    scale : LossScale
        The loss's.
    """

    def __init__(
        self, place: HostArrays | GPUArrays, jobs: JobQueue, parameters: Iterable[Tensor], kinds: Sequence[str]
    ) -> None:
        self._place, self._jobs = place, jobs
        self.scale = LossScale(parameters)
        self.arrays: Kept = {kind: {} for kind in kinds}
        self.carried: dict[str, dict[str, Tensor]] = {}
        self._finite: list[Tensor] = []
        self._copies: dict[tuple[str, str], Array] = {}
        self._remembered: set[tuple[str, str]] = set()

    def unit(self, kind: str) -> float:
        """Return how many times larger an array is than it would be without a scale."""
        return self.scale.unit ** _POWERS.get(kind, 1)

    def begin(self) -> None:
        """Begin a backward pass: undo the last step if it was skipped, and convert all arrays to the present scale."""
        self.settle()
        if (ratio := self.scale.begin()) == 1.0:
            return

        def multiply() -> None:
            for kind, arrays in self.arrays.items():
                for array in arrays.values():
                    array *= ratio ** _POWERS.get(kind, 1)

        self._place.run(self._jobs, multiply)

    def remember(self, names: Iterable[str], kinds: Iterable[str]) -> None:
        """Copy the arrays of some parameters before the first backward pass of a step changes them."""
        for kind in kinds:
            for name in self.arrays[kind].keys() & names:
                key, array = (kind, name), self.arrays[kind][name]
                if key in self._remembered:
                    continue
                if key in self._copies:
                    self._place.put(array, self._copies[key])
                else:
                    self._copies[key] = self._place.copy(array)
                self._remembered.add(key)

    def watch(self, finite: Tensor) -> None:
        """Take a tensor of one element: whether the means of a bucket are finite on all ranks."""
        self._finite.append(finite)

    def settle(self) -> None:
        """Undo what the last step changed if not all its means are finite."""
        if not self._finite:
            return

        def restore() -> None:
            if not all(map(bool, self._finite)):
                for kind, name in self._remembered:
                    self._place.put(self._copies[kind, name], self.arrays[kind][name])

        self._place.run(self._jobs, restore)
        if self.scale.ended:
            self._finite.clear()
            self._remembered.clear()

    def restart(self, carried: Mapping[str, Mapping[str, Tensor]], *, loaded: bool) -> None:
        """Forget all arrays; the caller then stores those of a state, if one is loaded."""
        self.scale.restart(loaded=loaded)
        self.arrays.update({kind: {} for kind in self.arrays})
        self.carried = {kind: dict(tensors) for kind, tensors in carried.items()}
        for remembered in (self._finite, self._copies, self._remembered):
            remembered.clear()
