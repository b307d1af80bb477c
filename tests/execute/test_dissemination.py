"""Small allreduces, whose arrays travel with the handshake."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from math import ceil, log2

import numpy as np
import pytest
from fakes.loopback import World
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll import ZFP, Communicator, ErrorFeedback
from compcoll.algorithms.dissemination import largest, surely_small
from compcoll.errors import CollectiveMismatch, UnknownAlgorithm
from compcoll.transports.base import Wire
from compcoll.transports.shared import Mail, Room

REDUCE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def in_order(reduce: np.ufunc, inputs: list[np.ndarray]) -> np.ndarray:
    """By halves where the number of ranks is a power of two, else one after the other."""
    if len(inputs) & len(inputs) - 1 == 0 and len(inputs) > 1:
        half = len(inputs) // 2
        return reduce(in_order(reduce, inputs[:half]), in_order(reduce, inputs[half:]))
    expected = inputs[0]
    for x in inputs[1:]:
        expected = reduce(expected, x)
    return expected


def algorithms(world: World) -> set[str]:
    return {comm.stats.algorithm for comm in world.comms if comm.stats is not None}


TYPES = [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)]
TYPES += ["float32", "float64", "complex64", "complex128"]


@given(st.data(), st.integers(2, 16), st.sampled_from([np.dtype(name).type for name in TYPES]))
@examples(100)
def test_what_numpy_reduces(data: st.DataObject, ranks: int, dtype: type) -> None:
    kind = np.dtype(dtype).kind
    ops = {"i": ["sum", "max", "min", "prod"], "u": ["sum", "max", "min", "prod"], "c": ["sum", "prod", "mean"]}
    op = data.draw(st.sampled_from(ops.get(kind, list(REDUCE))))
    most = largest(ranks) // np.dtype(dtype).itemsize
    n = data.draw(st.one_of(st.integers(0, 100), st.integers(0, most), st.just(most)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    inputs = [(rng.standard_normal(n) * 40).astype(np.int64).astype(dtype) for _ in range(ranks)]
    world = World(ranks, ranks_per_node=data.draw(st.integers(1, ranks)), seed=data.draw(st.sampled_from([0, None])))
    results = world.allreduce(inputs, op=op, algorithm="dissemination")
    assert algorithms(world) == {"dissemination"}
    sent = [comm.stats.wire_nbytes for comm in world.comms if comm.stats is not None]
    arrays = ranks - 1 if ranks & ranks - 1 else ranks.bit_length() - 1  # all others'; or one sum a round
    assert sent == [arrays * inputs[0].nbytes] * ranks
    expected = in_order(REDUCE[op], inputs)
    if op == "mean":
        expected = (expected * (1 / ranks)).astype(dtype)
    for result in results:
        np.testing.assert_array_equal(result, expected)  # the very bits


@given(st.integers(2, 20), st.lists(st.integers(0, 400), min_size=1, max_size=9), st.integers(1, 20))
@examples(40)
def test_one_after_the_other_through_memory(ranks: int, sizes: list[int], per_node: int) -> None:
    """Without a wait in between: no rank's next message may meet one that was not read."""
    world = World(ranks, ranks_per_node=per_node, seed=None)
    pending = [
        [comm.iallreduce(np.full(n, comm.rank + i, np.float32)) for i, n in enumerate(sizes)] for comm in world.comms
    ]
    world.loopback.run([request for requests in pending for request in requests])
    for requests in pending:
        for i, (request, n) in enumerate(zip(requests, sizes, strict=True)):
            np.testing.assert_array_equal(request.wait(), np.full(n, sum(range(ranks)) + i * ranks))


