"""Factors of gradients in host memory, with feedback: all that precedes their sums in one pass over memory."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from ...devices.host import HostDevice
from ...dtypes import DTYPES
from ...kernels import _host
from .factors import Gradient

_PRECISION = {getattr(torch, name): dtype.precision for name, dtype in DTYPES.items()}
_LINE = 64
"""Bytes to which rows of what is kept are aligned."""
_PAST_CACHES = 8 << 20
"""Bytes of a model's gradients that are not in any cache when they are needed again."""


class _Side(enum.IntEnum):
    NEITHER = 0
    LEFT = 1
    RIGHT = 2


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

    def losses(self) -> Tensor:
        out = torch.empty_like(self._kept)
        self._pass(0, _PRECISION[self.dtype], out, _Side.NEITHER)
        return out[:, : self.columns]

    def set_losses(self, values: Tensor) -> None:
        self._kept[:, : self.columns].copy_(values)
        self._sent_left.zero_()
        self._sent_right.zero_()

    def multiply(self, factor: float) -> None:
        self._kept.mul_(factor)
        self._sent_left.mul_(factor)

    def project_left(self, gradient: Tensor | None, right: Tensor, out: Tensor) -> None:
        self._project(gradient, _Side.LEFT, right, out)

    def project_right(self, gradient: Tensor | None, left: Tensor, out: Tensor) -> None:
        self._project(gradient, _Side.RIGHT, left, out)

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

    def _project(self, gradient: Tensor | None, side: _Side, given: Tensor, out: Tensor) -> None:
        values = None if gradient is None else self._plain(gradient)
        address, storage = (0, self.dtype) if values is None else (values.data_ptr(), values.dtype)
        self._pass(address, _PRECISION[storage], self._total, side, given.data_ptr(), out.data_ptr())

    def _pass(self, gradient: int, storage: int, total: Tensor, side: _Side, given: int = 0, factor: int = 0) -> None:
        self._kernels.project(
            gradient,
            storage,
            self._kept.data_ptr(),
            (self._sent_left.data_ptr(), self._sent_right.data_ptr()),
            total.data_ptr(),
            side,
            given,
            factor,
            torch.get_num_threads(),
        )

    def _plain(self, gradient: Tensor) -> Tensor:
        """Give a gradient as kernels take it: itself, or a copy."""
        if gradient.is_contiguous() and gradient.dtype in _PRECISION and not gradient.is_neg():
            return gradient
        dtype = gradient.dtype if gradient.dtype in _PRECISION else self.dtype
        return gradient.to(dtype).resolve_neg().contiguous()
