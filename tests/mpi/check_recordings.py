"""Blocking and nonblocking allreduces, which programs run in several lanes, have the same bits."""

from __future__ import annotations

import itertools
from functools import partial
from time import sleep
from typing import Any

import ml_dtypes
import numpy as np
from fakes.python_calls import functions_entered
from mpi4py import MPI
from promises import ALGORITHMS, FIXED, FLAT, one_of_each

import compcoll
from compcoll import (
    QSGD,
    ZFP,
    Communicator,
    ErrorFeedback,
    OneBit,
)
from compcoll.errors import CollectiveMismatch, InvalidBuffer

SIZES: list[tuple[int, Any, str]] = [
    (0, np.float32, "mean"),
    (1, np.float64, "sum"),
    (1000, np.float32, "mean"),
    (70_001, np.float32, "mean"),
    (70_001, np.float64, "sum"),
]


def check_same_bits_as_the_algorithm(comm: MPI.Intracomm) -> None:
    replayed, run = Communicator(comm), Communicator(comm)
    draw = np.random.default_rng(comm.rank)
    for codec, algorithm in itertools.product([None, *one_of_each(FIXED)], ALGORITHMS):
        for n, dtype, op in SIZES:
            how: dict[str, Any] = {"codec": codec, "algorithm": algorithm, "op": op}
            for _ in range(2):  # the first of them is compiled
                x = draw.standard_normal(n).astype(dtype)
                ours, theirs = replayed.allreduce(x, **how), run.iallreduce(x, **how).wait()
                np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
            assert replayed.allreduce(x, out=x, **how) is x
            np.testing.assert_array_equal(run.iallreduce(theirs.copy(), **how).wait().shape, x.shape)
            a, b = replayed.stats, run.stats
            assert a is not None and b is not None
            assert (a.codec, a.algorithm, a.wire_nbytes, a.ratio) == (b.codec, b.algorithm, b.wire_nbytes, b.ratio)
    replayed.free()
    run.free()


def check_files_of_a_repeated_call(comm: MPI.Intracomm) -> None:
    """A rank that waits long goes through more of them: so the least of many calls is held against the goal."""
    ours = Communicator(comm)
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    how: dict[str, Any] = {"codec": "zfp", "rate": 8, "algorithm": "ring"}
    for call, most in ((partial(ours.allreduce, x, **how), 5), (lambda: ours.iallreduce(x, **how).wait(), 8)):
        for _ in range(6):  # the first in each lane is compiled
            call()
        ways = [{code.co_filename for code in functions_entered(call)} - {"<string>"} for _ in range(10)]
        entered = min(ways, key=len)
        assert comm.allreduce(len(entered), MPI.MIN) <= most, entered
    ours.free()


def check_halves_and_shapes(comm: MPI.Intracomm) -> None:
    communicator = Communicator(comm)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        for shape in ((), (3,), (4, 5), (2, 300, 7)):
            x = np.random.default_rng(comm.rank).standard_normal(shape).astype(dtype)
            for _ in range(3):
                got = communicator.allreduce(x, codec="minmax", algorithm="ring")
                expected = communicator.iallreduce(x, codec="minmax", algorithm="ring").wait()
                assert got.shape == shape and got.dtype == x.dtype
                np.testing.assert_array_equal(got, expected)
    communicator.free()


def check_feedback(comm: MPI.Intracomm) -> None:
    replayed, run = Communicator(comm), Communicator(comm)
    for codec, algorithm in itertools.product([ZFP(rate=8), OneBit(), QSGD(bits=6, seed=1)], ALGORITHMS):
        ours, theirs = ErrorFeedback(), ErrorFeedback()
        for step in range(4):
            x = np.random.default_rng([comm.rank, step]).standard_normal(30_000).astype(np.float32)
            how: dict[str, Any] = {"codec": codec, "algorithm": algorithm}
            got = replayed.allreduce(x, feedback=ours, **how)
            np.testing.assert_array_equal(got, run.iallreduce(x, feedback=theirs, **how).wait())
            plain = replayed.allreduce(x, **how)  # another program
            np.testing.assert_array_equal(plain, run.iallreduce(x, **how).wait())
        if ours.residual is not None:
            np.testing.assert_array_equal(ours.residual, theirs.residual)
    replayed.free()
    run.free()