def test_a_message_through_memory() -> None:
    from compcoll.kernels import _host

    room, progressed = Room(2, 2), []
    mail = Mail(room, room.memory(), (0, 0), lambda: progressed.append(1))
    waiting = mail.message(0, 1, 0, sending=False)
    assert waiting is not None and waiting.Test()  # nothing was begun
    sent = mail.message(0, 1, 0, sending=True)
    assert sent is not None and sent.Test()
    arrays = [bytearray(64), bytearray(64)]
    ends = [mail.message(1, 0, 0, sending=False), sent, waiting, mail.message(1, 0, 0, sending=True)]
    none = Wire(memoryview(b""))

    def begin(exchange: _host.Exchange, looks: int, sleeps: int) -> _host.Collective:
        call = _host.Collective(exchange, same, 0, None, None)
        call.begin(None, None, None, 0, looks, sleeps)
        return call

    first = _host.Exchange(arrays[0], [(ends[0], ends[1], none, b"", 24, 8, 8, False)])
    second = _host.Exchange(arrays[1], [(ends[2], ends[3], none, b"", 24, 8, 8, True)])
    for number in range(1, 6):
        arrays[0][:8], arrays[1][:8] = bytes([number] * 8), bytes([number + 10] * 8)
        same = bytes([number] * 16)
        call = begin(first, 20, 0)
        assert not call.ended and call.level is None
        assert progressed, "others' messages must advance while this one is waited for"
        assert not call.Test()
        assert begin(second, 1, 0).ended and arrays[1][8:16] == bytes([number] * 8)
        assert call.Test() and call.ended and call.level == number & 3
        assert first.extremes == same and arrays[0][8:16] == bytes([number + 10] * 8)
        progressed.clear()
    call = begin(first, 20, 5)
    assert not call.ended
    assert not progressed, "to let others' messages advance takes the GIL: not where the wait is short"
    assert begin(second, 1, 0).ended and call.Test() and call.ended
    assert not begin(first, 1, 40).ended
    assert progressed
    assert mail.message(0, 1, 0, sending=True) is not None
    assert Mail(Room(1, 2), room.memory(), (0, 1), print).message(0, 1, 0, sending=True) is None
    for at, nbytes in ((1, 128), (0, 100), (0, 0), (0, 1 << 40)):
        with pytest.raises(ValueError, match="cache lines"):
            _host.SharedMessage(room.memory(), at, nbytes, True, print)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint16, np.int64, np.float32, np.float64])
def test_extreme_values_as_in_numpy(op: str, dtype: type) -> None:
    if np.dtype(dtype).kind == "f":
        values = np.array([np.nan, np.inf, -np.inf, 3.5, -1e-40, np.finfo(dtype).max], dtype)
    else:
        values = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, np.iinfo(dtype).max // 3, 0, 7], dtype)
    # Memory that is not aligned, and every pair of values.
    memory = np.empty(values.size**2 * values.itemsize + 1, np.uint8)[1:].view(dtype)
    memory[:] = np.repeat(values, values.size)
    inputs = [memory, np.tile(values, values.size), memory[::-1].copy()]
    with np.errstate(all="ignore"):
        expected = REDUCE[op](REDUCE[op](inputs[0], inputs[1]), inputs[2])
    for result in World(3).allreduce(inputs, op=op, codec=None):
        np.testing.assert_array_equal(result, expected)


def test_what_is_too_large_travels_otherwise() -> None:
    for ranks in (2, 3, 16):
        n = surely_small(ranks) // 4  # more only where it was measured
        world = World(ranks, ranks_per_node=1)
        world.allreduce([np.ones(n, np.float32)] * ranks)
        assert algorithms(world) == {"dissemination"}
        world.allreduce([np.ones(n + 1, np.float32)] * ranks)
        assert "dissemination" not in algorithms(world)
    assert largest(17) == largest(1) == surely_small(17) == 0 and largest(2) > surely_small(2) > surely_small(4) > 4096


