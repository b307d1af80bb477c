"""Algorithms as programs, which are recorded once and then run in C++.

If the codec's wires have a fixed size, only the plan and the slot determine the algorithm's messages, its kernels, and
the parts of the buffers that they use. So the algorithm's generator runs once on stand-ins for arrays, messages and
kernels, which record each step in a program. A call then runs that program in C++, with MPI's persistent messages
(MPI-4.1, section 3.9).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..codecs.base import Coders
from ..host.device import HostCoder
from ..kernels._host import Collective, Operation, Program
from ..pending import OrderingTicket, Pending
from ..plan.call import Call
from ..plan.signature import ON_GPU
from ..stats import Stats
from ..transports.base import Connection, Group, Persistent, Wire
from .compiled_plan import Buffers, CompiledPlan, Run
from .handshake import Handshake
from .slots import Slot

_MOST_CALLS = 2048  # of about 3 KiB
_MOST_MESSAGES = 1 << 15  # of 1 to 2 KiB

_Key = tuple[CompiledPlan, Slot, int, bool]
"""A plan, a slot, this rank's level in the handshake, and whether there is feedback."""


def sent(dest: int) -> str:
    """Return the name of a message to a rank in a trace."""
    return f"send to {dest}"


def received(source: int) -> str:
    """Return the name of a message from a rank in a trace."""
    return f"receive from {source}"


class Compiled(NamedTuple):
    """The objects that run the calls of one plan in one slot.

    Attributes
    ----------
    call : Collective
        Runs a call: the handshake, then the operation.
    operation : Operation or None
        The operation, such as a program; None if a generator runs the calls.
    messages : list of Persistent
        The program's persistent messages.
    """

    call: Collective
    operation: Operation | None
    messages: list[Persistent]


class _Given(NamedTuple):
    """A stand-in for an array of a run. A slice of it is a tuple: which array, and where the slice begins.

    Attributes
    ----------
    which : int
        0 for the values, 1 for the result, 2 for the residual.
    size, itemsize : int
        Number of elements, and bytes per element.
    """

    which: int
    size: int
    itemsize: int

    def __getitem__(self, part: Any) -> Any:
        return self.which, part.start


class _NotedMessage:
    """A recorded message, which completes at once."""

    def __init__(self, message: Persistent) -> None:
        self.message = message

    def Test(self) -> bool:
        return True


class _Notes:
    """A stand-in for a transport that records messages (implements `compcoll.transports.base.Transport`)."""

    def __init__(self, transport: Connection, program: Program, messages: list[Persistent]) -> None:
        self.rank, self.size, self.nodes = transport.rank, transport.size, transport.nodes
        self._transport, self._program, self._messages = transport, program, messages

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        return self._noted(self._transport.send_init(wire, dest, tag), sent(dest), wire)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return self._noted(self._transport.recv_init(wire, source, tag), received(source), wire)

    def _noted(self, message: Persistent, name: str, wire: Wire) -> Pending:
        self._program.start(message, name, wire.nbytes)
        self._messages.append(message)
        return _NotedMessage(message)


class Programs:
    """The most recently compiled calls of a communicator.

    Parameters
    ----------
    transport : Connection
        Transport between all ranks.
    handshake : Handshake
        The handshakes with which calls begin.
    traced : bool
        Whether calls record the times of their steps.
    """

    def __init__(self, transport: Connection, handshake: Handshake, *, traced: bool = False) -> None:
        self._transport, self._handshake, self._traced = transport, handshake, traced
        self._kept: dict[_Key, Compiled] = {}  # the oldest first
        self._messages = 0

    def compiled(self, plan: CompiledPlan, slot: Slot, level: int, feedback: bool) -> Compiled:
        """Return a plan's calls in a slot, for a rank with this level in the handshake. Compile them on first use."""
        key = plan, slot, level, feedback
        return self._kept.get(key) or self._compile(key)

    def free(self) -> None:
        """Free all programs and their messages."""
        for key in list(self._kept):
            self._forget(key)

    def _compile(self, key: _Key) -> Compiled:
        plan, slot, level, feedback = key
        operation: Operation | None = None
        if level != ON_GPU:
            operation = plan.operation if plan.new_operation is None else plan.new_operation()
        messages: list[Persistent] = []
        if plan.compiles:
            operation, messages = self._rehearse(plan, slot, feedback)
        while len(self._kept) >= _MOST_CALLS or self._messages + len(messages) > _MOST_MESSAGES:
            # In a slot in use, the program may be running, or about to.
            oldest = next((each for each in self._kept if each[1].free), None)
            if oldest is None:
                break
            self._forget(oldest)
        call = self._handshake.collective(plan.plan.signature, level, plan.piggyback, operation, traced=self._traced)
        self._messages += len(messages)
        compiled = self._kept[key] = Compiled(call, operation, messages)
        return compiled

    def _rehearse(self, compiled: CompiledPlan, slot: Slot, feedback: bool) -> tuple[Program, list[Persistent]]:
        plan, call, stats = compiled.plan, compiled.plan.call, Stats("", None, "")
        x, out, residual = (
            _Given(which, size, call.itemsize)
            for which, size in enumerate((call.n, _elements_out(call, self._transport.size), call.n))
        )
        buffers = Buffers(x, out, None, residual if feedback else None)
        assert plan.coders is not None
        coder, raw = plan.coders
        assert isinstance(coder, HostCoder) and isinstance(raw, HostCoder)
        program, messages = Program(self._traced), list[Persistent]()
        noted = replace(plan, coders=Coders(coder.noted(program), raw.noted(program)))
        slot.arena.rewind()
        group = Group(_Notes(self._transport, program, messages), slot.group.tag)
        for pending in compiled.steps(noted, buffers, Run(group, slot.arena.allocate, stats, OrderingTicket(None))):
            if isinstance(pending, _NotedMessage):
                program.wait(pending.message)
        program.sends(stats.wire_nbytes, stats.raw_sent_nbytes)
        return program, messages

    def _forget(self, key: _Key) -> None:
        compiled = self._kept.pop(key)
        self._messages -= len(compiled.messages)
        for message in compiled.messages:
            self._transport.release(message)


def _elements_out(call: Call, ranks: int) -> int:
    """Return the number of elements of the result."""
    if call.collective in ("reduce_scatter", "scatter"):
        return call.n // ranks
    return call.n * ranks if call.collective in ("allgather", "gather") else call.n
