"""Tests that fail with faults which were once put in by hand and which nothing saw."""

from __future__ import annotations

import math
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals
from promises import FIXED, one_of_each

from compcoll import QSGD, ZFP, Cast, Codec, ErrorFeedback, IntSum, MinMax, OneBit, Sign
from compcoll.algorithms import sparse
from compcoll.codecs import FP8
from compcoll.codecs.sparse.sparsifier import FULL, WIRES
from compcoll.errors import InvalidArgument, WireCorrupted
from compcoll.host.device import HostDevice
from compcoll.host.encode_options import EncodeOptions
from compcoll.host.quantizer import integer_levels
from compcoll.plan import choose
from compcoll.sparse import DGCFeedback, TopK, VarianceFeedback, warmup_density

KERNELS = Path(__file__).resolve().parents[3] / "compcoll" / "kernels"
SETS = HostDevice.instruction_sets()


def test_values_below_normal_numbers_have_no_power_code() -> None:
    """They round to the smallest normal number or have no code: then they stay, and are not sent as 0."""
    x = np.array([2.0**-125, 2.0**-127, 2.0**-128, -(2.0**-140), 0], np.float32)
    coder = TopK(1.0, wire="packed").coder(HostDevice(), "float32")
    chosen = coder.select(x.size, x, 1.0, None)
    indices, sent = coder.sent(chosen)
    assert indices.tolist() == [0, 1] and sent.tolist() == [2.0**-125, 2.0**-126]
    (comm,), state = World(1).comms, ErrorFeedback()
    result = comm.allreduce(x, codec=TopK(1.0, wire="packed"), feedback=state)
    assert result.tolist() == [2.0**-125, 2.0**-126, 0, 0, 0]
    assert state.residual.tolist() == [0, -(2.0**-127), *x[2:].tolist()]


@pytest.mark.parametrize(
    ("indices", "entries"),
    [
        ([65533], [65533]),
        ([65534], [65534]),
        ([65535], [65535, 0]),
        ([65536], [65535, 1]),
        ([0, 65535], [0, 65534]),
        ([0, 65536, 196_606], [0, 65535, 0, 65535, 65534]),
    ],
)
def test_runs_of_long_gaps(indices: list[int], entries: list[int]) -> None:
    """65535 alone says that no element is sent there; a gap of 65534 is one entry."""
    n = 200_000
    kernels = HostDevice().selection("float32")
    chosen, values = np.array(indices, np.uint32), np.arange(1, len(indices) + 1, dtype=np.float32)
    number = WIRES.index("runs")
    wire = np.empty(kernels.wire_nbytes(n, chosen, number, FULL), np.uint8)
    kernels.write(n, chosen, values, number, FULL, 0.0, 0, wire)
    assert wire[32 : -4 * len(indices)].view(np.uint16).tolist() == entries
    got, sent = kernels.read(wire, n)
    assert got.tolist() == indices and sent.tolist() == values.tolist()


@pytest.mark.parametrize("count", [11, 1 << 32, 1 << 62])
@pytest.mark.parametrize("index_format", range(4))
def test_counts_above_the_buffer_are_refused_before_memory_is_taken(index_format: int, count: int) -> None:
    """Four bytes each, 2**62 elements take none: nothing else would stop them."""
    value_format = 2 if WIRES[index_format] == "packed" else 0
    wire = struct.pack("<4BidQQ", index_format, value_format, 4, 0, 0, 0.0, 10, count)
    with pytest.raises(WireCorrupted, match="more elements than the buffer"):
        HostDevice().selection("float32").read(np.frombuffer(wire, np.uint8).copy(), 10)


