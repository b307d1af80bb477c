"""Other implementations of the codecs' operations: zfpy, NumPy and torch expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from compcoll.codecs import ZFP, Cast, Codec, MinMax
from compcoll.dtypes import DTYPES

Array = npt.NDArray[Any]
Operation = Callable[[], Any]
Operations = Mapping[str, Operation]


def _operations(encode: Operation, decode: Callable[[Any], Any], add: Callable[[Any], Any]) -> Operations:
    """Return the operations of a codec: encode, and decode or decode and add what it returns."""
    wire = encode()
    return {"encode": encode, "decode": lambda: decode(wire), "accumulate": lambda: add(wire)}


def _zfpy(codec: ZFP, x: Array) -> Operations:
    if x.dtype not in (np.float32, np.float64):
        return {}
    import zfpy

    modes = {"rate": codec.rate, "tolerance": codec.tolerance, "precision": codec.precision}
    mode = {name: value for name, value in modes.items() if value is not None}
    element, sums = zfpy.dtype_to_ztype(x.dtype), x.copy()

    def decode(stream: bytes) -> Any:
        return zfpy._decompress(stream, element, x.shape, **mode)

    return _operations(
        lambda: zfpy.compress_numpy(x, write_header=False, **mode),
        decode,
        lambda stream: np.add(sums, decode(stream), out=sums),
    )


def _numpy_cast(codec: Cast, x: Array) -> Operations:
    wire, sums = DTYPES[codec.dtype].numpy, x.copy()
    return _operations(
        lambda: x.astype(wire),
        lambda coded: coded.astype(x.dtype),
        lambda coded: np.add(sums, coded.astype(x.dtype), out=sums),
    )


def _numpy_minmax(codec: MinMax, x: Array) -> Operations:
    blocks = x[: x.size // codec.block * codec.block].reshape(-1, codec.block)
    # Expressions that pack fewer bits than a byte would be another codec's.
    if not blocks.size or codec.bits != 8:
        return {}
    sums = blocks.copy()

    def encode() -> tuple[Array, Array, Array]:
        lowest, highest = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
        step = np.maximum((highest - lowest) / 255, np.finfo(np.float32).tiny)
        return np.rint((blocks - lowest) / step).astype(np.uint8), lowest, step

    def decode(wire: tuple[Array, Array, Array]) -> Array:
        codes, lowest, step = wire
        values: Array = lowest + codes * step
        return values

    return _operations(encode, decode, lambda wire: np.add(sums, decode(wire), out=sums))


def _torch_cast(codec: Cast, x: Array) -> Operations:
    import torch

    if x.dtype.name == "bfloat16":
        return {}
    values, wire = torch.from_numpy(x), getattr(torch, codec.dtype)
    sums = values.clone()
    return _operations(lambda: values.to(wire), lambda coded: coded.to(values.dtype), sums.add_)


def _torch_minmax(codec: MinMax, x: Array) -> Operations:
    import torch

    if x.dtype.name == "bfloat16" or codec.bits != 8 or x.size < codec.block:
        return {}
    blocks = torch.from_numpy(x)[: x.size // codec.block * codec.block].reshape(-1, codec.block)
    sums = blocks.clone()

    def encode() -> tuple[Any, Any, Any]:
        lowest, highest = torch.aminmax(blocks, dim=1, keepdim=True)
        step = ((highest - lowest) / 255).clamp_min(torch.finfo(torch.float32).tiny)
        return ((blocks - lowest) / step).round().to(torch.uint8), lowest, step

    def decode(wire: tuple[Any, Any, Any]) -> Any:
        codes, lowest, step = wire
        return lowest + codes * step

    return _operations(encode, decode, lambda wire: sums.add_(decode(wire)))


RIVALS: Mapping[str, Mapping[str, Callable[[Any, Array], Operations]]] = {
    "zfpy": {"zfp": _zfpy},
    "numpy": {"cast": _numpy_cast, "minmax": _numpy_minmax},
    "torch": {"cast": _torch_cast, "minmax": _torch_minmax},
}
"""Makers of a codec's operations, by library and codec."""


def rival_operations(library: str, codec: Codec, x: Array) -> Operations:
    """Return a library's equivalents of a codec's operations on some values, by name; empty if there are none."""
    made = RIVALS[library].get(codec.name)
    return {} if made is None else made(codec, x)


def available(threads: int) -> tuple[str, ...]:
    """Return the names of the installed `RIVALS`, and let torch use that many threads."""
    found = tuple(name for name in RIVALS if find_spec(name) is not None)
    if "torch" in found:
        import torch

        torch.set_num_threads(threads)
    return found
