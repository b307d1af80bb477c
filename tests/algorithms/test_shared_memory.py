"""Allreduces through shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, magnitude, normals
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from compcoll import Cast, MinMax
from compcoll.errors import CollectiveMismatch, UnknownAlgorithm
from compcoll.host.device import HostDevice
from compcoll.transports import shared

ROOM = shared.Room(2, 2)
PIECE = 256 * 1024 + 4096  # bytes, about
DTYPES: list[Any] = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def check_sums(results: list[np.ndarray], inputs: list[np.ndarray], factor: float = 1.0) -> None:
    """Within rounding of the exact sum, and the same bits everywhere."""
    dtype = inputs[0].dtype
    computed = np.float64 if dtype == np.float64 else np.float32
    digits = float(ml_dtypes.finfo(dtype).eps) / 2
    bound = len(inputs) * float(np.finfo(computed).eps) * magnitude(inputs) * factor
    exact = exact_sum(inputs) * factor
    if dtype.itemsize == 2:
        # A mean's terms are rounded, too; halves below the smallest normal number have fewer digits.
        bound += digits * (np.abs(exact) + (magnitude(inputs) * factor if factor != 1.0 else 0.0))
        bound += len(inputs) * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    for result in results:
        assert result.dtype == dtype
        assert np.all(np.abs(result.astype(np.float64) - exact) <= bound)
        np.testing.assert_array_equal(result.view(np.uint8), results[0].view(np.uint8))


@given(
    st.integers(1, 17),
    st.sampled_from(DTYPES),
    st.one_of(st.integers(0, 300), st.integers(0, 40_000)),
    st.sampled_from(["sum", "mean"]),
    st.integers(0, 1000),
)
@examples(150)
def test_sums(ranks: int, dtype: Any, n: int, op: str, seed: int) -> None:
    world = World(ranks, seed=seed)
    inputs = normals(ranks, n, dtype, seed)
    kept = [x.copy() for x in inputs]
    results = world.allreduce(inputs, op=op, algorithm="shared_memory")
    check_sums(results, inputs, 1 / ranks if op == "mean" else 1.0)
    for x, before in zip(inputs, kept, strict=True):
        np.testing.assert_array_equal(x, before)
    if ranks > 1:
        for comm in world.comms:
            assert comm.stats is not None and comm.stats.algorithm == "shared_memory"
            assert comm.stats.wire_nbytes == inputs[0].nbytes and comm.stats.ratio == 1.0


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nbytes", [PIECE - 1024, PIECE, PIECE + 2, 5 * PIECE + 998])
def test_buffers_of_many_pieces(ranks: int, dtype: Any, nbytes: int) -> None:
    world = World(ranks, seed=ranks)
    inputs = normals(ranks, nbytes // np.dtype(dtype).itemsize, dtype)
    check_sums(world.allreduce(inputs, algorithm="shared_memory"), inputs)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_place_and_out(ranks: int) -> None:
    world = World(ranks)
    inputs = normals(ranks, PIECE // 4 * 3 + 5)
    results = [np.empty_like(x) for x in inputs]
    for given_out in (True, False):
        buffers = results if given_out else [x.copy() for x in inputs]
        sums = world.loopback.run(
            [
                comm.iallreduce(x if given_out else buffer, out=buffer, algorithm="shared_memory")
                for comm, x, buffer in zip(world.comms, inputs, buffers, strict=True)
            ]
        )
        assert all(total is buffer for total, buffer in zip(sums, buffers, strict=True))
        check_sums(buffers, inputs)


def test_whole_numbers_exactly() -> None:
    world = World(6)
    inputs = [np.arange(200_000, dtype=np.float32) % (997 + rank) for rank in range(6)]
    for total in world.allreduce(inputs, algorithm="shared_memory"):
        np.testing.assert_array_equal(total, exact_sum(inputs))


def test_shapes_and_non_finite_values() -> None:
    world = World(3)
    inputs = [x.reshape(4, 5, 50) for x in normals(3, 1000)]
    inputs[1][0, 0, 0], inputs[2][3, 4, 49], inputs[0][1, 1, 1] = np.nan, np.inf, -np.inf
    for total in world.allreduce(inputs, algorithm="shared_memory"):
        assert total.shape == (4, 5, 50)
        assert np.isnan(total[0, 0, 0]) and total[3, 4, 49] == np.inf and total[1, 1, 1] == -np.inf
        assert np.isfinite(total).sum() == total.size - 3


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.sampled_from(range(3))), min_size=2, max_size=8), st.integers(0, 99)
)
@examples(25)
def test_several_in_flight_share_the_memory(calls: list[tuple[int, int]], seed: int) -> None:
    world = World(3, seed=seed)
    inputs = [normals(3, n, DTYPES[which], seed=seed + i) for i, (n, which) in enumerate(calls)]
    options = [{"algorithm": "shared_memory"}, {"algorithm": "ring"}, {"algorithm": "shared_memory", "op": "mean"}]
    pending = [
        [comm.iallreduce(x[comm.rank], **options[which]) for x, (_, which) in zip(inputs, calls, strict=True)]
        for comm in world.comms
    ]
    world.loopback.run([request for requests in pending for request in requests])
    for i, (_, which) in enumerate(calls):
        results = [requests[i].wait() for requests in pending]
        if which != 1:
            check_sums(results, inputs[i], 1 / 3 if which == 2 else 1.0)


def test_auto_takes_it_for_all_but_small_arrays_of_one_node() -> None:
    for ranks in (2, 4):
        world = World(ranks)
        for n, expected in ((16, "dissemination"), (20_000, "shared_memory"), (1 << 22, "shared_memory")):
            world.allreduce(normals(ranks, n))
            assert {comm.stats.algorithm for comm in world.comms if comm.stats is not None} == {expected}
    apart = World(4, ranks_per_node=2)
    apart.allreduce(normals(4, 100_000))
    assert "shared_memory" not in {comm.stats.algorithm for comm in apart.comms if comm.stats is not None}


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ({"codec": MinMax()}, np.float32),
        ({"op": "max"}, np.float32),
        ({}, np.int32),
    ],
)
def test_what_it_refuses(arguments: dict[str, Any], dtype: Any) -> None:
    world = World(2)
    x = np.arange(10).astype(dtype)
    errors = world.errors([lambda comm: comm.iallreduce(x, algorithm="shared_memory", **arguments)] * 2)
    for error in errors:
        assert isinstance(error, UnknownAlgorithm) and re.search("uncompressed float16.* of one node", str(error))
    check_sums(world.allreduce(normals(2, 50), algorithm="shared_memory"), normals(2, 50))


def test_refused_between_nodes_without_memory_and_with_checksums() -> None:
    nowhere = World(2)
    for comm in nowhere.comms:
        comm._collectives._setting = comm._collectives._setting._replace(shared=False)
    for world in (World(4, ranks_per_node=2), nowhere, World(2, checksum=True)):
        for error in world.errors(
            [lambda comm: comm.iallreduce(np.ones(9), algorithm="shared_memory")] * len(world.comms)
        ):
            assert isinstance(error, UnknownAlgorithm)


def test_a_mismatch_touches_nothing() -> None:
    world = World(2)
    inputs = [np.ones(100_000, np.float32), np.ones(100_001, np.float32)]
    starts = [lambda comm, x=x: comm.iallreduce(x, out=x, algorithm="shared_memory") for x in inputs]
    assert all(isinstance(error, CollectiveMismatch) for error in world.errors(starts))
    assert all(np.all(x == 1.0) for x in inputs)
    check_sums(world.allreduce(normals(2, 100_000), algorithm="shared_memory"), normals(2, 100_000))


def test_another_process_finds_the_memory_that_is_offered() -> None:
    made = shared.offer(ROOM)
    assert made is not None
    memory, offered = made
    assert len(memory) == ROOM.nbytes and offered.process == os.getpid()
    program = (
        "import sys; from compcoll.transports import shared; "
        "memory = shared.accept(shared.Offer(*map(int, sys.argv[1:4]), sys.argv[4])); memory[:5] = b'there'"
    )
    arguments = [str(offered.process), str(offered.descriptor), str(offered.nbytes), offered.mark]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60)
    assert memory[:5] == b"there"
    shared.withdraw(offered)
    assert shared.accept(offered) is None


def test_no_other_file_is_taken_for_the_memory(tmp_path: Any) -> None:
    made = shared.offer(ROOM)
    assert made is not None
    offered = made[1]
    try:
        assert shared.accept(offered) is not None
        assert shared.accept(offered._replace(mark=bytes(16).hex())) is None
        assert shared.accept(offered._replace(nbytes=offered.nbytes + 1)) is None
        assert shared.accept(offered._replace(process=2**22 + 1)) is None
        with (tmp_path / "memory").open("w+b") as file:
            file.write(bytes(offered.nbytes))
            file.flush()
            assert shared.accept(offered._replace(descriptor=file.fileno(), mark=bytes(16).hex())) is None
    finally:
        shared.withdraw(offered)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    from compcoll.kernels import _host

    device, memory = HostDevice(), ROOM.memory()
    raw, other = (Cast(name).coder(device, "float32").bound for name in ("float32", "float16"))
    for arguments in ((memory, 2, 2, raw), (memory, 0, 2, other), (bytearray(64), 0, 2, raw)):
        with pytest.raises(ValueError, match=r"no such|leaves values as they are|memory for a piece"):
            _host.SharedSum(*arguments, 1.0)
    transfer = _host.SharedSum(memory, 0, 2, raw, 1.0)
    assert transfer.done and not transfer.Test()
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="alike"):
        transfer.begin(x, np.ones(5, np.float32), None, 0)
    transfer.begin(x, np.ones(4, np.float32), None, 0)
    with pytest.raises(ValueError, match="has not ended"):
        transfer.begin(x, x, None, 0)


def test_naps_in_vain_are_the_last() -> None:
    """Of a wait: who waits then looks at its time-out in between, and naps again where it waits for something else."""
    from compcoll.kernels import _host

    coder, memory, milliseconds = Cast("float32").coder(HostDevice(), "float32").bound, ROOM.memory(), 40
    operations = [_host.SharedSum(memory, rank, 2, coder, 1.0) for rank in range(2)]
    x = np.ones(len(memory), np.float32)  # more pieces than there is room for at once

    theirs, ours = (
        _host.Collective(_host.Exchange(bytearray(1), []), bytes(16), 0, None, operation) for operation in operations
    )
    for call, naps in ((theirs, 0), (ours, milliseconds)):
        call.begin(x, np.empty_like(x), None, 0, 1, naps)

    def seconds(progress: bool) -> float:
        began = time.monotonic()
        assert ours.Test() == progress
        return time.monotonic() - began

    for _ in range(2):  # what was waited for has come: there may be naps again
        assert sum(seconds(False) >= 1e-3 * milliseconds for _ in range(50)) < 25
        assert theirs.Test() and not ours.done
        assert seconds(True) >= 1e-3 * milliseconds