def check_beside_others(comm: MPI.Intracomm) -> None:
    """A rank with another collective under way makes all go on in a lane of the call's number."""
    communicator = Communicator(comm)
    x = np.random.default_rng(comm.rank).standard_normal((50, 400)).astype(np.float32)
    how: dict[str, Any] = {"codec": "zfp", "rate": 16, "algorithm": "direct"}
    alone = communicator.allreduce(x, **how)
    for busy in range(comm.size):
        other = compcoll.get_communicator(comm)
        late = other.iallreduce(x, algorithm="ring") if comm.rank == busy else None
        np.testing.assert_array_equal(communicator.allreduce(x, **how), alone)
        stats = communicator.stats
        assert stats is not None and stats.algorithm == ("direct" if comm.size > 1 else "copy")
        if late is None:
            late = other.iallreduce(x, algorithm="ring")
        late.wait()
        np.testing.assert_array_equal(communicator.allreduce(x, **how), alone)
    communicator.free()


def check_calls_that_do_not_belong_together(comm: MPI.Intracomm) -> None:
    """Of short and of long messages: nothing stays under way."""
    if comm.size == 1:
        return
    communicator = Communicator(comm)
    for n, algorithm in itertools.product([3000, 600_000], ALGORITHMS):
        x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
        usual: dict[str, Any] = {"codec": "zfp", "rate": 8, "algorithm": algorithm}
        others: list[dict[str, Any]] = [
            {**usual, "rate": 16},
            {**usual, "rate": 4},
            {**usual, "algorithm": "ring" if algorithm == "direct" else "direct"},
            {**usual, "out": x[:1]},
            {"algorithm": "native"},
        ]
        expected, before = communicator.allreduce(x, **usual), x.copy()
        for other, odd in itertools.product(others, {0, comm.size - 1}):
            try:
                communicator.allreduce(x, **(other if comm.rank == odd else usual))
            except (CollectiveMismatch, InvalidBuffer):
                pass
            else:
                raise AssertionError(f"{other} belongs together with {usual}")
            np.testing.assert_array_equal(x, before)
            for _ in range(2):
                np.testing.assert_array_equal(communicator.allreduce(x, **usual), expected)
            if comm.rank == odd:
                got = communicator.iallreduce(x, **usual).wait()
            else:
                got = communicator.allreduce(x, **usual)
            np.testing.assert_array_equal(got, expected)
    communicator.free()


def check_old_recordings_are_given_back(comm: MPI.Intracomm) -> None:
    """More than are kept, over and over."""
    from compcoll.execute import programs

    most, programs._MOST_MESSAGES = programs._MOST_MESSAGES, 100
    try:
        communicator = Communicator(comm)
        for _ in range(3):
            for n in range(1000, 60_000, 4999):
                x = np.full(n, comm.rank + 1.0, np.float32)
                got = communicator.allreduce(x, codec="cast", dtype="bfloat16", algorithm="ring")
                np.testing.assert_allclose(got, comm.size * (comm.size + 1) / 2, rtol=0.02)
        held = [len(each.messages) for each in communicator._programs._kept.values()]
        assert held and (sum(held) <= 100 or len(held) == 1)
        assert communicator._programs._messages == sum(held)
        communicator.free()
        assert not communicator._programs._kept
    finally:
        programs._MOST_MESSAGES = most


