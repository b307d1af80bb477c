"""Collectives over a group: the same bits as on the loopback stand-in, whose bits are those over MPI."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from fakes.loopback import World, normals
from logs import logged
from oracles import collectives as oracles
from promises import DIFFERENCES, FLAT

import compcoll.torch
from compcoll import ZFP, Communicator, ErrorFeedback
from compcoll.errors import ReferenceMismatch, UnknownAlgorithm
from compcoll.plan.cost import RAW
from compcoll.plan.profile import _measured as measured
from compcoll.torch.buffers import COMPRESSIBLE
from compcoll.torch.groups.membership import member_of
from compcoll.torch.groups.transport import GroupTransport

CPU = torch.device("cpu")
SIZES = (1, 700, 20011)


def standing() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def tensor_of(array: Any) -> torch.Tensor:
    return (
        torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        if array.dtype == "bfloat16"
        else torch.tensor(array)
    )


def bytes_of(values: Any) -> bytes:
    if isinstance(values, torch.Tensor):
        return values.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(values).tobytes()


def check_mpi4py_is_not_installed() -> None:
    for module in (
        "backend.autoload",
        "gradients.compression",
        "low_rank.methods",
        "groups.collectives",
    ):
        importlib.import_module(f"compcoll.torch.{module}")
    with pytest.raises(compcoll.errors.MPIMissing, match="mpi4py is not installed"):
        Communicator()


CODECS = (("zfp", {"rate": 8}), ("minmax", {"bits": 4}), ("qsgd", {}), ("cast", {"dtype": "bfloat16"}), ("sign", {}))


@np.errstate(all="ignore")
def check_all_reduce_has_the_bits_of_loopback() -> None:
    rank, size = standing()
    for algorithm in FLAT:
        for name, options in CODECS if algorithm == "direct" else CODECS[:2]:
            world = World(size)
            for number, n in enumerate(SIZES):
                for dtype in (np.float32, ml_dtypes.bfloat16) if n == SIZES[1] else (np.float32,):
                    inputs = normals(size, n, dtype, seed=number)
                    for op, ours in (("sum", "sum"),) if name == "sign" else (("avg", "mean"),):
                        expected = world.allreduce(inputs, op=ours, codec=name, algorithm=algorithm, **options)
                        tensor = tensor_of(inputs[rank])
                        compcoll.torch.all_reduce(tensor, op, codec=name, algorithm=algorithm, **options)
                        # What is drawn at random depends on the number of the call.
                        if name != "qsgd":
                            assert bytes_of(tensor) == bytes_of(expected[rank]), (algorithm, name, n, dtype)
                        parts = [torch.empty_like(tensor) for _ in range(size)]
                        dist.all_gather(parts, tensor)
                        assert len({bytes_of(part) for part in parts}) == 1


def check_feedback_and_sparse_sums_have_the_bits_of_loopback() -> None:
    rank, size = standing()
    for codec, options, algorithm in (
        ("minmax", {"bits": 2}, "direct"),
        ("topk", {"density": 0.05}, "sparse_ring"),
        ("topk", {"density": 0.05}, "sparse_direct"),
    ):
        world, own = World(size), ErrorFeedback()
        theirs = [ErrorFeedback() for _ in range(size)]
        for step in range(3):
            inputs = normals(size, 5000, seed=step)
            expected = world.run(
                lambda comm, x, theirs=theirs, codec=codec, options=options, algorithm=algorithm: comm.iallreduce(
                    x, codec=codec, algorithm=algorithm, feedback=theirs[comm.rank], **options
                ),
                inputs,
            )
            tensor = torch.tensor(inputs[rank])
            compcoll.torch.all_reduce(tensor, codec=codec, algorithm=algorithm, feedback=own, **options)
            assert bytes_of(tensor) == bytes_of(expected[rank]), (codec, step)
        assert bytes_of(own.residual) == bytes_of(theirs[rank].residual)


def between_hosts(hosts: Sequence[str]) -> Communicator:
    return Communicator(GroupTransport(dist.group.WORLD, CPU, 60.0, host=hosts[dist.get_rank()]))


def check_between_nodes_too() -> None:
    rank, size = standing()
    for hosts in ([f"host{rank}" for rank in range(size)], ["a", "a", *"bcd"]):
        comm = between_hosts(hosts)
        assert len(set(comm.nodes)) == len(set(hosts[:size]))
        world = World(size)
        for n in SIZES:
            inputs = normals(size, n, seed=n)
            for algorithm in ("direct", "ring"):
                expected = world.allreduce(inputs, codec="zfp", rate=8, algorithm=algorithm)
                for _ in range(3):  # opened, rehearsed, replayed
                    got = comm.allreduce(inputs[rank], codec="zfp", rate=8, algorithm=algorithm)
                    assert bytes_of(got) == bytes_of(expected[rank]), (hosts, algorithm, n)
            exact = np.sum(inputs, axis=0, dtype=np.float64)
            for algorithm in ("auto", "native", "hierarchical"):
                got = comm.allreduce(inputs[rank], algorithm=algorithm)
                np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
        joined = comm.allgatherv(np.full(rank + 1, rank, np.float32), codec=None)
        assert joined.tolist() == [r for r in range(size) for _ in range(r + 1)]
        # Of different lengths on their way, and several at once.
        requests = [comm.iallreduce(inputs[rank], codec="zfp", precision=12, algorithm="direct") for _ in range(6)]
        assert len({bytes_of(request.wait()) for request in requests}) == 1
        comm.free()


class Noted:
    """A gloo group whose messages are noted down."""

    def __init__(self, gloo: Any, notes: list[tuple[str, int]]) -> None:
        self._gloo, self._notes = gloo, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._notes.append(("send", tag))
        return self._gloo.send(tensors, rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self._notes.append(("receive", tag))
        return self._gloo.recv(tensors, rank, tag)


def check_receives_are_posted_before_anything_leaves() -> None:
    """What leaves earlier asks the receiver, whose answer waits behind the receiver's own wires."""
    rank, size = standing()
    transport = GroupTransport(dist.group.WORLD, CPU, 60.0, host=f"host{rank}")
    comm = Communicator(transport)
    x = np.ones(1 << 20, np.float32)
    for _ in range(3):  # opened, rehearsed, replayed
        comm.allreduce(x, codec="zfp", rate=8, algorithm="direct")
    notes: list[tuple[str, int]] = []
    transport._gloo = Noted(transport._gloo, notes)
    comm.allreduce(x, codec="zfp", rate=8, algorithm="direct")
    wires = [what for what, tag in notes if tag > 1]  # those are handshakes'
    posted = wires.index("send")
    assert posted >= 2 * (size - 1) and wires[posted:] == ["send"] * (len(wires) - posted), notes
    comm.free()


