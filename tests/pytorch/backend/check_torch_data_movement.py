"""What moves elements between the ranks of a process group, on every element type, against NumPy in float64."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from groups import EVERY, all_gather_single, reduce_scatter_single, same, stacked, values, world
from mpi.world import raised
from mpi4py import MPI

from compcoll.errors import InvalidArgument, InvalidBuffer


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
            all_gather_single(whole, values(r, dtype))
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


def check_what_is_not_contiguous(comm: MPI.Intracomm) -> None:
    """Large enough that memory which nobody holds is given back to the system."""
    p, r = comm.size, comm.rank
    n = 1500
    numbers = torch.arange(n * n).view(n, n).float()
    with world() as group:
        for whole in (False, True):
            parts = [torch.empty(n, n) if whole else torch.empty(n, n).t() for _ in range(p)]
            options = dist.GatherOptions()
            options.rootRank = 1 % p
            group.gather([parts] if r == 1 % p else [], [(numbers + r).t()], options).wait()
            assert r != 1 % p or all(torch.equal(part, (numbers + k).t()) for k, part in enumerate(parts))
            group.allgather([parts], [(numbers - r).t()]).wait()
            assert all(torch.equal(part, (numbers - k).t()) for k, part in enumerate(parts))


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
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.complex32):
            total = torch.empty(r + 1, dtype=dtype)
            dist.reduce_scatter(total, [torch.full((k + 1,), float(r + k)).to(dtype) for k in range(p)])
            assert (total.to(torch.complex64) == sum(range(p)) + p * r).all(), dtype


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
                    all_gather_single(out, source)
            manager.wait()
            assert outs[0].view(p, 2)[:, 0].tolist() == list(range(p)) and (outs[1] == 1).all()
        ins, outs = [torch.arange(2.0 * p), torch.full((3 * p,), 1.0 + r)], [torch.empty(2), torch.empty(3)]
        with dist._coalescing_manager(group):
            for out, source in zip(outs, ins, strict=True):
                reduce_scatter_single(out, source)
        assert (outs[0] == torch.tensor([2.0 * r, 2.0 * r + 1]) * p).all() and (outs[1] == p * (p + 1) / 2).all()
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