CODECS: list[Codec] = [ZFP(rate=8), MinMax(), QSGD(), OneBit(), FP8(), Cast("float16"), Sign("mean")]
CODECS += [codec for codec in one_of_each(FIXED) if codec.name not in {other.name for other in CODECS}]


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_no_feedback_keeps_what_is_not_finite(codec: Codec, instruction_set: str) -> None:
    """Neither a loss of NaN or Inf, nor one of a cast that overflows."""
    x, residual = unusual(), np.zeros(8192, np.float32)
    coder = codec.coder(HostDevice(1, instruction_set), "float32")
    wire = np.empty(coder.wire_nbytes(x.size), np.uint8)
    for _ in range(2):
        coder.encode(x.size, x, (), wire, EncodeOptions(residual=residual))
        assert np.isfinite(residual).all() and residual.any()


def test_no_feedback_of_sums_keeps_what_is_not_finite() -> None:
    world, feedbacks = World(2), [ErrorFeedback(), ErrorFeedback()]
    for _ in range(2):
        world.loopback.run(
            [c.iallreduce(unusual(), codec=IntSum(), feedback=f) for c, f in zip(world.comms, feedbacks)]
        )
        assert all(np.isfinite(each.state_dict()["residual"]).all() for each in feedbacks)


def unusual() -> np.ndarray:
    x = np.linspace(-1, 1, 8192, dtype=np.float32)
    x[5], x[2100], x[2500], x[3000] = np.nan, np.inf, -np.inf, 1e30
    return x


def test_a_search_ends_soon(tmp_path: Path) -> None:
    """Whatever counts do: no more trials than three bisections have. So without halving, too."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "compcoll is built with a C++ compiler"
    source = """
        #include <cstdio>
        #include "threshold_search.h"
        template <class F> int trials(F above) {
            int count = 0;
            compcoll::ThresholdSearch search{1, 2, 0.0, 1.0, 0.3, 0.0, 0.0, 0.0};
            search.run([&](double threshold) { return ++count < 100000 ? above(threshold) : 1.5; });
            return count;
        }
        int main() {
            for (double where : {1e-5, 0.01, 0.29, 0.5, 0.9, 0.99999})
                for (double many : {3.0, 1000.0, 1e9})
                    for (double few : {0.0, 0.9})
                        std::printf("%d\\n", trials([=](double t) { return t < where ? many * (2 - t) : few; }));
        }
    """
    program = tmp_path / "search"
    (tmp_path / "search.cpp").write_text(source)
    compile_it = [compiler, "-std=c++17", f"-I{KERNELS}", f"{program}.cpp", "-o", str(program)]
    subprocess.run(compile_it, check=True, timeout=60)
    told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=20).stdout
    most = [int(line) for line in told.split()]
    assert len(most) == 36 and max(most) <= 3 * math.ceil(math.log2(1e6)) + 3, most


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_highest_level_is_the_highest(ranks: int) -> None:
    """A product of rounded numbers may be a level too high; were it sent, sums of all ranks' would overflow."""
    levels = np.float32(integer_levels(IntSum(32, 8).levels(ranks), "float32"))
    x = np.random.default_rng(0).uniform(1, 2, 4096).astype(np.float32)
    step = x / levels
    too_high = x[np.rint(x * (np.float32(1) / step)) > levels][:64]
    assert too_high.size > 8
    for value in too_high:
        given = np.full(8, value, np.float32)
        result = World(ranks).allreduce([given] * ranks, codec=IntSum(32, 8), algorithm="ring")[0]
        np.testing.assert_allclose(result, ranks * value, rtol=1e-6)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
def test_zfp_marks_what_is_not_finite_alike(instruction_set: str, dtype: str, kind: float) -> None:
    """A one and zeros, whatever else is in the block: by fast paths, and by the portable one of a last, short block."""
    x = np.array([1.5, -2.0, kind, 3.0] * 33 + [kind], dtype)
    coder = ZFP(rate=8).coder(HostDevice(1, instruction_set), dtype)
    wire = np.zeros(coder.wire_nbytes(x.size), np.uint8)
    coder.encode(x.size, x, (), wire)
    blocks = wire[: 34 * 4].reshape(34, 4)
    assert (blocks == [1, 0, 0, 0]).all()


