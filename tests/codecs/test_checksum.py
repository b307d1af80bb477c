"""Wires with checksums: no changed bit reaches a result, by any codec and algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.deferred import DeferredWorld, DeviceArray
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from promises import ALGORITHMS, CHOOSING, FIXED, one_of_each
from properties import examples

import compcoll
from compcoll import ZFP, Communicator, IntSum
from compcoll.errors import CompcollError, InvalidArgument, WireCorrupted
from compcoll.execute.gpu import DeviceCollectives
from compcoll.transports.base import Wire
from compcoll.transports.loopback import LoopbackTransport

OPENING_TAG = 0
CHECKED = [None, *one_of_each(FIXED), ZFP(lossless=True), IntSum()]
WAYS: list[dict[str, Any]] = [{"algorithm": a, "codec": c} for c in CHECKED for a in ALGORITHMS]
WAYS += [{"algorithm": a, "codec": c} for c in one_of_each(CHOOSING) for a in ("sparse_ring", "sparse_direct")]


class Flipping(LoopbackTransport):
    """Sends as it is told, but for one bit of one message; handshakes are left alone.

    Attributes
    ----------
    lengths : list of int
        Bytes of the messages sent.
    victim : tuple of int or None
        Which message, and which bit of it.
    """

    def __init__(self, end: LoopbackTransport) -> None:
        super().__init__(end.world, end.rank, end.size, end.nodes)
        self.lengths: list[int] = []
        self.victim: tuple[int, int] | None = None

    def isend(self, wire: Wire, dest: int, tag: int) -> Any:
        if tag != OPENING_TAG:
            if self.victim is not None and self.victim[0] == len(self.lengths):
                changed = np.array(wire.content, np.uint8)
                changed[self.victim[1] // 8] ^= 1 << self.victim[1] % 8
                wire = Wire(changed)
            self.lengths.append(wire.nbytes)
        return super().isend(wire, dest, tag)


def flipping_world(size: int, **settings: Any) -> tuple[World, list[Flipping]]:
    world = World(size, seed=None, ranks_per_node=2, **settings)
    ends = [Flipping(end) for end in world.loopback.transports]
    world.comms = [Communicator(end, **settings) for end in ends]
    return world, ends


def flipping_devices(size: int, *, direct: bool, checksum: bool) -> tuple[DeferredWorld, list[Flipping]]:
    """Arrays of a device whose work is done late; rank 1 has its own on the host."""
    world = DeferredWorld(size, direct=direct, on_host=(1,), seed=None, ranks_per_node=2, checksum=checksum)
    ends = [Flipping(end) for end in world.loopback.transports]
    for comm, device, end in zip(world.comms, world.devices, ends, strict=True):
        if device is not None:
            comm._gpu = DeviceCollectives(device, comm._collectives, end, direct=direct)
    return world, ends


def outcomes(requests: list[compcoll.Request]) -> list[Any]:
    """Each rank's result or error; None where it waits for ever."""
    found: list[Any] = [None] * len(requests)
    idle = 0
    while idle < 20 and any(end is None for end in found):
        idle += 1
        for rank, request in enumerate(requests):
            if found[rank] is not None:
                continue
            before = request.steps
            try:
                if request.test():
                    found[rank] = request.wait()
            except CompcollError as error:
                found[rank] = error
            if found[rank] is not None or request.steps != before:
                idle = 0
    return found


def run(
    size: int, way: dict[str, Any], victim: tuple[int, int, int] | None, checksum: bool, direct: bool | None = None
) -> tuple[list[Any], list[Any]]:
    """All ranks' outcomes, and the lengths of the messages that each has sent. `victim`: rank, message and bit;
    `direct`: arrays are on a device, whose memory the transport takes or not.
    """
    inputs: list[Any] = normals(size, 700)
    if direct is None:
        world, ends = flipping_world(size, checksum=checksum)
    else:
        world, ends = flipping_devices(size, direct=direct, checksum=checksum)
        inputs = world.upload(inputs)
    if victim is not None:
        ends[victim[0]].victim = victim[1:]
    found = outcomes([comm.iallreduce(x, **way) for comm, x in zip(world.comms, inputs, strict=True)])
    if isinstance(world, DeferredWorld):
        for rank, device in enumerate(world.devices):
            if device is not None and isinstance(found[rank], DeviceArray):
                found[rank] = device.download(found[rank])
    for comm in world.comms:  # nothing comes for those that still wait
        comm._engine.fail(CompcollError("the test is over"))
    return found, [end.lengths for end in ends]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way['algorithm']}-{way['codec']}")
def test_a_changed_bit_is_named_and_reaches_no_result(way: dict[str, Any]) -> None:
    rng = np.random.default_rng(len(str(way)))
    for size in (2, 3, 5):
        check_flips(size, way, rng, 4)


