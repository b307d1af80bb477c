"""Low-rank factors of one gradient, their residual, and orthonormalisation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...dtypes import DTYPES
from ...host.device import HostDevice
from ...kernels import _host

_CACHED = 1 << 17
"""Number of elements of which a core's cache holds two copies."""
_PRECISION = {getattr(torch, name): dtype.precision for name, dtype in DTYPES.items()}
_LINE = 64
"""Alignment in bytes of the rows of residuals."""
_PAST_CACHES = 8 << 20
"""Size of a model's gradients in bytes above which they have left all caches before they are used again."""
_NEITHER, _LEFT, _RIGHT = range(3)
"""Which factor a kernel pass computes."""
_SEED = 0x0B7A


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the rows (first dimension) and columns (all others) of a gradient viewed as a matrix."""
    return shape[0], math.prod(shape[1:])


def worthwhile(shape: torch.Size, rank: int, rate: float, factors: int) -> bool:
    """Return whether factors reduce the elements sent for a gradient by more than a rate.

    Parameters
    ----------
    shape : torch.Size
        Shape of the gradient.
    rank : int
        Columns of the factors.
    rate : float
        Ratio of the matrix's elements to the elements sent.
    factors : int
        Number of factors per step, 1 or 2. With 1, the two alternate, and their mean size counts.
    """
    if len(shape) < 2:
        return False
    rows, columns = matrix_shape(shape)
    return rank <= min(rows, columns) and 2 * rows * columns > rate * factors * rank * (rows + columns)


class Gradient:
    """One parameter's gradient: exact, or a product of a left factor (rows × rank) and a right one (rank × columns).

    Arithmetic is in float32, or in float64 for float64 gradients.

    Parameters
    ----------
    name : str
        Name of the parameter.
    shape : torch.Size
        Shape of the gradient.
    dtype : torch.dtype
        Element type of the gradient.
    device : torch.device
        Device of the gradient.
    rank : int
        Columns of the left factor; 0 for an exact gradient.
    feedback : bool
        Whether to keep a residual.

    Attributes
    ----------
    left, right : torch.Tensor
        Factors, rows × rank and rank × columns. The same on all ranks.
    feedback : bool
        Whether the residual of this rank's contribution to the sums is kept.
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
        """Fill both factors with normally distributed random numbers."""
        for factor in (self.left, self.right):
            factor.copy_(torch.randn(factor.shape, generator=generator, dtype=self.dtype))

    def residual(self) -> Tensor:
        """Return the residual of this rank's contribution, rows × columns, in the gradient's units."""
        assert self._residual is not None
        return self._residual

    def set_residual(self, values: Tensor) -> None:
        """Replace the residual."""
        self.residual().copy_(values)

    def multiply(self, factor: float) -> None:
        """Multiply the residual by a factor, to change its unit."""
        self.residual().mul_(factor)

    def project_left(self, gradient: Tensor | None, right: Tensor, out: Tensor) -> None:
        """Compute the left factor of this rank's matrix (gradient, if any, plus residual) for a given right one."""
        if gradient is None:
            out.zero_()
        else:
            torch.mm(self._matrix(gradient), right.t(), out=out)
        if self._residual is not None:
            out.addmm_(self._residual, right.t())

    def project_right(self, gradient: Tensor | None, left: Tensor, out: Tensor) -> None:
        """Compute the right factor of this rank's matrix for a given left one."""
        if gradient is None:
            out.zero_()
        else:
            torch.mm(left.t(), self._matrix(gradient), out=out)
        if self._residual is not None:
            out.addmm_(left.t(), self._residual)

    def finish(self, gradient: Tensor, left: Tensor, right: Tensor, sent: tuple[Tensor, Tensor] | None) -> None:
        """Store the product of the mean's factors as the gradient, and update the residual.

        Parameters
        ----------
        gradient : torch.Tensor
            The gradient that was projected; zeros if that was None. Overwritten.
        left, right : torch.Tensor
            Factors of the mean.
        sent : tuple of torch.Tensor, optional
            Factors of this rank's contribution to the mean: the new residual is this rank's matrix minus their product.
            If None, the residual does not change.
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
        """Return whether an element type can hold the product of finite factors: float16 ends at 65504."""
        return dtype is not torch.float16 or bool(torch.mm(left, right).to(dtype).isfinite().all())

    def _matrix(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(self.rows, self.columns).to(self.dtype)

    def _blocks(self) -> Iterator[slice]:
        """Yield blocks of rows to process together: on a CPU as many as stay in cache between two passes."""
        step = self.rows
        if self.left.device.type == "cpu":
            step = max(_CACHED * torch.get_num_threads() // self.columns, 1)
        for begin in range(0, self.rows, step):
            yield slice(begin, begin + step)


class OnePassGradient(Gradient):
    """A gradient whose residual depends only on this rank's own factor, as in ACP-SGD.

    One pass reads the gradient and the residual, stores their sum in a second buffer, and computes the factor. If all
    means are finite, this sum and the sent factors replace the earlier ones. The next pass subtracts the factors'
    product from the sum. So a step that is not finite needs no undoing.

    Parameters
    ----------
    name, shape, dtype, rank
        As for `Gradient`.
    nbytes : int
        Size in bytes of all the model's gradients.
    """

    def __init__(self, name: str, shape: torch.Size, dtype: torch.dtype, rank: int, nbytes: int) -> None:
        super().__init__(name, shape, dtype, torch.device("cpu"), rank, feedback=False)
        self.feedback = True
        line = _LINE // self.dtype.itemsize
        self._kept = torch.zeros(self.rows, -(-self.columns // line) * line, dtype=self.dtype)
        self._total = torch.empty_like(self._kept)
        self._sent_left, self._sent_right = torch.zeros_like(self.left), torch.zeros_like(self.right)
        device = HostDevice()
        self._kernels = (_host.LowRank64 if self.dtype is torch.float64 else _host.LowRank32)(
            device.instruction_sets().index(device.instruction_set),
            self.rows,
            self.columns,
            rank,
            self._kept.shape[1],
            nbytes > _PAST_CACHES,
        )

    def residual(self) -> Tensor:
        out = torch.empty_like(self._kept)
        self._pass(None, _NEITHER, None, None, out)
        return out[:, : self.columns]

    def set_residual(self, values: Tensor) -> None:
        self._kept[:, : self.columns].copy_(values)
        self._sent_left.zero_()
        self._sent_right.zero_()

    def multiply(self, factor: float) -> None:
        self._kept.mul_(factor)
        self._sent_left.mul_(factor)

    def project_left(self, gradient: Tensor | None, right: Tensor, out: Tensor) -> None:
        self._pass(gradient, _LEFT, right, out, self._total)

    def project_right(self, gradient: Tensor | None, left: Tensor, out: Tensor) -> None:
        self._pass(gradient, _RIGHT, left, out, self._total)

    def finish(self, gradient: Tensor, left: Tensor, right: Tensor, sent: tuple[Tensor, Tensor] | None) -> None:
        if sent is not None:
            self._kept, self._total = self._total, self._kept
            self._sent_left.copy_(sent[0])
            self._sent_right.copy_(sent[1])
        product = self._plain(gradient)
        self._kernels.multiply(
            left.data_ptr(), right.data_ptr(), product.data_ptr(), _PRECISION[product.dtype], torch.get_num_threads()
        )
        if product is not gradient:
            gradient.copy_(product)

    def _pass(
        self, gradient: Tensor | None, side: int, given: Tensor | None, factor: Tensor | None, total: Tensor
    ) -> None:
        values = None if gradient is None else self._plain(gradient)
        self._kernels.project(
            0 if values is None else values.data_ptr(),
            _PRECISION[self.dtype if values is None else values.dtype],
            self._kept.data_ptr(),
            (self._sent_left.data_ptr(), self._sent_right.data_ptr()),
            total.data_ptr(),
            side,
            0 if given is None else given.data_ptr(),
            0 if factor is None else factor.data_ptr(),
            torch.get_num_threads(),
        )

    def _plain(self, gradient: Tensor) -> Tensor:
        """Return the gradient itself if the kernels can read it, and else a contiguous copy."""
        if gradient.is_contiguous() and gradient.dtype in _PRECISION and not gradient.is_neg():
            return gradient
        dtype = gradient.dtype if gradient.dtype in _PRECISION else self.dtype
        return gradient.to(dtype).resolve_neg().contiguous()


def orthonormal(matrices: Tensor) -> Tensor:
    """Return orthonormal columns that span the matrices' columns: Q of a reduced QR decomposition.

    Identical inputs give identical bits on machines of one kind with the same number of threads. Each matrix is first
    divided by its largest magnitude, so that squares of tiny gradients do not underflow.

    A column that depends linearly on earlier ones, up to rounding, is replaced by a direction from a fixed random
    sequence. In a zero matrix, this applies to all columns. So the result is orthonormal for matrices of any rank, and
    a layer whose gradient was zero has a direction when its gradient becomes nonzero. Products with a zero gradient
    remain zero.

    Parameters
    ----------
    matrices : torch.Tensor
        (count, rows, columns), float32 or float64, finite, with at most as many columns as rows.

    Returns
    -------
    torch.Tensor
        (count, rows, columns).
    """
    largest = matrices.abs().amax(dim=(1, 2), keepdim=True)
    scaled = matrices / torch.where(largest == 0, 1.0, largest)
    columns, upper = torch.linalg.qr(scaled)
    lengths = upper.diagonal(dim1=1, dim2=2).abs()
    rounding = torch.finfo(matrices.dtype).eps * matrices.shape[1] ** 0.5 * lengths.amax(dim=1, keepdim=True)
    idle = lengths <= 4 * rounding
    if not bool(idle.any()):
        return columns
    generator = torch.Generator().manual_seed(_SEED)
    spare = torch.randn(matrices.shape[1:], generator=generator, dtype=matrices.dtype).to(matrices.device)
    return torch.linalg.qr(torch.where(idle.unsqueeze(1), spare, columns))[0]


def orthonormalize(matrices: list[Tensor]) -> list[Tensor]:
    """Apply `orthonormal` to each matrix; matrices of the same shape and type form one batch.

    Parameters
    ----------
    matrices : list of torch.Tensor
        Each (rows, columns).
    """
    batches: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for number, matrix in enumerate(matrices):
        batches.setdefault((matrix.shape, matrix.dtype), []).append(number)
    results = list(matrices)
    for numbers in batches.values():
        for number, result in zip(numbers, orthonormal(torch.stack([matrices[i] for i in numbers])), strict=True):
            results[number] = result
    return results
