"""Executes the sm_90 machine code of a kernel, one thread block after the other, without a GPU, and counts.

A warp runs whichever of its threads stand first in the program, up to where the compiler has them meet again. Counted
are instructions as a warp issues them and sectors of 32 bytes that global accesses ask for. Of time it says nothing.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable

import numpy as np

from .sass import ZERO, Cubin, Instruction, Kernel, Operand, operand, terms

LANES = 32
BASE = 0x7F00_0000_0000
"""The address at which global memory begins."""

_PARAMETERS = 0x210  # where a kernel's are in constant memory
_ALL = 100  # a meeting of all threads of a warp, beside those with numbers
_SYSTEM = {"SR_TID.X": "thread", "SR_CTAID.X": "thread_block", "SR_LANEID": "lane"}

Words = np.ndarray  # of uint32, one a lane
Handler = Callable[["Warp", Instruction, np.ndarray], None]


class Counts:
    """What was executed.

    Attributes
    ----------
    instructions : int
        Issued by warps.
    by_name : Counter
        The same, by the instruction's name with its modifiers.
    sectors : int
        Of 32 bytes, that loads and stores of global memory asked for.
    """

    def __init__(self) -> None:
        self.instructions = 0
        self.by_name: collections.Counter[str] = collections.Counter()
        self.sectors = 0


class Memory:
    """Global memory, that arrays are put in one after the other."""

    def __init__(self, cubin: Cubin, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self._top = 0
        program = self.put(np.frombuffer(cubin.memory, np.uint8))
        self.fourth_bank = {where: program + at for where, at in cubin.pointers.items()}

    def put(self, array: np.ndarray, offset: int = 0) -> int:
        """Copy an array to so many bytes after a multiple of 256, and tell its address."""
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        begin = self._top + offset
        self.data[begin : begin + raw.size] = raw
        self._top = -(-(begin + raw.size) // 256) * 256 + 256
        return BASE + begin

    def get(self, address: int, nbytes: int) -> np.ndarray:
        return self.data[address - BASE : address - BASE + nbytes].copy()


def run(kernel: Kernel, memory: Memory, grid: int, block: int, parameters: bytes) -> Counts:
    """Run a kernel's thread blocks one after the other."""
    constants = np.zeros(0x1000, np.uint8)
    constants[:24] = np.frombuffer(struct.pack("<6I", block, 1, 1, grid, 1, 1), np.uint8)
    constants[_PARAMETERS : _PARAMETERS + len(parameters)] = np.frombuffer(parameters, np.uint8)
    jumps = np.frombuffer(kernel.jumps, np.uint8)
    counts = Counts()
    by_address = {instruction.address: instruction for instruction in kernel.instructions}
    for thread_block in range(grid):
        shared = np.zeros(65536, np.uint8)
        warps = [
            Warp(by_address, memory, shared, {0: constants, 2: jumps}, counts, first, block, thread_block)
            for first in range(0, block, LANES)
        ]
        while running := [warp for warp in warps if not warp.exited.all()]:
            for warp in running:
                warp.run()
            assert all(warp.exited.all() or warp.at_barrier for warp in warps)
            for warp in warps:
                warp.at_barrier = False
    return counts