def check_the_librarys_own_collectives() -> None:
    rank, size = standing()
    comm = between_hosts([f"host{rank}" for rank in range(size)])
    x = np.arange(size * 10, dtype=np.int64) + 100 * rank
    every = [np.arange(size * 10, dtype=np.int64) + 100 * r for r in range(size)]
    for op, reduce in (("sum", np.add), ("max", np.maximum), ("prod", np.multiply), ("bor", np.bitwise_or)):
        assert (comm.allreduce(x, op=op) == reduce.reduce(every)).all(), op
    assert (comm.reduce_scatter(x, algorithm="native") == np.sum(every, 0)[10 * rank : 10 * rank + 10]).all()
    assert (comm.allgather(x, algorithm="native") == np.stack(every)).all()
    assert (
        comm.alltoall(x, algorithm="native") == np.concatenate([e[10 * rank : 10 * rank + 10] for e in every])
    ).all()
    assert (comm.bcast(x, 1, algorithm="native") == every[1]).all()
    for root in range(size):
        before = x.copy()
        total = comm.reduce(x, root, op="max", algorithm="native")
        stacked = comm.gather(x, root, algorithm="native")
        assert (x == before).all()
        if rank == root:
            assert (total == np.max(every, 0)).all() and (stacked == np.stack(every)).all()
        else:
            assert total is None and stacked is None
        part = comm.scatter(x, root, algorithm="native")
        assert (part == every[root][10 * rank : 10 * rank + 10]).all()
    for rows in (x.size, 1, 0):
        counts = [oracles.counts_of(rows, size, source) for source in range(size)]
        got = comm.alltoallv(x[:rows], counts[rank], algorithm="native")
        parts = [np.split(each[:rows], np.cumsum(count)[:-1])[rank] for each, count in zip(every, counts)]
        assert (got == np.concatenate(parts)).all()
    nothing = comm.gather(x[:0], 0, algorithm="native"), comm.scatter(x[:0], 0, algorithm="native")
    assert nothing[1].shape == (0,) and (nothing[0] is None or nothing[0].shape == (size, 0))
    summed = comm.reduce(np.full(999, rank, np.float32), 1, codec="cast", algorithm="ring")
    assert summed is None or (summed == sum(range(size))).all()
    halves = np.full(5, 1.5, ml_dtypes.bfloat16)
    assert (comm.allgather(halves, algorithm="native") == 1.5).all()
    comm.free()


