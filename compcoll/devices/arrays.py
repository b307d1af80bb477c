"""Half-precision host memory, kept as uint16, to and from the type that is computed with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def load(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.floating]:
    """Values of stored memory, in float64 for float64 and else in float32."""
    return array.view(NUMPY_DTYPES[dtype]).astype(np.float64 if dtype == "float64" else np.float32, copy=False)


def store(values: npt.NDArray[np.floating], out: npt.NDArray[Any], dtype: str) -> None:
    """Write values to stored memory, rounded to its type."""
    with np.errstate(over="ignore"):
        out.view(NUMPY_DTYPES[dtype])[:] = values
