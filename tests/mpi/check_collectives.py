"""The promises over real MPI: same bits on every rank, errors within bounds, stats that tell the truth."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from mpi.world import MPIWorld, raised
from mpi4py import MPI
from oracles import collectives as oracles
from promises import (
    ADDITIVE,
    ALGORITHMS,
    CODECS,
    DIFFERENCES,
    RECORDS,
    Case,
    algorithms_of,
    check_codec,
    encodings,
    error_bound,
    exact,
    stats_of,
)

import compcoll
from compcoll import ZFP, Communicator, ErrorFeedback, IntSum, MinMax, Sign
from compcoll.codecs.base import UPDATING
from compcoll.transports.mpi import MPITransport


def normals(comm: MPI.Intracomm, n: int, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """This rank's values, and all ranks' sum in float64."""
    everybody = [np.random.default_rng([n, rank]).standard_normal(n).astype(dtype) for rank in range(comm.size)]
    return everybody[comm.rank], np.sum([x.astype(np.float64) for x in everybody], axis=0)


def assert_same_bits(comm: MPI.Intracomm, result: np.ndarray) -> None:
    assert len(set(comm.allgather(hashlib.sha256(result.tobytes()).digest()))) == 1


def assert_close(result: np.ndarray, expected: np.ndarray, relative: float, hops: int) -> None:
    largest = np.abs(expected).max(initial=0)
    assert np.abs(result.astype(np.float64) - expected).max(initial=0) <= relative * hops * (largest + 1)


def check_codecs(comm: MPI.Intracomm, algorithm: str) -> None:
    """Every codec through every promise."""
    world = MPIWorld(comm)
    for codec in (*CODECS, *ADDITIVE):
        check_codec(Case(codec, algorithm), world)
    world.free()


def check_allreduce(comm: MPI.Intracomm) -> None:
    """Blocking calls of all sizes."""
    world = MPIWorld(comm)
    for codec, algorithm, n in itertools.product(CODECS, [*ALGORITHMS, "auto"], [0, 1, 70000]):
        case = Case(codec, algorithm, n)
        inputs = case.inputs(world)
        x, before = inputs[comm.rank], inputs[comm.rank].copy()
        result = world.comms[0].allreduce(x, codec=codec, algorithm=algorithm)
        assert_same_bits(comm, result)
        assert x.tobytes() == before.tobytes()
        bound = error_bound(case, inputs, encodings(world, stats_of(world)))
        assert np.abs(result.astype(np.float64) - exact(case, inputs)).max(initial=0) <= bound, case
    world.free()


def check_shared_memory(comm: MPI.Intracomm) -> None:
    """Several at once, in line with others, in and out of place, of all sizes."""
    communicator = Communicator(comm)
    for n in (0, 1, 63, 5000, 65856, 65857, 400_001):
        x, expected = normals(comm, n)
        result = communicator.allreduce(x, algorithm="shared_memory")
        pending = [communicator.iallreduce(x, algorithm="shared_memory") for _ in range(3)]
        pending.insert(1, communicator.iallreduce(x, codec="cast", dtype="float32", algorithm="ring"))
        again = communicator.allreduce(x.copy(), algorithm="shared_memory")
        assert_same_bits(comm, result)
        for got in [result, again, *(request.wait() for request in pending)]:
            assert_close(got, expected, 1e-6, comm.size)
        assert again.tobytes() == result.tobytes()
        assert communicator.allreduce(x, out=x, algorithm="shared_memory").tobytes() == result.tobytes()
        stats = communicator.stats
        assert stats is not None and stats.algorithm == ("shared_memory" if comm.size > 1 else "copy")
    communicator.free()


def check_ranks_part(comm: MPI.Intracomm) -> None:
    """Two ranks that sleep in turns on one core take one each, though the system lets them be."""
    allowed = os.sched_getaffinity(0)
    if comm.size != 2 or len(allowed) < 2 or len(set(comm.allgather(frozenset(allowed)))) > 1:
        return
    core_of_this = ctypes.CDLL(None).sched_getcpu
    communicator = Communicator(comm)
    x = np.ones(1 << 20, np.float32)
    communicator.allreduce(x, algorithm="shared_memory")
    os.sched_setaffinity(0, {min(allowed)})
    communicator.allreduce(x, algorithm="shared_memory")
    os.sched_setaffinity(0, allowed)
    # No call of MPI in between: ranks that both look for messages again and again are parted by the system.
    cores = []
    for _ in range(300):
        communicator.allreduce(x, algorithm="shared_memory")
        cores.append(core_of_this())
    assert os.sched_getaffinity(0) == allowed
    assert any(one != other for one, other in zip(*comm.allgather(cores), strict=True))
    communicator.free()


def check_large_messages(comm: MPI.Intracomm) -> None:
    """Beyond every eager limit, several segments a chunk, many pieces."""
    x, expected = normals(comm, 3_000_001)
    plain = compcoll.allreduce(x, algorithm="shared_memory", comm=comm)
    assert_same_bits(comm, plain)
    assert_close(plain, expected, 1e-6, comm.size)
    for codec, bound in ((ZFP(rate=8), 0.5), (ZFP(rate=16), 2e-3), (MinMax(), 0.02)):
        for algorithm in ALGORITHMS:
            result = compcoll.allreduce(x, codec=codec, algorithm=algorithm, comm=comm)
            assert_same_bits(comm, result)
            assert_close(result, expected, bound, comm.size)


def check_element_types(comm: MPI.Intracomm) -> None:
    plain = [(None, "auto"), (None, "native"), (None, "shared_memory")]
    for dtype, op in itertools.product([np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ["sum", "mean"]):
        for codec, algorithm in [*plain, (MinMax(), "ring"), (ZFP(rate=8), "direct")]:
            for n in (10, 50000):
                x, expected = normals(comm, n, dtype)
                result = compcoll.allreduce(x, op=op, codec=codec, algorithm=algorithm, comm=comm)
                assert result.dtype == x.dtype
                assert_same_bits(comm, result)
                scale = comm.size if op == "mean" else 1
                assert_close(result, expected / scale, 0.5 if isinstance(codec, ZFP) else 0.04, 1)


def check_uncompressed_types_and_operations(comm: MPI.Intracomm) -> None:
    for dtype in (np.int8, np.uint16, np.int32, np.int64, np.float32, np.complex64, np.complex128, np.bool_):
        x = (np.arange(20) % 3 + comm.rank % 2).astype(dtype)
        expected = np.empty_like(x)
        op = MPI.LOR if dtype is np.bool_ else MPI.SUM
        comm.Allreduce(x, expected, op)
        np.testing.assert_array_equal(compcoll.allreduce(x, op=op, comm=comm), expected)
    x = np.arange(5, dtype=np.float32) + comm.rank
    last = np.arange(5, dtype=np.float32) + comm.size - 1
    np.testing.assert_array_equal(compcoll.allreduce(x, op="max", comm=comm), last)
    np.testing.assert_array_equal(compcoll.allreduce(x.astype(np.float16), op=MPI.MAX, comm=comm), last)
    np.testing.assert_array_equal(compcoll.allreduce(x, op="min", comm=comm), np.arange(5))
    np.testing.assert_array_equal(compcoll.iallreduce(x, op="max", comm=comm).wait(), last)
    bits = np.array([1 << comm.rank % 8], np.int32)
    assert compcoll.allreduce(bits, op="bor", comm=comm)[0] == sum({1 << rank % 8 for rank in range(comm.size)})
    mean = compcoll.allreduce(np.array([comm.rank + 1j]), op="mean", comm=comm)
    np.testing.assert_allclose(mean, [(comm.size - 1) / 2 + 1j])


def check_other_collectives(comm: MPI.Intracomm) -> None:
    p, rank = comm.size, comm.rank
    assert algorithms_of("allgather") == algorithms_of("allgatherv") == algorithms_of("reduce_scatter")
    ours = [(MinMax(), name) for name in algorithms_of("reduce_scatter")]
    for codec, algorithm in [(None, "auto"), (ZFP(rate=16), "auto"), *ours]:
        x = np.random.default_rng(rank).standard_normal((p * 3, 50)).astype(np.float32)
        everybody = np.stack(comm.allgather(x))
        bound = 0 if codec is None else 0.1 * p
        block = compcoll.reduce_scatter(x, codec=codec, algorithm=algorithm, comm=comm)
        exact = everybody.astype(np.float64).sum(axis=0)
        assert np.abs(block - exact[rank * 3 : rank * 3 + 3]).max() <= bound + 1e-5
        gathered = compcoll.allgather(x, codec=codec, algorithm=algorithm, comm=comm)
        assert_same_bits(comm, gathered)
        assert np.abs(gathered - everybody).max() <= bound
        mine = np.ascontiguousarray(x[: rank % 3])
        joined = compcoll.allgatherv(mine, codec=codec, algorithm=algorithm, comm=comm)
        assert_same_bits(comm, joined)
        exact_joined = np.concatenate([everybody[r][: r % 3] for r in range(p)])
        assert joined.shape == exact_joined.shape
        assert np.abs(joined - exact_joined).max(initial=0) <= bound
        for root in {0, p - 1, p // 2}:
            told = compcoll.bcast(x, root, codec=codec, comm=comm)
            assert_same_bits(comm, told)
            assert np.abs(told - everybody[root]).max() <= bound
        blocks = compcoll.alltoall(x, codec=codec, comm=comm)
        exact_blocks = np.concatenate([everybody[r][rank * 3 : rank * 3 + 3] for r in range(p)])
        assert np.abs(blocks - exact_blocks).max() <= bound
        for root in {0, p - 1, p // 2}:
            mean = compcoll.reduce(x, root, op="mean", codec=codec, algorithm=algorithm, comm=comm)
            stacked = compcoll.gather(x, root, codec=codec, comm=comm)
            if rank == root:
                assert np.abs(mean - exact / p).max() <= bound + 1e-5
                assert np.abs(stacked - everybody).max() <= bound
            else:
                assert mean is None and stacked is None
            part = compcoll.scatter(x, root, codec=codec, comm=comm)
            assert np.abs(part - everybody[root][rank * 3 : rank * 3 + 3]).max() <= bound
        counts = oracles.counts_of(p * 3, p, rank)
        for counted in (counts, np.array(counts)):
            rows = compcoll.alltoallv(x, counted, codec=codec, comm=comm)
            right = oracles.expected("alltoallv", everybody, rank)
            assert rows.shape == right.shape and np.abs(rows - right).max(initial=0) <= bound
    counts = np.arange(4, dtype=np.int64) + rank
    np.testing.assert_array_equal(compcoll.allgather(counts, comm=comm), [np.arange(4) + r for r in range(p)])
    np.testing.assert_array_equal(compcoll.bcast(counts, p - 1, comm=comm), np.arange(4) + p - 1)


def check_empty_arrays(comm: MPI.Intracomm) -> None:
    """By MPI's own and by our own algorithms: results have no elements, and their right shapes."""
    p, root = comm.size, comm.size - 1
    x = np.empty((0, 3), np.float32)
    for algorithms in (("native",) * 4, ("direct", "linear", "linear", "pairwise"), ("auto",) * 4):
        for codec in (None, "cast") if algorithms[0] != "native" else (None,):
            options = [{"algorithm": name, "codec": codec, "comm": comm} for name in algorithms]
            total = compcoll.reduce(x, root, **options[0])
            stacked = compcoll.gather(x, root, **options[1])
            if comm.rank == root:
                assert total.shape == (0, 3) and stacked.shape == (p, 0, 3)
            else:
                assert total is stacked is None
            assert compcoll.scatter(x, root, **options[2]).shape == (0, 3)
            assert compcoll.alltoallv(x, [0] * p, **options[3]).shape == (0, 3)
            rows = np.ones((comm.rank, 3), np.float32)  # all for rank 0
            got = compcoll.alltoallv(rows, [comm.rank] + [0] * (p - 1), **options[3])
            assert got.shape == (sum(range(p)) if comm.rank == 0 else 0, 3) and (got == 1).all()


