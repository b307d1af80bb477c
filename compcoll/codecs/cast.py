"""Casts to a shorter floating-point format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import DTYPES, computed_on
from ..errors import InvalidArgument
from .base import Codec, Coder, Device, ErrorBound, Example, Speed
from .options import OneOf, option
from .quantization import float_rounding


def uncompressed(device: Device, dtype: str) -> Coder:
    """Return the coder that sends values unchanged."""
    return device.coder(("cast", DTYPES[dtype].precision, 0), dtype)


@dataclass(frozen=True)
class Cast(Codec):
    """Send values in a shorter floating-point format, rounded to nearest even.

    Values beyond the format's range become infinite: float16 ends at 65504.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32", "float64"}
        The format on the wire. It must not be wider than the format of the values.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 2048, dtype=np.float32)
    >>> compcoll.encode(x, codec=compcoll.Cast("bfloat16")).nbytes, x.nbytes
    (4096, 8192)
    """

    dtype: str = option("float16", OneOf(tuple(DTYPES)), "the format on the wire")

    name: ClassVar[str] = "cast"
    for_auto = ({"dtype": "bfloat16"}, {"dtype": "float32"})  # in float16, values above 65504 would become infinite
    speeds = (
        Speed("cast float32", 32, 10e9, 10e9, 8e9, 6e9),
        Speed("cast float16", 16, 10e9, 10e9, 8e9, 6e9),
        Speed("cast bfloat16", 16, 10e9, 10e9, 8e9, 6e9),
    )
    examples = (
        Example({"dtype": "float16"}, "bdb2f0be5d6c9e22 d5fb48295316ca3f f6887afc8d157c04 5f32b1a4a72cff44"),
        Example({"dtype": "bfloat16"}, "c23a8d19a5b2a51a dde6f0feb2783068 fb5f003d0053a14e 4359e95cac287960"),
    )

    @property
    def kind(self) -> str:
        return f"cast {self.dtype}"

    label = kind

    def coder(self, device: Device, dtype: str) -> Coder:
        if self.dtype == "float64" and dtype != "float64":
            raise InvalidArgument(f"cast: a {self.dtype} wire is wider than the {dtype} values")
        return device.coder(("cast", DTYPES[self.dtype].precision, 0), dtype)

    def encoding_error(self, dtype: str) -> float:
        """Return the error of rounding to the format on the wire."""
        wire = DTYPES[self.dtype]
        return 0.0 if wire.precision >= DTYPES[dtype].precision else float_rounding(wire.rounding)

    def error_bound(self, dtype: str) -> ErrorBound:
        wire = DTYPES[self.dtype]
        exact = wire.precision >= computed_on(dtype).precision
        return ErrorBound() if exact else ErrorBound(relative=wire.rounding, absolute=wire.smallest / 2)
