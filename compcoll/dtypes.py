"""The table of element types that can be compressed."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class DType(NamedTuple):
    """A floating-point type.

    Attributes
    ----------
    name : str
        NumPy's name.
    numpy : numpy.dtype
        NumPy's data type.
    precision : int
        Significant bits, including the hidden bit. Kernels identify the type by this number.
    smallest : float
        The smallest positive number.
    """

    name: str
    numpy: np.dtype[Any]
    precision: int
    smallest: float

    @property
    def is_half(self) -> bool:
        """Whether the type has 16 bits; such values are converted to float32 for computation."""
        return self.numpy.itemsize == 2

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.numpy.itemsize

    @property
    def rounding(self) -> float:
        """The largest relative error of rounding to this type."""
        return 2.0**-self.precision

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return float(ml_dtypes.finfo(self.numpy).max)  # type: ignore[no-untyped-call]


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float16", np.dtype(np.float16), 11, 2.0**-24),
        DType("bfloat16", np.dtype(ml_dtypes.bfloat16), 8, 2.0**-133),
        DType("float32", np.dtype(np.float32), 24, 2.0**-149),
        DType("float64", np.dtype(np.float64), 53, 2.0**-1074),
    )
}
"""The element types, by name."""

HALVES = frozenset(name for name, dtype in DTYPES.items() if dtype.is_half)
"""Names of the 16-bit types."""


def computed_on(dtype: str) -> DType:
    """Return the type of computation for a type: float64 for float64, else float32."""
    return DTYPES["float64" if dtype == "float64" else "float32"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy type for a name, including bfloat16."""
    return DTYPES[name].numpy if name in DTYPES else np.dtype(name)
