"""Casts: fewer bits a value by a shorter floating-point format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InvalidArgument
from .base import DTYPES, Coder, Device


@dataclass(frozen=True)
class Cast:
    """Send values in a shorter floating-point format, rounded to nearest even.

    Values beyond the format's range become infinite: float16 ends at 65504.

    Parameters
    ----------
    dtype : {"float16", "bfloat16", "float32", "float64"}
        The format on the wire. It must not be wider than the values'.
    """

    dtype: str = "float16"

    name: ClassVar[str] = "cast"
    block: ClassVar[int] = 1
    fixed_size: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"cast: dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")

    def coder(self, device: Device, dtype: str) -> Coder:
        if self.dtype == "float64" and dtype != "float64":
            raise InvalidArgument(f"cast: a {self.dtype} wire is wider than the {dtype} values")
        return device.coder(("cast", DTYPES.index(self.dtype), 0), dtype)
