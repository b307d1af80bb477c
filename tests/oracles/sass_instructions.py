"""What the instructions of sm_90 do that compcoll's kernels are made of; an unknown one is a KeyError."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .sass import ZERO, Instruction, operand
from .sass_machine import LANES, Handler, Warp

Mask = np.ndarray
U32, U64 = np.uint32, np.uint64
_LOW = U64(0xFFFFFFFF)
_COMPARE: dict[str, Callable[[Any, Any], np.ndarray]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P[0-9T]", text) is not None


def _flushed(x: np.ndarray) -> np.ndarray:
    """Zeros for subnormal numbers."""
    bits = x.view(U32)
    return np.where(bits & U32(0x7F800000) == 0, bits & U32(0x80000000), bits).astype(U32).view(np.float32)


def _combined(modifiers: tuple[str, ...], value: np.ndarray, other: np.ndarray) -> np.ndarray:
    if "AND" in modifiers:
        return value & other
    return value | other if "OR" in modifiers else value ^ other


# ---- integers


def _move(warp: Warp, i: Instruction, mask: Mask) -> None:
    warp.set(i.operands[0], warp.integers(i.operands[1]), mask)


def _multiply_add(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, *rest = i.operands
    carry = rest.pop(0) if _is_predicate(rest[0]) else "PT"
    a, b = (warp.integers(text) for text in rest[:2])
    if not {"WIDE", "HI"} & set(i.modifiers):
        total = a.astype(U64) * b + warp.integers(rest[2])
        if "X" in i.modifiers:
            total = total + warp.predicate(rest[3])
        return warp.set(target, total & _LOW, mask)
    if "U32" in i.modifiers:
        product = a.astype(U64) * b
    else:
        product = (a.view(np.int32).astype(np.int64) * b.view(np.int32)).view(U64)
    total = product + warp.wide(rest[2])
    warp.set_predicate(carry, total < product, mask)
    if "HI" in i.modifiers:
        return warp.set(target, total >> U64(32), mask)
    return warp.set_wide(target, total, mask)


def _add(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, *rest = i.operands
    carries = []
    while _is_predicate(rest[0]):
        carries.append(rest.pop(0))
    count = 2 if i.name == "VIADD" else 3
    total = np.zeros(LANES, U64)
    for text in rest[:count]:
        what = operand(text)
        # The carry is that of the sum of complements, of which a negative number needs one more.
        total = total + (warp.integers(text) if not what.negative else ~warp.raw(text)[0]) + U64(what.negative)
    if "X" in i.modifiers:
        for text in rest[count:]:
            total = total + warp.predicate(text)
    for number, name in enumerate(carries):
        warp.set_predicate(name, total >> U64(32) > number, mask)
    warp.set(target, total & _LOW, mask)


def _logic(warp: Warp, i: Instruction, mask: Mask) -> None:
    carry, operands = "PT", list(i.operands)
    if _is_predicate(operands[0]):
        carry = operands.pop(0)
    target, a, b, c, table, condition = operands
    value = _by_table(warp.integers(a), warp.integers(b), warp.integers(c), int(table, 16))
    warp.set(target, value, mask)
    other = warp.predicate(condition)
    warp.set_predicate(carry, (value != 0) & other if "PAND" in i.modifiers else (value != 0) | other, mask)


def _by_table(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = a & ~a
    for index in range(8):
        if table >> index & 1:
            result = result | (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def _logic_of_predicates(warp: Warp, i: Instruction, mask: Mask) -> None:
    first, second, *terms, table, other = i.operands
    a, b, c = (warp.predicate(text) for text in terms)
    warp.set_predicate(first, _by_table(a, b, c, int(table, 16)), mask)
    warp.set_predicate(second, _by_table(a, b, c, int(other, 16)), mask)


def _shift(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, low, by, high = i.operands
    x = warp.integers(low).astype(U64) | warp.integers(high).astype(U64) << U64(32)
    wide = bool({"U64", "S64"} & set(i.modifiers))
    signed = any(re.fullmatch(r"S\d+", modifier) for modifier in i.modifiers)
    most = 64 if wide else 32
    count = warp.integers(by).astype(np.int64)
    count = count % most if "W" in i.modifiers else np.minimum(count, most)
    upper = "HI" in i.modifiers
    if "L" in i.modifiers:
        shifted = np.where(count >= 64, U64(0), x << np.minimum(count, 63).astype(U64))
    elif upper and not wide:  # the upper word alone
        top = warp.integers(high)
        shifted = (top.view(np.int32).astype(np.int64) if signed else top.astype(np.int64)) >> count
        return warp.set(target, shifted, mask)
    elif signed:
        shifted = x.view(np.int64) >> np.minimum(count, 63)
    else:
        shifted = np.where(count >= 64, U64(0), x >> np.minimum(count, 63).astype(U64))
    shifted = shifted.view(U64)
    warp.set(target, shifted >> U64(32) if upper else shifted & _LOW, mask)


def _scaled_add(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, *rest = i.operands
    carry = rest.pop(0) if _is_predicate(rest[0]) else "PT"
    if "HI" in i.modifiers:
        if "SX32" in i.modifiers:
            x, by, rest = (
                warp.integers(rest[0]).view(np.int32).astype(np.int64).view(U64),
                rest[2],
                [rest[1], *rest[3:]],
            )
        else:
            x = warp.integers(rest[0]).astype(U64) | warp.integers(rest[2]).astype(U64) << U64(32)
            by, rest = rest[3], [rest[1], *rest[4:]]
        total = (x << U64(int(by, 16)) >> U64(32)) + warp.integers(rest[0])
        if "X" in i.modifiers:
            total = total + warp.predicate(rest[1])
    else:
        raw, what = warp.raw(rest[0])
        shifted = raw.astype(U64) << U64(int(rest[2], 16)) & _LOW
        shifted = (shifted ^ _LOW) + U64(1) if what.negative else shifted
        total = shifted + warp.integers(rest[1])
    warp.set_predicate(carry, total >> U64(32) != 0, mask)
    warp.set(target, total & _LOW, mask)


def _compare_integers(warp: Warp, i: Instruction, mask: Mask) -> None:
    first, second, a, b, condition, *carry = i.operands
    x, y = warp.integers(a), warp.integers(b)
    if "U32" not in i.modifiers:
        x, y = x.view(np.int32), y.view(np.int32)
    how = i.modifiers[0]
    if "EX" not in i.modifiers:
        result = _COMPARE[how](x, y)
    elif how == "EQ":
        result = (x == y) & warp.predicate(carry[0])
    elif how == "NE":
        result = (x != y) | warp.predicate(carry[0])
    else:
        result = _COMPARE[how[0] + "T"](x, y) | (x == y) & warp.predicate(carry[0])
    other = warp.predicate(condition)
    warp.set_predicate(first, _combined(i.modifiers, result, other), mask)
    warp.set_predicate(second, _combined(i.modifiers, ~result, other), mask)


def _select(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, a, b, condition = i.operands
    if i.name == "FSEL":
        x, y = warp.floats(a).view(U32), warp.floats(b).view(U32)
    else:
        x, y = warp.integers(a), warp.integers(b)
    warp.set(target, np.where(warp.predicate(condition), x, y), mask)


def _permute(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, a, selector, b = i.operands
    x = warp.integers(a).astype(U64) | warp.integers(b).astype(U64) << U64(32)
    chosen = warp.integers(selector)
    result = np.zeros(LANES, U64)
    for k in range(4):
        nibble = chosen >> U32(4 * k) & U32(15)
        byte = x >> (U64(8) * (nibble & U32(7))) & U64(255)
        byte = np.where(nibble & 8, np.where(byte & U64(128), U64(255), U64(0)), byte)
        result = result | byte << U64(8 * k)
    warp.set(target, result, mask)


def _extremum(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, *terms = i.operands
    condition = next(text for text in terms if _is_predicate(text))
    numbers = [warp.integers(text) for text in terms[: terms.index(condition)]]
    if i.name == "VIADDMNMX":
        numbers = [numbers[0] + numbers[1], numbers[2]]
    if "U32" not in i.modifiers:
        numbers = [number.view(np.int32) for number in numbers]
    least, most = np.minimum.reduce(numbers), np.maximum.reduce(numbers)
    warp.set(target, np.where(warp.predicate(condition), least, most).view(U32), mask)


def _by_lane(function: Callable[[int], int]) -> Handler:
    def run(warp: Warp, i: Instruction, mask: Mask) -> None:
        found = [function(int(number)) & 0xFFFFFFFF for number in warp.integers(i.operands[-1])]
        warp.set(i.operands[0], np.array(found, U32), mask)

    return run


def _leading_one(warp: Warp, i: Instruction, mask: Mask) -> None:
    lengths = np.array([int(number).bit_length() for number in warp.integers(i.operands[1])], np.int64)
    found = 32 - lengths if "SH" in i.modifiers else lengths - 1
    warp.set(i.operands[0], np.where(lengths == 0, 0xFFFFFFFF, found), mask)


def _absolute(warp: Warp, i: Instruction, mask: Mask) -> None:
    warp.set(i.operands[0], np.abs(warp.integers(i.operands[1]).view(np.int32)).view(U32), mask)


# ---- floating point


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
        result = _COMPARE[how[:-1]](x, y) | unordered
    else:
        result = _COMPARE[how](x, y) & ~unordered
    other = warp.predicate(condition)
    warp.set_predicate(first, _combined(i.modifiers, result, other), mask)
    warp.set_predicate(second, _combined(i.modifiers, ~result, other), mask)


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


# ---- between threads, and memory


def _shuffle(warp: Warp, i: Instruction, mask: Mask) -> None:
    _, target, value, by, _ = i.operands
    distance, lane = warp.integers(by).astype(np.int64), warp.lane.astype(np.int64)
    source = {
        "BFLY": lambda: lane ^ distance,
        "IDX": lambda: distance & 31,
        "UP": lambda: np.where(lane >= distance, lane - distance, lane),
        "DOWN": lambda: np.where(lane + distance < LANES, lane + distance, lane),
    }[i.modifiers[0]]()
    warp.set(target, warp.integers(value)[source], mask)


def _ballot(mask: Mask) -> int:
    return sum(1 << int(lane) for lane in np.nonzero(mask)[0])


def _vote(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, condition = i.operands[0], i.operands[-1]
    holds = mask & warp.predicate(condition)
    if _is_predicate(target):
        all_or_any = holds.any() if "ANY" in i.modifiers else (holds == mask).all()
        warp.set_predicate(target, np.full(LANES, all_or_any), mask)
    elif target.startswith("U"):
        warp.uniform[operand(target).number] = _ballot(holds)
    else:
        warp.set(target, np.full(LANES, _ballot(holds), U32), mask)


def _match(warp: Warp, i: Instruction, mask: Mask) -> None:
    numbers = warp.integers(i.operands[-1])
    warp.set(i.operands[-2], np.array([_ballot(mask & (numbers == number)) for number in numbers], U32), mask)


def _reduce(warp: Warp, i: Instruction, mask: Mask) -> None:
    how = next((m for m in i.modifiers if m in ("OR", "SUM", "MIN", "MAX")), "AND")
    numbers = warp.integers(i.operands[1])[mask]
    numbers = numbers.view(np.int32) if "S32" in i.modifiers else numbers
    function = {"OR": np.bitwise_or, "SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "AND": np.bitwise_and}[how]
    warp.uniform[operand(i.operands[0]).number] = int(function.reduce(numbers)) & 0xFFFFFFFF


def _to_uniform(warp: Warp, i: Instruction, mask: Mask) -> None:
    target = next(text for text in i.operands if text.startswith("U"))
    warp.uniform[operand(target).number] = warp.integers(i.operands[-1])[np.argmax(mask)]


def _system(warp: Warp, i: Instruction, mask: Mask) -> None:
    if i.name == "CS2R":
        assert i.operands[1] == "SRZ", i
        words = np.zeros(LANES, U64)
        return (
            warp.set(i.operands[0], words, mask) if "32" in i.modifiers else warp.set_wide(i.operands[0], words, mask)
        )
    value = warp.system(i.operands[1]) if not i.operands[1].startswith("SR_Cga") else np.zeros(LANES, U32)
    if i.name == "S2UR":
        warp.uniform[operand(i.operands[0]).number] = value[0]
    else:
        warp.set(i.operands[0], value, mask)


def _constant(warp: Warp, i: Instruction, mask: Mask) -> None:
    target, source = i.operands
    found = [warp.raw(source, half)[0].copy() for half in range(2 if "64" in i.modifiers else 1)]
    for number, words in enumerate(found, int(operand(target).number)):
        if i.name == "ULDC":
            warp.uniform[number] = words[0]
        else:
            warp.registers[number][mask] = words[mask]


def _predicates_to_register(warp: Warp, i: Instruction, mask: Mask) -> None:
    words = sum((warp.predicates[k].astype(U32) << U32(k) for k in range(7)), np.zeros(LANES, U32))
    warp.set(i.operands[0], words & warp.integers(i.operands[-1]), mask)


def _register_to_predicates(warp: Warp, i: Instruction, mask: Mask) -> None:
    words, wanted = warp.integers(i.operands[1]), warp.integers(i.operands[2])
    for k in range(7):
        which = mask & (wanted >> U32(k) & U32(1)).astype(bool)
        warp.predicates[k][which] = (words >> U32(k) & U32(1)).astype(bool)[which]


def _access(warp: Warp, i: Instruction, mask: Mask) -> None:
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    size = next((sizes[modifier] for modifier in i.modifiers if modifier in sizes), 4)
    space = "global" if i.name in ("LDG", "STG") else "shared"
    lanes = np.nonzero(mask)[0]
    address = next(text for text in i.operands if "[" in text)
    data, places = warp.access(space, warp.addresses(address)[lanes], size)
    if i.name == "ATOMS":
        assert "OR" in i.modifiers, i
        for lane, place in zip(lanes, places[:, 0], strict=True):
            data[place : place + 4].view(U32)[:] |= warp.integers(i.operands[-1])[lane]
    elif i.name.startswith("L"):
        first = operand(i.operands[0]).number
        for word in range(max(size // 4, 1)):
            found = np.zeros(len(lanes), U32)
            for k in range(min(size, 4)):
                found = found | data[places[:, 4 * word + k]].astype(U32) << U32(8 * k)
            if "S8" in i.modifiers:
                found = found.astype(np.uint8).view(np.int8).astype(np.int32).view(U32)
            warp.registers[first + word][lanes] = found
    else:
        what = operand(i.operands[-1])
        for word in range(max(size // 4, 1)):
            words = warp.registers[what.number + word if what.number != 255 else 255][lanes]
            for k in range(min(size, 4)):
                data[places[:, 4 * word + k]] = words >> U32(8 * k) & U32(255)


HANDLERS: dict[str, Handler] = {
    "MOV": _move,
    "IMAD": _multiply_add,
    **dict.fromkeys(("IADD3", "VIADD"), _add),
    "LOP3": _logic,
    "PLOP3": _logic_of_predicates,
    "SHF": _shift,
    "LEA": _scaled_add,
    "ISETP": _compare_integers,
    **dict.fromkeys(("SEL", "FSEL"), _select),
    "PRMT": _permute,
    **dict.fromkeys(("VIMNMX", "VIMNMX3", "IMNMX", "VIADDMNMX"), _extremum),
    "BREV": _by_lane(lambda number: int(f"{number:032b}"[::-1], 2)),
    "POPC": _by_lane(int.bit_count),
    "FLO": _leading_one,
    "IABS": _absolute,
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
    "SHFL": _shuffle,
    **dict.fromkeys(("VOTE", "VOTEU"), _vote),
    "MATCH": _match,
    "REDUX": _reduce,
    "R2UR": _to_uniform,
    **dict.fromkeys(("S2R", "S2UR", "CS2R"), _system),
    **dict.fromkeys(("LDC", "ULDC"), _constant),
    "P2R": _predicates_to_register,
    "R2P": _register_to_predicates,
    **dict.fromkeys(("LDG", "STG", "LDS", "STS", "ATOMS"), _access),
}


def _uniform(handler: Handler) -> Handler:
    """What an instruction does, once for the warp: with registers of which there is one."""

    def run(warp: Warp, i: Instruction, mask: Mask) -> None:
        target = next(text for text in i.operands if operand_is_uniform(text))
        number = int(operand(target).number)
        kept = warp.registers[_SPARE : _SPARE + 2].copy()
        renamed = tuple(f"R{_SPARE}" if text is target else text for text in i.operands)
        handler(warp, i._replace(operands=renamed), mask)
        found = warp.registers[_SPARE : _SPARE + 2, np.argmax(mask)]
        if number != 255:
            warp.uniform[number : number + (2 if "WIDE" in i.modifiers else 1)] = found[
                : 2 if "WIDE" in i.modifiers else 1
            ]
        warp.registers[_SPARE : _SPARE + 2] = kept

    return run


_SPARE = 252


def operand_is_uniform(text: str) -> bool:
    return re.fullmatch(r"UR(\d+|Z)", text) is not None


UNIFORM: dict[str, Handler] = {
    "UISETP": _compare_integers,
    "UPLOP3": _logic_of_predicates,
    **{
        f"U{name}": _uniform(HANDLERS[name])
        for name in ("MOV", "IADD3", "LEA", "LOP3", "SHF", "IMAD", "SEL", "PRMT", "POPC", "FLO", "BREV")
    },
}
