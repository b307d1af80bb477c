"""What the tests know of each codec beyond its class: a `Reference` in a file of the codec's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from oracles.quantizers import Coded
from promises import FIXED

from compcoll import Codec
from compcoll.codecs.base import ErrorBound
from compcoll.codecs.options import Integers, OneOf
from compcoll.errors import InvalidArgument
from compcoll.host.device import HostDevice

# For each operation of a GPU's kernels, at most this many instructions a value, and sectors as a multiple of the least.
Instructions = Mapping[str, tuple[float, float]]


class Option(NamedTuple):
    """An option's default, the values at its limits, and values next to them that are refused."""

    default: Any
    accepted: Sequence[Any]
    refused: Sequence[Any] = ()


@dataclass(frozen=True)
class Reference:
    """What tests compare a codec with. Pairs are for values of float32 and of float64.

    Attributes
    ----------
    options : mapping
        Every option of the class.
    formula : callable or None
        ``formula(codec, x, rng_counter, position)`` computes wire and decoded values in NumPy, for any configuration
        and x of float32 or float64. None if the codec has no wires of its own or a test file of its own.
    bounds, estimates : mapping
        By configuration: what `error_bound` and `encoding_error` return.
    instructions : mapping
        By configuration: the costs of the GPU kernels, for codecs that a kernel is named after.
    """

    options: Mapping[str, Option]
    formula: Callable[[Any, np.ndarray, int, int], Coded] | None
    bounds: Mapping[Codec, tuple[ErrorBound, ErrorBound]]
    estimates: Mapping[Codec, tuple[float | None, float | None]]
    instructions: Mapping[Codec, Instructions] = field(default_factory=dict)


def references() -> dict[str, Reference]:
    """Return all references by the codec's name."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return {name: import_module(f"{__name__}.{name}").REFERENCE for name in names}


def block_of(default: int, most: int = 1 << 20) -> Option:
    """Return the option ``block``: multiples of 8 up to ``most``."""
    return Option(default, (8, most), (0, 9, 12, 8.0, most + 8))


# The RMS error of rounding normal values to floating point, over half a unit in the last place of 1: all values from
# 2**e to 2**(e + 1) have the error 2**e / √3.
ROUNDING = math.sqrt(
    sum(4.0**e * (math.erf(2**e * math.sqrt(2)) - math.erf(2**e / math.sqrt(2))) for e in range(-60, 5)) / 3
)


def alike(value: float) -> tuple[float, float]:
    """Return the same value for float32 and float64."""
    return value, value


def quantizer_bounds(block: int, of_largest: float) -> tuple[ErrorBound, ErrorBound]:
    """Return the bounds of a quantizer whose error is this part of a block's largest magnitude."""
    single = ErrorBound(block, of_largest + 4 * 2.0**-24, absolute=2.0**-79)
    return single, ErrorBound(block, of_largest + 4 * 2.0**-53, absolute=2.0**-899)


# ---- configurations, by the limits that a class gives its options ----

BLOCKS = [8, 16, 24, 64, 72, 128, 512, 1000, 2048, 2056]  # of which short buffers have several


def _values(limits: Any) -> Sequence[Any]:
    """Return all values of an option if they are few."""
    if isinstance(limits, OneOf):
        return [value for value in limits.values if value is not None]
    if isinstance(limits, Integers) and limits.high - limits.low < 8:
        return range(limits.low, limits.high + 1)
    return ()


def _limits(codec: Any) -> dict[str, Any]:
    """Return the limits of the options that a codec uses; those of other modes are None or False."""
    used = [one for one in fields(codec) if not any(getattr(codec, one.name) is off for off in (None, False))]
    return {one.name: one.metadata["limits"] for one in used}


def configurations(name: str) -> list[Any]:
    """Return a codec for each combination of those options that have few values."""
    codec = next(codec for codec in FIXED if codec.name == name)
    few = {option: values for option, limits in _limits(codec).items() if (values := _values(limits))}
    return [replace(codec, **dict(zip(few, chosen))) for chosen in product(*few.values())]


@st.composite
def random_codecs(draw: st.DrawFn, name: str, dtype: str) -> Any:
    """Draw a configuration for an element type: each option as in an example of the class, or any of its values."""
    codec = draw(st.sampled_from([codec for codec in FIXED if codec.name == name]))
    chosen: dict[str, Any] = {}
    for option, limits in _limits(codec).items():
        if values := _values(limits):
            strategy: st.SearchStrategy[Any] = st.sampled_from(values)
        elif isinstance(limits, Integers) and limits.multiple > 1:
            strategy = st.sampled_from(BLOCKS)
        elif isinstance(limits, Integers):
            strategy = st.integers(limits.low, limits.high)
        else:
            strategy = st.floats(limits.low, min(limits.high, 1e3), exclude_min=not limits.closed)
        chosen[option] = draw(st.just(getattr(codec, option)) | strategy)
    codec = replace(codec, **chosen)
    try:
        codec.coder(HostDevice(1), dtype)
    except InvalidArgument:  # of other element types
        reject()
    return codec
