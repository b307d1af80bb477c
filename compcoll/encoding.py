"""A codec without MPI, for those who want to look at it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import config
from .codecs.base import DTYPES, Codec
from .codecs.registry import as_codec
from .devices.host import HostDevice
from .errors import InvalidArgument, InvalidBuffer, UnsupportedDType


def encode(x: Any, codec: str | Codec = "zfp", **codec_options: Any) -> Any:
    """Encode an array.

    Parameters
    ----------
    x : numpy.ndarray
        C-contiguous; float16, bfloat16, float32 or float64.
    codec : str or Codec
        A codec or its name.
    **codec_options
        Configuration of a codec given by name.

    Returns
    -------
    numpy.ndarray of uint8
        The wire, as a collective would send it.

    Examples
    --------
    >>> wire = compcoll.encode(x, codec="zfp", rate=8)
    >>> y = compcoll.decode(wire, x.shape, x.dtype, codec="zfp", rate=8)
    """
    device = HostDevice(config.threads(1))
    device.check_readable(x, "x")
    coder = _named(codec, codec_options).coder(device, _compressible(device.dtype_name(x)))
    wire = device.empty_bytes(coder.wire_nbytes(x.size))
    nbytes = coder.encode(x.size, device.flat(x, device.dtype_name(x)), (), wire)
    return wire[:nbytes]


def decode(
    wire: Any, shape: int | tuple[int, ...], dtype: Any, /, codec: str | Codec = "zfp", **codec_options: Any
) -> Any:
    """Decode the wire of an array of that shape and element type; ``codec`` as it was for `encode`.

    Raises
    ------
    InvalidBuffer
        If the wire has not the length that these arguments call for.
    """
    device = HostDevice(config.threads(1))
    device.check_readable(wire, "wire")
    out = np.empty(shape, dtype)
    name = _compressible(device.dtype_name(out))
    chosen = _named(codec, codec_options)
    coder = chosen.coder(device, name)
    n, expected = math.prod(out.shape), coder.wire_nbytes(out.size)
    if wire.dtype != np.uint8 or wire.nbytes > expected or (chosen.fixed_size and wire.nbytes != expected):
        raise InvalidBuffer(
            f"wire has {wire.nbytes} bytes of {wire.dtype}, but {chosen!r} writes "
            f"{'' if chosen.fixed_size else 'at most '}{expected} bytes of uint8 for {n} values of {name}"
        )
    coder.decode(n, None, (wire.reshape(-1),), device.flat(out, name))
    return out


def _named(codec: str | Codec, options: dict[str, Any]) -> Codec:
    chosen = as_codec(codec, options)
    if chosen is None:
        raise InvalidArgument("codec=None: a codec is needed here")
    return chosen


def _compressible(dtype: str) -> str:
    if dtype not in DTYPES:
        raise UnsupportedDType(f"{dtype} elements cannot be encoded: {', '.join(DTYPES)} can")
    return dtype
