"""What floating-point instructions of sm_90 do; and comparisons, of integers, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .sass import ZERO, Instruction, operand
from .sass_machine import LANES, Handler, Warp

Mask = np.ndarray
U32, U64 = np.uint32, np.uint64
COMPARE: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def combined(modifiers: tuple[str, ...], value: np.ndarray, other: np.ndarray) -> np.ndarray:
    if "AND" in modifiers:
        return value & other
    return value | other if "OR" in modifiers else value ^ other


def _flushed(x: np.ndarray) -> np.ndarray:
    """Zeros for subnormal numbers."""
    bits = x.view(U32)
    return np.where(bits & U32(0x7F800000) == 0, bits & U32(0x80000000), bits).astype(U32).view(np.float32)


def _float_arithmetic(warp: Warp, i: Instruction, mask: Mask) -> None:
    values = [warp.floats(text) for text in i.operands[1 : 4 if i.name == "FFMA" else 3]]
    if "FTZ" in i.modifiers:
        values = [_flushed(value) for value in values]
    exact = [value.astype(np.longdouble) for value in values]
    if i.name == "FADD":
        total = exact[0] + exact[1]
    else:
        total = exact[0] * exact[1] + (exact[2] if i.name == "FFMA" else 0)
    if i.name != "FFMA":  # the sign of a zero is the product's or the sum's
        result = values[0] + values[1] if i.name == "FADD" else values[0] * values[1]
    else:
        result = total.astype(np.float32)
    if "RZ" in i.modifiers:
        result = np.where(np.abs(result) > np.abs(total), np.nextafter(result, np.float32(0)), result).astype(
            np.float32
        )
    if "SAT" in i.modifiers:
        result = np.clip(np.nan_to_num(result), np.float32(0), np.float32(1))
    warp.set(i.operands[0], (_flushed(result) if "FTZ" in i.modifiers else result).view(U32), mask)


def _double_arithmetic(warp: Warp, i: Instruction, mask: Mask) -> None:
    values = [warp.doubles(text) for text in i.operands[1 : 4 if i.name == "DFMA" else 3]]
    if i.name == "DFMA":
        a, b, c = (value.astype(np.longdouble) for value in values)
        result = (a * b + c).astype(np.float64)
    else:
        result = values[0] + values[1] if i.name == "DADD" else values[0] * values[1]
    warp.set_wide(i.operands[0], result.view(U64), mask)


def _compare_floats(warp: Warp, i: Instruction, mask: Mask) -> None:
    first, second, a, b, condition = i.operands
    x, y = (warp.floats(a), warp.floats(b)) if i.name == "FSETP" else (warp.doubles(a), warp.doubles(b))
    if "FTZ" in i.modifiers:
        x, y = _flushed(x), _flushed(y)
    how, unordered = i.modifiers[0], np.isnan(x) | np.isnan(y)
    if how in ("NAN", "NUM"):
        result = unordered == (how == "NAN")
    elif how[-1] == "U":
        result = COMPARE[how[:-1]](x, y) | unordered
    else:
        result = COMPARE[how](x, y) & ~unordered
    other = warp.predicate(condition)
    warp.set_predicate(first, combined(i.modifiers, result, other), mask)
    warp.set_predicate(second, combined(i.modifiers, ~result, other), mask)


def _float_extremum(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, a, b, condition = i.operands
    x, y = warp.floats(a), warp.floats(b)
    if "FTZ" in i.modifiers:
        x, y = _flushed(x), _flushed(y)
    least, most = (np.minimum, np.maximum) if "NAN" in i.modifiers else (np.fmin, np.fmax)
    found = np.where(warp.predicate(condition), least(x, y), most(x, y))
    warp.set(target, np.where(np.isnan(found), np.uint32(0x7FFFFFFF), found.view(U32)), mask)


def _to_integer(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, source = i.operands
    x = warp.doubles(source) if "F64" in i.modifiers else warp.floats(source)
    x = (_flushed(x) if "FTZ" in i.modifiers else x).astype(np.float64)
    x = np.nan_to_num(np.trunc(x) if "TRUNC" in i.modifiers else np.rint(x))
    if "U64" in i.modifiers:
        warp.set_wide(target, np.clip(x, 0, 2.0**64 - 2048).astype(U64), mask)
    elif "U32" in i.modifiers:
        warp.set(target, np.clip(x, 0, 2.0**32 - 1).astype(np.int64), mask)
    else:
        warp.set(target, np.clip(x, -(2.0**31), 2.0**31 - 1).astype(np.int64), mask)


_SMALL = {"U8": np.uint8, "S8": np.int8, "U16": np.uint16, "S16": np.int16, "U32": np.uint32}


def _to_float(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, source = i.operands
    if {"S64", "U64"} & set(i.modifiers):
        numbers = warp.wide(source).view(np.int64 if "S64" in i.modifiers else np.uint64)
    else:
        kind = next((_SMALL[modifier] for modifier in i.modifiers if modifier in _SMALL), np.int32)
        words = warp.integers(source)
        numbers = words.view(np.int32) if kind is np.int32 else words.astype(kind)
    if "F64" in i.modifiers:
        return warp.set_wide(target, numbers.astype(np.float64).view(U64), mask)
    result = numbers.astype(np.float32)
    if "RP" in i.modifiers:
        short = result.astype(np.float64) < numbers.astype(np.float64)
        result = np.where(short, np.nextafter(result, np.float32(np.inf)), result).astype(np.float32)
    return warp.set(target, result.view(U32), mask)


def _between_floats(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, source = i.operands
    if i.modifiers[:2] == ("F32", "F64"):
        warp.set(target, warp.doubles(source).astype(np.float32).view(U32), mask)
    else:
        assert i.modifiers[:2] == ("F64", "F32"), i
        warp.set_wide(target, warp.floats(source).astype(np.float64).view(U64), mask)


_EIGHT_BITS = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def _pair(warp: Warp, i: Instruction, mask: Mask) -> None:
    """Two numbers to a format of 16 or 8 bits, or two of 8 bits to halves."""
    eight = next((_EIGHT_BITS[modifier] for modifier in i.modifiers if modifier in _EIGHT_BITS), None)
    if eight is None:
        return _narrow_pair(warp, i, mask)
    target, *sources = i.operands
    if "UNPACK_B" in i.modifiers:
        pair = warp.integers(sources[0])
        codes = [(pair >> U32(8 * k)).astype(np.uint8).view(eight) for k in range(2)]
        low, high = (code.astype(np.float16).view(np.uint16).astype(U32) for code in codes)
        return warp.set(target, low | high << U32(16), mask)
    assert {"SATFINITE", "PACK_AB_MERGE_C"} <= set(i.modifiers), i
    most = np.float32(ml_dtypes.finfo(eight).max)
    high, low = (np.clip(warp.floats(text), -most, most).astype(eight).view(np.uint8) for text in sources[:2])
    warp.set(target, low.astype(U32) | high.astype(U32) << U32(8) | warp.integers(sources[2]) << U32(16), mask)


def _narrow_pair(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, high, low = i.operands
    assert i.modifiers[:2] in (("F16", "F32"), ("BF16", "F32")), i
    half = np.float16 if "F16" in i.modifiers else ml_dtypes.bfloat16
    halves = [warp.floats(text).astype(half).view(np.uint16).astype(U32) for text in (high, low)]
    warp.set(target, halves[0] << U32(16) | halves[1], mask)


def _widen_half(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, _, source = i.operands[0], i.operands[1], i.operands[-1]
    warp.set(target, warp.integers(source).astype(np.uint16).view(np.float16).astype(np.float32).view(U32), mask)


def _half_constants(warp: Warp, i: Instruction, mask: Mask) -> None:
    """A constant of two halves plus a product of zeros: how a number comes into a register on another pipe."""
    target, a, b, *halves = i.operands
    assert operand(a).number == operand(b).number == ZERO and len(halves) == 2, i
    high, low = (int(np.float16(operand(text).number).view(np.uint16)) for text in halves)
    warp.set(target, np.full(LANES, high << 16 | low, U32), mask)


def _special_function(warp: Warp, i: Instruction, mask: Mask) -> None:
    how = i.modifiers[0]
    if how.endswith("64H"):
        constant = operand(i.operands[1]).kind == "float"  # the upper half of a number, which is written in full
        upper = (
            warp.doubles(i.operands[1]).view(U64) >> U64(32) if constant else warp.integers(i.operands[1]).astype(U64)
        )
        x = (upper << U64(32)).view(np.float64)
        y = 1 / x if how == "RCP64H" else 1 / np.sqrt(x)
        return warp.set(i.operands[0], y.view(U64) >> U64(32), mask)
    x = warp.floats(i.operands[1])
    y = {"RCP": lambda: np.float32(1) / x, "RSQ": lambda: (1 / np.sqrt(x)).astype(np.float32)}[how]()
    return warp.set(i.operands[0], y.view(U32), mask)


def _check_division(warp: Warp, i: Instruction, mask: Mask) -> None:
    """Whether a quotient needs the slow way: where it or what it is made of might leave the normal numbers."""
    x, y = (np.abs(warp.floats(text)) for text in i.operands[1:3])
    small, large = np.float32(2.0**-120), np.float32(2.0**120)
    plain = (y > small) & (y < large) & (x < large) & ((x / y > small) | (x == 0))
    warp.set_predicate(i.operands[0], ~plain, mask)


FLOATING: dict[str, Handler] = {
    **dict.fromkeys(("FADD", "FMUL", "FFMA"), _float_arithmetic),
    **dict.fromkeys(("DADD", "DMUL", "DFMA"), _double_arithmetic),
    **dict.fromkeys(("FSETP", "DSETP"), _compare_floats),
    "FMNMX": _float_extremum,
    "F2I": _to_integer,
    **dict.fromkeys(("I2F", "I2FP"), _to_float),
    "F2F": _between_floats,
    "F2FP": _pair,
    "HADD2": _widen_half,
    "HFMA2": _half_constants,
    "MUFU": _special_function,
    "FCHK": _check_division,
}
