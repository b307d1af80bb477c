"""Fusion buffers: gradients' factors, and exact gradients, that are summed together."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...feedback import ErrorFeedback
from ..account import Account
from .factors import Gradient

if TYPE_CHECKING:
    from .sums import Sums

Wait = Callable[[], None]


class Kind(enum.Enum):
    """The part of gradients that have factors which is in a buffer."""

    EXACT = "exact"
    LEFT = "left"
    RIGHT = "right"


def numbers_of(gradient: Gradient, kind: Kind) -> int:
    """Count the numbers that a gradient is sent as."""
    if kind is Kind.EXACT or not gradient.rank:
        return gradient.size * gradient.parts
    return gradient.rank * (gradient.rows if kind is Kind.LEFT else gradient.columns)


class Buffer:
    """Memory of what is summed together: factors, then exact gradients, then a number for each flag.

    Parameters
    ----------
    gradients : sequence of Gradient
        Of one element type, in the order in which they become ready.
    kind : Kind
        What of them is sent.
    device : torch.device
        Where the memory is.
    flags : int
        How many.

    Attributes
    ----------
    own : torch.Tensor
        This rank's factors.
    wire : torch.Tensor
        Sent, and the mean when it was received.
    factors : int
        How many numbers of the wire are factors.
    losses : ErrorFeedback or None
        What a codec lost of them.
    due : set of str
        Gradients that are still to come before it can be sent.
    sent : bool
        Whether it was.
    """

    def __init__(self, gradients: Sequence[Gradient], kind: Kind, device: torch.device, flags: int = 0) -> None:
        self.gradients = list(gradients)
        self.kind = kind
        low = [g for g in gradients if self.has_factor(g)]
        offset = 0
        self._places: dict[str, tuple[int, int]] = {}
        for gradient in (*low, *(g for g in gradients if not self.has_factor(g))):
            end = offset + numbers_of(gradient, kind)
            self._places[gradient.name] = (offset, end)
            offset = end
        self.factors = sum(numbers_of(g, kind) for g in low)
        self._flags = offset
        dtype = gradients[0].dtype
        self.own = torch.zeros(self.factors, dtype=dtype, device=device)
        self.wire = torch.zeros(offset + flags, dtype=dtype, device=device)
        self.losses: ErrorFeedback | None = None
        self.due = {gradient.name for gradient in gradients}
        self.sent = False

    def has_factor(self, gradient: Gradient) -> bool:
        """Tell whether a gradient is sent as a factor here."""
        return self.kind is not Kind.EXACT and gradient.rank > 0

    def restart(self) -> None:
        """Make ready for another step."""
        self.due = {gradient.name for gradient in self.gradients}
        self.sent = False

    def own_factor(self, gradient: Gradient) -> Tensor:
        """Give the memory to which this rank's factor is written."""
        return self._shaped(self.own, gradient)

    def mean_factor(self, gradient: Gradient) -> Tensor:
        """The mean of all ranks' factors."""
        return self._shaped(self.wire, gradient)

    def lost_factor(self, gradient: Gradient) -> Tensor | None:
        """Give what a codec lost of this rank's part of the mean, if one took part."""
        if self.losses is None or self.losses.residual is None:
            return None
        return self._shaped(torch.from_numpy(self.losses.residual), gradient)

    def put(self, gradient: Gradient, values: Tensor | None, ranks: int) -> None:
        """Put a gradient in as it is, divided by the number of ranks; zeros for None."""
        begin, end = self._places[gradient.name]
        part = self.wire[begin:end].view((*gradient.shape, 2) if gradient.parts == 2 else gradient.shape)
        if values is None:
            part.zero_()
            return
        part.copy_(torch.view_as_real(values.resolve_conj()) if gradient.parts == 2 else values)
        part.div_(ranks)

    def get(self, gradient: Gradient, values: Tensor) -> None:
        """Take a mean out."""
        begin, end = self._places[gradient.name]
        part = self.wire[begin:end]
        if gradient.parts == 2:
            # A copy: pairs that begin at an odd place are no complex numbers to PyTorch.
            values.copy_(torch.view_as_complex(part.view(*gradient.shape, 2).clone()))
        else:
            values.copy_(part.view(gradient.shape))

    def put_flags(self, flags: Sequence[bool]) -> None:
        self.wire[self._flags :] = torch.tensor(flags, dtype=self.wire.dtype)

    def get_flags(self) -> list[bool]:
        """Tell which flags were set on any rank."""
        raised: list[bool] = (self.wire[self._flags :] != 0).tolist()
        return raised

    def start(self, sums: Sums, account: Account, ranks: int) -> Wait:
        """Have the mean computed; what is returned waits until it is there."""
        torch.div(self.own, ranks, out=self.wire[: self.factors])
        return sums.start(self, account)

    def _shaped(self, memory: Tensor, gradient: Gradient) -> Tensor:
        begin, end = self._places[gradient.name]
        left = self.kind is Kind.LEFT
        return memory[begin:end].view((-1, gradient.rank) if left else (gradient.rank, -1))


def fuse(
    gradients: Sequence[Gradient], kind: Kind, nbytes: float, device: torch.device, *, flagged: bool
) -> list[Buffer]:
    """Buffers for all of a model's gradients.

    A buffer is full when it holds so many bytes times the rate at which this kind compresses the whole model: so there
    are about as many buffers as there would be uncompressed.

    Parameters
    ----------
    gradients : sequence of Gradient
        In the order in which they become ready.
    kind : Kind
        What of them is sent.
    nbytes : float
        Uncompressed size of a buffer; 0 for each gradient on its own.
    device : torch.device
        Where they are.
    flagged : bool
        Whether the last buffer has a flag for each gradient.

    Returns
    -------
    list of Buffer
        In the order in which they are sent.
    """
    sent = {g.name: numbers_of(g, kind) * g.dtype.itemsize for g in gradients}
    limit = nbytes * sum(sent.values()) / max(sum(g.nbytes for g in gradients), 1)
    groups: list[list[Gradient]] = []
    open_groups: dict[torch.dtype, list[Gradient]] = {}
    for gradient in gradients:
        group = open_groups.setdefault(gradient.dtype, [])
        if not group:
            groups.append(group)
        group.append(gradient)
        if sum(sent[g.name] for g in group) >= limit:
            del open_groups[gradient.dtype]
    order = {gradient.name: number for number, gradient in enumerate(gradients)}
    groups.sort(key=lambda group: order[group[-1].name])
    last = len(groups) - 1
    flags = len(gradients) if flagged else 0
    return [Buffer(group, kind, device, flags if number == last else 0) for number, group in enumerate(groups)]
