"""The microscaling formats of the Open Compute Project, and NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..dtypes import computed_on
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import OneOf, option

_BLOCK, _NVFP4_BLOCK = 32, 1024
_ROTATION = 8  # of the kernel's `first`


class _Format(NamedTuple):
    """A format.

    Attributes
    ----------
    first : int
        Selects the kernel's code.
    error : float
        RMS error of normal values, measured on 25 million.
    largest_error : float
        Largest error over a block's largest magnitude: of rounding, or of values between the element type's largest
        number and the next power of two.
    """

    first: int
    error: float
    largest_error: float


_FORMATS = {
    "mxfp8_e4m3": _Format(0, 2.9343e-2, 2.0**-3),
    "mxfp8_e5m2": _Format(1, 5.3961e-2, 2.0**-3),
    "mxfp6_e3m2": _Format(3, 5.3961e-2, 2.0**-3),
    "mxfp6_e2m3": _Format(4, 2.8375e-2, 2.0**-4),
    "mxfp4": _Format(5, 1.14947e-1, 2.0**-2),
    "mxint8": _Format(2, 8.2561e-3, 2.0**-7),
    "nvfp4": _Format(0, 9.5141e-2, 0.18),
}


@dataclass(frozen=True)
class MX(Codec):
    """Round values to elements of 4, 6 or 8 bits that share a power of two in blocks of 32: microscaling formats.

    If M is a block's largest magnitude, the block's scale is ``2**(floor(log2(M)) - e)``, where ``2**e`` is the largest
    power of two that the element type has. Elements are the values divided by the scale, rounded to nearest (ties to
    even) and bounded to the type's largest finite number. So a block's largest values may become smaller, by up to an
    eighth (``mxfp4``: a quarter, ``mxfp6_e2m3``: a 16th, ``mxint8``: a 128th). Scales are from ``2**-127`` to
    ``2**127``: larger float64 values are bounded, and smaller ones become 0. The wire of a block is the scale as a byte
    (E8M0), then the elements, the first in the lowest bits. Blocks that hold NaN or Inf decode to NaN.

    ``nvfp4`` has a scale in E4M3 for each 16 elements of 4 bits (E2M1), and a float32 scale for each 1024 values, so
    that each message can be decoded alone. The wire of 1024 values is the float32 scale, the 64 scales, then the
    elements; a shorter last block also has 64 scales. A block that holds NaN or Inf decodes to NaN; if all its values
    are below 2**-80, to 0. Elements that are NaN or Inf, which other encoders may write, are not decoded as such.

    Parameters
    ----------
    format : {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"}
        The element type and its scales: 8.25, 6.25 or 4.25 bits for a value, ``nvfp4`` 4.53.
    rotate : bool
        Multiply each 32 values by an orthogonal matrix before they are encoded, and by its inverse after they are
        decoded: the Hadamard matrix times signs, the same on all ranks. This spreads large values over all 32. If
        some values are much larger than the others (Student's t with 3 degrees of freedom), the error of ``mxint8``
        falls from 1.3e-2 to 7.1e-3 and that of ``mxfp4`` from 0.142 to 0.113; that of ``nvfp4`` rises from 0.089 to
        0.098. A last block of fewer values is not rotated. Blocks whose rotated values reach 2**120 (float64: 2**1016)
        decode to NaN. float16 values near 65504 may decode to Inf.

    References
    ----------
    Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.

    NVIDIA, "Pretraining Large Language Models with NVFP4", 2025.

    S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024, for rotations.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.MX()).nbytes, x.nbytes
    (2112, 8192)
    >>> compcoll.encode(x, codec=compcoll.MX("mxfp4", rotate=True)).nbytes
    1088
    """

    format: str = option("mxfp8_e4m3", OneOf(tuple(_FORMATS)), "element type and scales")
    rotate: bool = option(False, OneOf((False, True)), "spread large values over 32 values")

    name: ClassVar[str] = "mx"
    for_auto = ({"format": "mxfp6_e2m3"}, {"format": "mxfp4"})  # with 8 bits, fp8 and int8 have smaller errors
    speeds = (Speed("mx", 8.25, 3.4e9, 3.1e9, 2.6e9, 1.6e9), Speed("mx", 4.25, 3.1e9, 6.9e9, 5.5e9, 2.1e9))
    examples = (
        Example({}, "dd94645dd94ce018 43fa959e55c95a5a 366cd3742159063e c83d21360a9bc55a"),
        Example({"format": "mxfp4"}, "5fff0f6b0a5b0f17 4cad072675dd97b0 62245e50b125f413 36926d79a1e8d4b4"),
        Example({"format": "mxfp6_e2m3"}, "93a8dddfb5d82380 cb0ec1c78dd92b78 ff005940883d3b59 07e59a8e3c107fee"),
        Example(
            {"format": "mxint8", "rotate": True},
            "04cee7814567544e 48ebc9ce2c75fe58 d27ed34b9093e7fa ef10a3552dcaec41",
        ),
        Example(
            {"format": "nvfp4", "rotate": True},
            "9823b9fcd48bba15 a937e37a0c8f7b5a 54b322dea77b6dbc fc330d1c69ce3844",
        ),
    )

    @property
    def block(self) -> int:  # type: ignore[override]
        return _NVFP4_BLOCK if self.format == "nvfp4" else _BLOCK

    def coder(self, device: Device, dtype: str) -> Coder:
        first = _FORMATS[self.format].first
        if self.format == "nvfp4":
            return device.coder(("nvfp4", first + self.rotate, self.block), dtype)
        return device.coder(("mx", first + _ROTATION * self.rotate, self.block), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the RMS error, as measured. A rotation does not change it, since normal values stay normal."""
        return _FORMATS[self.format].error

    def error_bound(self, dtype: str) -> ErrorBound:
        """Return a part of the block's largest magnitude. For float64 it holds below 2**127, with ``rotate`` 2**124.

        With ``rotate``, it is 32 times as large: 32 errors add up in the worst case, each times ``1 / √32``, and the
        largest rotated value may be √32 times the largest value.
        """
        of_largest = _FORMATS[self.format].largest_error * (32 if self.rotate else 1)
        absolute = 2.0**-79 if self.format == "nvfp4" else 2.0**-126
        return ErrorBound(self.block, of_largest * (1 + 64 * computed_on(dtype).rounding), absolute=absolute)
