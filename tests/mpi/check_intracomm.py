"""Communicators in mpi4py's conventions. The oracle is NumPy in float64, or mpi4py's own communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import compcoll
from compcoll.codecs.registry import codec_classes
from compcoll.dtypes import DTYPES
from compcoll.mpi.settings import Settings
from compcoll.mpi.totals import Totals

KINDS = (np.float32, np.float64, np.complex64, np.complex128)
N = 240  # elements of a rank's block
NEAR = 2e-3  # zfp with 16 bits a value, at any number of ranks here


def datatype(kind: Any) -> MPI.Datatype:
    return MPI.Datatype.fromcode(np.dtype(kind).char)


def counting(comm: MPI.Intracomm, *, moved: bool = True, **settings: Any) -> compcoll.Intracomm:
    """A communicator that compresses every message that it can, and counts."""
    return compcoll.Intracomm._with(
        comm, Settings(compcoll.ZFP(rate=16), {}, 1, moved, totals=Totals(**settings), **settings)
    )


def compressed(comm: compcoll.Intracomm, method: str) -> int:
    """How many calls of a method were compressed since the last look at any method."""
    assert comm._settings.totals is not None
    found = comm._settings.totals.by_method.get(method)
    comm._settings.totals.by_method.clear()
    return 0 if found is None else found.compressed


def values(comm: MPI.Intracomm, n: int, kind: Any, rank: int | None = None) -> np.ndarray:
    """A rank's values, by default those of this rank, which are smooth: zfp then keeps many digits."""
    at = np.linspace(0, 3, n) + (comm.rank if rank is None else rank)
    return (np.sin(at) + (1j * np.cos(at) if np.dtype(kind).kind == "c" else 0)).astype(kind)


