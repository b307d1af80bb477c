"""Conversion of host memory, where 16-bit floats are stored as uint16, to and from the type of computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import DTYPES, computed_on
from .encode_options import EncodeOptions


def load(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.floating]:
    """Return the stored values: as float64 for float64, else as float32."""
    return array.view(DTYPES[dtype].numpy).astype(computed_on(dtype).numpy, copy=False)


def store(values: npt.NDArray[np.floating], out: npt.NDArray[Any], dtype: str) -> None:
    """Store values in memory of type ``dtype``, rounded to it."""
    with np.errstate(over="ignore"):
        out.view(DTYPES[dtype].numpy)[:] = values


def store_residual(values: npt.NDArray[Any], decoded: npt.NDArray[Any], how: EncodeOptions) -> None:
    """Store in ``how.residual`` what encoding lost of the values; errors that are not finite count as 0."""
    with np.errstate(invalid="ignore"):
        error = (values - decoded) * values.dtype.type(how.residual_scale)
    error[~np.isfinite(error)] = 0
    how.residual[:] = error if how.feed else how.residual + error
