"""The low-rank factors of one gradient, and what they have lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_CACHED = 1 << 17
"""Elements of a matrix that a core's cache holds twice."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix: its first dimension, and all others."""
    return shape[0], math.prod(shape[1:])


def worthwhile(shape: torch.Size, rank: int, rate: float, factors: int) -> bool:
    """Tell whether what is sent of a gradient is smaller than its matrix, by more than this rate.

    Parameters
    ----------
    shape : torch.Size
        The gradient's.
    rank : int
        Columns of the factors.
    rate : float
        Elements of the matrix to those that are sent.
    factors : int
        How many of the two a step sends. If 1, they take turns: counted is their mean.
    """
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return rank <= min(rows, columns) and 2 * rows * columns > rate * factors * rank * (rows + columns)


class Gradient:
    """One parameter's gradient: exact, or a product of a left factor (rows × rank) and a right one (rank × columns).

    Arithmetic is in float32, or float64 for such gradients.

    Parameters
    ----------
    name : str
        The parameter's.
    shape : torch.Size
        Of the gradient.
    dtype : torch.dtype
        Of the gradient.
    device : torch.device
        Where it is.
    rank : int
        Columns of the left factor; 0 for an exact gradient.
    feedback : bool
        Whether what is lost is kept.

    Attributes
    ----------
    left, right : torch.Tensor
        Factors, the right one transposed. The same on all ranks.
    feedback : bool
        Whether what this rank's part of the sums loses is kept.
    """

    def __init__(
        self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, rank: int, *, feedback: bool
    ) -> None:
        self.name = name
        self.shape = shape
        self.rank = rank
        self.size = math.prod(shape)
        self.nbytes = self.size * dtype.itemsize
        real = dtype.to_real()
        self.parts = 2 if dtype.is_complex else 1
        self.dtype = real if real.itemsize > 4 else torch.float32
        self.feedback = feedback and rank > 0
        self._residual: Tensor | None = None
        if not rank:
            return
        self.rows, self.columns = matrix_shape(shape)
        self.left = torch.zeros(self.rows, rank, dtype=self.dtype, device=device)
        self.right = torch.zeros(rank, self.columns, dtype=self.dtype, device=device)
        if feedback:
            self._residual = torch.zeros(self.rows, self.columns, dtype=self.dtype, device=device)

    def draw(self, generator: torch.Generator) -> None:
        """Take both factors from a generator's normal numbers."""
        for factor in (self.left, self.right):
            factor.copy_(torch.randn(factor.shape, generator=generator, dtype=self.dtype))

    def losses(self) -> Tensor:
        """Give what this rank's part of the sums has lost so far, in the gradient's units: rows × columns."""
        assert self._residual is not None
        return self._residual

    def set_losses(self, values: Tensor) -> None:
        """Replace what was lost."""
        self.losses().copy_(values)

    def multiply(self, factor: float) -> None:
        """Have what was lost in other units."""
        self.losses().mul_(factor)

    def forget(self) -> None:
        """Forget what was lost."""
        if self.feedback:
            self.set_losses(torch.zeros(()))

    def project_left(self, gradient: Tensor | None, right: Tensor, out: Tensor) -> None:
        """Compute the left factor, for a right one, of this rank's matrix: the gradient, if there is one, and what was
        lost.
        """
        if gradient is None:
            out.zero_()
        else:
            torch.mm(self._matrix(gradient), right.t(), out=out)
        if self._residual is not None:
            out.addmm_(self._residual, right.t())

    def project_right(self, gradient: Tensor | None, left: Tensor, out: Tensor) -> None:
        """Compute the right factor, for a left one, of this rank's matrix."""
        if gradient is None:
            out.zero_()
        else:
            torch.mm(left.t(), self._matrix(gradient), out=out)
        if self._residual is not None:
            out.addmm_(left.t(), self._residual)

    def finish(self, gradient: Tensor, left: Tensor, right: Tensor, sent: tuple[Tensor, Tensor] | None) -> None:
        """Store a product as the gradient; what another product leaves of this rank's matrix will be what was lost.

        Parameters
        ----------
        gradient : torch.Tensor
            What was projected, zeros if that was None. Replaced.
        left, right : torch.Tensor
            Factors of the mean.
        sent : tuple of torch.Tensor, optional
            Factors of what this rank's matrix gave to the mean. Without it losses stay as they are.
        """
        for rows in self._blocks():
            part = gradient[rows]
            if sent is not None and self._residual is not None:
                kept = self._residual[rows]
                kept.add_(part.reshape(kept.shape))
                kept.addmm_(sent[0][rows], sent[1], alpha=-1)
            if part.is_contiguous() and part.dtype == self.dtype:
                torch.mm(left[rows], right, out=part.view(-1, self.columns))
            else:
                part.copy_(torch.mm(left[rows], right).view(part.shape))

    def can_hold(self, left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
        """Tell whether an element type can hold a product of finite factors: float16 ends at 65504."""
        return dtype is not torch.float16 or bool(torch.mm(left, right).to(dtype).isfinite().all())

    def _matrix(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(self.rows, self.columns).to(self.dtype)

    def _blocks(self) -> Iterator[slice]:
        """Rows to be worked on together: on a CPU as many as stay in its cache from one pass to the next."""
        step = self.rows
        if self.left.device.type == "cpu":
            step = max(_CACHED * torch.get_num_threads() // self.columns, 1)
        for begin in range(0, self.rows, step):
            yield slice(begin, begin + step)
