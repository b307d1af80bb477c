"""Wire formats of codecs, for the cost model."""

from __future__ import annotations

from typing import Any

from .. import config
from ..codecs import Codec
from .cost import RAW, WireFormat, raw

_HALF = 2.0  # the compression ratio for which a segment has its default size


def kind_of(codec: Codec | None) -> str:
    """Return the codec's kind, as in profiles."""
    return RAW if codec is None else codec.kind


def wire_format(codec: Codec | None, device: Any, dtype: str, itemsize: int) -> WireFormat:
    """Return the format of values on the wire with a codec.

    Parameters
    ----------
    codec : Codec or None
        None for uncompressed values.
    device : Device
        Binds the codec.
    dtype, itemsize : str, int
        Element type.
    """
    return raw(itemsize) if codec is None else WireFormat(codec.kind, codec.wire_bits(device, dtype), itemsize)


def segment_nbytes(codec: Codec | None, ratio: float, nodes: int, *, blocks: bool = False) -> int:
    """Return the uncompressed bytes of a segment; ``ratio`` is the compression ratio, used for fixed-size codecs."""
    by_ratio = codec is None or (codec.fixed_size and not codec.additive)
    return config.segment_nbytes(nodes, ratio if by_ratio else _HALF, blocks=blocks)


def short(codec: Codec | None) -> str:
    """Return a codec's label for tables."""
    return "-" if codec is None else codec.label
