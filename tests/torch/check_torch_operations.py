"""Every operation of a process group, on every element type, against NumPy in float64."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from groups import assert_same_bits, raised, world
from mpi4py import MPI
from torch.distributed import ReduceOp

from compcoll.errors import CollectiveMismatch, InvalidArgument, InvalidBuffer, PeerTimeout, UnsupportedDType
from compcoll.torch import Options

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
COMPLEX = [torch.complex64, torch.complex128]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
EVERY = [*FLOATS, *INTEGERS, *COMPLEX, *FP8, torch.bool]


def values(rank: int, dtype: torch.dtype, shape: Any = (7,)) -> torch.Tensor:
    """Small integers, which every type holds exactly; as many ranks' sums and products do."""
    generator = np.random.default_rng([rank, 5])
    numbers = torch.from_numpy(generator.integers(0 if dtype in (torch.bool, torch.uint8) else -2, 3, shape))
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.flip(0).double()).to(dtype)
    return numbers.to(torch.float32).to(dtype) if dtype in FP8 else numbers.to(dtype)


def stacked(comm: MPI.Intracomm, dtype: torch.dtype, shape: Any = (7,)) -> np.ndarray:
    """All ranks' values in double precision."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    every = [values(rank, dtype, shape) for rank in range(comm.size)]
    return np.stack([(v.float() if dtype in FP8 else v).to(wide).numpy() for v in every])


def same(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    wide = torch.complex128 if tensor.dtype.is_complex else torch.float64
    return bool(((tensor.float() if tensor.dtype in FP8 else tensor).to(wide).numpy() == expected).all())


def check_allreduce(comm: MPI.Intracomm) -> None:
    sums = {ReduceOp.SUM: np.sum, ReduceOp.PRODUCT: np.prod}
    ordered = {ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}
    with world():
        for dtype in EVERY[:-1]:
            for op, oracle in {**sums, **({} if dtype.is_complex else ordered)}.items():
                if dtype.is_complex and op == ReduceOp.PRODUCT:
                    continue
                for asynchronous in (False, True):
                    x = values(comm.rank, dtype)
                    work = dist.all_reduce(x, op=op, async_op=asynchronous)
                    if asynchronous:
                        work.wait()
                    assert same(x, oracle(stacked(comm, dtype), axis=0)), (dtype, op)
                    assert_same_bits(comm, [x])
        for dtype, (op, ufunc) in itertools.product(
            INTEGERS,
            {
                ReduceOp.BAND: np.bitwise_and,
                ReduceOp.BOR: np.bitwise_or,
                ReduceOp.BXOR: np.bitwise_xor,
            }.items(),
        ):
            x = values(comm.rank, dtype)
            dist.all_reduce(x, op=op)
            assert same(x, ufunc.reduce(stacked(comm, dtype).astype(np.int64), axis=0)), (dtype, op)
        for op, oracle in {
            ReduceOp.SUM: np.any,
            ReduceOp.MAX: np.any,
            ReduceOp.BOR: np.any,
            ReduceOp.PRODUCT: np.all,
            ReduceOp.MIN: np.all,
            ReduceOp.BAND: np.all,
        }.items():
            x = values(comm.rank, torch.bool)
            dist.all_reduce(x, op=op)
            assert same(x, oracle(stacked(comm, torch.bool), axis=0)), op


def check_means_and_scaled_sums(comm: MPI.Intracomm) -> None:
    with world():
        for dtype in [*FLOATS, torch.complex64]:
            x = values(comm.rank, dtype)
            dist.all_reduce(x, op=ReduceOp.AVG)
            assert np.allclose(x.to(torch.complex128), stacked(comm, dtype).mean(axis=0), rtol=1e-2), dtype
        # Neither a sum of halves beyond 65504 nor halves divided to nothing first.
        for value in (60000.0, 6e-8):
            x = torch.full((5,), value, dtype=torch.float16)
            before = x.clone()
            dist.all_reduce(x, op=ReduceOp.AVG)
            assert (x == before).all()
        x = torch.full((3,), comm.rank + 1.0)
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
        assert (x == comm.size * (comm.size + 1) / 4).all()


def check_sizes_and_strides(comm: MPI.Intracomm) -> None:
    with world():
        for n in (0, 1, 1000, 300_001):
            x = values(comm.rank, torch.float32, (n,))
            dist.all_reduce(x)
            assert same(x, stacked(comm, torch.float32, (n,)).sum(axis=0))
        x = values(comm.rank, torch.float64, (6, 4)).t()
        assert not x.is_contiguous()
        dist.all_reduce(x)
        assert same(x, stacked(comm, torch.float64, (6, 4)).sum(axis=0).T)
        y = values(comm.rank, torch.int32, (6, 4))[:, 1:3]
        dist.broadcast(y, comm.size - 1)
        assert same(y, stacked(comm, torch.int32, (6, 4))[-1][:, 1:3])
        leaf = torch.nn.Parameter(values(comm.rank, torch.float32))
        dist.broadcast(leaf, 0)
        assert same(leaf.detach(), stacked(comm, torch.float32)[0]) and leaf.requires_grad
        leaf.untyped_storage().resize_(0)  # numpy() would have forbidden that


def check_moving(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        for dtype in EVERY:
            every = stacked(comm, dtype)
            x = values(r, dtype)
            dist.broadcast(x, src=p - 1)
            assert same(x, every[-1]), dtype

            parts = [torch.empty_like(x) for _ in range(p)]
            dist.all_gather(parts, values(r, dtype))
            assert all(same(part, every[k]) for k, part in enumerate(parts)), dtype

            whole = torch.empty((p, 7), dtype=dtype)
            dist.all_gather_single(whole, values(r, dtype))
            assert same(whole, every), dtype

            root = [torch.empty_like(x) for _ in range(p)] if r == 1 % p else None
            dist.gather(values(r, dtype), root, dst=1 % p)
            assert root is None or all(same(part, every[k]) for k, part in enumerate(root)), dtype

            mine = torch.empty_like(x)
            dist.scatter(mine, [values(k, dtype) for k in range(p)] if r == 0 else None, src=0)
            assert same(mine, every[r]), dtype

            out = torch.empty((p, 7), dtype=dtype)
            dist.all_to_all_single(out, values(r, dtype).repeat(p).view(p, 7))
            assert same(out, every), dtype

            parts = [torch.empty_like(x) for _ in range(p)]
            dist.all_to_all(parts, [values(r, dtype)] * p)
            assert all(same(part, every[k]) for k, part in enumerate(parts)), dtype


def check_uneven(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        parts = [torch.empty(k + 1) for k in range(p)]
        dist.all_gather(parts, torch.full((r + 1,), float(r)))
        assert all((part == k).all() for k, part in enumerate(parts))
        sent = [k + r for k in range(p)]
        received = [r + k for k in range(p)]
        out = torch.empty(sum(received), 3)
        dist.all_to_all_single(out, torch.full((sum(sent), 3), float(r)), received, sent)
        assert [float(part.sum()) for part in out.split(received)] == [3.0 * k * n for k, n in enumerate(received)]
        total = torch.empty(r + 1)
        dist.reduce_scatter(total, [torch.full((k + 1,), float(r + k)) for k in range(p)])
        assert (total == sum(range(p)) + p * r).all()


def check_reduce_and_scatter(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        for dtype in [*FLOATS, *INTEGERS]:
            x = values(r, dtype)
            dist.reduce(x, dst=p - 1)
            assert r != p - 1 or same(x, stacked(comm, dtype).sum(axis=0)), dtype
            assert r == p - 1 or same(x, stacked(comm, dtype)[r]), dtype
            expected = stacked(comm, dtype, (p, 5)).sum(axis=0)[r]
            for form in ("single", "list"):
                out = torch.empty(5, dtype=dtype)
                source = values(r, dtype, (p, 5))
                if form == "single":
                    dist.reduce_scatter_single(out, source)
                else:
                    dist.reduce_scatter(out, list(source.unbind()))
                assert same(out, expected), (dtype, form)


def check_coalesced(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world() as group:
        tensors = [values(r, torch.float32, (n,)) for n in (3, 1, 0, 50)]
        dist.all_reduce_coalesced(tensors)
        assert all(
            same(t, stacked(comm, torch.float32, (n,)).sum(axis=0)) for t, n in zip(tensors, (3, 1, 0, 50), strict=True)
        )
        outputs = [[torch.empty(n) for n in (2, 4)] for _ in range(p)]
        dist.all_gather_coalesced(outputs, [torch.full((n,), float(r)) for n in (2, 4)])
        assert all((t == k).all() for k, part in enumerate(outputs) for t in part)
        for asynchronous in (False, True):
            ins, outs = [torch.full((2,), float(r)), torch.full((3,), 1.0)], [torch.empty(2 * p), torch.empty(3 * p)]
            with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
                for out, source in zip(outs, ins, strict=True):
                    dist.all_gather_single(out, source)
            manager.wait()
            assert outs[0].view(p, 2)[:, 0].tolist() == list(range(p)) and (outs[1] == 1).all()
        with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
            x, y = torch.ones(4), torch.full((2,), float(r))
            group.allreduce([x])
            group.broadcast([y])
        manager.wait()
        assert (x == p).all() and (y == 0).all()


def check_messages(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        if p == 1:
            return
        for n in (1, 1_000_000):
            out = torch.empty(n)
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.full((n,), float(r)), (r + 1) % p),
                    dist.P2POp(dist.irecv, out, (r - 1) % p),
                ]
            )
            for request in requests:
                request.wait()
            assert (out == (r - 1) % p).all()
        if r == 0:
            seen = set()
            for _ in range(p - 1):
                x = torch.empty(2, dtype=torch.bfloat16)
                source = dist.recv(x, tag=7)
                assert (x == source).all()
                seen.add(source)
            assert seen == set(range(1, p))
        else:
            dist.send(torch.full((2,), float(r), dtype=torch.bfloat16), 0, tag=7)
        if r == 0:
            dist.send(torch.zeros(1), 1, tag=1)
            dist.send(torch.ones(1), 1, tag=2)
        elif r == 1:
            later, first = torch.empty(1), torch.empty(1)
            future = dist.irecv(later, 0, tag=2).get_future()
            assert dist.recv(first, 0, tag=1) == 0 and first == 0
            assert future.wait()[0] is not None and later == 1
            assert isinstance(raised(lambda: dist.irecv(torch.empty(1), 0, tag=-1)), InvalidArgument)
        dist.barrier()
        if r == 0:
            dist.send(torch.zeros(3), 1)
        elif r == 1:
            assert isinstance(raised(lambda: dist.recv(torch.zeros(5), 0)), InvalidBuffer)


def check_a_send_that_nobody_waits_for(comm: MPI.Intracomm) -> None:
    """A large message goes on while its sender does something else than calling MPI."""
    with world():
        if comm.rank == 0 and comm.size > 1:
            request = dist.isend(torch.ones(2_000_000), 1)
            deadline = time.monotonic() + 30
            while not request.done:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        elif comm.rank == 1:
            time.sleep(0.2)
            x = torch.zeros(2_000_000)
            dist.recv(x, 0)
            assert (x == 1).all()


def check_objects(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        every: list[Any] = [None] * p
        dist.all_gather_object(every, {"rank": r, "text": "x" * r})
        assert every == [{"rank": k, "text": "x" * k} for k in range(p)]
        said: list[Any] = [r, None]
        dist.broadcast_object_list(said, src=0)
        assert said == [0, None]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {k}" for k in range(p)] if r == 0 else None, src=0)
        assert mine == [f"for {r}"]


def check_groups(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world() as group:
        for ranks in ([0], list(range(p))[::-1], list(range(0, p, 2)), list(range(p))):
            sub = dist.new_group(ranks)
            if r in ranks:
                x = torch.tensor([float(r)])
                dist.all_reduce(x, group=sub)
                assert x == sum(ranks) and dist.get_world_size(sub) == len(ranks)
                dist.broadcast(x, src=ranks[-1], group=sub)
        parted = group.split_group([0, p - 1] if p > 1 else [0])
        assert (parted is not None) == (r in (0, p - 1))
        if parted is not None:
            x = torch.ones(1)
            parted.allreduce([x]).wait()
            assert x == parted.size()
        if p % 2 == 0:
            mesh = dist.init_device_mesh("cpu", (2, p // 2), mesh_dim_names=("a", "b"))
            x = torch.tensor([float(r)])
            dist.all_reduce(x, group=mesh["a"].get_group())
            assert x == r % (p // 2) * 2 + p // 2
        gloo = dist.new_group(backend="gloo")
        x = torch.ones(1)
        dist.all_reduce(x, group=gloo)
        assert x == p


def check_futures(comm: MPI.Intracomm) -> None:
    with world():
        futures = []
        for k in range(20):
            x = torch.full((100 * k,), 1.0 + k)
            futures.append(dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0].sum()))
        for k, future in enumerate(futures):
            assert future.wait() == comm.size * 100 * k * (1 + k)

        def nested(future: Any) -> torch.Tensor:
            y = future.value()[0] * 2
            return dist.all_reduce(y, async_op=True).get_future().wait()[0]

        chained = [dist.all_reduce(torch.ones(4 + k), async_op=True).get_future().then(nested) for k in range(5)]
        assert all((future.wait() == 2 * comm.size**2).all() for future in chained)


def check_sparse(comm: MPI.Intracomm) -> None:
    with world():
        places = torch.tensor([[comm.rank, comm.size], [0, 1]])
        x = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0]), (comm.size + 1, 2))
        dist.all_reduce(x)
        expected = torch.zeros(comm.size + 1, 2)
        expected[: comm.size, 0], expected[comm.size, 1] = 1, 2 * comm.size
        assert (x.to_dense() == expected).all()


def check_compression(comm: MPI.Intracomm) -> None:
    """Floating sums and means of some size are compressed, nothing else is; the same bits are on every rank."""
    n = 1 << 18  # 1 MiB of float32
    generator = torch.Generator().manual_seed(comm.rank)
    mine = torch.randn(n, generator=generator)
    every = torch.stack([torch.randn(n, generator=torch.Generator().manual_seed(k)) for k in range(comm.size)]).double()
    with world(Options(codec="zfp", rate=16)) as group:
        for op, oracle in ((ReduceOp.SUM, torch.sum), (ReduceOp.AVG, torch.mean)):
            for dtype, bound in ((torch.float32, 1e-2), (torch.bfloat16, 0.1), (torch.float16, 2e-2)):
                x = mine.clone().to(dtype)
                expected = oracle(every.to(dtype).double(), 0)
                dist.all_reduce(x, op=op)
                assert (x.double() - expected).abs().max() < bound, (op, dtype, (x.double() - expected).abs().max())
                assert_same_bits(comm, [x])
            if comm.size > 1:
                assert not (x == expected.to(x.dtype)).all()
                assert group.stats.collective == "allreduce" and "ZFP" in str(group.stats.codec)
        out = torch.empty(n // comm.size)
        dist.reduce_scatter_single(out, mine[: n // comm.size * comm.size].clone())
        part = every.sum(0)[: n // comm.size * comm.size].view(comm.size, -1)[comm.rank]
        assert (out - part).abs().max() < 1e-2
        assert comm.size == 1 or group.stats.collective == "reduce_scatter"
        pieces = list(mine.clone().view(8, -1).unbind())
        dist.all_reduce_coalesced(pieces)
        assert comm.size == 1 or group.stats.collective == "allreduce"
        last = group.stats
        x = mine[:1000].clone()
        dist.all_reduce(x)
        assert np.allclose(x, every.sum(0)[:1000], rtol=1e-5, atol=1e-5)
        for op in (ReduceOp.MAX, ReduceOp.MIN):
            x = mine.clone()
            dist.all_reduce(x, op=op)
            assert (x.double() == (every.max(0) if op == ReduceOp.MAX else every.min(0)).values).all()
        x = mine.mul(1000).long()
        dist.all_reduce(x)
        assert (x == every.float().mul(1000).long().sum(0)).all()
        x = mine.clone()
        dist.broadcast(x, 0)
        assert (x.double() == every[0]).all()
        assert group.stats is last


def check_bad_input(comm: MPI.Intracomm) -> None:
    p, r = comm.size, comm.rank
    with world():
        x = torch.ones(8)

        def usable() -> None:
            y = torch.ones(1)
            dist.all_reduce(y)
            assert y == p and (x == 1).all()

        for kind, call in [
            (UnsupportedDType, lambda: dist.all_reduce(x, op=ReduceOp.BAND)),
            (UnsupportedDType, lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=ReduceOp.AVG)),
            (InvalidArgument, lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * (p + 1))),
            (InvalidBuffer, lambda: dist.all_gather_single(torch.empty(p + 1), torch.empty(1))),
            (InvalidBuffer, lambda: dist.all_gather([torch.empty(1)] * (p + 1), torch.empty(1))),
            (InvalidBuffer, lambda: dist.reduce_scatter_single(torch.empty(1), torch.empty(p + 1))),
            (InvalidBuffer, lambda: dist.group.WORLD.allreduce([x, x])),
        ]:
            assert isinstance(raised(call), kind), call
            usable()
        assert "device" in str(raised(lambda: dist.all_reduce(torch.ones(1, device="meta"))))
        usable()
        if p == 1:
            return
        for usual, odd in [
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(torch.ones(9))),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x.double())),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op=ReduceOp.MAX)),
            (lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)),
            (lambda: dist.broadcast(x, 0), lambda: dist.broadcast(x, 1)),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(x, op=ReduceOp.BAND)),
            (lambda: dist.all_reduce(x), lambda: dist.all_reduce(torch.ones(9), async_op=True).wait()),
        ]:
            error = raised(odd if r == 1 else usual)
            assert isinstance(error, CollectiveMismatch | UnsupportedDType), error
            assert isinstance(error, UnsupportedDType) or "rank 1" in str(error)
            usable()
        splits = [2] * p if r == 1 else [1] * p
        error = raised(lambda: dist.all_to_all_single(torch.empty(p), torch.ones(sum(splits)), [1] * p, splits))
        assert isinstance(error, CollectiveMismatch), error
        usable()
    for wrong in ({"codec": "nope"}, {"codec": "zfp", "rate": 1}, {"codec": "zfp", "min_bytes": -1}, {"rate": 8}):
        assert isinstance(raised(lambda wrong=wrong: Options(**wrong)), InvalidArgument)
    assert isinstance(raised(lambda: dist.init_process_group("compcoll", pg_options=3)), InvalidArgument)


def check_time_out(comm: MPI.Intracomm) -> None:
    with world(seconds=1.0):
        if comm.size > 1 and comm.rank == 0:
            started = time.monotonic()
            x = torch.ones(3)
            error = raised(lambda: dist.all_reduce(x))
            assert isinstance(error, PeerTimeout) and " Timed out " in str(error)
            assert 0.9 < time.monotonic() - started < 10 and (x == 1).all()
            assert "cannot be used any more" in str(raised(lambda: dist.all_reduce(x)))
            error = raised(lambda: dist.recv(torch.zeros(1), 1))
            assert isinstance(error, PeerTimeout), error
        comm.Barrier()
    with world():
        dist.barrier()