def check_mpis_own_reduce(comm: MPI.Intracomm) -> None:
    """All types and operations, blocking and not, in place and elsewhere; only the root has a result."""
    p, rank = comm.size, comm.rank
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.int64, np.complex64):
        for op in ("sum", "prod") if dtype is np.complex64 else ("sum", "max", "prod"):
            whole = np.arange(12).reshape(3, 4) % (2 if op == "prod" else 5)  # products that 16 bits hold exactly
            combine = {"sum": np.sum, "max": np.max, "prod": np.prod}[op]
            right = combine([(whole + each % 2).astype(np.float64) for each in range(p)], axis=0)
            for root in {0, p - 1}:
                x = (whole + rank % 2).astype(dtype)
                given = {"op": op, "algorithm": "native", "comm": comm}
                for got in (compcoll.reduce(x, root, **given), compcoll.ireduce(x, root, **given).wait()):
                    assert (got is None) == (rank != root)
                    assert got is None or (got.dtype == x.dtype and np.array_equal(got.astype(np.complex128), right))
                for start in (compcoll.reduce, lambda *a, **k: compcoll.ireduce(*a, **k).wait()):
                    x = (whole + rank % 2).astype(dtype)
                    got = start(x, root, out=x, **given)
                    kept = right if rank == root else (whole + rank % 2)
                    assert np.array_equal(x.astype(np.complex128), kept) and got is (x if rank == root else None)
    half = compcoll.reduce(np.full(3, rank, np.float16), 0, op="mean", algorithm="native", comm=comm)
    assert half is None or (half == (p - 1) / 2).all()