def near(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.linalg.norm(found - expected) <= NEAR * np.linalg.norm(expected), (found[:4], expected[:4])


def forms(x: np.ndarray) -> Iterator[Any]:
    """A message in all forms that mpi4py takes."""
    kind = datatype(x.dtype)
    yield x
    yield [x, kind]
    yield [x, x.size]
    yield [x, x.size, kind]
    yield (x, (x.size, 0), kind)
    yield [MPI.memory.frombuffer(x), x.size, kind]
    yield [x.view(np.uint8), x.size, kind.typechar]
    yield [memoryview(x), x.size, 0, kind]
    yield [x, x.size, 0, None]
    yield (x, (x.size, 0), None)


def sums(comm: MPI.Intracomm, n: int, kind: Any) -> np.ndarray:
    wide = np.result_type(kind, np.float64)
    return np.sum([values(comm, n, kind, rank).astype(wide) for rank in range(comm.size)], axis=0)


def check_sums_in_all_forms(comm: MPI.Intracomm) -> None:
    own, expected_calls = counting(comm), int(comm.size > 1)
    for kind in KINDS:
        x, out = values(comm, N, kind), np.zeros(N, kind)
        for sent, received in zip(forms(x), forms(out), strict=True):
            out[:] = 0
            own.Allreduce(sent, received)
            assert compressed(own, "Allreduce") == expected_calls
            near(out, sums(comm, N, kind))
            out[:] = x
            own.Allreduce(MPI.IN_PLACE, received, MPI.SUM)
            assert compressed(own, "Allreduce") == expected_calls
            near(out, sums(comm, N, kind))
            root = comm.size - 1
            out[:] = 0
            own.Reduce(sent, received if comm.rank == root else None, root=root)
            assert compressed(own, "Reduce") == expected_calls
            near(out, sums(comm, N, kind) if comm.rank == root else np.zeros(N))


def check_sums_in_blocks(comm: MPI.Intracomm) -> None:
    own, expected_calls = counting(comm), int(comm.size > 1)
    for kind in KINDS:
        x, out = values(comm, N * comm.size, kind), np.zeros(N, kind)
        expected = sums(comm, x.size, kind)[comm.rank * N :][:N]
        own.Reduce_scatter_block(x, out)
        assert compressed(own, "Reduce_scatter_block") == expected_calls
        near(out, expected)
        own.Reduce_scatter_block([x, N, datatype(kind)], [out, datatype(kind)])
        near(out, expected)
        in_place = x.copy()
        own.Reduce_scatter_block(MPI.IN_PLACE, in_place)
        assert compressed(own, "Reduce_scatter_block") == 2 * expected_calls
        near(in_place[:N], expected)
        out[:] = 0
        own.Reduce_scatter(x, out, [N] * comm.size)
        assert compressed(own, "Reduce_scatter") == expected_calls
        near(out, expected)
        own.Reduce_scatter(x, out)  # the counts of other ranks are not known
        assert compressed(own, "Reduce_scatter") == 0
        near(out, expected)
        uneven = [N] * (comm.size - 1) + [N - 5]
        cut, rest = x[: sum(uneven)].copy(), np.zeros(uneven[comm.rank], kind)
        own.Reduce_scatter(cut, rest, uneven)
        assert compressed(own, "Reduce_scatter") == 0 or comm.size == 1
        near(rest, sums(comm, x.size, kind)[comm.rank * N :][: rest.size])


def check_halves(comm: MPI.Intracomm) -> None:
    """MPI's datatype of float16, which ranks may name or not, and bfloat16, which only codecs take."""
    own, expected_calls = counting(comm), int(comm.size > 1)
    x, out, expected = values(comm, N, np.float16), np.zeros(N, np.float16), sums(comm, N, np.float16).real
    for first, others in ((out, [out, MPI.FLOAT16_T]), ([out, N, MPI.FLOAT16_T], out)):
        out[:] = 0
        own.Reduce(x, first if comm.rank == 0 else None)
        assert compressed(own, "Reduce") == expected_calls
        own.Allreduce(x, first if comm.rank == 0 else others)
        assert compressed(own, "Allreduce") == expected_calls
        near(out.astype(np.float64), expected)
    above = compcoll.Intracomm(comm, codec="zfp", rate=16, min_bytes=2 * N + 1)
    summed = np.zeros_like(out)
    comm.Allreduce(x, summed)
    above.Allreduce(x, out)
    np.testing.assert_array_equal(out, summed)
    if comm.size > 1:
        x = values(comm, N, np.float64).astype(DTYPES["bfloat16"].numpy)
        out = np.zeros_like(x)
        own.Allreduce(x, out)
        np.testing.assert_allclose(out.astype(float), expected, atol=0.03 * comm.size)


def moving(comm: MPI.Intracomm) -> Iterator[tuple[str, Callable[[Any], None], np.ndarray]]:
    """Calls that move values: method, call of a communicator, and where the result arrives."""
    p, rank, root = comm.size, comm.rank, comm.size - 1
    at_root = rank == root
    for kind in KINDS:
        mpi = datatype(kind)
        x, whole = values(comm, N, kind), values(comm, N * p, kind)
        out, all_out = np.zeros(N, kind), np.zeros(N * p, kind)
        yield "Bcast", lambda c, x=x: c.Bcast(x, root), x
        for sent, received in zip(forms(x), forms(out), strict=True):
            yield "Scatter", lambda c, r=received, w=whole: c.Scatter(w if at_root else None, r, root), out
            yield "Allgather", lambda c, s=sent, r=all_out: c.Allgather(s, r), all_out
        yield "Allgather", lambda c, x=x, r=all_out, t=mpi: c.Allgather(x, [r, N, t]), all_out
        yield "Gather", lambda c, x=x, r=all_out: c.Gather(x, r if at_root else None, root), all_out
        yield "Alltoall", lambda c, w=whole, r=all_out: c.Alltoall(w, r), all_out
        filled = whole.copy()
        yield "Alltoall", lambda c, f=filled: c.Alltoall(MPI.IN_PLACE, f), filled
        filled = whole.copy()
        yield "Allgather", lambda c, f=filled: c.Allgather(MPI.IN_PLACE, f), filled
        filled = whole.copy()
        own = MPI.IN_PLACE if at_root else x
        yield "Gather", lambda c, f=filled, o=own: c.Gather(o, f if at_root else None, root), filled
        filled = whole.copy()
        own = MPI.IN_PLACE if at_root else out
        yield "Scatter", lambda c, f=filled, o=own: c.Scatter(f if at_root else None, o, root), out

        counts = [5 + 40 * (r % 3) for r in range(p)]
        spaced = [sum(counts[:r]) + 3 * r for r in range(p)]
        mine, out = values(comm, counts[rank], kind), np.zeros(counts[rank], kind)
        wide = np.zeros(sum(counts) + 3 * p, kind)
        for vector in ([wide, counts], [wide, (counts, spaced), mpi], [wide, counts, spaced, mpi], [wide, counts, mpi]):
            yield "Allgatherv", lambda c, m=mine, v=vector: c.Allgatherv(m, v), wide
            yield "Gatherv", lambda c, m=mine, v=vector: c.Gatherv(m, v if at_root else None, root), wide
        from_here = values(comm, wide.size, kind)
        for vector in ([from_here, counts], [from_here, (counts, spaced), mpi]):
            yield "Scatterv", lambda c, v=vector, o=out: c.Scatterv(v if at_root else None, o, root), out
            back = [counts[rank]] * p
            got = np.zeros(sum(back) + p, kind)
            apart = [r * (back[0] + 1) for r in range(p)]
            yield "Alltoallv", lambda c, v=vector, g=got, b=back: c.Alltoallv(v, [g, b]), got
            yield "Alltoallv", lambda c, v=vector, g=[got, (back, apart), mpi]: c.Alltoallv(v, g), got
        last = [0] * (p - 1) + [N]  # all other ranks send and receive nothing, of whatever type
        nothing = np.zeros(N if rank == p - 1 else 0, kind)
        sums_of = [N if rank == p - 1 else 0] * p
        got = np.zeros(sum(sums_of), kind)
        yield "Alltoallv", lambda c, v=[x, last], g=[got, sums_of]: c.Alltoallv(v, g), got
        yield "Scatterv", lambda c, v=[x, last], o=nothing: c.Scatterv(v if at_root else None, o, root), nothing


def moved_by_both(comm: MPI.Intracomm, own: compcoll.Intracomm) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Make the same calls by MPI, and by our own communicator: method, our result, and MPI's."""
    for method, call, out in moving(comm):
        before = out.copy()
        call(comm)
        expected = out.copy()
        out[:] = before
        call(own)
        yield method, out, expected


def check_moved_values_arrive_as_by_mpi(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    for method, out, expected in moved_by_both(comm, own):
        assert compressed(own, method) == int(comm.size > 1), method
        near(out, expected)


def check_moved_values_are_left_to_mpi_unless_asked_for(comm: MPI.Intracomm) -> None:
    own = counting(comm, moved=False)
    for method, out, expected in moved_by_both(comm, own):
        assert compressed(own, method) == 0
        assert out.tobytes() == expected.tobytes()


def check_other_values_and_operations_are_left_to_mpi(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    for kind in (np.int32, np.int64, np.uint8, np.longdouble):
        x, out = (np.arange(N) % 10).astype(kind), np.zeros(N, kind)
        own.Allreduce(x, out)
        own.Allreduce([x, datatype(kind)], [out, datatype(kind)])
        np.testing.assert_array_equal(out, x * comm.size)
        own.Bcast(out, 0)
    x, out = values(comm, N, np.float64), np.zeros(N)
    for op in (MPI.MAX, MPI.MIN, MPI.PROD, MPI.Op.Create(lambda a, b, _: None, commute=True)):
        own.Allreduce(x, out, op)
    own.Allreduce(x, out, op=MPI.MAX)
    np.testing.assert_array_equal(out, np.max([values(comm, N, np.float64, r) for r in range(comm.size)], axis=0))
    for each in ("Scan", "Exscan"):
        getattr(own, each)(x, out)
    own.Alltoallw(
        [x.copy(), [N // comm.size] * comm.size, [0] * comm.size, [MPI.DOUBLE] * comm.size],
        [np.zeros(N), [N // comm.size] * comm.size, [0] * comm.size, [MPI.DOUBLE] * comm.size],
    )
    one = np.zeros(1)
    own.Allreduce(np.float64(2), one)  # a NumPy scalar, as pylops-mpi sends it
    near(one, np.array([2.0 * comm.size]))
    assert own.allreduce({comm.rank}, op=lambda a, b: a | b) == set(range(comm.size))
    totals = own._settings.totals
    assert totals is not None
    assert {name: each.compressed for name, each in totals.by_method.items() if each.compressed} == (
        {"Allreduce": 1} if comm.size > 1 else {}
    )  # the scalar, since every size is compressed here


def check_derived_types(comm: MPI.Intracomm) -> None:
    """One rank describes the same values by a derived datatype, which MPI allows: all ranks leave them to MPI."""
    own = counting(comm)
    for kind in (np.float64, np.int64):
        values_ = np.arange(N, dtype=kind)
        x = values_.copy() if comm.rank == 0 else np.zeros(2 * N, kind)
        vector = datatype(kind).Create_vector(N, 1, 2).Commit()
        own.Bcast(x if comm.rank == 0 else [x, 1, vector], 0)
        np.testing.assert_array_equal(x if comm.rank == 0 else x[::2], values_)
        assert compressed(own, "Bcast") == 0 or comm.size == 1
        vector.Free()


def check_codecs_that_need_previous_values(comm: MPI.Intracomm) -> None:
    """Receive buffers hold anything, so these messages are MPI's own."""
    for codec in (name for name, cls in codec_classes().items() if cls.needs_reference):
        own = compcoll.Intracomm(comm, codec=codec, min_bytes=0, moved=True)
        x = values(comm, 5000, np.float32)
        expected = np.stack(comm.allgather(x))
        got = np.full((comm.size, 5000), comm.rank, np.float32)
        own.Allgather(x, got)
        np.testing.assert_array_equal(got, expected)
        own.Bcast(x, root=comm.size - 1)
        np.testing.assert_array_equal(x, expected[-1])


def check_ranks_that_describe_a_message_differently(comm: MPI.Intracomm) -> None:
    """What MPI allows, with messages just around the size from which they are compressed on some description."""
    p, rank, n = comm.size, comm.rank, 1000
    own = compcoll.Intracomm(comm, codec="zfp", rate=16, min_bytes=n * 6, moved=True)
    ints = np.arange(n * p, dtype=np.int32)
    own.Gather(MPI.IN_PLACE if rank == 0 else ints[:n], ints if rank == 0 else None)
    own.Scatter(ints if rank == 0 else None, MPI.IN_PLACE if rank == 0 else ints[:n])
    square = np.zeros((100, 100))
    column = MPI.DOUBLE.Create_vector(100, 1, 100).Commit()
    own.Bcast([square, 1, column] if rank == 0 else np.empty(100))
    column.Free()
    longer = np.empty(n * p * (2 if rank == 0 else 1), np.int32)
    own.Allgatherv(ints[:n], [longer, [n] * p])
    x, out = values(comm, n * p, np.float64), np.zeros(n)
    expected = sums(comm, n * p, np.float64).real[rank * n :][:n]
    for _ in range(2):
        mixed = [x, x.size, MPI.DOUBLE] if rank == 0 else x
        own.Reduce_scatter(mixed, out, [n] * p)
        near(out, expected)
        mixed = [x, n, MPI.DOUBLE] if rank == 0 else x
        own.Reduce_scatter_block(mixed, out, MPI.MAX)
        own.Reduce_scatter_block(mixed, out)
        near(out, expected)
    whole = np.zeros(n * p)
    for described in ([x, [x.size, 0], MPI.DOUBLE], [x[:1], x.size, MPI.DOUBLE]):  # also beyond an array's end
        own.Allreduce(described if rank == 0 else x, whole)
        near(whole, sums(comm, n * p, np.float64).real)


class Bare:
    """An array of another library, whose element types are classes."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.dtype = x, x.dtype.type
        self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    def __len__(self) -> int:
        return self.x.size


class Count:
    """A number that only tells its value as an index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __index__(self) -> int:
        return self.n


def check_numbers_and_libraries_of_other_kinds(comm: MPI.Intracomm) -> None:
    """Rank 0 describes its messages in the least usual ways."""
    own, first, p = counting(comm), comm.rank == 0, comm.size
    x, out = values(comm, N * p, np.float32), np.zeros(N * p, np.float32)
    expected = sums(comm, N * p, np.float32).real
    for sent in (Bare(x), [x, Count(x.size), MPI.FLOAT], [x, np.int16(x.size), MPI.FLOAT], [Bare(x), x.size]):
        out[:] = 0
        own.Allreduce(sent if first else x, out)
        assert compressed(own, "Allreduce") == int(p > 1)
        near(out, expected)
    mine = expected[comm.rank * N :][:N]
    for counts in ([Count(N)] * p, np.full(p, N, np.int16), [np.array(N)] * p, (N,) * p):
        own.Reduce_scatter(x, out[:N], counts if first else [N] * p)
        assert compressed(own, "Reduce_scatter") == int(p > 1)
        near(out[:N], mine)
    least = compcoll.Intracomm(comm, codec="zfp", rate=16, min_bytes=0)
    nothing = np.empty(0, np.float32)
    least.Allreduce([None, 0, MPI.FLOAT] if first else nothing, [None, 0, MPI.FLOAT] if first else nothing)


def check_memory_in_other_orders_and_kinds(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    z = np.asfortranarray(values(comm, N, np.complex128).reshape(20, -1))
    for kind in (MPI.DOUBLE, MPI.C_DOUBLE_COMPLEX):
        out = np.zeros_like(z)
        own.Allreduce([z, kind], [out, kind])
        assert compressed(own, "Allreduce") == int(comm.size > 1)
        near(out, sums(comm, N, np.complex128).reshape(20, -1))
    x = values(comm, N, np.float64)
    for same in (np.ma.masked_array(x), np.matrix(x)):
        out = np.zeros(N)
        own.Allreduce(same, out)
        near(out, sums(comm, N, np.float64).real)


def check_a_request_that_is_asked_first(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    x = np.tile(values(comm, N, np.float64), comm.size)
    request = own.Ireduce_scatter_block(MPI.IN_PLACE, x)
    while not request.Get_status():
        pass
    x[:] = 7
    request.Wait()
    assert (x == 7).all() and compressed(own, "Ireduce_scatter_block") == int(comm.size > 1)


def check_what_a_codec_does_not_take_is_left_to_mpi(comm: MPI.Intracomm) -> None:
    """Values of too few bits for a rate, and a codec that only an allreduce can use."""
    x = values(comm, N, np.float32)
    for settings, method in ((compcoll.ZFP(rate=40), "Allreduce"), (compcoll.IntSum(bits=16), "Reduce")):
        own = compcoll.Intracomm._with(comm, Settings(settings, {}, 1, moved=False, totals=Totals()))
        out, expected = np.zeros(N, np.float32), np.zeros(N, np.float32)
        for _ in range(2):
            getattr(own, method)(x, out)
            getattr(comm, method)(x, expected)
            np.testing.assert_array_equal(out, expected)
        assert compressed(own, method) == 0


def check_without_a_codec_everything_is_mpis_own(comm: MPI.Intracomm) -> None:
    own = compcoll.Intracomm(comm)
    for kind in KINDS:
        x, out, expected = values(comm, N, kind), np.zeros(N, kind), np.zeros(N, kind)
        own.Allreduce(x, out)
        comm.Allreduce(x, expected)
        assert out.tobytes() == expected.tobytes()
    for _, out, expected in moved_by_both(comm, own):
        assert out.tobytes() == expected.tobytes()


def check_by_default_the_model_decides(comm: MPI.Intracomm) -> None:
    """In one node MPI's own is faster; then nothing is lost."""
    own = compcoll.Intracomm(comm, codec="zfp", rate=16)
    x, out, expected = values(comm, 1 << 16, np.float32), np.zeros(1 << 16, "f"), np.zeros(1 << 16, "f")
    comm.Allreduce(x, expected)
    for _ in range(2):
        own.Allreduce(x, out)
        plan = compcoll.get_communicator(comm).explain(x, codec="zfp", rate=16)
        assert (out.tobytes() == expected.tobytes()) == (plan.codec is None)


def check_communicators_made_of_it(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    p, group = comm.size, comm.Get_group()
    duplicate, request = own.Idup()
    request.Wait()
    ring = [(comm.rank - 1) % p], [(comm.rank + 1) % p]
    made = [
        duplicate,
        *(own.Dup(), own.Clone(), own.Split(0, comm.rank), own.Split(comm.rank % 2), own.Create(group)),
        *(own.Split_type(MPI.COMM_TYPE_SHARED), own.Create_group(group), own.Create_cart([p])),
        *(own.Create_graph(list(range(1, p + 1)), [(r + 1) % p for r in range(p)]),),
        *(own.Create_dist_graph_adjacent(*ring), own.Create_dist_graph([comm.rank], [1], ring[1])),
    ]
    made += [made[8].Sub([True]), made[8].Dup(), made[1].Dup()]
    for each in made:
        assert isinstance(each, compcoll.Intracomm) and each._settings is own._settings
        x, out = np.full(N, each.rank, np.float64), np.zeros(N)
        each.Allreduce(x, out)
        np.testing.assert_allclose(out, sum(range(each.size)), rtol=NEAR)
        assert compressed(own, "Allreduce") == int(each.size > 1)
    assert isinstance(made[8], MPI.Cartcomm) and made[8].Get_coords(comm.rank) == [comm.rank]
    assert isinstance(made[9], MPI.Graphcomm) and isinstance(made[10], MPI.Distgraphcomm)
    cart = comm.Create_cart([p])
    for given in (cart, made[8]):
        again = compcoll.Intracomm(given, codec="int8")
        assert again.Get_topo() == cart.Get_topo() and again == given
    for each in (*made, cart):
        each.Free()
    assert own.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    assert own == comm and MPI.Comm.Compare(own, comm) == MPI.IDENT
    group.Free()


def check_requests(comm: MPI.Intracomm) -> None:
    own, calls = counting(comm), int(comm.size > 1)
    expected = sums(comm, N, np.float64).real
    x, outs = values(comm, N, np.float64), [np.zeros(N) for _ in range(6)]
    requests = [own.Iallreduce(x, out) for out in outs[:3]]
    requests.append(own.Ireduce(x, outs[3] if comm.rank == 0 else None))
    requests += [comm.Iallreduce(x, outs[4]), own.Iallreduce(x, outs[5])]
    MPI.Request.Waitall(requests)
    for out in outs if comm.rank == 0 else outs[:3] + outs[4:]:
        near(out, expected)
    assert compressed(own, "Iallreduce") == 4 * calls
    whole, block = np.tile(x, comm.size), np.zeros(N)
    for start in (own.Ireduce_scatter_block, lambda *a: own.Ireduce_scatter(*a, [N] * comm.size)):
        block[:] = 0
        request = start(whole, block)
        while not request.Test():
            pass
        near(block, expected)
    in_place = x.copy()
    own.Iallreduce(MPI.IN_PLACE, in_place).wait()
    near(in_place, expected)
    assert MPI.Request.Waitany([own.Iallreduce(x, in_place)]) == 0
    blocking = np.zeros(N)
    pending = own.Iallreduce(x, in_place)
    own.Allreduce(x, blocking)  # while the other is under way
    pending.Wait()
    near(blocking, expected)


def check_persistent_requests(comm: MPI.Intracomm) -> None:
    own = counting(comm)
    if comm.size == 1:
        return  # MPI's own, which not every MPI has
    x, out, total, block = np.zeros(N), np.zeros(N), np.zeros(N), np.zeros(N // comm.size)
    blocks = x[: N // comm.size * comm.size]
    requests = [
        own.Allreduce_init(x, out),
        own.Reduce_init(x, total if comm.rank == 0 else None, MPI.SUM, 0, MPI.INFO_NULL),
        own.Reduce_scatter_block_init(blocks, block, info=MPI.INFO_NULL),
        own.Reduce_scatter_init(blocks, block, [block.size] * comm.size),
    ]
    for step in range(3):
        x[:] = step + comm.rank
        for request in requests:
            request.Start()
        MPI.Request.Waitall(requests)
        expected = np.full(N, sum(step + rank for rank in range(comm.size)), float)
        near(out, expected)
        near(block, expected[: block.size])
        if comm.rank == 0:
            near(total, expected)
    requests[0].Start()
    with pytest.raises(MPI.Exception):
        requests[0].Start()
    requests[0].Wait()
    for request in requests:
        request.Free()
    assert compressed(own, "Allreduce_init") == 4


def check_bad_arguments(comm: MPI.Intracomm) -> None:
    """MPI's own answer, or a named error on all ranks; then the communicator still works."""
    own = compcoll.Intracomm(comm, codec="zfp", rate=16, min_bytes=1)
    x, out = values(comm, N, np.float64), np.zeros(N)
    fixed = np.zeros(N)
    fixed.flags.writeable = False

    def works() -> None:
        out[:] = 0
        own.Allreduce(x, out)
        near(out, sums(comm, N, np.float64).real)

    everywhere: list[tuple[Callable[[], None], Any]] = [
        (lambda: own.Allreduce(x, out[:-1]), ValueError),
        (lambda: own.Allreduce(x, np.zeros((N, 2))[:, 0]), (ValueError, BufferError)),
        (lambda: own.Allreduce(x, out.astype("f")), ValueError),
        (lambda: own.Allreduce([x, 2 * N, MPI.DOUBLE], [out, N, MPI.DOUBLE]), (ValueError, MPI.Exception)),
        (lambda: own.Allreduce("text", out), TypeError),
        (lambda: own.Allreduce(x), TypeError),
        (lambda: own.Reduce(x, out, root=comm.size), MPI.Exception),
        (lambda: own.Allreduce([x, MPI.DATATYPE_NULL], [out, MPI.DATATYPE_NULL]), (ValueError, MPI.Exception)),
    ]
    if comm.size > 1:
        everywhere += [
            (lambda: own.Allreduce(x, fixed), (compcoll.errors.InvalidBuffer, ValueError, BufferError)),
            (lambda: own.Allreduce(out[:-1], out[1:]), compcoll.errors.InvalidBuffer),
        ]
    before = out.copy()
    assert type(own).fromhandle(MPI.COMM_NULL.handle) == MPI.COMM_NULL
    own.Reduce(x, x.copy(), root=np.array(0))
    with pytest.raises(compcoll.errors.InvalidArgument, match=r"MPI\.COMM_WORLD"):
        compcoll.Intracomm(codec="zfp", rate=16)
    for call, errors in everywhere:
        with pytest.raises(errors):
            call()
        np.testing.assert_array_equal(out, before)
        works()
        before = out.copy()
    if comm.size > 1:
        # Only the last rank's array is read-only: it says so to the others.
        bad = fixed if comm.rank == comm.size - 1 else out
        with pytest.raises((compcoll.errors.InvalidBuffer, compcoll.errors.CollectiveMismatch)):
            own.Allreduce(x, bad)
        works()
    with pytest.raises(compcoll.errors.InvalidArgument):
        compcoll.Intracomm(comm, codec="zfp", rate=16, min_bytes=-1)
    with pytest.raises(compcoll.CompcollError):
        compcoll.Intracomm(comm, codec="no such codec")
    freed = own.Dup()
    freed.Allreduce(x, out)
    freed.Free()
    with pytest.raises((compcoll.CompcollError, MPI.Exception)):
        freed.Allreduce(x, out)
    with pytest.raises((compcoll.CompcollError, MPI.Exception)):
        compcoll.Intracomm(MPI.COMM_NULL, codec="zfp", rate=16, min_bytes=1).Allreduce(x, out)
    if comm.size > 1:
        half = own.Split(comm.rank % 2)
        between = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
        with pytest.raises(compcoll.errors.InvalidArgument):
            compcoll.Intracomm(between, codec="zfp", rate=16)
        between.Free()
        half.Free()


def check_a_dry_run_changes_nothing(comm: MPI.Intracomm) -> None:
    own = counting(comm, dry_run=True)
    x, out, expected = values(comm, N, np.float64), np.zeros(N), np.zeros(N)
    comm.Allreduce(x, expected)
    own.Allreduce(x, out)
    assert out.tobytes() == expected.tobytes()
    comm.Iallreduce(x, expected).Wait()  # which may add in another order than Allreduce
    own.Iallreduce(x, out).Wait()
    assert out.tobytes() == expected.tobytes()
    totals = own._settings.totals
    assert totals is not None
    if comm.size > 1:
        assert totals.by_method["Allreduce"].compressed == totals.by_method["Iallreduce"].compressed == 1
        assert totals.by_method["Allreduce"].saved == N * 8 * 3 // 4
        assert "would save" in totals.table("")
