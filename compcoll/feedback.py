"""Error feedback: what compression loses in one call is added to the next."""

from __future__ import annotations

from typing import Any

from .errors import InvalidBuffer


class ErrorFeedback:
    """Keeps what this rank's encodings lose, from call to call. The caller owns it: one a buffer that is summed again
    and again, such as a gradient.

    Attributes
    ----------
    residual : array or None
        The loss kept: float64 for float64 buffers, else float32; None before the first call. Losses that are not
        finite are dropped.

    References
    ----------
    F. Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", Interspeech 2014.
    """

    def __init__(self) -> None:
        self.residual: Any = None
        self._dtype = ""

    def reset(self) -> None:
        """Forget everything lost so far."""
        self.residual = None

    def prepare(self, n: int, dtype: str, zeros: Any) -> Any:
        """The residual for a buffer of ``n`` elements, made by ``zeros(n, dtype)`` at first.

        Raises
        ------
        InvalidBuffer
            If an earlier call had another number of elements or another element type.
        """
        if self.residual is None:
            self.residual, self._dtype = zeros(n, dtype), dtype
        if self.residual.size != n or self._dtype != dtype:
            raise InvalidBuffer(
                f"feedback holds the loss of {self.residual.size} {self._dtype} elements, but this buffer has {n} of "
                f"{dtype}: use one ErrorFeedback a buffer, or reset() it"
            )
        return self.residual