class Warp:
    """Thirty-two threads and their registers."""

    def __init__(
        self,
        kernel: dict[int, Instruction],
        memory: Memory,
        shared: np.ndarray,
        constants: dict[int, np.ndarray],
        counts: Counts,
        first: int,
        block: int,
        thread_block: int,
    ) -> None:
        self.kernel, self.memory, self.shared, self.constants, self.counts = kernel, memory, shared, constants, counts
        self.registers = np.zeros((ZERO + 2, LANES), np.uint32)
        self.uniform = np.zeros(ZERO + 2, np.uint32)
        self.predicates = np.zeros((8, LANES), bool)
        self.uniform_predicates = np.zeros(8, bool)
        self.predicates[7] = self.uniform_predicates[7] = True
        self.slot = np.arange(LANES, dtype=np.uint32)
        self.thread = self.slot + np.uint32(first)
        self.thread_block = np.uint32(thread_block)
        self.at = np.zeros(LANES, np.int64)
        self.exited = self.thread >= block
        self.at_barrier = False
        self._meetings: dict[int, np.ndarray] = {}
        self._waits_at = np.full(LANES, -1)

    # ---- operands

    def predicate(self, text: str) -> np.ndarray:
        wanted = not text.startswith("!")
        name = text.lstrip("!")
        number = 7 if name.endswith("T") else int(name[-1])
        of = np.full(LANES, self.uniform_predicates[number]) if name.startswith("U") else self.predicates[number]
        return of == wanted

    def set_predicate(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name.endswith("T"):
            return
        if name.startswith("U"):
            self.uniform_predicates[int(name[-1])] = value[np.argmax(mask)]
        else:
            self.predicates[int(name[-1])][mask] = value[mask]

    def raw(self, text: str, half: int = 0) -> tuple[Words, Operand]:
        """The 32 bits of an operand, or those that follow them, before its sign and such are looked at."""
        what = operand(text)
        if what.kind == "R":
            words = self.registers[what.number + half if what.number != ZERO else ZERO]
        elif what.kind == "UR":
            words = np.full(LANES, self.uniform[what.number + half if what.number != ZERO else ZERO], np.uint32)
        elif what.kind == "c":
            words = self._constant(what, half)
        elif what.kind == "number":
            words = np.full(LANES, (what.number >> 32 * half) & 0xFFFFFFFF, np.uint32)
        else:
            words = np.full(LANES, what.number, np.float32).view(np.uint32)
        if what.part:
            bits = 8 if what.part[0] == "B" else 16
            words = words >> np.uint32(bits * int(what.part[1])) & np.uint32((1 << bits) - 1)
        return words, what

    def _constant(self, what: Operand, half: int) -> Words:
        at = sum((self._term(term) for term in what.terms), np.zeros(LANES, np.int64)) + 4 * half
        if what.bank == 4:
            pointer = self.memory.fourth_bank[int(at[0]) - 4 * half]
            return np.full(LANES, pointer >> 32 * half & 0xFFFFFFFF, np.uint32)
        constants = self.constants[what.bank]
        at = np.clip(at, 0, constants.size - 4)
        return sum((constants[at + i].astype(np.uint32) << np.uint32(8 * i) for i in range(4)), np.uint32(0))

    def integers(self, text: str) -> Words:
        words, what = self.raw(text)
        if what.absolute:
            words = np.abs(words.view(np.int32)).view(np.uint32)
        if what.negative:
            return ~words + np.uint32(1)
        return ~words if what.inverted else words

    def wide(self, text: str) -> np.ndarray:
        """The 64 bits of an operand, as uint64."""
        if operand(text).kind == "number":
            return np.full(LANES, int(operand(text).number) & (1 << 64) - 1, np.uint64)
        low, what = self.raw(text)
        words = low.astype(np.uint64) | self.raw(text, 1)[0].astype(np.uint64) << np.uint64(32)
        return ~words + np.uint64(1) if what.negative else words

    def floats(self, text: str) -> np.ndarray:
        words, what = self.raw(text)
        values = words.view(np.float32)
        values = np.abs(values) if what.absolute else values
        return -values if what.negative else values

    def doubles(self, text: str) -> np.ndarray:
        what = operand(text)
        if what.kind == "float":
            values = np.full(LANES, what.number, np.float64)
        else:
            values = self.wide(text.strip("-|")).view(np.float64)
        values = np.abs(values) if what.absolute else values
        return -values if what.negative else values

    def set(self, name: str, words: np.ndarray, mask: np.ndarray) -> None:
        """Set a register by the lower 32 bits of numbers."""
        number = operand(name).number
        if number != ZERO:
            self.registers[number][mask] = (words & 0xFFFFFFFF).astype(np.uint32)[mask]

    def set_wide(self, name: str, words: np.ndarray, mask: np.ndarray) -> None:
        number = operand(name).number
        if number != ZERO:
            words = words.view(np.uint64)
            self.registers[number][mask] = words.astype(np.uint32)[mask]
            self.registers[number + 1][mask] = (words >> np.uint64(32)).astype(np.uint32)[mask]

    def _term(self, term: str) -> np.ndarray:
        """One of what an address is the sum of."""
        if term[0] in "-0":
            return np.full(LANES, int(term, 16), np.int64)
        name, _, factor = term.partition(".X")
        if name.endswith(".64"):
            return self.wide(name).view(np.int64)
        if name.startswith("U"):
            return self.integers(name).astype(np.int64)
        return self.integers(name).view(np.int32).astype(np.int64) * int(factor or 1)

    def addresses(self, text: str) -> np.ndarray:
        inner = text[text.rindex("[") + 1 : -1]
        return sum((self._term(term) for term in terms(inner)), np.zeros(LANES, np.int64))

    def system(self, name: str) -> Words:
        return np.zeros(LANES, np.uint32) + getattr(self, _SYSTEM[name])

    # ---- the way through the program

    def run(self) -> None:
        """Go on up to a barrier of the thread block, or the end."""
        from .sass_instructions import HANDLERS, UNIFORM

        while not self.exited.all():
            self._release()
            able = ~self.exited & (self._waits_at < 0)
            assert able.any(), "threads wait for each other for ever"
            here = int(self.at[able].min())
            stand = able & (self.at == here)
            instruction = self.kernel[here]
            mask = stand & self.predicate(instruction.guard)
            self.counts.instructions += 1
            self.counts.by_name[".".join((instruction.name, *instruction.modifiers))] += 1
            control = _CONTROL.get(instruction.name)
            if control is not None:
                self.at[stand] += 16
                control(self, instruction, mask)
                if self.at_barrier:
                    return
                continue
            handler = UNIFORM.get(instruction.name) or HANDLERS[instruction.name]
            if mask.any():
                try:
                    handler(self, instruction, mask)
                except Exception as error:
                    raise AssertionError(f"{instruction}: {error!r}") from error
            self.at[stand] += 16

    def _release(self) -> None:
        """Let go on who have met."""
        for number in set(self._waits_at[self._waits_at >= 0].tolist()):
            members = ~self.exited & self._meetings.get(number, True)
            if (self._waits_at[members] == number).all():
                self._waits_at[members] = -1

    def _branch(self, instruction: Instruction, mask: np.ndarray) -> None:
        *conditions, target = instruction.operands
        if "DIV" in instruction.modifiers:  # for a warp whose threads have parted, which the masks take care of here
            return
        for condition in conditions:
            if "URZ" not in condition:
                mask = mask & self.predicate(condition)
        self.at[mask] = int(target.strip("`()"), 16)

    def _return(self, instruction: Instruction, mask: np.ndarray) -> None:
        self.at[mask] = self.registers[operand(instruction.operands[0].split()[0]).number].astype(np.int64)[mask]

    def _exit(self, _: Instruction, mask: np.ndarray) -> None:
        self.exited = self.exited | mask

    def _barrier(self, _: Instruction, __: np.ndarray) -> None:
        assert len(set(self.at[~self.exited].tolist())) == 1, "a barrier that not all threads reach"
        self.at_barrier = True

    def _open_meeting(self, instruction: Instruction, mask: np.ndarray) -> None:
        self._meetings[int(instruction.operands[0][1:])] = mask.copy()

    def _leave_meeting(self, instruction: Instruction, mask: np.ndarray) -> None:
        *conditions, name = instruction.operands
        for condition in conditions:
            mask = mask & self.predicate(condition)
        self._meetings[int(name[1:])] = self._meetings[int(name[1:])] & ~mask

    def _meet(self, instruction: Instruction, mask: np.ndarray) -> None:
        self._waits_at[mask] = int(instruction.operands[-1][1:])

    def _meet_all(self, instruction: Instruction, mask: np.ndarray) -> None:
        if "ALL" in instruction.modifiers:
            self._waits_at[mask] = _ALL

    def _nothing(self, _: Instruction, __: np.ndarray) -> None:
        pass

    def access(self, space: str, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory that lanes mean, and each byte's place in it."""
        assert (addresses % size == 0).all(), "misaligned"
        if space == "shared":
            return self.shared, addresses[:, None] + np.arange(size)
        places = addresses[:, None] - BASE + np.arange(size)
        assert (places >= 0).all() and (places < self.memory.data.size).all(), "no such memory"
        self.counts.sectors += len(set((places[:, 0] // 32).tolist()))
        return self.memory.data, places


_CONTROL: dict[str, Handler] = {
    "BRA": Warp._branch,
    "CALL": Warp._branch,
    **dict.fromkeys(("RET", "BRX"), Warp._return),
    "EXIT": Warp._exit,
    "BAR": Warp._barrier,
    "BSSY": Warp._open_meeting,
    "BREAK": Warp._leave_meeting,
    "BSYNC": Warp._meet,
    "WARPSYNC": Warp._meet_all,
    **dict.fromkeys(("NOP", "YIELD", "BMOV", "ENDCOLLECTIVE"), Warp._nothing),
}
