"""ZFP's modes of variable size through zfpy, on host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import zfpy

from ..devices.encode_options import EncodeOptions
from ..errors import WireCorrupted
from .numpy_codec import NumpyCoder, Values


def zfpy_coder(dtype: str, *, tolerance: float | None, precision: int | None) -> NumpyCoder:
    """A coder whose wires hold a zfp stream: within a tolerance, of some bit planes, or without loss."""
    mode: dict[str, float] = {}
    if tolerance is not None:
        mode = {"tolerance": tolerance}
    if precision is not None:
        mode = {"precision": precision}

    def encode(values: Values, how: EncodeOptions) -> bytes:
        stream: bytes = zfpy.compress_numpy(values, write_header=False, **mode)
        return stream

    def decode(stream: bytes, n: int, computed: np.dtype[Any]) -> Values:
        if not stream:
            raise WireCorrupted(f"a zfp stream of 0 bytes for {n} values")
        # libzfp reads on past the end of a short stream: give it zeros to read.
        padded = stream + bytes(n * computed.itemsize + 64)
        return np.asarray(zfpy._decompress(padded, zfpy.dtype_to_ztype(computed), (n,), **mode))

    return NumpyCoder(dtype, encode, decode)