BETWEEN_DEVICES = [
    pytest.param(
        *(way, direct),
        id=f"{way['algorithm']}-{way['codec']}-{'direct' if direct else 'staged'}",
        marks=[pytest.mark.slow] * ((number // len(ALGORITHMS) + number + direct) % 2),  # each way is quick once
    )
    for number, way in enumerate(WAYS)
    for direct in (False, True)
]


@pytest.mark.parametrize(("way", "direct"), BETWEEN_DEVICES)
def test_a_changed_bit_on_its_way_between_devices(way: dict[str, Any], direct: bool) -> None:
    rng = np.random.default_rng(len(str(way)))
    for size in (2, 5):
        on_host, _ = run(size, way, None, True)
        for end, expected in zip(check_flips(size, way, rng, 2, direct), on_host, strict=True):
            assert end.tobytes() == expected.tobytes()


def check_flips(
    size: int, way: dict[str, Any], rng: np.random.Generator, times: int, direct: bool | None = None
) -> list[np.ndarray]:
    """Change single bits; what comes of none changed."""
    clean, lengths = run(size, way, None, True, direct)
    for _ in range(times):
        rank = int(rng.choice([rank for rank in range(size) if lengths[rank]]))
        message = int(rng.integers(len(lengths[rank])))
        bit = int(rng.integers(8 * lengths[rank][message]))
        found, _ = run(size, way, (rank, message, bit), True, direct)
        assert any(isinstance(end, WireCorrupted) for end in found), found
        for end, expected in zip(found, clean, strict=True):
            if isinstance(end, np.ndarray):
                assert end.tobytes() == expected.tobytes()
            else:
                assert end is None or isinstance(end, WireCorrupted), end
    return clean


def test_without_checksums_a_changed_bit_goes_unnoticed() -> None:
    """What the checksums are for."""
    way = {"codec": "cast", "algorithm": "ring"}
    clean, _ = run(2, way, None, False)
    found, _ = run(2, way, (0, 0, 100), False)
    assert not any(isinstance(end, CompcollError) for end in found)
    assert any(end.tobytes() != expected.tobytes() for end, expected in zip(found, clean, strict=True))


@examples(60)
@given(st.sampled_from(WAYS), st.integers(1, 6), st.integers(0, 3000), st.sampled_from([np.float32, np.float64]))
def test_results_are_those_without_checksums(way: dict[str, Any], size: int, n: int, dtype: type) -> None:
    inputs = normals(size, n, dtype)
    plain = World(size).allreduce(inputs, **way)
    world = World(size, checksum=True)
    checked = world.allreduce(inputs, **way)
    for a, b in zip(plain, checked, strict=True):
        assert a.tobytes() == b.tobytes()
    if way["codec"] is None:
        assert np.abs(checked[0] - exact_sum(inputs)).max(initial=0) <= 1e-5 * magnitude(inputs).max(initial=0)


def test_other_collectives() -> None:
    world = World(3, checksum=True)
    inputs = normals(3, 600)
    for result in world.run(lambda comm, x: comm.iallgather(x, codec="cast", algorithm="ring"), inputs):
        np.testing.assert_array_equal(result, [x.astype(np.float16).astype(np.float32) for x in inputs])
    for result in world.run(
        lambda comm, x: comm.iallgatherv(x, algorithm="ring"), [inputs[0][:5], inputs[1][:0], inputs[2]]
    ):
        np.testing.assert_array_equal(result, np.concatenate([inputs[0][:5], inputs[2]]))
    for result in world.run(lambda comm, x: comm.ibcast(x, 1), inputs):
        np.testing.assert_array_equal(result, inputs[1])
    for rank, result in enumerate(world.run(lambda comm, x: comm.ialltoall(x), inputs)):
        np.testing.assert_array_equal(result, np.concatenate([x[200 * rank : 200 * rank + 200] for x in inputs]))


def test_what_mpi_does_itself_has_no_checksums() -> None:
    with pytest.raises(InvalidArgument, match="checksum=1: True or False"):
        World(2, checksum=1)
    world = World(2, checksum=True)
    for error in world.errors([lambda comm: comm.iallreduce(np.ones(5, np.int32))] * 2):
        assert isinstance(error, InvalidArgument) and "checksum=True" in str(error)


def test_ranks_that_differ_in_checksums() -> None:
    world = World(2)
    world.comms[1] = Communicator(world.loopback.transports[1], checksum=True)
    errors = world.errors([lambda comm: comm.iallreduce(np.ones(50, np.float32), algorithm="ring")] * 2)
    assert all("with checksums" in str(error) for error in errors)
