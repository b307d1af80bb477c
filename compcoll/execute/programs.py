"""Algorithms as programs, which are recorded once and then run in C++.

If the codec's wires have a fixed size, only the plan and the slot determine the algorithm's messages, its kernels, and
the parts of the buffers that they use. So the algorithm's generator runs once on stand-ins for arrays, messages and
kernels, which record each step in a program. A call then runs that program in C++, with MPI's persistent messages
(MPI-4.1, section 3.9).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from ..codecs.base import Coders
from ..host.device import HostCoder
from ..kernels._host import Operation, Program
from ..pending import OrderingTicket, Pending
from ..plan.call import Call
from ..stats import Stats
from ..transports.base import Connection, Group, Persistent, Wire
from .compiled_plan import Buffers, Compiled, CompiledPlan, Run
from .slots import Slot

_MOST_KEPT = 1 << 15  # messages: a kibibyte or two each

_Key = tuple[CompiledPlan, Slot, bool]
"""The key of a program: its plan, its slot, and whether there is feedback."""


class _Given(NamedTuple):
    """A stand-in for an array of a run. Indexing returns where a part begins.

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

    def __init__(self, transport: Connection, compiled: Compiled) -> None:
        self.rank, self.size, self.nodes = transport.rank, transport.size, transport.nodes
        self._transport, self._compiled = transport, compiled

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        return self._noted(self._transport.send_init(wire, dest, tag))

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        return self._noted(self._transport.recv_init(wire, source, tag))

    def _noted(self, message: Persistent) -> Pending:
        self._compiled.program.start(message)
        self._compiled.messages.append(message)
        return _NotedMessage(message)


class Programs:
    """The programs of a communicator that were compiled last.

    Parameters
    ----------
    transport : Transport
        Transport between all ranks.
    """

    def __init__(self, transport: Connection) -> None:
        self._transport = transport
        self._kept: dict[_Key, Compiled] = {}  # the oldest first
        self._messages = 0

    def operation(self, compiled: CompiledPlan, slot: Slot, feedback: bool) -> Operation | None:
        """Return the operation that runs a call in a slot; None if a generator runs it."""
        if not compiled.compiles:
            return compiled.operation
        found = self._kept.get((compiled, slot, feedback))
        return self._compile(compiled, slot, feedback) if found is None else found.program

    def forget(self, plans: Iterable[CompiledPlan]) -> None:
        """Free the programs of plans that are not used again, unless their slot is in use."""
        gone = set(plans)
        gone |= {each.unblocked for each in gone if each.unblocked is not None}
        for key in list(self._kept):
            if key[0] in gone and key[1].free:
                self._forget(key)

    def free(self) -> None:
        """Free all programs and their messages."""
        for key in list(self._kept):
            self._forget(key)

    def _compile(self, compiled: CompiledPlan, slot: Slot, feedback: bool) -> Program:
        made = self._rehearse(compiled, slot, feedback)
        for key in list(self._kept):
            if self._messages + len(made.messages) <= _MOST_KEPT:
                break
            if key[1].free:  # else the program may be running, or about to
                self._forget(key)
        self._kept[compiled, slot, feedback] = made
        self._messages += len(made.messages)
        return made.program

    def _rehearse(self, compiled: CompiledPlan, slot: Slot, feedback: bool) -> Compiled:
        plan, call, stats = compiled.plan, compiled.plan.call, Stats("", None, "")
        made = Compiled(Program(), [])
        x, out, residual = (
            _Given(which, size, call.itemsize)
            for which, size in enumerate((call.n, _elements_out(call, self._transport.size), call.n))
        )
        buffers = Buffers(x, out, None, residual if feedback else None)
        assert plan.coders is not None
        coder, raw = plan.coders
        assert isinstance(coder, HostCoder) and isinstance(raw, HostCoder)
        program = made.program
        noted = replace(plan, coders=Coders(coder.noted(program), raw.noted(program)))
        slot.arena.rewind()
        group = Group(_Notes(self._transport, made), slot.group.tag)
        for pending in compiled.steps(noted, buffers, Run(group, slot.arena.allocate, stats, OrderingTicket(None))):
            if isinstance(pending, _NotedMessage):
                program.wait(pending.message)
        program.sends(stats.wire_nbytes, stats.raw_sent_nbytes)
        return made

    def _forget(self, key: _Key) -> None:
        compiled = self._kept.pop(key)
        self._messages -= len(compiled.messages)
        for message in compiled.messages:
            self._transport.release(message)


def _elements_out(call: Call, ranks: int) -> int:
    """Return the number of elements of the result."""
    if call.collective == "reduce_scatter":
        return call.n // ranks
    return call.n * ranks if call.collective == "allgather" else call.n
