"""The CUDA programs: their sources and compiler options. This module needs neither a GPU, CuPy nor a compiler."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from ..dtypes import DTYPES, computed_on
from ..kernels import _host

KERNELS = Path(__file__).parent.parent / "kernels"
"""The folder where the sources are installed."""

COMPUTED = ("float32", "float64")
PROGRAMS = (*_host.codecs(), "integer_quantizer", "sparse")
"""The programs, which are compiled separately: each codec's kernels, integer quantizers, and sparsification."""

_FUNCTIONS = {
    "integer_quantizer": (
        *("survey_blocks", "encode_integers", "decode_integers", "encode_votes", "decode_votes", "combine_numbers"),
    ),
    "sparse": (
        *("moments_sparse", "sample_sparse", "count_sparse", "place_sparse", "compact_sparse"),
        *("take_sparse", "put_sparse", "add_sparse", "subtract_sparse"),
    ),
}
TILE = 2048
"""Values that a warp keeps in its registers, in programs for one configuration."""


class Program(NamedTuple):
    """CUDA C++ source and its options for NVRTC or nvcc.

    Attributes
    ----------
    source : str
        The text of ``kernels/device.cu``, which includes headers.
    options : tuple of str
        Include path, language standard, floating-point rules, codecs, types, and a digest of all sources. The digest
        keeps caches correct that compare only text and options.
    functions : tuple of str
        Names of the kernels, ``extern "C"``.
    """

    source: str
    options: tuple[str, ...]
    functions: tuple[str, ...]


class Configuration(NamedTuple):
    """Parameters of kernels/device.h that can be constants of a program rather than arguments of each launch.

    Attributes
    ----------
    first, second, variant, storage : int
        The codec's parameters and variant, and the element type of arrays; storage 0 if launches pass that type.
    bits : int
        Bits of a code.
    """

    first: int
    second: int
    variant: int
    storage: int
    bits: int


def configuration(codec: str, first: int, second: int, bits: int, variant: int, dtype: str) -> Configuration | None:
    """Return the configuration to compile a codec's program for; None if a warp cannot hold its blocks.

    A warp works in rounds of 128 values. A block needs at least one round, two with codes of 2 or 4 bits or with random
    numbers, or eight with codes of 1 bit. ``bits`` is the length of a code.
    """
    # Sums of many wires take several launches, which pass on float32 even if the elements are halves.
    storage = DTYPES[dtype].precision if dtype == "float32" else 0
    if computed_on(dtype).name != "float32":
        return None
    if codec in ("cast", "zfp"):
        return Configuration(first, second, variant, storage, 0)
    if TILE % second:
        return None
    least = {1: 1024, 2: 256, 4: 256, 8: 256 if codec == "qsgd" else 128}.get(bits, TILE + 1)
    return Configuration(first, second, variant, storage, bits) if second >= least else None


def kernel_names(codec: str, computed: str) -> list[str]:
    """Return the names of a codec's kernels; ZFP has one for each maximum of a block's bits."""
    if codec != "zfp":
        return [codec]
    return ["zfp32", "zfp64", "zfp128" if computed == "float32" else "zfp256"]


@functools.cache
def _source() -> tuple[str, str]:
    """Return the program's text, and a digest of it and all headers."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(KERNELS.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    source = (KERNELS / "device.cu").read_text()
    digest.update(source.encode())
    return source, digest.hexdigest()


@functools.cache
def program(codec: str | None = None, computed: str | None = None, known: Configuration | None = None) -> Program:
    """Return the CUDA program of one of `PROGRAMS` and one of `COMPUTED`, by default of all; or of one configuration.

    A program of all kernels takes a minute to compile; a program of one codec and type takes seconds.
    """
    codecs = PROGRAMS if codec is None else (codec,)
    own = ("cast", "zfp", *_FUNCTIONS)  # the other codecs have blocks and share their kernels
    part = [] if codec is None else [f"-DCOMPCOLL_{codec.upper()}" if codec in own else f"-DCOMPCOLL_BLOCKS={codec}"]
    types = COMPUTED if computed is None else (computed,)
    source, digest = _source()
    options = (
        f"-I{KERNELS}",
        "--std=c++17",
        "--fmad=false",
        f"-DCOMPCOLL_DIGEST=0x{digest}",
        *part,
        *(f"-DCOMPCOLL_{name.upper()}={value}" for name, value in (known._asdict() if known else {}).items()),
        f"-DCOMPCOLL_TYPES={sum(1 << COMPUTED.index(name) for name in types)}",
    )
    functions = tuple(
        f"{function}_{name}"
        for one in codecs
        for name in types
        for function in (
            _FUNCTIONS[one]
            if one in _FUNCTIONS
            else [f"{verb}_{kernel}" for kernel in kernel_names(one, name) for verb in ("encode", "recode", "decode")]
        )
    )
    return Program(source, options, functions)