def check_one_ranks_bad_arguments(comm: MPI.Intracomm) -> None:
    """A wrong root, or wrong counts, on one rank: all ranks raise, and the communicator stays usable."""
    p = comm.size
    ours, x = Communicator(comm), np.arange(6 * p, dtype=np.float32)
    good = [6] * p
    bad: list[tuple[str, str, dict[str, Any]]] = [
        *((name, "is not a rank", {"root": root}) for name in ("reduce", "gather", "scatter") for root in (p, -1, 0.0)),
        *(("alltoallv", "rows for each rank", {"counts": counts}) for counts in (good[1:], [*good[1:], 5], 6, None)),
        ("alltoallv", "rows for each rank", {"counts": [-1, *good[2:], 13] if p > 1 else [-1]}),
        ("alltoallv", "rows for each rank", {"counts": [float(count) for count in good]}),
        *((name, "the result is", {"root": p - 1, "out": np.empty(5 * p)}) for name in ("reduce", "gather", "scatter")),
    ]
    for name, why, given in bad:
        usual = {"counts": good} if name == "alltoallv" else {"root": p - 1}
        for method in (name, f"i{name}"):
            arguments = given if comm.rank == p - 1 else usual

            def call(method: str = method, arguments: dict[str, Any] = arguments) -> None:
                result = getattr(ours, method)(x, **arguments)
                if method.startswith("i"):
                    result.wait()

            assert why in str(raised(call)), (name, given)
            assert (ours.allreduce(np.ones(2)) == p).all()
    ours.free()