def check_groups_know_their_ranks_in_the_job() -> None:
    """Their timelines have these numbers."""
    rank, size = standing()
    group = dist.new_group(range(1, size))
    if rank > 0:
        transport = GroupTransport(group, CPU, 60.0)
        assert list(transport.global_ranks()) == dist.get_process_group_ranks(group)
        assert transport.global_ranks()[transport.rank] == rank


def check_handles_and_futures_are_pytorchs() -> None:
    rank, size = standing()
    inputs = [normals(size, 3000, seed=seed) for seed in range(5)]
    tensors = [torch.tensor(each[rank]) for each in inputs]
    works = [compcoll.torch.all_reduce(tensor, async_op=True, codec="zfp", rate=16) for tensor in tensors]
    # A call that is known already has the future of the first one.
    doubled = [work.get_future().then(lambda future: future.value()[0] * 2) for work in works]
    for work, tensor, each in zip(works, tensors, inputs, strict=True):
        assert work.wait() and work.is_completed()
        np.testing.assert_allclose(tensor, np.sum(each, 0), atol=0.02)
    assert all(torch.equal(each.wait(), 2 * tensor) for each, tensor in zip(doubled, tensors, strict=True))
    # What is not contiguous, and several as one.
    whole = torch.tensor(inputs[0][rank]).view(60, 50)
    compcoll.torch.all_reduce(whole.t(), codec="zfp", rate=16)
    np.testing.assert_allclose(whole.flatten(), np.sum(inputs[0], 0), atol=0.02)
    parts = [torch.tensor(inputs[1][rank][:1000]), torch.tensor(inputs[1][rank][1000:])]
    compcoll.torch.all_reduce_coalesced(parts, op=dist.ReduceOp.AVG, codec="zfp", rate=16, algorithm="direct")
    np.testing.assert_allclose(torch.cat(parts), np.mean(inputs[1], 0), atol=0.02)
    stats = compcoll.torch.stats()
    assert stats is not None and stats.algorithm == "direct" and stats.codec == repr(ZFP(rate=16))
    assert 0 < stats.wire_nbytes < stats.raw_sent_nbytes


def check_shards_and_gathers() -> None:
    rank, size = standing()
    inputs = normals(size, 600 * size, seed=3)
    output = torch.empty(600)
    world = World(size)
    expected = world.run(
        lambda comm, x: comm.ireduce_scatter(x, op="mean", codec="zfp", rate=8, algorithm="direct"), inputs
    )
    compcoll.torch.reduce_scatter_tensor(
        output, torch.tensor(inputs[rank]), "avg", codec="zfp", rate=8, algorithm="direct"
    )
    assert bytes_of(output) == bytes_of(expected[rank])
    gathered = torch.empty(size, 600)
    expected = world.run(lambda comm, x: comm.iallgather(x[:600], codec="zfp", rate=8, algorithm="direct"), inputs)
    work = compcoll.torch.all_gather_into_tensor(
        gathered, torch.tensor(inputs[rank][:600]), async_op=True, codec="zfp", rate=8, algorithm="direct"
    )
    assert work is not None and work.wait()
    assert bytes_of(gathered) == bytes_of(expected[rank])


