"""``python -m compcoll cubins``: compile the CUDA kernels ahead of time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from ..codecs import ALL, SZP, Cast, Codec
from ..dtypes import DTYPES, computed_on
from ..errors import UnsupportedDevice
from ..gpu import cubins
from ..gpu.coder import DeviceCoder
from ..gpu.programs import COMPUTED, Program, program
from ..host.cores import affinity
from .arguments import add_codec_options, chosen_codec

EXAMPLE = "python -m compcoll cubins --arch 90 --codec zfp:rate=8"


def programs(codecs: list[Codec], dtype: str) -> list[Program]:
    """Return the programs that collectives on arrays of a type need: with each of these codecs, and without a codec."""
    device: Any = SimpleNamespace(coder=partial(DeviceCoder, cast(Any, None)))  # without a runtime: nothing is launched
    fixed = [codec for codec in (Cast(dtype), *codecs) if codec.fixed_size and not codec.additive]
    computed = computed_on(dtype).name
    coders: list[Any] = [codec.coder(device, dtype) for codec in fixed]
    coders.append(Cast(computed).coder(device, computed))  # the type in which sparsifiers compute
    found: list[Program] = [coder.program for coder in coders]
    found += [
        program("integer_quantizer", computed),
        program("integer_quantizer", COMPUTED[0]),
        program("sparse", computed),
    ]
    if any(isinstance(codec, SZP) for codec in codecs):
        found.append(program("szp", computed))
    return list(dict.fromkeys(found))


DESCRIPTION = (
    "Compiles the CUDA kernels of one codec, or of all codecs with default options, into the folder "
    "COMPCOLL_CUBINS (default: a folder in the user's cache). All ranks that use this folder find them. Needs NVRTC "
    "(cupy-cuda13x[ctk] or cupy-cuda12x[ctk]), but no GPU. Kernels not compiled before are compiled at their first "
    "use, by one rank of a node."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    known = ", ".join(cubins.ARCHITECTURES)
    text = f"compute capabilities without a dot, by default {known}: A100, H100, B200"
    parser.add_argument("--arch", nargs="+", default=list(cubins.ARCHITECTURES), metavar="NUMBER", help=text)
    parser.add_argument("--dtype", default="float32", choices=list(DTYPES), help="element type (default: float32)")
    add_codec_options(parser, "compile for this codec only (default: all codecs, with default options)")


def run(args: argparse.Namespace) -> int:
    """Compile the programs, and print a line for each file."""
    if cubins.nvrtc() is None:
        raise UnsupportedDevice("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    chosen = chosen_codec(args)
    wanted = programs([cls() for cls in ALL] if chosen is None else [chosen], args.dtype)
    total = 0
    for text, nbytes in compiled(wanted, args.arch):
        print(text, flush=True)
        total += nbytes
    print(f"{len(wanted) * len(args.arch)} files, {total / 1e6:.1f} MB, in {cubins.folder()}")
    return 0


def compiled(wanted: list[Program], architectures: list[str]) -> Iterator[tuple[str, int]]:
    """Compile programs on all cores; for each finished one, yield a line of text and its size in bytes.

    Raises
    ------
    UnsupportedDevice
        If a program cannot be compiled, or the folder cannot be written to.
    """
    pairs = [(one, arch) for arch in architectures for one in wanted]

    def make(pair: tuple[Program, str]) -> tuple[str, int]:
        began = time.monotonic()
        path = cubins.make(*pair)
        if path is None:
            raise UnsupportedDevice(f"{cubins.folder()} cannot be written to: set COMPCOLL_CUBINS to another folder")
        return f"{path.name}  {time.monotonic() - began:.1f} s", path.stat().st_size

    with ThreadPoolExecutor(len(affinity())) as pool:
        yield from pool.map(make, pairs)