def check_numbers_are_added_by_any_algorithm(comm: MPI.Intracomm) -> None:
    """MPI's own included: its integers add up to the same bits as ours."""
    for n in (0, 5, 70001):
        x, expected = normals(comm, n)
        results = []
        for algorithm in [*ALGORITHMS, "native"]:
            for codec in (IntSum(), Sign()):
                result = compcoll.allreduce(x, codec=codec, algorithm=algorithm, comm=comm)
                assert_same_bits(comm, result)
                results.append(result)
            stats = compcoll.get_communicator(comm).stats
            assert stats is not None and stats.codec == repr(Sign())
            known = algorithm != "native"  # MPI does not tell what it sends
            assert (stats.wire_nbytes >= 0) == known and (known or (stats.wire_nbytes, stats.ratio) == (-1, 1))
        for result in results[::2]:
            assert_close(result, expected, 1e-3, comm.size)
            assert result.tobytes() == results[0].tobytes()
        votes = np.sign(np.sum([np.sign(y) for y in comm.allgather(x)], axis=0))
        for result in results[1::2]:
            np.testing.assert_array_equal(result, votes)


def check_stats(comm: MPI.Intracomm) -> None:
    n = 64 * 1024 * comm.size
    x, _ = normals(comm, n)
    compcoll.allreduce(x, codec="zfp", rate=8, algorithm="ring", comm=comm)
    stats = compcoll.get_communicator(comm).stats
    assert stats is not None
    if comm.size == 1:
        assert (stats.codec, stats.algorithm) == (None, "copy")
        return
    assert (stats.codec, stats.algorithm) == (repr(ZFP(rate=8)), "ring")
    assert stats.wire_nbytes == 2 * (comm.size - 1) * n // comm.size
    assert stats.raw_nbytes == 4 * n and stats.ratio == 4.0
    parts = stats.encode_seconds + stats.decode_seconds + stats.wait_seconds
    assert 0 < parts <= stats.total_seconds
    compcoll.allreduce(x[:100], codec="zfp", comm=comm)
    stats = compcoll.get_communicator(comm).stats
    assert stats is not None and stats.codec is None
    in_pairs = comm.size & comm.size - 1 == 0
    sums = comm.size.bit_length() - 1 if in_pairs else comm.size - 1
    assert stats.wire_nbytes == {"native": -1, "dissemination": sums * 400, "shared_memory": 400}[stats.algorithm]