def check_many_in_flight(comm: MPI.Intracomm) -> None:
    """Many more than there are lanes, of all kinds, waited for in another order: those behind wait for those before."""
    communicator, p, rank = Communicator(comm), comm.size, comm.rank
    codec = {"codec": "cast", "dtype": "bfloat16"}
    for _ in range(3):
        started = []
        for k in range(60):
            x = np.full(p * (1 + 50 * (k % 7)), rank + 1.0, np.float32)
            algorithm = ("ring", "direct", "auto")[k % 3]
            total, block = p * (p + 1) / 2, (x.size // p,)
            started += [
                (communicator.iallreduce(x, algorithm=algorithm, **codec), np.full(x.size, total)),
                (communicator.ireduce_scatter(x, algorithm=algorithm, **codec), np.full(block, total)),
                (communicator.iallgather(x, algorithm=algorithm, **codec), np.add.outer(np.arange(p), np.ones(x.size))),
                (communicator.ibcast(x, k % p, **codec), np.full(x.size, k % p + 1.0)),
                (communicator.ialltoall(x, **codec), np.repeat(np.arange(p) + 1.0, x.size // p)),
                (communicator.iallreduce(x[:1]), np.full(1, total)),
                (communicator.iscatter(x, k % p, **codec), np.full(block, k % p + 1.0)),
                (communicator.ialltoallv(x, [x.size // p] * p, **codec), np.repeat(np.arange(p) + 1.0, x.size // p)),
                (communicator.ireduce(x, k % p, algorithm=algorithm, **codec), np.full(x.size, total)),
                (communicator.igather(x, k % p, **codec), np.add.outer(np.arange(p), np.ones(x.size))),
            ]
            if rank != k % p:  # no result
                started[-2:] = [(request, None) for request, _ in started[-2:]]
        for request, expected in started[::-1]:
            if expected is None:
                assert request.wait() is None
            else:
                np.testing.assert_allclose(request.wait(), expected, rtol=0.02)
    blocking = communicator.allreduce(np.ones(1000, np.float32), algorithm="ring", **codec)
    np.testing.assert_array_equal(blocking, float(p))
    communicator.free()


def check_recordings_share_memory(comm: MPI.Intracomm) -> None:
    """Calls of all sizes and algorithms in turns: each has its own sums."""
    communicator = Communicator(comm)
    calls = [(n, algorithm) for n in (70_000, 3000, 1 << 20, 9) for algorithm in FLAT]
    expected = {}
    for turn in range(3):
        for n, algorithm in calls[turn:] + calls[:turn]:
            x = np.random.default_rng(n + comm.rank).standard_normal(n, np.float32)
            options = {"codec": "minmax", "bits": 8, "algorithm": algorithm}
            got = communicator.allreduce(x, **options)
            if turn == 0:
                expected[n, algorithm] = communicator.iallreduce(x, **options).wait()
            np.testing.assert_array_equal(got, expected[n, algorithm])
    communicator.free()


def check_persistent_requests_beside_others(comm: MPI.Intracomm) -> None:
    """Ranks are late by turns, so that a run sometimes ends in its start, and sometimes finds others under way."""
    ours, late = Communicator(comm), np.random.default_rng(comm.rank)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (5000, {"algorithm": "ring"}),
        (5000, {"codec": "cast", "algorithm": "direct"}),
        (300, {"op": "max"}),  # MPI's own, which must not block in start()
    ]
    arrays = [np.empty(n, np.float32) for n, _ in kinds]
    requests = [ours.allreduce_init(x, **how) for x, (_, how) in zip(arrays, kinds)]
    order = np.random.default_rng(7).integers(0, len(kinds) + 2, 300)
    others: list[tuple[Any, int]] = []
    under_way: dict[int, int] = {}
    for step, kind in enumerate(order):
        if late.random() < 0.2:
            sleep(late.random() / 2000)
        term = step % 16
        total = sum(range(comm.size)) + term * comm.size
        if kind == len(kinds):
            others.append((ours.iallreduce(np.full(700, comm.rank + term, np.float32)), total))
        elif kind > len(kinds):
            assert (ours.allreduce(np.full(9, comm.rank + term, np.float32)) == total).all()
        else:
            if kind in under_way:
                assert (requests[kind].wait() == under_way.pop(kind)).all()
            arrays[kind][:] = comm.rank + term
            requests[kind].start()
            under_way[kind] = term + comm.size - 1 if "op" in kinds[kind][1] else total
    for kind, expected in under_way.items():
        assert (requests[kind].wait() == expected).all()
    assert all((request.wait() == expected).all() for request, expected in others)
    ours.free()
