"""What ranks send each other before a collective, byte by byte, and the limits of what is kept from call to call."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

from compcoll import Communicator, ErrorFeedback, IntSum, MinMax, Sign
from compcoll.algorithms.costs import Costs
from compcoll.algorithms.direct import _others
from compcoll.errors import CollectiveMismatch, InvalidArgument, WireCorrupted
from compcoll.execute import handshake, host, planned_steps, programs
from compcoll.execute.compiled_plan import Buffers, feedback_refused, named_codec
from compcoll.execute.handshake import places
from compcoll.execute.planned_steps import Ranks
from compcoll.execute.slots import AT_ONCE
from compcoll.layout import in_pairs, longest_message
from compcoll.plan.signature import BUSY, FREE, ON_GPU, Signature, fingerprint, mismatch
from compcoll.transports.base import Wire
from compcoll.transports.loopback import Key, Loopback, LoopbackTransport


def test_fingerprints_leave_room_for_levels() -> None:
    """Smallest and largest, of 8 bytes each, the most significant first: they differ in two bits by the level."""
    own = Signature("call")
    seen = set()
    for level in (FREE, BUSY, ON_GPU):
        low, high = own.extremes[level][:8], own.extremes[level][8:]
        assert low == high and len(high) == 8 and int.from_bytes(low, "big") & 3 == level
        seen.add(int.from_bytes(low, "big") >> 2)
    assert seen == {fingerprint("call") >> 2} and fingerprint("call") & 3 == 0 and len(own.extremes) == 3
    assert fingerprint("call") != fingerprint("cal") and Signature("call", "salt").extremes != own.extremes
    line = Signature("x" * 600, "salt").here()
    assert re.fullmatch(r"x{256} at .*test_handshakes\.py:\d+", line.call)
    assert line.extremes == Signature("x" * 600, "salt").extremes


@pytest.mark.parametrize("ranks", range(2, 18))
def test_partners_of_an_opening(ranks: int) -> None:
    """Who sends is who is received from, in every round; after all of them everybody has heard of everybody."""
    transports = Loopback(ranks).transports
    heard = [{rank} for rank in range(ranks)]
    for number in range((ranks - 1).bit_length()):
        rounds = [handshake._round(transport, number, 0, None) for transport in transports]
        sends: dict[int, int] = {}
        for transport, each in zip(transports, rounds, strict=True):
            message: Any = each.sending(16)
            (source, dest, tag), nbytes = message._post().key, message._post().wire.nbytes
            assert (source, tag, nbytes) == (transport.rank, 0, 16) and each.sending(16) is message
            sends[dest] = source
            assert len(each.outgoing) == longest_message(ranks) == each.incoming.buffer.nbytes
        before = [set(known) for known in heard]
        for rank, each in enumerate(rounds):
            assert each.before == (sends[rank] < rank)
            assert each.new == (0 if in_pairs(ranks) else 1 << number)
            heard[rank] |= before[sends[rank]]
    assert all(known == set(range(ranks)) for known in heard)
    assert [places(rank, ranks) for rank in range(ranks)] == [
        (1, 0) if in_pairs(ranks) else (ranks, (ranks - rank) % ranks) for rank in range(ranks)
    ]


def test_messages_of_openings_have_few_lengths() -> None:
    """At most a sixteenth more than is sent, in steps of the signature's 16 bytes."""
    lengths = {length: handshake._padded(length) for length in range(16, 20_000)}
    for length, padded in lengths.items():
        assert padded % 16 == 0 and length <= padded < length + max(16, length / 16 + 1)
    assert len(set(lengths.values())) < 16 * 12


def test_lines_on_calls_carry_a_checksum() -> None:
    line = b"call".ljust(512)
    good = bytearray(line + handshake._checksum(line))
    assert handshake._read(Wire(memoryview(good)), 0) == "call"
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 4
        with pytest.raises(WireCorrupted, match="rank 3's description of its call has changed"):
            handshake._read(Wire(memoryview(changed)), 3)