def check_feedback(comm: MPI.Intracomm) -> None:
    x, expected = normals(comm, 20000)
    feedback, total = ErrorFeedback(), np.zeros(x.size)
    single = compcoll.allreduce(x, codec="zfp", rate=8, algorithm="ring", comm=comm)
    for _ in range(20):
        total += compcoll.allreduce(x, codec="zfp", rate=8, algorithm="ring", comm=comm, feedback=feedback)
    assert comm.size == 1 or np.std(total / 20 - expected) < np.std(single - expected) / 4


def check_differences(comm: MPI.Intracomm) -> None:
    """Codecs that send differences give exact results. If previous values differ, all ranks raise, and can go on."""
    communicator, last = Communicator(comm, timeout=50), comm.size - 1
    for codec, collective, dtype in itertools.product(DIFFERENCES, UPDATING, (ml_dtypes.bfloat16, np.float64)):
        everybody = [np.random.default_rng(rank).standard_normal(70_001).astype(dtype) for rank in range(comm.size)]
        expected = oracles.expected(collective, everybody, comm.rank, root=last)
        root: dict[str, Any] = {"root": last} if collective == "bcast" else {}
        for algorithm in (*algorithms_of(collective), "auto"):
            x = everybody[comm.rank]
            out = oracles.previous(codec, collective, everybody, root=last)["out"]
            if collective == "bcast" and comm.rank != last:
                x = out
            call = partial(getattr(communicator, collective), x, out=out, algorithm=algorithm, **root)
            assert call(codec=codec) is out and out.tobytes() == expected.tobytes()
            if comm.size > 1 and algorithm != "auto":
                assert communicator.stats is not None and communicator.stats.codec == repr(codec)
                out.reshape(-1)[5] += dtype(comm.rank == 0)
                before, error = out.tobytes(), raised(partial(call, codec=codec))
                assert isinstance(error, compcoll.errors.ReferenceMismatch) and "rank 0" in str(error)
                assert out.tobytes() == before
                for again in (None, codec):
                    call(codec=again, **({"algorithm": "auto"} if again is None else {}))
                    assert out.tobytes() == expected.tobytes()
    communicator.free()


def check_several_in_flight(comm: MPI.Intracomm) -> None:
    algorithms = [name for name, _ in zip(itertools.cycle(ALGORITHMS), range(max(4, len(ALGORITHMS))))]
    inputs = [normals(comm, n) for n, _ in zip(itertools.cycle((1000, 0, 300000, 17)), algorithms)]
    for progress in ("wait", "thread"):
        communicator = Communicator(comm, codec="minmax", progress=progress)
        requests = [communicator.iallreduce(x, algorithm=a) for (x, _), a in zip(inputs, algorithms, strict=True)]
        exact = communicator.allreduce(np.ones(3, np.float32), codec=None)
        assert exact.tolist() == [comm.size] * 3
        for request, (_, expected) in reversed(list(zip(requests, inputs, strict=True))):
            result = request.wait()
            assert request.done and request.test()
            assert_same_bits(comm, result)
            assert_close(result, expected, 0.04, comm.size)
        communicator.free()