@pytest.mark.parametrize("codec", [MinMax(4), ZFP(rate=6), Cast("bfloat16")])
@pytest.mark.parametrize("per_node", [2, 3])
def test_feedback_inside_of_nodes_is_left_alone(codec: Codec, per_node: int) -> None:
    """Members of a node lose nothing, and what their leader lost between nodes is not told to them as if it was new."""
    size = 2 * per_node
    world, inputs = World(size, ranks_per_node=per_node), normals(size, 4000)
    feedbacks = [ErrorFeedback() for _ in inputs]
    exact, total, rounds = exact_sum(inputs), np.zeros(4000), 16
    for _ in range(rounds):
        results = world.loopback.run(
            [
                c.iallreduce(x, codec=codec, algorithm="hierarchical", feedback=f)
                for c, x, f in zip(world.comms, inputs, feedbacks)
            ]
        )
        assert len({result.tobytes() for result in results}) == 1
        total += results[0]
    kept = [f.state_dict()["residual"].astype(float) for f in feedbacks]
    for rank, residual in enumerate(kept):
        assert residual.any() == (rank % per_node == 0)
    # What was not sent is what is kept: nothing is lost or sent twice.
    np.testing.assert_allclose(total + sum(kept), rounds * exact, atol=2e-3)


def broadcast_object(monkeypatch: pytest.MonkeyPatch, answers: list[bytes]) -> None:
    """Let ranks announce that."""

    def gather(group: Any, own: bytes) -> Iterator[None]:
        yield from ()
        return answers

    monkeypatch.setattr(sparse, "gather", gather)


