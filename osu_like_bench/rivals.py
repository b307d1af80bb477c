"""Other implementations of the codecs' operations: zfpy, NumPy and torch expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.codecs import ZFP, Cast, Codec, MinMax
from compcoll.devices.arrays import NUMPY_DTYPES

Array = npt.NDArray[Any]
Operation = Callable[[], Any]
Operations = Mapping[str, Operation]

OPERATIONS = ("encode", "decode", "accumulate", "feedback")


def _zfpy(codec: Codec, x: Array) -> Operations:
    if not isinstance(codec, ZFP) or x.dtype not in (np.float32, np.float64):
        return {}
    import zfpy

    modes = {"rate": codec.rate, "tolerance": codec.tolerance, "precision": codec.precision}
    mode = {name: value for name, value in modes.items() if value is not None}
    element = zfpy.dtype_to_ztype(x.dtype)
    sums = x.copy()

    def encode() -> bytes:
        stream: bytes = zfpy.compress_numpy(x, write_header=False, **mode)
        return stream

    stream = encode()

    def decode() -> Array:
        values: Array = zfpy._decompress(stream, element, x.shape, **mode)
        return values

    return {"encode": encode, "decode": decode, "accumulate": lambda: np.add(sums, decode(), out=sums)}


def _numpy(codec: Codec, x: Array) -> Operations:
    if isinstance(codec, Cast):
        return _numpy_cast(NUMPY_DTYPES[codec.dtype], x)
    # Expressions that pack fewer bits than a byte would be another codec's.
    return _numpy_minmax(codec.block, x) if isinstance(codec, MinMax) and codec.bits == 8 else {}


def _numpy_cast(wire: np.dtype[Any], x: Array) -> Operations:
    coded, sums = x.astype(wire), x.copy()
    return {
        "encode": lambda: x.astype(wire),
        "decode": lambda: coded.astype(x.dtype),
        "accumulate": lambda: np.add(sums, coded.astype(x.dtype), out=sums),
    }


def _numpy_minmax(block: int, x: Array) -> Operations:
    values = x[: x.size // block * block].reshape(-1, block)
    if not values.size:
        return {}

    def encode() -> tuple[Array, Array, Array]:
        lowest, highest = values.min(1, keepdims=True), values.max(1, keepdims=True)
        step = np.maximum((highest - lowest) / 255, np.finfo(np.float32).tiny)
        return np.rint((values - lowest) / step).astype(np.uint8), lowest, step

    codes, lowest, step = encode()
    sums = values.copy()
    return {
        "encode": encode,
        "decode": lambda: lowest + codes * step,
        "accumulate": lambda: np.add(sums, lowest + codes * step, out=sums),
    }


def _torch(codec: Codec, x: Array) -> Operations:
    import torch

    if x.dtype.name == "bfloat16":
        return {}
    values = torch.from_numpy(x)
    if isinstance(codec, Cast):
        coded = values.to(getattr(torch, codec.dtype))
        sums = values.clone()
        return {
            "encode": lambda: values.to(coded.dtype),
            "decode": lambda: coded.to(values.dtype),
            "accumulate": lambda: sums.add_(coded),
        }
    if not isinstance(codec, MinMax) or codec.bits != 8 or x.size < codec.block:
        return {}
    blocks = values[: x.size // codec.block * codec.block].reshape(-1, codec.block)

    def encode() -> tuple[Any, Any, Any]:
        lowest, highest = torch.aminmax(blocks, dim=1, keepdim=True)
        step = ((highest - lowest) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        return ((blocks - lowest) / step).round().to(torch.uint8), lowest, step

    codes, lowest, step = encode()
    totals = blocks.clone()
    return {
        "encode": encode,
        "decode": lambda: lowest + codes * step,
        "accumulate": lambda: totals.add_(lowest + codes * step),
    }


RIVALS: Mapping[str, Callable[[Codec, Array], Operations]] = {"zfpy": _zfpy, "numpy": _numpy, "torch": _torch}


def available(threads: int) -> tuple[str, ...]:
    """Names of the `RIVALS` that are installed; torch is told to use that many threads."""
    found = tuple(name for name in RIVALS if find_spec(name) is not None)
    if "torch" in found:
        import torch

        torch.set_num_threads(threads)
    return found
