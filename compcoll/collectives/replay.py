"""Collectives that were rehearsed once and are replayed from then on.

Which messages an algorithm sends and which kernels it runs, on which parts of its buffers, depends on the plan and the
lane alone as long as wires have one size. So the algorithm is run once on arrays that are not there, with messages and
kernels that are only noted down, as a program. A call is then a run of that program, in C++. MPI's persistent messages
(MPI-4.1, section 3.9) belong to it; it starts and tests them by MPI's own functions, without Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from ..devices.host import HostCoder
from ..kernels._host import Body
from ..progress import Pending, Steps, Turn
from ..stats import Stats
from ..transports.base import Connection, Group, Persistent, Transport, Wire
from .call import Call
from .handshake import SentAhead
from .lanes import Lane, Lanes
from .plan import Plan
from .recipe import Buffers, Recipe, Recording, Run, driven

_MOST_KEPT = 1 << 15  # messages: a kibibyte or two each


class _Given(NamedTuple):
    """A stand-in for an array that a run will be given: its parts are where they begin.

    Attributes
    ----------
    which : int
        0 for the values, 1 for the result, 2 for the residual.
    size, itemsize : int
        As of the array.
    """

    which: int
    size: int
    itemsize: int

    def __getitem__(self, part: Any) -> Any:
        return self.which, part.start


class _NotedMessage:
    """A message of a program's."""

    def __init__(self, message: Persistent) -> None:
        self.message = message

    def Test(self) -> bool:
        return True


class _Agreement:
    """A stand-in for a message that has come: nothing behind it leaves before all ranks are known to make this call."""

    def Start(self) -> None:
        """Nothing is to be sent."""

    def Test(self) -> bool:
        return True


class _Notes:
    """A stand-in for a transport that notes messages down (the contract is `compcoll.transports.base.Transport`)."""

    def __init__(self, transport: Transport, recording: Recording) -> None:
        self.rank, self.size, self.nodes = transport.rank, transport.size, transport.nodes
        self._recording = recording
        self.send_init, self.recv_init = transport.send_init, transport.recv_init
        self.free = transport.free
        self.forget = transport.forget

    def isend(self, wire: Wire, dest: int, tag: int) -> Pending:
        message = self.send_init(wire, dest, tag)
        if self._recording.program.start(message, sends=True):
            self._recording.ahead.append(SentAhead(message, dest, tag, wire.nbytes))
        return self._noted(message)

    def irecv(self, wire: Wire, source: int, tag: int) -> Pending:
        message = self.recv_init(wire, source, tag)
        self._recording.program.start(message, sends=False)
        return self._noted(message)

    def _noted(self, message: Persistent) -> Pending:
        self._recording.messages.append(message)
        return _NotedMessage(message)


class Recordings:
    """The recordings of a communicator, the latest ones that were made.

    Parameters
    ----------
    transport : Transport
        Between all ranks.
    lanes : Lanes
        Where they run.
    """

    def __init__(self, transport: Connection, lanes: Lanes) -> None:
        self._transport = transport
        # Who can only be waited for asks the receiver before a message leaves: sent ahead of the opening it would wait
        # for receives that are posted after it, and the opening for what is encoded.
        self._sends_ahead = not transport.blocks
        self._lanes = lanes
        self._kept: dict[Recording, tuple[int, bool]] = {}  # the oldest first
        self._messages = 0

    def make_replayable(self, recipe: Recipe, steps: Callable[[Plan, Buffers, Run], Steps]) -> None:
        """Have the calls of a recipe replayed, if they can be; ``steps`` makes the algorithm's own, by a plan."""
        if not isinstance(recipe.plan.coder, HostCoder):
            return
        recipe.algorithm, recipe.steps = steps, partial(self._replay, recipe, steps)

    def _replay(
        self, recipe: Recipe, steps: Callable[[Plan, Buffers, Run], Steps], buffers: Buffers, run: Run
    ) -> Steps:
        """The steps of a call: the algorithm's, if it is the first."""
        recipe.calls += 1
        if recipe.calls == 1:
            return steps(recipe.plan, buffers, run)
        return driven(self._recording(recipe, run.lane, buffers.residual is not None).program, buffers, run)

    def body_for(self, recipe: Recipe, feedback: bool) -> Body | None:
        """Give a recipe that has none a body for blocking calls, and return it; None before its first call has run, and
        where its calls are not replayed.
        """
        if not recipe.calls:
            return None
        arena = self._lanes.alone.arena
        before = arena.fresh_nbytes
        program = self._recording(recipe, self._lanes.alone, feedback).program
        program.expect_fresh(arena.fresh_nbytes - before)
        if feedback:
            recipe.with_feedback = program
        else:
            recipe.body = program
        return program

    def sent_ahead(self, recipe: Recipe) -> Recording | None:
        """Return the recording of which something was sent ahead of an opening that has not ended well."""
        for recording in recipe.recordings.values():
            if recording.program.ahead:
                return recording
        return None

    def forget(self, recipes: Iterable[Recipe]) -> None:
        """Let go of recipes that are not used again."""
        for recipe in recipes:
            for recording in list(recipe.recordings.values()):
                self._forget(recording)
            if recipe.unblocked is not None:
                self.forget([recipe.unblocked])

    def _recording(self, recipe: Recipe, lane: Lane, feedback: bool) -> Recording:
        key = lane.number, feedback
        found = recipe.recordings.get(key)
        if found is None:
            found = recipe.recordings[key] = self._rehearse(recipe, lane, feedback)
            self._kept[found] = key
            self._messages += len(found.messages)
            for old in list(self._kept):
                if self._messages <= _MOST_KEPT:
                    break
                if old is not found and old.program.done:
                    self._forget(old)
        return found

    def _rehearse(self, recipe: Recipe, lane: Lane, feedback: bool) -> Recording:
        plan, call = recipe.plan, recipe.plan.call
        recording, stats = Recording(recipe), Stats("", None, "")
        x, out, residual = (
            _Given(which, size, call.itemsize)
            for which, size in enumerate((call.n, _elements_out(call, self._transport.size), call.n))
        )
        buffers = Buffers(x, out, None, residual if feedback else None)
        assert recipe.algorithm is not None and isinstance(plan.coder, HostCoder)
        program = recording.program
        if not self._sends_ahead:
            program.wait(_Agreement())
        raw = plan.raw.noted(program) if isinstance(plan.raw, HostCoder) else None
        noted = plan._replace(coder=plan.coder.noted(program), raw=raw)
        lane.arena.rewind()
        group = Group(_Notes(self._transport, recording), lane.group.tag)
        for pending in recipe.algorithm(noted, buffers, Run(group, lane.arena.take, stats, Turn(None), lane)):
            if isinstance(pending, _NotedMessage):
                program.wait(pending.message)
        program.sends(stats.wire_nbytes, stats.raw_sent_nbytes)
        return recording

    def _forget(self, recording: Recording) -> None:
        recipe = recording.recipe
        del recipe.recordings[self._kept.pop(recording)]
        if recipe.body is recording.program:
            recipe.body = None
        if recipe.with_feedback is recording.program:
            recipe.with_feedback = None
        self._messages -= len(recording.messages)
        for message in recording.messages:
            self._transport.forget(message)

    def free(self) -> None:
        """Give all messages back."""
        for recording in list(self._kept):
            self._forget(recording)


def _elements_out(call: Call, ranks: int) -> int:
    """Elements of the result."""
    if call.collective == "reduce_scatter":
        return call.n // ranks
    return call.n * ranks if call.collective == "allgather" else call.n
