"""The options of an encoding, which every device's coders take."""

from __future__ import annotations

from typing import Any, NamedTuple


class EncodeOptions(NamedTuple):
    """The rest of what an encoding does, beside the values that it adds and the wire that it writes.

    Attributes
    ----------
    residual : array or None
        Receives the loss of this encoding, times ``residual_scale``, for a later call.
    feed : bool
        Whether what the residual held is first added to the values; if not, the loss is added to the residual.
    residual_scale : float
        This rank's share of the loss.
    decoded : array or None
        Receives the decoded wire.
    scale : float
        The factor of the values, but not of the wires that are added.
    rng_counter : int
        Below 2**64: the random numbers that a codec takes which rounds at random.
    position : int
        Where in the whole buffer the values begin.
    """

    residual: Any = None
    feed: bool = True
    residual_scale: float = 1.0
    decoded: Any = None
    scale: float = 1.0
    rng_counter: int = 0
    position: int = 0


PLAIN = EncodeOptions()
"""The values as they are, and nothing but the wire written."""