def check_broadcasts() -> None:
    """From any rank, named in the default group or in its own; the source, too, gets what is decoded."""
    rank, size = standing()
    group = dist.new_group(range(size - 1, -1, -1))  # of other ranks than the default group
    for src in range(size):
        inputs = normals(size, 600, seed=src)
        expected = World(size).run(
            lambda comm, x, src=src: comm.ibcast(x, src, codec="cast", dtype="bfloat16", algorithm="binomial"), inputs
        )
        own = dist.get_group_rank(group, src)
        for how in ((src,), (src, group), (None, group, False, own)):
            tensor = torch.tensor(inputs[rank]).reshape(20, 30).t()  # not contiguous
            values = torch.tensor(expected[rank]).reshape(20, 30).t()
            if rank != src:
                tensor.zero_()
            assert compcoll.torch.broadcast(tensor, *how, codec="cast", dtype="bfloat16", algorithm="binomial") is None
            assert bytes_of(tensor) == bytes_of(values)
    tensor = torch.full((100,), float(rank))
    work = compcoll.torch.broadcast(tensor, 1, async_op=True)
    assert work is not None and work.wait() and bool((tensor == 1).all())


def check_differences_from_what_all_ranks_have() -> None:
    """Bit for bit, of all element types; tensors of other values than the other ranks' are refused by all."""
    rank, size = standing()
    for codec, dtype in itertools.product(DIFFERENCES, COMPRESSIBLE):
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32 if dtype.itemsize == 4 else torch.int64
        drawn = torch.Generator().manual_seed(7)
        old = torch.randint(-(2**15), 2**15, (size, 3000), generator=drawn).to(bits)
        new = old ^ (torch.rand(old.shape, generator=drawn) < 0.02).to(bits)

        kept, tensor = old[0].clone().view(dtype), (new if rank == 1 else old)[0].clone().view(dtype)
        options: dict[str, Any] = {"codec": codec, "algorithm": "binomial"}
        if rank == 1:
            options["reference"] = kept
        work = compcoll.torch.broadcast(tensor, 1, async_op=True, **options)
        assert work is not None and work.wait()
        assert bytes_of(tensor) == bytes_of(new[0])
        assert bytes_of(kept) == bytes_of((new if rank == 1 else old)[0])
        stats = compcoll.torch.stats()
        assert stats is not None and stats.codec == repr(codec)
        assert stats.wire_nbytes <= 0.08 * max(stats.raw_sent_nbytes, 1)

        options = {"codec": codec, "algorithm": "ring"}
        output = old.clone().view(dtype)
        compcoll.torch.all_gather_into_tensor(output, new[rank].view(dtype), **options)
        assert bytes_of(output) == bytes_of(new)
        output = torch.stack([old, old], dim=-1).view(dtype)[..., 0]  # not contiguous
        compcoll.torch.all_gather_into_tensor(output, new[rank].view(dtype), **options)
        assert bytes_of(output) == bytes_of(new)

        output = old.clone().view(dtype)
        if rank == size - 1:
            output.view(bits)[0, 0] ^= 1
        before = bytes_of(output)
        with pytest.raises(ReferenceMismatch, match=f"rank {size - 1}.*previous values"):
            compcoll.torch.all_gather_into_tensor(output, new[rank].view(dtype), **options)
        assert bytes_of(output) == before
        compcoll.torch.all_gather_into_tensor(output, old[rank].view(dtype), codec=None)  # as the error advises
        assert bytes_of(output) == bytes_of(old)
        compcoll.torch.all_gather_into_tensor(output, new[rank].view(dtype), **options)
        assert bytes_of(output) == bytes_of(new)

        kept, tensor = torch.zeros(3000, dtype=dtype), old[rank].clone().view(dtype)
        reference = {"reference": kept} if rank == 1 else {}
        with pytest.raises(ReferenceMismatch, match="once with codec=None"):
            compcoll.torch.broadcast(tensor, 1, codec=codec, algorithm="binomial", **reference)
        compcoll.torch.broadcast(tensor, 1, codec=None, **reference)
        assert bytes_of(tensor) == bytes_of(old[1])
        tensor.view(bits)[::50] += rank == 1
        compcoll.torch.broadcast(tensor, 1, codec=codec, algorithm="binomial", **reference)
        assert bytes_of(tensor) == bytes_of(old[1] + (torch.arange(3000) % 50 == 0).to(bits))
        assert rank != 1 or bytes_of(kept) == bytes_of(tensor)


