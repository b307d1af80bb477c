"""Half-precision host memory, kept as uint16, to and from the type that is computed with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES, computed_on


def load(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.floating]:
    """Values of stored memory, in float64 for float64 and else in float32."""
    return array.view(DTYPES[dtype].numpy).astype(computed_on(dtype).numpy, copy=False)


def store(values: npt.NDArray[np.floating], out: npt.NDArray[Any], dtype: str) -> None:
    """Write values to stored memory, rounded to its type."""
    with np.errstate(over="ignore"):
        out.view(DTYPES[dtype].numpy)[:] = values