def test_what_fits_into_a_message() -> None:
    """The most that a rank sends in a round, of messages of 16 KiB with their 16 bytes of signature, but 128 KiB of
    arrays between pairs; and of what `auto` takes, 16 KiB over the number of rounds. None of one rank, or above 16.
    """
    assert [(largest(ranks), surely_small(ranks)) for ranks in (1, 17, 32)] == [(0, 0)] * 3
    for ranks in range(2, 17):
        rounds = ceil(log2(ranks))
        known, most = 1, 0  # arrays that a rank has, doubled in each round until it has all
        while known < ranks:
            most, known = max(most, min(known, ranks - known)), min(2 * known, ranks)
        longest = 131072 if 2**rounds == ranks else (16384 - 16) // most
        assert largest(ranks) == longest
        assert surely_small(ranks) == min(longest, 16384 // rounds)


def test_it_can_be_named_for_what_it_takes() -> None:
    world = World(3)
    for result in world.allreduce([np.arange(5.0)] * 3, algorithm="dissemination"):
        np.testing.assert_array_equal(result, 3 * np.arange(5.0))
    assert algorithms(world) == {"dissemination"}
    x = np.ones(10, np.float32)
    refused: list[tuple[int, np.ndarray, dict[str, object]]] = [
        (3, x, {"codec": "zfp"}),
        (3, x.astype(np.float16), {}),
        (3, x > 0, {"op": "lor"}),
        (3, np.ones(largest(3) // 4 + 1, np.float32), {}),
        (17, x, {}),
    ]
    for ranks, values, more in refused:
        arguments = {"algorithm": "dissemination", **more}
        calls = [lambda comm, x=values, given=arguments: comm.iallreduce(x, **given)] * ranks
        for error in World(ranks).errors(calls):
            assert isinstance(error, UnknownAlgorithm) and "takes uncompressed arrays of up to" in str(error)


def test_a_codec_that_was_asked_for_is_used_where_mpi_is_not() -> None:
    for ranks, expected in ((4, "recursive_doubling"), (3, "direct")):
        world = World(ranks)
        world.allreduce([np.ones(4, np.float32)] * ranks, codec=ZFP(rate=8))
        assert algorithms(world) == {expected}
        assert all(comm.stats is not None and comm.stats.codec == repr(ZFP(rate=8)) for comm in world.comms)


def lost(feedback: ErrorFeedback) -> bytes:
    residual = feedback.state_dict()["residual"]
    return b"" if residual is None else residual.tobytes()


def test_in_place_and_several_under_way() -> None:
    world, count = World(5), 7
    values = [[np.full(3, 10.0 * i + rank) for i in range(count)] for rank in range(5)]
    requests = [
        comm.iallreduce(own[i], out=own[i]) for i in range(count) for comm, own in zip(world.comms, values, strict=True)
    ]
    world.loopback.run(requests)
    for own in values:
        for i, x in enumerate(own):
            np.testing.assert_array_equal(x, np.full(3, 50.0 * i + 10))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_disagreement_is_found_and_nothing_written(ranks: int) -> None:
    world = World(ranks)
    outs = [np.full(rank % 2 + 1, 7.0) for rank in range(ranks)]

    def start(rank: int, comm: Communicator):  # type: ignore[no-untyped-def]
        return comm.iallreduce(np.ones(rank % 2 + 1), out=outs[rank])

    found = world.errors([lambda comm, rank=rank: start(rank, comm) for rank in range(ranks)])
    assert all(isinstance(error, CollectiveMismatch) for error in found)
    assert all((out == 7.0).all() for out in outs)
    world.allreduce([np.ones(2)] * ranks)


@pytest.mark.parametrize("per_node", [1, 2], ids=["messages", "memory"])
def test_more_sizes_than_openings_are_kept(per_node: int) -> None:
    """Those of small arrays are forgotten, the one without is still used: of a call to which one rank comes late."""
    world = World(2, ranks_per_node=per_node, seed=None, timeout=5)
    ring = {"codec": "minmax", "algorithm": "ring"}

    def run(comm: Communicator) -> None:
        for n in range(1, 300):
            assert comm.allreduce(np.ones(n, np.float32), algorithm="dissemination")[0] == 2
        for number in range(4):
            if comm.rank == number % 2:
                time.sleep(0.2)
            np.testing.assert_allclose(comm.allreduce(np.ones(5000, np.float32), **ring), 2, rtol=1e-2)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, world.comms)) == [None, None]