def check_all_to_all_of_uneven_rows() -> None:
    rank, size = standing()
    for dtype in (torch.float32, torch.bfloat16):
        rows = [[(3 * source + 5 * dest) % 4 for dest in range(size)] for source in range(size)]
        blocks = [
            [
                torch.randn(rows[s][d], 33, generator=torch.Generator().manual_seed(10 * s + d)).to(dtype)
                for d in range(size)
            ]
            for s in range(size)
        ]
        coming = [blocks[source][rank] for source in range(size)]
        for async_op in (False, True):
            output = torch.full((sum(map(len, coming)), 33), torch.nan, dtype=dtype)
            work = compcoll.torch.all_to_all_single(
                *(output, torch.cat(blocks[rank]), [len(each) for each in coming], rows[rank]),
                async_op=async_op,
                codec="minmax",
                bits=8,
            )
            if work is not None:
                work.wait()
            # As a rank by itself encodes them.
            alone = [
                compcoll.decode(compcoll.encode(x, "minmax", bits=8), x.shape, x.dtype, codec="minmax", bits=8)
                for each in coming
                if len(each)
                and (
                    x := np.asarray(each.float()).astype(ml_dtypes.bfloat16 if dtype is torch.bfloat16 else np.float32)
                )
                is not None
            ]
            assert bytes_of(output) == b"".join(map(bytes_of, alone)), (dtype, async_op)
    even, output = torch.randn(2 * size, 8), torch.empty(2 * size, 8)
    compcoll.torch.all_to_all_single(output, even, codec="cast", dtype="float16")
    every = [torch.empty_like(even) for _ in range(size)]
    dist.all_gather(every, even)
    assert torch.equal(output, torch.cat([each[2 * rank : 2 * rank + 2].half().float() for each in every]))


def check_groups_of_some_ranks() -> None:
    rank, _ = standing()
    pair = dist.new_group([2, 0])
    tensor = torch.full((5000,), float(rank))
    if rank == 1:
        with pytest.raises(compcoll.errors.InvalidArgument, match="not in that group"):
            compcoll.torch.all_reduce(tensor, group=pair, codec="zfp")
        return
    compcoll.torch.all_reduce(tensor, group=pair, codec="zfp", algorithm="direct")
    assert torch.equal(tensor, torch.full((5000,), 2.0))
    assert compcoll.torch.stats(pair) is not None


def check_auto_goes_by_what_links_carry() -> None:
    rank, size = standing()
    group, named = dist.new_group(), os.environ.pop("COMPCOLL_PROFILE")
    try:
        x = torch.full((1 << 16,), float(rank))
        with logged(logging.INFO) as lines:
            compcoll.torch.all_reduce(x, group=group, codec="zfp", rate=8)
        assert len(lines) == (rank == 0), lines  # nothing of the measurement's own calls
        told = f"{member_of(group, CPU).communicator.explain(x.numpy(), codec='zfp', rate=8)}"
        assert "profile: quick profile" in told, told
        assert torch.allclose(x, torch.full_like(x, sum(range(size))), atol=0.1)
        # It is the same on all ranks, so that they decide alike.
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, told)
        assert len(set(everybody)) == 1
        stats = compcoll.torch.stats(group)
        assert stats is not None and f"{stats.algorithm} " in told
        # The group's own, what compresses, and of what sends values as they are only what is about as fast.
        timings = [timing for known in measured.values() for timing in known.timings]
        assert {"native", "ring", "direct"} <= {timing.algorithm for timing in timings}
        plain = {timing.algorithm for timing in timings if timing.codec == RAW}
        assert plain <= {"native", "shared_memory", "dissemination"}
    finally:
        os.environ["COMPCOLL_PROFILE"] = named


