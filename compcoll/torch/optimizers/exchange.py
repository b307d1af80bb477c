"""The mean of a vector over the ranks, compressed, with what that loses kept for the next time."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ...sparse import Sparsifier
from ..account import Account
from ..arrays import HostArray
from ..buffers import array_of
from ..states import draw_as_begun


class Exchange(Protocol):
    """Averages one vector, again and again.

    Attributes
    ----------
    losses : array or None
        What compression has lost so far of each element; None if that is not kept.
    of_mean : bool
        Whether losses are parts of the mean, of which the ranks' sum counts; else of this rank's values.
    """

    losses: HostArray | None
    of_mean: bool

    def mean(self, vector: Tensor, communicator: Communicator, account: Account) -> int:
        """Have a vector in host memory be the ranks' mean; returns the bytes sent. Collective."""

    def try_out(self, communicator: Communicator) -> None:
        """Refuse what a call would, on a few zeros. Collective."""


def exact_mean(vector: Tensor, communicator: Communicator, account: Account) -> int:
    """Average a vector without a codec, in place; returns the bytes sent. Collective."""
    values = array_of(vector)
    communicator.allreduce(values, op="mean", out=values, codec=None)
    return _count(communicator, account)


class CodedExchange:
    """An `Exchange` by compcoll's allreduce.

    With the algorithm ``"direct"`` a rank's values are encoded once, and the mean once more by the owner of each part,
    both with feedback: a rank keeps what its own encodings lost.

    Parameters
    ----------
    codec : Codec or None
        As for `compcoll.allreduce`.
    algorithm : str
        Of that.
    feedback : bool
        Whether losses are kept.
    vector : Tensor
        Others like this one will be averaged.

    Raises
    ------
    InvalidArgument
        If the codec needs second moments of samples.
    """

    of_mean = True

    def __init__(self, codec: Codec | None, algorithm: str, feedback: bool, vector: Tensor) -> None:
        self._codec, self._algorithm = codec, algorithm
        self._feedback: ErrorFeedback | None = None
        self._vector = vector
        self.losses: HostArray | None = None
        if isinstance(codec, Sparsifier) and codec.state is not ErrorFeedback:
            raise InvalidArgument(f"{codec!r} decides by second moments of samples, which there are of gradients only")
        if feedback and codec is not None:
            self._feedback = ErrorFeedback()

    def try_out(self, communicator: Communicator) -> None:
        if self._codec is None:
            return
        feedback = None if self._feedback is None else ErrorFeedback()
        communicator.allreduce(
            torch.zeros(64, dtype=self._vector.dtype).numpy(),
            op="mean",
            feedback=feedback,
            codec=self._codec,
            algorithm=self._algorithm,
        )
        if self._feedback is not None:
            communicator.prepare_feedback(self._feedback, array_of(self._vector))
            self.losses = self._feedback.residual

    def mean(self, vector: Tensor, communicator: Communicator, account: Account) -> int:
        values = array_of(vector)
        draw_as_begun(self._feedback, communicator)
        communicator.allreduce(
            values, op="mean", out=values, feedback=self._feedback, codec=self._codec, algorithm=self._algorithm
        )
        return _count(communicator, account)


def _count(communicator: Communicator, account: Account) -> int:
    """Add the collective that ended last to an account; returns the bytes that it sent."""
    stats = communicator.stats
    assert stats is not None
    before = account.wire_nbytes
    account.add(stats, 2 * (communicator.size - 1) / communicator.size)
    return account.wire_nbytes - before
