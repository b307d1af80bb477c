"""Differences: the wire, results bit for bit, previous values that differ between ranks, and what refuses the codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World
from hypothesis import given
from hypothesis import strategies as st
from oracles import collectives as oracles
from oracles.codecs.delta import wire_of
from promises import DIFFERENCES, DTYPES, algorithms_of, paired
from properties import examples

import compcoll
from compcoll import Codec, Delta, errors
from compcoll.algorithms.record import REDUCTIONS
from compcoll.codecs.base import UPDATING, Coder
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.plan import accuracy, choose

RUNS = [(collective, name) for collective in UPDATING for name in algorithms_of(collective)]
SEGMENT = 512  # bytes, so that short buffers have several segments


@pytest.fixture(scope="module", autouse=True)
def _small_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPCOLL_SEGMENT", str(SEGMENT))
        yield


def bits_of(dtype: Any) -> np.dtype[Any]:
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def any_bits(shape: Any, dtype: Any, seed: int) -> np.ndarray:
    """Return elements of any bits: NaN of all payloads, infinities, subnormal numbers, zeros of both signs."""
    rng, bits = np.random.default_rng(seed), bits_of(dtype)
    return rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True).view(dtype)


def changed(old: np.ndarray, at: Any) -> np.ndarray:
    """Return a copy of which these elements differ in the lowest bit."""
    new = old.copy()
    new.view(bits_of(old.dtype))[at] ^= 1
    return new


def coder_of(dtype: Any) -> Coder:
    return Delta().coder(HostDevice(1), np.dtype(dtype).name)


def encoded(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the wire of a difference; encoding updates the previous values."""
    coder, kept = coder_of(old.dtype), old.copy()
    wire = np.full(coder.wire_nbytes(new.size), 0xA5, np.uint8)
    length = coder.encode(new.size, new, (), wire, EncodeOptions(decoded=kept))
    assert kept.tobytes() == new.tobytes()
    return wire[:length]


def check_wire(old: np.ndarray, new: np.ndarray) -> None:
    wire, out = encoded(old, new), old.copy()
    assert wire.tobytes() == wire_of(*([item.tobytes() for item in x] for x in (old, new)))
    coder_of(old.dtype).decode(new.size, None, (wire,), out)
    assert out.tobytes() == new.tobytes()


changes = st.one_of(st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.floats(0, 1))


@examples(100)
@given(st.integers(0, 3000), st.sampled_from(DTYPES), changes, st.integers(0, 2**31))
def test_wires_are_those_of_the_description(n: int, dtype: Any, part: float, seed: int) -> None:
    old = any_bits(n, dtype, seed)
    check_wire(old, changed(old, np.random.default_rng(seed).random(n) < part))


GAPS = [*itertools.product([0, 1, 254, 255, 256, 509, 510, 511], DTYPES)]
GAPS += paired([65534, 65535, 65536, 70000], DTYPES)


@pytest.mark.parametrize(("gap", "dtype"), GAPS)
def test_gaps_of_all_lengths(gap: int, dtype: Any) -> None:
    for at in ([gap], [3, 4 + gap], [0, 1 + gap, 2 + 2 * gap]):
        old = any_bits(at[-1] + 1, dtype, gap)
        check_wire(old, changed(old, at))
        check_wire(np.append(old, any_bits(gap, dtype, 1)), np.append(changed(old, at), any_bits(gap, dtype, 1)))