def check_the_groups_own_all_reduce_is_taken_where_it_is_faster() -> None:
    rank, size = standing()
    group = dist.new_group()
    member = member_of(group, CPU)
    values = torch.full((1000,), float(rank + 1))
    explain = member.communicator.explain
    member.communicator.explain = lambda *args, **more: explain(*args, **{**more, "codec": None, "algorithm": "native"})
    results = (("sum", size * (size + 1) / 2), ("avg", (size + 1) / 2))
    with logged(logging.INFO) as lines:
        for op, expected in 2 * results:  # and again, when it is known
            for async_op, learnt in itertools.product((False, True), repeat=2):
                x = values.clone().requires_grad_(learnt)
                work = compcoll.torch.all_reduce(x, op, group, async_op, codec="zfp")
                if work is not None:
                    work.wait()
                torch.testing.assert_close(x.detach(), torch.full_like(values, expected))
    told = [line.getMessage() for line in lines]
    assert len(told) == (2 if rank == 0 else 0) and all("native" in line for line in told), told
    stats = compcoll.torch.stats(group)
    assert stats is not None and (stats.algorithm, stats.codec) == ("native", None)
    assert sorted((each.by_group is not None, each.operation.name) for each in member.decided.values()) == [
        (True, "mean"),
        (True, "sum"),
    ]


def check_errors_name_the_library_whose_own_collective_is_meant() -> None:
    with pytest.raises(UnknownAlgorithm, match='algorithm="native" is gloo\'s own and uncompressed'):
        compcoll.torch.all_reduce(torch.ones(1000), codec="zfp", rate=8, algorithm="native")


def check_sums_go_through_memory_that_ranks_of_a_node_share() -> None:
    rank, size = standing()
    group = dist.new_group()
    communicator = member_of(group, CPU).communicator
    for n in (16, 1 << 12, 1 << 14):
        values = torch.arange(n, dtype=torch.float32).view(-1, 16) + rank
        planned = communicator.explain(values.numpy().reshape(-1), codec="zfp", rate=8).algorithm
        assert planned in ("shared_memory", "dissemination"), (n, planned)
        for op in 2 * ("sum", "avg"):  # and again, when it is known
            for async_op in (False, True):
                x = values.clone().requires_grad_()
                work = compcoll.torch.all_reduce(x, op, group, async_op, codec="zfp", rate=8)
                if work is not None:
                    assert work.wait()
                expected = size * (values - rank) + sum(range(size))
                torch.testing.assert_close(x.detach(), expected / (size if op == "avg" else 1))
                stats = compcoll.torch.stats(group)
                assert stats is not None and (stats.algorithm, stats.codec) == (planned, None), (n, op, async_op)


def check_what_a_call_was_decided_to_be_is_its_own() -> None:
    """Calls that differ in one argument each, in turns: none takes another's place."""
    rank, size = standing()
    group, whole = dist.new_group(), size * (size + 1) / 2
    calls = (("direct", 8, "sum"), ("ring", 8, "avg"), ("direct", 16, "avg"), ("auto", 8, "sum"))
    for _ in range(3):
        for algorithm, rate, op in calls:
            x = torch.full((5000,), rank + 1.0)
            compcoll.torch.all_reduce(x, op, group, codec="zfp", rate=rate, algorithm=algorithm)
            torch.testing.assert_close(x, torch.full_like(x, whole / (size if op == "avg" else 1)), atol=0.05, rtol=0)
            stats = compcoll.torch.stats(group)
            assert stats is not None
            if algorithm != "auto":
                assert (stats.algorithm, stats.codec) == (algorithm, repr(ZFP(rate=rate)))
        halved = torch.full((5000,), rank + 1.0)
        scaled = dist._make_nccl_premul_sum(0.5 + rank)
        compcoll.torch.all_reduce(halved, scaled, group, codec="zfp", rate=16, algorithm="direct")
        expected = sum((r + 0.5) * (r + 1) for r in range(size))
        torch.testing.assert_close(halved, torch.full_like(halved, expected), atol=0.05, rtol=1e-3)
