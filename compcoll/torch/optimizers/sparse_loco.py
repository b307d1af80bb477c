"""SparseLoCo: local steps with sparse outer gradients, whose largest elements are sent with two bits each."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...codecs.base import Codec
from ...communicator import Communicator
from ...deprecated import renamed_arguments
from ...errors import InvalidArgument
from ..buffers import HostArray, array_of
from ..training_stats import TrainingStats
from .common import Averager, Ranks
from .diloco import DiLoCo

CHUNK = 4096
"""Number of elements per chunk, 64 × 64. The largest ones of each chunk are sent."""

Bytes = npt.NDArray[np.uint8]


class ChunkedTopK:
    """A code for the largest elements of each chunk of 4096: their indices, and two bits per value.

    Indices are ascending and use Elias-Fano coding: the lower bits are stored directly. The upper parts form a bit
    vector whose n-th 1 is at the upper part of the n-th index plus n. With 41 elements (1 %), an index takes 8.6 bits.
    A value is encoded as its sign and one of two magnitudes. The chunk's sent magnitudes form two groups, those above
    their mean and the rest, and each group is represented by its mean.

    Parameters
    ----------
    density : float
        Fraction of the elements to send. k is this fraction of a chunk, rounded up.

    Attributes
    ----------
    k : int
        Number of elements sent per chunk.

    References
    ----------
    P. Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", Journal of the ACM 21(2), 1974.
    """

    def __init__(self, density: float) -> None:
        self.k = math.ceil(density * CHUNK)
        self._low_bits = int(math.log2(CHUNK // self.k))
        self._high_bits = self.k + (CHUNK >> self._low_bits)

    def encode(self, values: npt.NDArray[np.float32]) -> Bytes:
        """Encode chunks, one per row, and return their wires, one per row."""
        rows = torch.from_numpy(values)
        chosen = torch.topk(rows.abs(), self.k, dim=1, sorted=False).indices.sort(dim=1).values
        taken, indices = rows.gather(1, chosen).numpy(), chosen.numpy()
        magnitudes = np.abs(taken)
        with np.errstate(over="ignore", invalid="ignore"):
            large = magnitudes > magnitudes.mean(axis=1, keepdims=True)
            count = large.sum(axis=1)
            above = np.where(large, magnitudes, 0).sum(axis=1) / np.maximum(count, 1)
            below = np.where(large, 0, magnitudes).sum(axis=1) / np.maximum(self.k - count, 1)
        levels = np.stack([below, above], axis=1).astype("<f4")
        high = np.zeros((len(values), self._high_bits), np.uint8)
        np.put_along_axis(high, (indices >> self._low_bits) + np.arange(self.k), 1, axis=1)
        low = (indices[..., None] >> np.arange(self._low_bits)) & 1
        codes = np.stack([np.signbit(taken), large], axis=-1)
        bits = [high, low.reshape(len(values), -1).astype(np.uint8), codes.reshape(len(values), -1).astype(np.uint8)]
        return np.concatenate([levels.view(np.uint8), np.packbits(np.concatenate(bits, axis=1), axis=1)], axis=1)

    def decode(self, wire: Bytes) -> npt.NDArray[np.float32]:
        """Decode wires, one per row, and return the chunks, one per row."""
        count = len(wire)
        levels = np.ascontiguousarray(wire[:, :8]).view("<f4")
        bits = np.unpackbits(wire[:, 8:], axis=1)
        ends = np.cumsum([self._high_bits, self.k * self._low_bits, 2 * self.k])
        high = np.nonzero(bits[:, : ends[0]])[1].reshape(count, self.k) - np.arange(self.k)
        low = bits[:, ends[0] : ends[1]].reshape(count, self.k, self._low_bits).astype(np.int64)
        indices = (high << self._low_bits) + (low << np.arange(self._low_bits)).sum(axis=-1)
        codes = bits[:, ends[1] : ends[2]].reshape(count, self.k, 2)
        magnitudes = np.take_along_axis(levels, codes[..., 1].astype(np.int64), axis=1)
        values = np.zeros((count, CHUNK), np.float32)
        np.put_along_axis(values, indices, np.where(codes[..., 0], -magnitudes, magnitudes), axis=1)
        return values


class _SparseAverager(Averager):
    """Averages the largest elements of ``e ← β e + Δ``.

    `ChunkedTopK` encodes the elements to send, and e keeps the rest. All ranks add all wires in rank order. The mean of
    an element is over the ranks that sent it.
    """

    of_mean = False

    def __init__(self, density: float, beta: float, vector: Tensor) -> None:
        self._code, self._beta = ChunkedTopK(density), beta
        self._padded = -(-vector.numel() // CHUNK) * CHUNK
        self.residual: HostArray | None = torch.zeros_like(vector).numpy()

    def try_out(self, communicator: Communicator) -> None:
        """Do nothing: there is no codec that could fail."""

    def average(self, vector: Tensor, communicator: Communicator, stats: TrainingStats) -> int:
        values, residual = array_of(vector), self.residual
        assert residual is not None
        residual *= self._beta
        residual += values
        chunks = np.zeros(self._padded, np.float32)
        chunks[: residual.size] = residual
        wire = self._code.encode(chunks.reshape(-1, CHUNK))
        sent = self._code.decode(wire).reshape(-1)[: residual.size]
        residual -= sent
        residual[~np.isfinite(residual)] = 0
        every = communicator.allgather(wire.reshape(-1), codec=None).reshape(communicator.size, *wire.shape)
        values[...] = 0
        count = np.zeros(values.size, np.int32)
        for each in every:
            part = self._code.decode(each).reshape(-1)[: values.size]
            values += part
            count += part != 0
        values /= np.maximum(count, 1)
        others = communicator.size - 1
        stats.calls["allgather, chunked top-k"] += 1
        stats.raw_nbytes += values.nbytes
        stats.wire_nbytes += others * wire.nbytes
        stats.raw_sent_nbytes += others * values.nbytes
        return others * wire.nbytes


class SparseLoCo(DiLoCo):
    """Train each rank locally, and average the largest elements of the changes of many steps: SparseLoCo. Collective.

    Each rank adds its outer gradient to its unsent remainder, ``e ← beta e + Δ``. It sends the largest elements of
    every 4096 of e, with two bits per value and about 8 bits per index. e keeps the rest. Error feedback takes the
    place of the outer momentum: the common parameters move by the mean, times ``lr``. The mean of an element is over
    the ranks that sent it: if a single rank sends an element, it moves by that rank's value.

    Parameters
    ----------
    model, inner, every, warmup, fragments, delay, alpha, group, timeout, transport
        As for `DiLoCo`.
    density : float
        Fraction of the elements to send: above 0, at most 0.5. The paper uses 0.01 to 0.03.
    beta : float
        Factor of e from one outer step to the next, from 0 to 1.
    lr : float
        The outer learning rate.

    Attributes
    ----------
    outer, steps, stats
        As for `DiLoCo`.

    Raises
    ------
    InvalidArgument, HookTaken, CollectiveMismatch, NotUnderMPI, MPIMissing, ThreadsUnavailable
        As for `DiLoCo`.

    Notes
    -----
    On each rank, the sent values plus the new e equal ``beta e + Δ``, up to rounding. If a state is loaded on another
    number of ranks, the mean of e over the ranks is kept.

    The authors' program also averages an element over the ranks that sent it. With the mean over all ranks, few of a
    rank's elements move far: in the study of a small GPT, the loss is 2.43 instead of 2.37.

    References
    ----------
    A. Sarfi, B. Thérien, J. Lidin, E. Belilovsky, "Communication Efficient LLM Pre-training with SparseLoCo", arXiv
    2508.15706; https://github.com/one-covenant/SparseLoCo.

    Examples
    --------
    >>> model = nn.Linear(64, 64)
    >>> inner = torch.optim.AdamW(model.parameters())
    >>> sparse = compcoll.torch.SparseLoCo(model, inner, every=30, density=0.02)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> inner.step()
    """

    conserves: ClassVar[str] = "decay"

    @renamed_arguments(over="transport")
    def __init__(
        self,
        model: nn.Module,
        inner: torch.optim.Optimizer,
        *,
        every: int,
        density: float = 0.02,
        beta: float = 0.95,
        lr: float = 1.0,
        warmup: int = 0,
        fragments: int = 1,
        delay: int = 0,
        alpha: float | None = None,
        group: Ranks | None = None,
        timeout: float | None = None,
        transport: str = "auto",
    ) -> None:
        for name, value, highest in (("density", density, 0.5), ("beta", beta, 1.0), ("lr", lr, math.inf)):
            if not (0 <= value <= highest and math.isfinite(value)) or (name == "density" and value == 0):
                raise InvalidArgument(f"{name}={value!r} must be finite, from 0 (density: above 0) to {highest:g}")
        self._make = partial(_SparseAverager, density, beta)
        self._values = f"density {density:g}, beta {beta:g}, lr {lr:g}"
        outer = partial(torch.optim.SGD, lr=lr)
        schedule: dict[str, Any] = {"every": every, "warmup": warmup, "fragments": fragments, "delay": delay}
        super().__init__(
            model, inner, outer, **schedule, alpha=alpha, group=group, timeout=timeout, transport=transport
        )

    def _averagers(self, codec: Codec | None, feedback: bool) -> tuple[Callable[[Tensor], Averager], str]:
        return self._make, self._values
