"""int8 at its limits. `test_formulas.py` compares it with its formula."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import compcoll
from compcoll import Int8
from compcoll.dtypes import DTYPES
from compcoll.host.device import HostDevice

SETS = HostDevice.instruction_sets()


def encode(instruction_set: str, codec: Int8, x: np.ndarray) -> np.ndarray:
    coder = codec.coder(HostDevice(1, instruction_set), x.dtype.name)
    wire = np.empty(coder.wire_nbytes(x.size), np.uint8)
    coder.encode(x.size, HostDevice.flat(x, x.dtype.name), (), wire)
    return wire


def decode(instruction_set: str, codec: Int8, wire: np.ndarray, n: int, dtype: Any) -> np.ndarray:
    out = np.empty(n, dtype)
    name = out.dtype.name
    codec.coder(HostDevice(1, instruction_set), name).decode(n, None, (wire,), HostDevice.flat(out, name))
    return out


@pytest.mark.parametrize("instruction_set", SETS)
def test_bytes_by_hand(instruction_set: str) -> None:
    """Scale 2: ties to even, the largest magnitude is 127 whatever its sign, a block of zeros is zeros."""
    x = np.array([254, -254, 1, 3, 5, -1, -3, 0] + [0] * 8, np.float32)
    wire = encode(instruction_set, Int8(8), x)
    assert wire.tobytes().hex() == "00000040" + "7f8100020200fe00" + "00000000" + "00" * 8


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("instruction_set", SETS)
def test_the_largest_finite_numbers_stay_finite(instruction_set: str, dtype: Any) -> None:
    for largest in (ml_dtypes.finfo(dtype).max, np.nextafter(ml_dtypes.finfo(dtype).max, dtype(0))):
        x = np.array([largest, -largest, largest / dtype(2), 0, 0, 0, 0, 0], dtype)
        got = decode(instruction_set, Int8(8), encode(instruction_set, Int8(8), x), 8, dtype).astype(np.float64)
        rounding = 0.51 / 127 + DTYPES[x.dtype.name].rounding
        assert np.isfinite(got).all() and np.abs(got - x.astype(np.float64)).max() <= float(largest) * rounding


def test_a_scale_a_row() -> None:
    """With rows of very different size, as of layers' gradients, a scale for each keeps the small ones."""
    rows = np.random.default_rng(0).standard_normal((32, 120)) * 10.0 ** np.linspace(-6, 6, 32)[:, None]
    x = rows.astype(np.float32)
    by_rows = compcoll.decode(compcoll.encode(x, "int8", block=120), x.shape, x.dtype, "int8", block=120)
    assert (np.abs(by_rows - x).max(axis=1) <= np.abs(x).max(axis=1) * (0.5 / 127 + 1e-6)).all()
    as_one = compcoll.decode(compcoll.encode(x, "int8", block=3840), x.shape, x.dtype, "int8", block=3840)
    assert not as_one[0].any()
