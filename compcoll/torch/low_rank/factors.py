"""The low-rank factors of one gradient, what they have lost, and orthonormal columns."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...dtypes import DTYPES
from ...host.device import HostDevice
from ...kernels import _host

_CACHED = 1 << 17
"""Elements of a matrix that a core's cache holds twice."""
_PRECISION = {getattr(torch, name): dtype.precision for name, dtype in DTYPES.items()}
_LINE = 64
"""Bytes to which rows of what is kept are aligned."""
_PAST_CACHES = 8 << 20
"""Bytes of a model's gradients that are not in any cache when they are needed again."""
_NEITHER, _LEFT, _RIGHT = range(3)
"""The factor that a pass of the kernels computes."""
_SEED = 0x0B7A


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

    def residual(self) -> Tensor:
        """Give what this rank's part of the sums has lost so far, in the gradient's units: rows × columns."""
        assert self._residual is not None
        return self._residual

    def set_residual(self, values: Tensor) -> None:
        """Replace what was lost."""
        self.residual().copy_(values)

    def multiply(self, factor: float) -> None:
        """Have what was lost in other units."""
        self.residual().mul_(factor)

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
            Factors of what this rank's matrix gave to the mean. Without it residuals stay as they are.
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


class OnePassGradient(Gradient):
    """A gradient of which this rank's own factor decides what is lost: ACP-SGD's.

    A pass reads the gradient and what was lost, stores their sum beside, and has the factor at its end. When all means
    are known, and finite, that sum and the factors that were sent take the place of those before: the product is
    subtracted from it by the next pass. So nothing has to be undone after a step that was not finite.

    Parameters
    ----------
    name, shape, dtype, rank
        As of `Gradient`.
    nbytes : int
        Of all gradients of the model.
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
        """Give a gradient as kernels take it: itself, or a copy."""
        if gradient.is_contiguous() and gradient.dtype in _PRECISION and not gradient.is_neg():
            return gradient
        dtype = gradient.dtype if gradient.dtype in _PRECISION else self.dtype
        return gradient.to(dtype).resolve_neg().contiguous()


def orthonormal(matrices: Tensor) -> Tensor:
    """Orthonormal columns that span the matrices' columns: the Q of a reduced QR decomposition.

    The same bits give the same bits, on machines of one kind with the same number of threads. Each matrix is scaled by
    its largest magnitude first, so that tiny gradients do not vanish in squares.

    A column that adds nothing to those before it, but for rounding errors, gets a direction of a fixed random sequence
    in its place: all columns of a matrix of zeros do. So the result is orthonormal whatever the rank, and a layer whose
    gradient was zero finds a direction when it comes alive; products with a zero gradient stay zeros.

    Parameters
    ----------
    matrices : torch.Tensor
        (count, rows, columns) of float32 or float64, finite, with no more columns than rows.

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
    """`orthonormal` of each of some matrices; those of one shape and type are decomposed in one batch.

    Parameters
    ----------
    matrices : list of torch.Tensor
        (rows, columns) each.
    """
    batches: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for number, matrix in enumerate(matrices):
        batches.setdefault((matrix.shape, matrix.dtype), []).append(number)
    results = list(matrices)
    for numbers in batches.values():
        for number, result in zip(numbers, orthonormal(torch.stack([matrices[i] for i in numbers])), strict=True):
            results[number] = result
    return results
