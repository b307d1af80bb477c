"""Blocking calls that are replayed from a recording, in one process; for real: tests/mpi/check_recordings.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import World, normals

from compcoll import FP8, QSGD, ZFP, Cast, ErrorFeedback, MinMax, OneBit, _host
from compcoll.devices.host import HostDevice

CODECS: list[Any] = [
    None,
    ZFP(rate=8),
    MinMax(bits=3, block=64),
    Cast("float16"),
    OneBit(block=64),
    FP8(),
    QSGD(seed=5),
]


def blocking(world: World, inputs: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    """A thread for each rank."""
    with ThreadPoolExecutor(len(inputs)) as pool:
        calls = [pool.submit(comm.allreduce, x, **options) for comm, x in zip(world.comms, inputs, strict=True)]
        return [call.result(60) for call in calls]


@given(
    st.integers(2, 6),
    st.sampled_from(["ring", "direct", "recursive_doubling", "hierarchical"]),
    st.sampled_from(CODECS),
    st.integers(0, 5000),
    st.sampled_from([np.float32, np.float64, np.float16]),
    st.sampled_from(["sum", "mean"]),
)
@settings(max_examples=40, deadline=None)
def test_the_bits_of_the_algorithm(ranks: int, algorithm: str, codec: Any, n: int, dtype: Any, op: str) -> None:
    replayed, run = (World(ranks, ranks_per_node=2, seed=None, timeout=30) for _ in range(2))
    how = {"algorithm": algorithm, "codec": codec, "op": op}
    for seed in range(3):  # recorded, replayed, replayed
        inputs = normals(ranks, n, dtype, seed)
        for ours, theirs in zip(blocking(replayed, inputs, **how), run.allreduce(inputs, **how), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
    for one, other in zip(replayed.comms, run.comms, strict=True):
        a, b = one.stats, other.stats
        assert a is not None and b is not None
        assert (a.codec, a.algorithm, a.wire_nbytes, a.raw_sent_nbytes) == (
            *(b.codec, b.algorithm, b.wire_nbytes, b.raw_sent_nbytes),
        )


def test_calls_like_one_another_are_recorded_once() -> None:
    world = World(2, seed=None, timeout=30)
    inputs = normals(2, 1000)
    feedback = [ErrorFeedback() for _ in range(2)]
    for _ in range(3):
        blocking(world, inputs, codec="zfp", rate=8, algorithm="ring")
        blocking(world, inputs, codec="zfp", rate=8, algorithm="direct")
        with ThreadPoolExecutor(2) as pool:
            calls = [
                pool.submit(comm.allreduce, x, codec="zfp", rate=8, algorithm="ring", feedback=kept)
                for comm, x, kept in zip(world.comms, inputs, feedback, strict=True)
            ]
            assert all(np.isfinite(call.result(60)).all() for call in calls)
    for comm in world.comms:
        assert len(comm._recordings._kept) == 3  # the ring's with feedback is another


class _Message:
    """Comes at once."""

    def Start(self) -> None:
        pass

    def Test(self) -> bool:
        return True


def test_what_a_program_refuses() -> None:
    coder = HostDevice().coder(("zfp", 32, 0), "float32").bound
    program = _host.Program()
    wire = np.empty(coder.wire_nbytes(100), np.uint8)
    with pytest.raises(ValueError, match="nothing to sum"):
        program.encode(coder, 100, None, 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    with pytest.raises(ValueError, match="too short"):
        program.encode(coder, 150, (0, 0), 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    with pytest.raises(ValueError, match="no such array"):
        program.decode(coder, 100, None, 1.0, [wire], (3, 0), 1)
    program = _host.Program()
    program.start(_Message())
    program.wait(_Message())
    program.encode(coder, 100, (0, 50), 1.0, [], None, True, 1.0, 0, 0, wire, None, 1)
    program.decode(coder, 100, None, 1.0, [wire], (1, 0), 1)
    x, out = np.ones(150, np.float32), np.zeros(100, np.float32)
    for short in ((x[:149], out), (x, out[:99])):
        with pytest.raises(ValueError, match="shorter"):
            program.begin(*short, None, 0, 1, 0)
    assert program.done
    program.begin(x, out, None, 0, 1, 0)
    with pytest.raises(ValueError, match="has not ended"):
        program.begin(x, out, None, 0, 1, 0)
    assert not program.done and program.Test() and program.done and not program.Test()
    np.testing.assert_allclose(out, 1.0, rtol=1e-2)
    assert program.encode_seconds > 0 and program.decode_seconds > 0 and program.wait_seconds == 0
