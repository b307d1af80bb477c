"""What the instructions of sm_90 do that compcoll's kernels are made of; an unknown one is a KeyError."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .sass import Instruction, operand
from .sass_floats import COMPARE, FLOATING, combined
from .sass_machine import LANES, Handler, Warp

Mask = np.ndarray
U32, U64 = np.uint32, np.uint64
_LOW = U64(0xFFFFFFFF)


def _is_predicate(text: str) -> bool:
    return re.fullmatch(r"!?U?P[0-9T]", text) is not None


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
        result = COMPARE[how](x, y)
    elif how == "EQ":
        result = (x == y) & warp.predicate(carry[0])
    elif how == "NE":
        result = (x != y) | warp.predicate(carry[0])
    else:
        result = COMPARE[how[0] + "T"](x, y) | (x == y) & warp.predicate(carry[0])
    other = warp.predicate(condition)
    warp.set_predicate(first, combined(i.modifiers, result, other), mask)
    warp.set_predicate(second, combined(i.modifiers, ~result, other), mask)


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


# ---- between threads, and memory


def _shuffle(warp: Warp, i: Instruction, mask: Mask) -> None:
    _, target, value, by, how = i.operands
    distance, slot = warp.integers(by).astype(np.int64), warp.slot.astype(np.int64)
    first = slot & warp.integers(how).astype(np.int64) >> 8  # of the lanes among which a lane exchanges
    source = {
        "BFLY": lambda: slot ^ distance,
        "IDX": lambda: first + distance % LANES,
        "UP": lambda: np.where(slot - distance >= first, slot - distance, slot),
        "DOWN": lambda: np.where(slot + distance < LANES, slot + distance, slot),
    }[i.modifiers[0]]()
    warp.set(target, warp.integers(value)[source], mask)


def _ballot(mask: Mask) -> int:
    return sum(1 << int(slot) for slot in np.nonzero(mask)[0])


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
        for slot, place in zip(lanes, places[:, 0], strict=True):
            data[place : place + 4].view(U32)[:] |= warp.integers(i.operands[-1])[slot]
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
    **FLOATING,
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