def test_minus_zero_and_payloads_of_nan_are_changes() -> None:
    old = np.array([0x0000, 0x7FC0, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)
    new = np.array([0x8000, 0x7FC1, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)
    check_wire(np.tile(old, 30), np.concatenate([new, np.tile(old, 29)]))


@examples(100)
@given(st.data())
def test_bytes_that_no_encoding_writes_raise_an_error(data: st.DataObject) -> None:
    """Or decode to something; never write outside, and never in part."""
    n, dtype = data.draw(st.integers(0, 600)), data.draw(st.sampled_from(DTYPES))
    old = any_bits(n, dtype, 1)
    wire = encoded(old, changed(old, slice(None, None, 7)))
    cut = data.draw(st.integers(0, wire.size))
    wire = np.append(wire[:cut], np.frombuffer(data.draw(st.binary(max_size=9)), np.uint8))
    if wire.size and data.draw(st.booleans()):
        wire[data.draw(st.integers(0, min(wire.size, 12) - 1))] ^= data.draw(st.integers(1, 255))
    memory = np.concatenate([old, old, old])
    out, before = memory[n : 2 * n], memory.tobytes()
    try:
        coder_of(dtype).decode(n, None, (wire,), out)
    except errors.WireCorrupted:
        assert memory.tobytes() == before
    assert memory[:n].tobytes() == memory[2 * n :].tobytes() == old.tobytes()


def start(collective: str, x: np.ndarray, comm: Any, **more: Any) -> Any:
    root = {"root": comm.size - 1} if collective == "bcast" else {}
    return getattr(comm, f"i{collective}")(x, **root, **{"codec": "delta", **more})


def case(collective: str, ranks: int, n: int, dtype: Any, part: float, seed: int) -> tuple[Any, np.ndarray]:
    """Return all ranks' inputs, and the previous result, from which a part of the elements of the new one differ."""
    inputs = list(any_bits((ranks, n), dtype, seed))
    result = oracles.expected(collective, inputs, 0, root=ranks - 1)
    return inputs, changed(result, np.random.default_rng(seed).random(result.shape) < part)


@pytest.mark.parametrize(("collective", "algorithm"), [*RUNS, *((name, "auto") for name in UPDATING)])
@examples(60)
@given(
    st.integers(1, 5),
    st.one_of(st.sampled_from([0, 1, 3]), st.integers(0, 2000)),
    st.sampled_from(DTYPES),
    changes,
    st.integers(0, 2**31),
    st.booleans(),
)
def test_results_are_exact(
    collective: str, algorithm: str, ranks: int, n: int, dtype: Any, part: float, seed: int, checksum: bool
) -> None:
    world = World(ranks, ranks_per_node=2, seed=seed, checksum=checksum)
    inputs, previous = case(collective, ranks, n, dtype, part, seed)
    outs = [previous.copy() for _ in inputs]
    if collective == "bcast":  # in place
        inputs[: ranks - 1] = outs[: ranks - 1]
    before = [x.tobytes() for x in inputs[ranks - 1 :]]
    expected = oracles.expected(collective, inputs, 0, root=ranks - 1).tobytes()
    results = world.run(lambda comm, x: start(collective, x, comm, out=outs[comm.rank], algorithm=algorithm), inputs)
    assert all(result is out for result, out in zip(results, outs, strict=True))
    assert {out.tobytes() for out in outs} == {expected}
    assert [x.tobytes() for x in inputs[ranks - 1 :]] == before
    if ranks > 1 and algorithm != "auto":
        assert {comm.stats.codec for comm in world.comms} == {"Delta()"}  # type: ignore[union-attr]


@pytest.mark.parametrize("part", [0.01, 0.02, 0.03])
@pytest.mark.parametrize(("collective", "algorithm"), RUNS)
def test_few_changes_make_short_wires(
    collective: str, algorithm: str, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPCOLL_SEGMENT")
    world = World(3, ranks_per_node=1)
    inputs, previous = case(collective, 3, 1 << 20, ml_dtypes.bfloat16, part, 5)
    world.run(lambda comm, x: start(collective, x, comm, out=previous.copy(), algorithm=algorithm), inputs)
    sent = [(comm.stats.wire_nbytes, comm.stats.raw_sent_nbytes) for comm in world.comms]  # type: ignore[union-attr]
    wire, raw = np.sum(sent, axis=0)
    print(f"{collective} by {algorithm}, {part:.0%} of bfloat16 changed: {wire / raw:.2%} of the bytes")
    assert part * 1.4 < wire / raw < part * 1.7 <= 0.08


@pytest.mark.parametrize(("collective", "algorithm"), RUNS)
def test_many_changes_make_wires_that_are_hardly_longer(collective: str, algorithm: str) -> None:
    world = World(3, ranks_per_node=1)
    inputs, previous = case(collective, 3, 1000, np.float32, 1.0, 5)
    world.run(lambda comm, x: start(collective, x, comm, out=previous.copy(), algorithm=algorithm), inputs)
    for comm in world.comms:
        assert comm.stats is not None
        segments = -(-comm.stats.raw_sent_nbytes // SEGMENT) + 2 * comm.size
        assert comm.stats.wire_nbytes <= comm.stats.raw_sent_nbytes + 8 * segments


@pytest.mark.parametrize(("collective", "algorithm"), RUNS)
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_previous_values_that_differ_are_refused_on_all_ranks(collective: str, algorithm: str, wrong: int) -> None:
    """Nothing changes; a call that sends all values makes them equal again, and the next one sends differences."""
    world = World(3, ranks_per_node=1)
    inputs, previous = case(collective, 3, 777, np.float32, 0.02, 1)
    outs = [previous.copy() for _ in inputs]
    outs[wrong].view(np.uint32).reshape(-1)[-1] ^= 1 << 31
    before = [out.tobytes() for out in outs]

    def starts(**more: Any) -> list[Any]:
        return [
            lambda comm, x=x, out=out: start(collective, x, comm, out=out, algorithm=algorithm, **more)
            for x, out in zip(inputs, outs, strict=True)
        ]

    others = ", ".join(str(rank) for rank in range(3) if rank != wrong)
    for error in world.errors(starts()):
        assert isinstance(error, errors.ReferenceMismatch)
        lines = str(error).replace(" (this one)", "").splitlines()
        assert any(line.startswith(f"  rank {wrong}: {collective}(") for line in lines), error
        assert any(line.startswith(f"  rank {others}: {collective}(") for line in lines), error
        assert str(error).count("(this one)") == 1 and "once with codec=None, which sends all values" in lines[-1]
    assert [out.tobytes() for out in outs] == before
    expected = oracles.expected(collective, inputs, 0, root=2).tobytes()
    for more in ({"codec": None}, {}, {}):
        assert world.errors(starts(**more)) == [None] * 3
        assert {out.tobytes() for out in outs} == {expected}
    assert world.comms[0].stats.codec == "Delta()"  # type: ignore[union-attr]


@pytest.mark.parametrize("collective", UPDATING)
def test_persistent_and_blocking_calls_and_several_at_once(collective: str) -> None:
    world = World(1)
    inputs, previous = case(collective, 1, 100, np.float64, 0.1, 3)
    blocking = getattr(world.comms[0], collective)
    assert blocking(inputs[0], out=(out := previous.copy()), codec="delta") is out
    assert out.tobytes() == inputs[0].tobytes()

    world = World(3, ranks_per_node=1)
    inputs, previous = case(collective, 3, 500, np.float64, 0.1, 3)
    runs = [[previous.copy() for _ in inputs] for _ in range(4)]
    world.loopback.run(
        [start(collective, x, comm, out=run[comm.rank]) for run in runs for comm, x in zip(world.comms, inputs)]
    )
    assert {out.tobytes() for run in runs for out in run} == {oracles.expected(collective, inputs, 0, root=2).tobytes()}
    prepared = [
        getattr(comm, f"{collective}_init")(x, out=out, codec="delta", **({"root": 2} if collective == "bcast" else {}))
        for comm, x, out in zip(world.comms, inputs, runs[0], strict=True)
    ]
    for step in range(3):
        for x in inputs:
            x.view(np.uint64)[step::5] += 1
        world.loopback.run([request.start() or request for request in prepared])
        assert {out.tobytes() for out in runs[0]} == {oracles.expected(collective, inputs, 0, root=2).tobytes()}


@pytest.mark.parametrize("collective", UPDATING)
def test_memory_that_is_not_aligned(collective: str) -> None:
    world = World(2)
    inputs, previous = case(collective, 2, 99, np.float32, 0.1, 3)
    outs = [np.frombuffer(bytearray(previous.nbytes + 1), np.uint8)[1:].view(np.float32) for _ in inputs]
    outs = [out.reshape(previous.shape) for out in outs]
    for out in outs:
        out[...] = previous
    algorithm = algorithms_of(collective)[0]
    world.run(lambda comm, x: start(collective, x, comm, out=outs[comm.rank], algorithm=algorithm), inputs)
    assert {out.tobytes() for out in outs} == {oracles.expected(collective, inputs, 0, root=1).tobytes()}


@pytest.mark.parametrize("codec", DIFFERENCES, ids=repr)
@pytest.mark.parametrize("collective", [name for name in choose.NAMES if name not in UPDATING])
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_collectives_refuse_the_codec(collective: str, codec: Codec, ranks: int) -> None:
    world, x = World(ranks), np.ones(4, np.float32)

    def call(comm: Any) -> Any:
        more = oracles.arguments(collective, x.size, ranks, comm.rank)
        return getattr(comm, f"i{collective}")(x, codec=codec, **more)

    for error in world.errors([call] * ranks):
        assert isinstance(error, errors.InvalidArgument)
        assert f"{collective} cannot use {codec!r}" in str(error) and "only allgather and bcast" in str(error)
    assert set(REDUCTIONS) & set(UPDATING) == set()


@pytest.mark.parametrize("codec", DIFFERENCES, ids=repr)
def test_what_has_no_previous_values_refuses_the_codec(codec: Codec) -> None:
    x = np.ones(4, np.float32)
    with pytest.raises(errors.InvalidArgument, match="encode cannot use"):
        compcoll.encode(x, codec=codec)
    with pytest.raises(errors.InvalidArgument, match="decode cannot use"):
        compcoll.decode(np.zeros(9, np.uint8), 4, np.float32, codec=codec)
    for dtype in ("float32", "bfloat16"):
        assert all(type(one) is not type(codec) for one in accuracy.candidates(HostDevice(1), dtype, 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_out_is_needed(ranks: int) -> None:
    """On every rank, in memory of its own on the root; the other ranks are told."""
    world, x = World(ranks), np.ones(4, np.float32)

    def bcast(comm: Any, out: Any) -> Any:
        return comm.ibcast(x, 0, out=out, codec="delta")

    for wrong in (None, x):
        error, *others = world.errors(
            [lambda comm, out=wrong: bcast(comm, out), *[lambda comm: bcast(comm, x.copy())] * (ranks - 1)]
        )
        assert isinstance(error, errors.InvalidBuffer) and "give it as out=" in str(error)
        assert all(isinstance(other, errors.CollectiveMismatch) for other in others)
    for error in world.errors([lambda comm: comm.iallgather(x, codec="delta")] * ranks):
        assert isinstance(error, errors.InvalidBuffer) and "give it as out=" in str(error)
    for _ in range(2):  # also after calls that were in order
        results = world.run(
            lambda comm, x: comm.iallgather(x, out=np.zeros((comm.size, 4), np.float32), codec="delta"), [x] * ranks
        )
        assert all((result == 1).all() for result in results)
        assert all(world.errors([lambda comm: comm.iallgather(x, codec="delta")] * ranks))