def ended(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_announced_lengths_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes, good in ((0, True), (100, True), (101, False), (1 << 60, False)):
        broadcast_object(monkeypatch, [struct.pack("<Q", 100), struct.pack("<Q", nbytes)])
        steps = sparse._lengths(None, None, 100, [100, 100])  # type: ignore[arg-type]
        if good:
            assert ended(steps) == [100, nbytes]
        else:
            with pytest.raises(WireCorrupted, match=f"rank 1 announced a sparse wire of {nbytes} bytes"):
                ended(steps)


def test_announced_regions_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks of 100 elements: two quantiles and a count each."""
    coder = SimpleNamespace(quantiles=lambda chosen, parts: [30, 60])
    job: Any = SimpleNamespace(group=SimpleNamespace(size=3), n=100, coder=coder)
    chosen: Any = SimpleNamespace(indices=np.arange(7))
    line = struct.Struct("<3Q")
    for odd, message in (
        ((30, 60, 7), None),
        ((101, 60, 7), "beyond the 100"),
        ((30, 60, 101), "beyond the 100"),
        ((1 << 63, 60, 7), "beyond the 100"),
        ((100, 0, 7), "out of order"),
    ):
        others = (30, 60, 7) if message != "out of order" else (100, 0, 7)
        broadcast_object(monkeypatch, [line.pack(*others), line.pack(*odd), line.pack(*others)])
        if message is None:
            assert ended(sparse._regions(job, chosen)) == ([(0, 30), (30, 60), (60, 100)], [7, 7, 7])
        else:
            with pytest.raises(WireCorrupted, match=message):
                ended(sparse._regions(job, chosen))


@pytest.mark.parametrize(("seconds", "expected"), [(1.1, "native"), (0.96, "native"), (0.94, "ring")])
def test_auto_compresses_where_that_is_clearly_faster(seconds: float, expected: str) -> None:
    found = [
        choose.Option("native", None, 1.0, 0.0),
        choose.Option("ring", MinMax(), seconds, 1e-2),
        choose.Option("direct", MinMax(), 2.0, 1e-3),
    ]
    assert choose.best(found).algorithm == expected


def test_scales_are_agreed_on_what_is_sent() -> None:
    """The feedback holds a hundred times what the values are: levels that end at the values would cut it off."""
    world, inputs = World(3), [np.full(64, 0.01 * (rank + 1), np.float32) for rank in range(3)]
    feedbacks = [ErrorFeedback() for _ in inputs]
    for comm, x, feedback in zip(world.comms, inputs, feedbacks):
        comm._prepare_feedback(feedback, x)
        feedback.residual[:] = 1.0
    results = world.loopback.run(
        [
            c.iallreduce(x, codec=IntSum(16, 64), algorithm="ring", feedback=f)
            for c, x, f in zip(world.comms, inputs, feedbacks)
        ]
    )
    np.testing.assert_allclose(results[0], 3.06, rtol=1e-3)


def test_long_contributions_travel_in_blocks() -> None:
    """A ring of p ranks passes each wire on in many messages: one long one keeps nobody waiting for all of it."""
    world, n = World(3), 1 << 20
    inputs = [x if rank == 0 else np.zeros_like(x) for rank, x in enumerate(normals(3, n))]
    longest = 0
    for transport in world.loopback.transports:
        send = transport.isend

        def counted(wire: Any, *arguments: Any, send: Any = send, **named: Any) -> Any:
            nonlocal longest
            longest = max(longest, wire.nbytes)
            return send(wire, *arguments, **named)

        transport.isend = counted  # type: ignore[method-assign]
    results = world.allreduce(inputs, codec=TopK(0.5), algorithm="sparse_ring")
    nbytes = world.comms[0].stats.wire_nbytes  # type: ignore[union-attr]
    assert np.count_nonzero(results[1]) >= n // 2
    assert 0 < longest <= nbytes / 4


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [(1, [0.001, 0.001]), (2, [0.25, 0.001]), (3, [0.25, 0.0625, 0.001, 0.001]), (9, [0.25, 0.0625, 0.015625])],
)
def test_a_warm_up_ends_when_it_shall(epochs: int, expected: list[float]) -> None:
    """Of five epochs, as published, one more would make no difference: a quarter of the fourth is less than 0.1 %."""
    assert [warmup_density(epoch, 0.001, epochs) for epoch in range(len(expected))] == expected


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_small_arrays_are_reduced_in_one_order(ranks: int) -> None:
    """Own values first would give other bits on each rank: of sums of three, and of zeros of either sign."""
    sums = World(ranks).allreduce(normals(ranks, 300, scale=1e3), algorithm="dissemination")
    assert len({result.tobytes() for result in sums}) == 1
    for op in ("max", "min"):
        zeros = [np.array([(-1.0) ** rank * 0.0]) for rank in range(ranks)]
        results = World(ranks).allreduce(zeros, op=op, algorithm="dissemination")
        assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_that_are_scattered_lose_nothing(algorithm: str, ranks: int) -> None:
    """What a sparsifier left out of one partial sum is sent later: all results and what is kept are all that was."""
    world, n = World(ranks), 600 * ranks
    inputs = normals(ranks, n)
    feedbacks = [ErrorFeedback() for _ in inputs]
    total, missing = np.zeros(n), []
    for rounds in range(1, 17):
        results = world.loopback.run(
            [
                c.ireduce_scatter(x, codec=TopK(0.25), algorithm=algorithm, feedback=f)
                for c, x, f in zip(world.comms, inputs, feedbacks)
            ]
        )
        total += np.concatenate(results)
        kept = sum(f.state_dict()["residual"].astype(float) for f in feedbacks)
        np.testing.assert_allclose(total + kept, rounds * exact_sum(inputs), atol=1e-4)
        missing.append(np.linalg.norm(kept))
    # Were it kept and not sent, twice as many calls would miss twice as much.
    assert 0 < missing[15] < 1.5 * missing[7]


@pytest.mark.parametrize("feedback", [DGCFeedback(), VarianceFeedback()])
def test_states_of_whole_sums_are_refused_where_these_are_scattered(feedback: ErrorFeedback) -> None:
    how: dict[str, Any] = {"codec": TopK(0.5), "algorithm": "ring", "feedback": feedback}
    for raised in World(2).errors([lambda comm: comm.ireduce_scatter(np.ones(8, np.float32), **how)] * 2):
        assert type(raised) is InvalidArgument and "is for allreduces" in str(raised)