def check_progress_by_itself(comm: MPI.Intracomm) -> None:
    """With a thread a collective ends without anybody waiting for it."""
    import time

    communicator = Communicator(comm, progress="thread")
    x, expected = normals(comm, 200000)
    request = communicator.iallreduce(x, codec="zfp", rate=16, algorithm="ring")
    deadline = time.monotonic() + 30
    while not request.done and time.monotonic() < deadline:
        time.sleep(0.001)
    assert request.done
    assert_close(request.wait(), expected, 2e-3, comm.size)
    communicator.free()


def check_the_callers_messages_advance_meanwhile(comm: MPI.Intracomm) -> None:
    """A rank that waits for the others in a collective may have what they wait for first."""
    message, n = np.full(4 << 20, comm.rank, np.uint8), np.ones(1, np.float32)
    communicator = Communicator(comm, timeout=40)
    for _ in range(3):
        sending = comm.Isend(message, (comm.rank + 1) % comm.size, 5) if comm.rank % 2 == 0 else None
        if sending is None or (comm.size % 2 and comm.rank == 0):
            received = np.empty_like(message)
            comm.Recv(received, (comm.rank - 1) % comm.size, 5)
            assert np.all(received == (comm.rank - 1) % comm.size)
        assert communicator.allreduce(n).tolist() == [comm.size]
        if sending is not None:
            sending.Wait()
    communicator.free()


def check_communicators_are_kept_with_their_owner(comm: MPI.Intracomm) -> None:
    kept = compcoll.get_communicator(comm)
    assert compcoll.get_communicator(comm) is kept
    other = comm.Dup()
    assert compcoll.get_communicator(other) is not kept
    x = np.ones(4, np.float32)
    assert compcoll.allreduce(x, comm=other)[0] == comm.size
    other.Free()
    half = comm.Split(comm.rank % 2, comm.rank)
    assert compcoll.allreduce(x, comm=half)[0] == half.size
    half.Free()
    assert compcoll.allreduce(x)[0] == comm.size


def check_buffers_are_reused(comm: MPI.Intracomm) -> None:
    communicator = Communicator(comm, codec="zfp", algorithm="ring")
    x, _ = normals(comm, 100000)
    out = np.empty_like(x)

    def slabs() -> list[int]:
        return [
            slab.ctypes.data
            for slot in (communicator._slots.alone, *communicator._slots.rotating)
            for slab in slot.arena.slabs
        ]

    def several() -> None:
        communicator.allreduce(x, out=out)
        for request in [communicator.iallreduce(x) for _ in range(6)]:
            request.wait()

    for _ in range(3):
        several()
    before = slabs()
    assert comm.size == 1 or before
    for _ in range(5):
        several()
    assert slabs() == before
    communicator.free()


def check_several_of_mpis_own_in_flight(comm: MPI.Intracomm) -> None:
    """MPI matches nonblocking collectives by the order of calls: it must be the same on all ranks."""
    import time

    communicator = Communicator(comm)
    p, rank = comm.size, comm.rank
    for iteration in range(60):
        requests = [communicator.iallreduce(np.full(4, float(k))) for k in range(6)]
        requests.append(communicator.iallgather(np.full(2, rank)))
        requests.append(communicator.ibcast(np.full(3, rank), iteration % p))
        requests.append(communicator.ialltoall(np.arange(p) + p * rank))
        requests.append(communicator.ireduce(np.full(3, rank), iteration % p))
        requests.append(communicator.igather(np.full(2, rank), iteration % p))
        requests.append(communicator.iscatter(np.arange(p) + p * rank, iteration % p))
        requests.append(communicator.ialltoallv(np.arange(p) + p * rank, [1] * p))
        if (iteration + rank) % 3 == 0:
            time.sleep(0.0001)
        results = [request.wait() for request in requests]
        assert [result[0] for result in results[:6]] == [k * p for k in range(6)]
        assert results[6][:, 0].tolist() == list(range(p))
        assert results[7].tolist() == [iteration % p] * 3
        assert results[8].tolist() == results[12].tolist() == [rank + p * other for other in range(p)]
        assert results[11].tolist() == [rank + p * (iteration % p)]
        if rank == iteration % p:
            assert results[9].tolist() == [sum(range(p))] * 3 and results[10][:, 0].tolist() == list(range(p))
        else:
            assert results[9] is results[10] is None
    communicator.free()