def test_long_calls_are_told_in_part() -> None:
    """Half a kibibyte of each; the own one is marked."""

    def attempt(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            comm._agree(Signature("b" if comm.rank == 2 else "a" * 600))
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        for rank, told in enumerate(pool.map(attempt, World(3, seed=None, timeout=20).comms)):
            first, second = (" (this one)", "") if rank < 2 else ("", " (this one)")
            assert told.splitlines()[1:] == [f"  rank 0, 1{first}: {'a' * 512}", f"  rank 2{second}: b"]
    assert str(mismatch(["a", "b", "a"], 1)).splitlines()[1:] == ["  rank 0, 2: a", "  rank 1 (this one): b"]


def test_no_more_are_opened_than_there_are_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind wait for the one before them in their lane: its memory and tags are in use."""
    world, held, opened = World(2), "all", [0, 0]
    deliver, isend = Loopback.deliver, LoopbackTransport.isend

    def openings_only(self: Loopback, key: Key) -> None:
        if not held or (held == "algorithms" and key[2] == 0):
            deliver(self, key)

    def counted(transport: LoopbackTransport, wire: Wire, dest: int, tag: int) -> Any:
        opened[transport.rank] += tag == 0
        return isend(transport, wire, dest, tag)

    monkeypatch.setattr(Loopback, "deliver", openings_only)
    monkeypatch.setattr(LoopbackTransport, "isend", counted)
    inputs = [normals(2, 300, seed=number) for number in range(2 * AT_ONCE)]
    pending = [
        [comm.iallreduce(x[comm.rank], codec=MinMax(4), algorithm="ring") for x in inputs] for comm in world.comms
    ]
    for held in ("all", "algorithms"):
        for requests in 50 * pending:
            requests[0].test()
        assert (
            opened == [AT_ONCE if held == "algorithms" else 1] * 2
        )  # one after the other, and each in a lane of its own
    held = ""
    for comm_requests in zip(*pending, strict=True):
        world.loopback.run(comm_requests)
    for x, first in zip(inputs, pending[0], strict=True):
        np.testing.assert_allclose(first.wait(), exact_sum(x), atol=2.0)


def test_slots_rotate() -> None:
    """Four, by the collective's number; another one is a blocking call's alone."""
    world = World(2)
    slots = world.comms[0]._slots
    for number in range(9):
        requests = [comm.iallreduce(np.ones(4, np.float32), algorithm="ring") for comm in world.comms]
        world.loopback.run(requests)
        (entered,) = (slot for slot in (slots.alone, *slots.rotating) if slot.last and slot.last.number == number)
        assert entered.number == 1 + number % AT_ONCE
    assert slots.alone.number == 0


@pytest.mark.parametrize("ranks", range(2, 14))
def test_ranks_of_a_node_begin_far_apart(ranks: int) -> None:
    """In direct exchanges, so that they do not all send to one node at once: as even as whole ranks allow."""
    for per_node in (each for each in range(1, ranks + 1) if ranks % each == 0):
        transport = Loopback(ranks, per_node).transports[0]
        for rank in range(ranks):
            group = SimpleNamespace(size=ranks, rank=rank, ranks=range(ranks), transport=transport)
            found = _others(SimpleNamespace(group=group))  # type: ignore[arg-type]
            apart = [(other - rank) % ranks - 1 for other in found]
            begin = rank % per_node * (ranks - 1) // per_node
            assert apart == [(begin + step) % (ranks - 1) for step in range(ranks - 1)]


@pytest.mark.parametrize(("calls", "messages"), [(5, 1000), (1000, 40)])
def test_programs_are_kept_up_to_a_number(calls: int, messages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest, and as many as docs/architecture.md says; older ones are made again when they are needed."""
    assert (programs._MOST_CALLS, programs._MOST_MESSAGES) == (2048, 32768)
    monkeypatch.setattr(programs, "_MOST_CALLS", calls)
    monkeypatch.setattr(programs, "_MOST_MESSAGES", messages)
    world = World(2, timeout=30)
    for again in range(3):
        for n in range(100, 112):
            inputs = normals(2, n, seed=n + again)
            for _ in range(2):
                for result in world.allreduce(inputs, codec=MinMax(), algorithm="ring"):
                    np.testing.assert_allclose(result, exact_sum(inputs), atol=0.1)
            for comm in world.comms:
                kept = comm._programs
                assert kept._messages == sum(len(each.messages) for each in kept._kept.values()) <= messages
                assert len(kept._kept) <= calls
    newest = list(world.comms[0]._programs._kept)
    assert len(newest) > 2 and newest[-1][0].plan.call.n == 111


def test_plans_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_MOST_PLANS", 3)
    world = World(2)
    collectives, sizes = world.comms[0]._collectives, []
    for n in range(1, 9):
        world.allreduce(normals(2, n), algorithm="ring")
        sizes.append(len(collectives._plans))
    assert sizes == [1, 2, 3, 3, 3, 3, 3, 3]
    assert [plan.plan.call.n for plan in collectives._plans.values()] == [6, 7, 8]


def test_rows_of_an_allgatherv_are_not_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(group: Any, own: bytes) -> Any:
        yield from ()
        return [own, planned_steps._COUNT.pack(-1)]

    monkeypatch.setattr(planned_steps, "gather", told)
    collectives = World(2).comms[0]._collectives
    plan, buffers = collectives.check("allgatherv", np.ones((3, 2)), None, None, None, (None, "ring", {}))
    with pytest.raises(WireCorrupted, match=r"negative number of rows: \[3, -1\]"):
        next(plan.steps(plan.plan, buffers, SimpleNamespace(group=None)))  # type: ignore[arg-type]


def test_random_numbers_are_of_a_call_and_a_rank() -> None:
    """The collective's number, up to 2**32, in the upper half of 64 bits; below it the rank."""
    collectives = World(3).comms[2]._collectives
    plan, buffers = collectives.check("allreduce", np.ones(5), "mean", None, None, ("qsgd", "ring", {}))
    for number, upper in ((0, 0), (5, 5), (2**32 - 1, 2**32 - 1), (2**32 + 7, 7)):
        run: Any = SimpleNamespace(group=None, allocate=None, stats=None, timeline=None, number=number)
        job = collectives._job(plan.plan, buffers, run, ())
        operands = job.operands
        assert operands.rng_counter == upper << 32 | 2 and operands.scale == pytest.approx(1 / 3)
        assert operands.itemsize == 8


@pytest.mark.parametrize(("codec", "bits"), [(IntSum(8), 8), (IntSum(16), 16), (Sign(), 1)])
def test_numbers_are_accounted_for_as_the_values_that_they_stand_for(codec: Any, bits: int) -> None:
    """Of a ring of four: a rank would send 2 (p - 1) / p of its buffer, and what is agreed on counts on the wire."""
    n, ranks = 1 << 16, 4
    world = World(ranks)
    world.allreduce(normals(ranks, n), codec=codec, algorithm="ring")
    for comm in world.comms:
        stats = comm.stats
        assert stats is not None and stats.raw_sent_nbytes == 2 * 3 * n
        sent = (2 * 3 / 4 if bits > 1 else 3) * n * bits / 8
        assert sent < stats.wire_nbytes < sent + 2 * 4 * n / codec.block + 64
    world.allreduce(normals(ranks, n), codec=codec, algorithm="recursive_doubling")
    assert world.comms[0].stats is not None and world.comms[0].stats.raw_sent_nbytes == 2 * n * 4


def test_tolerances_of_codec_auto() -> None:
    for tolerance in (0, 0.0, 0.5, np.float32(0.25), 3):
        assert named_codec("auto", {"tolerance": tolerance}) == (None, float(tolerance))
    for options in ({}, {"tolerance": 0.1, "bits": 4}, {"bits": 4}):
        with pytest.raises(InvalidArgument, match="tolerance=, the relative error that the result may have"):
            named_codec("auto", options)
    for bad in (-1e-9, math.inf, math.nan, "0.1", None):
        with pytest.raises(InvalidArgument, match="must be a finite number, 0 or more"):
            named_codec("auto", {"tolerance": bad})
    assert named_codec("auto:tolerance=1e-2", {}) == (None, 0.01)
    with pytest.raises(InvalidArgument, match="auto: tolerance='low' must be a finite number, 0 or more"):
        named_codec("auto:tolerance=low", {})
    with pytest.raises(InvalidArgument, match="tolerance is given twice"):
        named_codec("auto:tolerance=1e-2", {"tolerance": 1e-2})
    assert named_codec("minmax", {"bits": 4}) == named_codec("minmax:bits=4", {}) == (MinMax(4), None)


def test_feedback_is_refused_where_it_would_not_converge() -> None:
    """Also where nothing is compressed on these ranks, though others, or more of them, would."""
    for size, per_node, algorithm in ((4, 1, "ring"), (4, 4, "hierarchical"), (1, 1, "ring")):
        world = World(size, ranks_per_node=per_node)
        collectives = world.comms[0]._collectives
        for codec, options, refused in (
            ("terngrad", {"block": 1 << 20}, "would grow without end"),
            ("minmax", {}, ""),
            ("sign", {}, "votes leave no residual"),
        ):
            plan, _ = collectives.check("allreduce", np.ones(9), "sum", None, None, (codec, algorithm, options))
            assert (refused in feedback_refused(plan.plan)) and (feedback_refused(plan.plan) == "") == (not refused)


def test_buffers_in_place_stay_in_place() -> None:
    x = np.arange(6.0).reshape(2, 3)
    same, other = Buffers(x, x, x).flat(), Buffers(x, x.copy(), x, residual=x, feedback=ErrorFeedback()).flat()
    assert same.out is same.x and same.x.shape == (6,) and np.shares_memory(same.x, x) and same.result is x
    assert other.out is not other.x and other.out.shape == (6,) and other.residual is x and other.feedback is not None


def test_records_do_not_change() -> None:
    """Of algorithms' costs, and of the ranks: they are keys, or shared by many calls."""
    for record in (Costs, Ranks):
        assert record.__dataclass_params__.frozen, record  # type: ignore[attr-defined]
