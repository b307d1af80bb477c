"""The options of an encoding, for coders on all devices."""

from __future__ import annotations

from typing import Any, NamedTuple


class EncodeOptions(NamedTuple):
    """Options of an encoding, besides the terms that it adds and the wire that it writes.

    Attributes
    ----------
    residual : array or None
        Receives the compression error of this encoding, times ``residual_scale``, for a later call.
    feed : bool
        Whether the old residual is added to the values and then replaced. If not, the error is added to the residual.
    residual_scale : float
        Factor of the stored error: this rank's share of it.
    decoded : array or None
        Receives the decoded wire.
    scale : float
        Factor of the values, but not of the wires that are added.
    rng_counter : int
        Counter for the random numbers of codecs that round at random, below 2**64.
    position : int
        Index of the first value in the whole buffer.
    """

    residual: Any = None
    feed: bool = True
    residual_scale: float = 1.0
    decoded: Any = None
    scale: float = 1.0
    rng_counter: int = 0
    position: int = 0


PLAIN = EncodeOptions()
"""The default options: values unscaled, and only the wire is written."""
