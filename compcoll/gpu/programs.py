"""The CUDA programs: their sources and compiler options. This module needs neither a GPU, CuPy nor a compiler."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from ..dtypes import DTYPES, computed_on

KERNELS = Path(__file__).parent.parent / "kernels"
"""The folder where the sources are installed."""

COMPUTED = ("float32", "float64")
TILE = 2048
"""Values that a warp keeps in its registers, in programs for one configuration."""


class Program(NamedTuple):
    """CUDA C++ source and its options for NVRTC or nvcc.

    Attributes
    ----------
    source : str
        The text of ``kernels/device.cu``, which includes headers.
    options : tuple of str
        Include path, language standard, floating-point rules, codecs, types, and a digest of all sources. Caches that
        compare only text and options notice a changed header by the digest.
    """

    source: str
    options: tuple[str, ...]


class Configuration(NamedTuple):
    """Parameters of kernels/device.h that can be constants of a program rather than arguments of each launch.

    Attributes
    ----------
    first, second, variant, storage : int
        The codec's parameters and variant, and the element type of arrays. ``storage`` is 0 if launches pass the type.
    bits : int
        Bits of an encoded value.
    """

    first: int
    second: int
    variant: int
    storage: int
    bits: int


def configuration(codec: str, first: int, second: int, bits: int, variant: int, dtype: str) -> Configuration | None:
    """Return the configuration to compile a codec's program for; None if only the general program is possible.

    Such a program computes in float32, and a warp holds whole blocks of values. The warp works in rounds of 128 values.
    A block needs at least one round: two if an encoded value has 2 or 4 bits or random numbers are needed, eight if an
    encoded value has 1 bit. Of the 32 values of mx, a round holds four blocks. ``bits`` is the number of bits of an
    encoded value.
    """
    # If many wires take several launches, arrays of 16-bit floats have float32 sums between the launches.
    storage = DTYPES[dtype].precision if dtype == "float32" else 0
    if computed_on(dtype).name != "float32":
        return None
    if codec in ("cast", "zfp"):
        return Configuration(first, second, variant, storage, 0)
    if TILE % second or codec == "nvfp4":
        return None
    if codec == "mx":
        return Configuration(first, second, variant, storage, bits)
    least = {1: 1024, 2: 256, 4: 256, 8: 256 if codec == "qsgd" else 128}.get(bits, TILE + 1)
    return Configuration(first, second, variant, storage, bits) if second >= least else None


def kernel_names(codec: str, computed: str) -> list[str]:
    """Return the names of a codec's kernels. ZFP has three, for different maximum sizes of an encoded block in bits."""
    if codec != "zfp":
        return [codec]
    return ["zfp32", "zfp64", "zfp128" if computed == "float32" else "zfp256"]


@functools.cache
def _source() -> tuple[str, str]:
    """Return the text of kernels/device.cu, and a digest of it and all headers."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(KERNELS.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    source = (KERNELS / "device.cu").read_text()
    digest.update(source.encode())
    return source, digest.hexdigest()


@functools.cache
def program(codec: str, computed: str, known: Configuration | None = None) -> Program:
    """Return the CUDA program of a codec, ``"integer_quantizer"`` or ``"sparse"`` that computes in one of `COMPUTED`.

    A program takes seconds to compile. With ``known``, it contains the kernels of this configuration only.
    """
    # The other codecs have blocks and share their kernels.
    own = codec in ("cast", "zfp", "integer_quantizer", "sparse", "szp")
    source, digest = _source()
    options = (
        f"-I{KERNELS}",
        "--std=c++17",
        "--fmad=false",
        f"-DCOMPCOLL_DIGEST=0x{digest}",
        f"-DCOMPCOLL_{codec.upper()}" if own else f"-DCOMPCOLL_BLOCKS={codec}",
        *(f"-DCOMPCOLL_{name.upper()}={value}" for name, value in (known._asdict() if known else {}).items()),
        f"-DCOMPCOLL_TYPES={1 << COMPUTED.index(computed)}",
    )
    return Program(source, options)