class Late:
    """A request of MPI's that is seen to end late."""

    def __init__(self, request: Any) -> None:
        self.request, self.looks = request, 0

    def Test(self) -> bool:
        self.looks += 1
        return self.looks > 20 and self.request.Test()


class LateMPI(MPITransport):
    """MPI whose own nonblocking collectives end late."""


for _name in [name for name in dir(MPITransport) if name.startswith("i") and name[1:] in RECORDS["native"].collectives]:

    def _late(self: LateMPI, *args: Any, _name: str = _name, **options: Any) -> Late:
        return Late(getattr(super(LateMPI, self), _name)(*args, **options))

    setattr(LateMPI, _name, _late)


def check_equal_calls_in_flight(comm: MPI.Intracomm) -> None:
    """By every algorithm, of every collective: more of them than there are slots, waited for in the reverse order."""
    communicator, last, n = Communicator(LateMPI(comm), timeout=50), comm.size - 1, 12 * comm.size
    for collective in RECORDS["native"].collectives:
        given = oracles.arguments(collective, n, comm.size, comm.rank, last)
        for algorithm in ("native", *algorithms_of(collective)):
            everybody = [
                [np.arange(n, dtype=np.float32) + 100 * rank + call for rank in range(comm.size)] for call in range(6)
            ]
            start = partial(getattr(communicator, f"i{collective}"), algorithm=algorithm, codec=None, **given)
            requests = [start(inputs[comm.rank]) for inputs in everybody]
            for inputs, request in reversed(list(zip(everybody, requests, strict=True))):
                result, expected = request.wait(), oracles.expected(collective, inputs, comm.rank, last)
                assert (result is None) == (expected is None), (collective, algorithm)
                if expected is not None:
                    np.testing.assert_array_equal(result, expected, f"{collective} by {algorithm}")
    communicator.free()


def check_two_communicators(comm: MPI.Intracomm) -> None:
    """A rank that waits in one communicator advances the others: either order is a legal program."""
    one, other = Communicator(comm, timeout=20), Communicator(comm, timeout=20)
    x, expected = normals(comm, 100000)
    for codec in (None, MinMax()):
        for _ in range(3):
            request = one.iallreduce(x, codec=codec, algorithm="ring")
            if comm.rank % 2:
                assert_close(request.wait(), expected, 0.04, comm.size)
            total = other.allreduce(np.ones(5))
            assert total.tolist() == [comm.size] * 5
            assert_close(request.wait(), expected, 0.04, comm.size)
    one.free()
    other.free()


def check_freed_with_their_owner(comm: MPI.Intracomm) -> None:
    """MPIs have some two thousand communicators: ours are given back with the ones that they belong to."""
    for _ in range(300):
        passing = comm.Dup()
        compcoll.allreduce(np.ones(2, np.float32), comm=passing)
        passing.Free()


def check_means_of_halves_do_not_overflow(comm: MPI.Intracomm) -> None:
    for n in (100, 40000):
        x = np.full(n, 60000, np.float16)
        for algorithm in ALGORITHMS:
            mean = compcoll.allreduce(x, op="mean", algorithm=algorithm, comm=comm).astype(np.float64)
            assert np.abs(mean - 60000).max() <= 64 * comm.size
    wide = np.full(40000, 60000, np.float32)
    mean = compcoll.allreduce(wide, op="mean", codec="cast", algorithm="ring", comm=comm)
    assert np.abs(mean - 60000).max() <= 64 * comm.size
