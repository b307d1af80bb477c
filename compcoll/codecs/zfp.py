"""ZFP in one dimension, in blocks of four values. compcoll's kernels run the fixed rate, zfpy the other modes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..dtypes import computed_on
from ..errors import InvalidArgument, WireCorrupted
from ..host.encode_options import EncodeOptions
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .numpy_codec import NumpyCoder, Values
from .options import Integers, OneOf, Reals, option, repr_of_mode, set_one_mode

# Below these rates libzfp writes outside its buffers. compcoll writes no stream that libzfp cannot read.
_LOWEST_MAXBITS = {"float32": 9, "float64": 12}
_HIGHEST_RATE = {"float32": 32, "float64": 64}
_ERROR_AT_RATE_8 = 5.5e-2


@dataclass(frozen=True, repr=False)
class ZFP(Codec):
    """ZFP compression in one of four modes; the default is ``rate=8``.

    At a fixed rate the wire is libzfp's stream without header, byte for byte, with two exceptions. Blocks whose largest
    magnitude is below 2**-98 (float64: 2**-962) are sent as zeros, and blocks that hold NaN or Inf decode to NaN. The
    other modes have wires of variable size and run in zfpy, at zfpy's speed.

    Parameters
    ----------
    rate : float, optional
        Compressed bits per value: above 2 up to 32 for float32 and 16-bit floats, 3 to 64 for float64. Rounded to a
        quarter of a bit, since a block of four values takes a whole number of bits.
    tolerance : float, optional
        Largest absolute error of one encoding.
    precision : int, optional
        Number of bit planes to keep of each block, 1 to 64.
    lossless : bool, optional
        Whether to reproduce all values bit for bit.

    References
    ----------
    P. Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays", IEEE TVCG 20(12), 2014.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.ZFP(rate=8)).nbytes, x.nbytes
    (2048, 8192)
    """

    rate: float | None = option(None, Reals(2, 64), "compressed bits per value")
    tolerance: float | None = option(None, Reals(0), "largest absolute error")
    precision: int | None = option(None, Integers(1, 64), "bit planes")
    lossless: bool = option(False, OneOf((True, False)), "lose nothing")

    name: ClassVar[str] = "zfp"
    block = 4
    for_auto = tuple({"rate": rate} for rate in (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48))
    speeds = (
        Speed("zfp", 8, 6e9, 6e9, 5e9, 3e9),
        Speed("zfp", 16, 5e9, 5e9, 4e9, 2.5e9),
        Speed("zfpy", 16, 0.15e9, 0.12e9, 0.12e9, 0.07e9),
    )
    examples = (
        Example({"rate": 8}, "782e58c99b791d81 a0793319dff025bf 91c0ac292fbcf622 639a87cad19a1adf"),
        Example({"rate": 16}, "d2addad3ab73efe4 1f2a237d4b3c92ea f1680e6f9da503a9 60aeb0637a8464d6"),
        Example({"rate": 5.25}, "cf203a9ab3a681cf a1d6640d3222680a 05f31533415d1659 b7f8c7734a73f94a"),
        # No digests: versions of zfpy may write different wires for the same values.
        Example({"lossless": True}),
        Example({"tolerance": 1e-3}),
        Example({"precision": 16}),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_one_mode(self, "rate", 8.0)

    __repr__ = repr_of_mode

    @property
    def fixed_size(self) -> bool:  # type: ignore[override]
        return self.rate is not None

    @property
    def kind(self) -> str:
        return self.name if self.fixed_size else "zfpy"

    def coder(self, device: Device, dtype: str) -> Coder:
        if self.rate is None:
            return _zfpy_coder(dtype, tolerance=self.tolerance, precision=self.precision)
        computed = computed_on(dtype).name
        maxbits = math.floor(4 * self.rate + 0.5)
        if maxbits < _LOWEST_MAXBITS[computed] or self.rate > _HIGHEST_RATE[computed]:
            lowest = "at least 3" if computed == "float64" else "above 2"
            raise InvalidArgument(
                f"zfp: rate={self.rate:g} is out of range for {dtype}: {lowest}, at most {_HIGHEST_RATE[computed]}"
            )
        return device.coder(("zfp", maxbits, 0), dtype)

    def encoding_error(self, dtype: str) -> float | None:
        """Return the error measured on normal values at a fixed rate; None with a tolerance or precision.

        It is 5.5e-2 at rate 8, 1.4e-2 at 10 and 2.1e-4 at 16; each bit halves it. A block of float64 needs three more
        bits for its exponent.
        """
        if self.lossless:
            return 0.0
        if self.rate is None:
            return None
        rate = self.rate - (0.75 if dtype == "float64" else 0.0)
        return min(max(_ERROR_AT_RATE_8 * math.pow(2.0, 8 - rate), computed_on(dtype).rounding), 1.0)

    def bias(self, *, recoded: bool) -> float:
        """Return the bias of truncating bit planes, as measured on normal values at rates 8 and 16, 2 to 128 ranks."""
        return 0.3 if recoded else 0.17

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return the bound that the bit planes not sent give through the inverse transform.

        A block's k leading bit planes take at most 4k + 3 bits after its exponent. The other planes contribute less
        than 2/3 · 2**(32 - k) to a coefficient (negabinary digits). The inverse transform's rows sum to 15/4, and
        integers are scaled by 2**(30 - e) with 2**e at most twice the largest magnitude.
        """
        if self.lossless:
            return ErrorBound()
        if self.tolerance is not None:
            return ErrorBound(4, 4 * computed_on(dtype).rounding, absolute=self.tolerance)
        exponent_bits, rounded, flushed = (12, 2.0**-57, 2.0**-962) if dtype == "float64" else (9, 2.0**-25, 2.0**-98)
        if self.precision is not None:
            planes = self.precision
        else:
            assert self.rate is not None
            planes = max((math.floor(4 * self.rate + 0.5) - exponent_bits - 3) // 4, 0)
        # Without any bit plane all values decode to 0, and the error is the value itself.
        return ErrorBound(4, min(2 * 10 * 2.0**-planes, 20.0) + rounded, absolute=flushed)


def _zfpy_coder(dtype: str, *, tolerance: float | None, precision: int | None) -> NumpyCoder:
    """Return a host coder whose wires are zfp streams: within a tolerance, with some bit planes, or lossless."""
    import zfpy  # slow to import, and fixed rates do not need it

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
        # libzfp reads past the end of a short stream, so append zeros.
        padded = stream + bytes(n * computed.itemsize + 64)
        return np.asarray(zfpy._decompress(padded, zfpy.dtype_to_ztype(computed), (n,), **mode))

    return NumpyCoder(dtype, encode, decode)
