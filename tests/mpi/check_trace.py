"""COMPCOLL_TRACE: every kind of call is in the files of all ranks, and results are those without it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from oracles import chrome_trace

from compcoll import Communicator
from compcoll.errors import InvalidArgument

N = 50_000
CALLS: list[tuple[dict[str, Any], set[str]]] = [
    ({"codec": "int8", "algorithm": "ring"}, {"encode", "wait", "wire", "decode"}),
    ({"codec": "zfp", "rate": 8, "algorithm": "direct"}, {"encode", "wait", "wire", "decode"}),
    ({"codec": "topk", "density": 0.01}, {"encode", "wait", "decode"}),
    ({"codec": "intsum", "algorithm": "ring"}, {"wait", "wire"}),
    ({"algorithm": "native"}, {"operation"}),
    ({"algorithm": "shared_memory"}, {"operation"}),
]
"""Arguments, and the kinds of steps after the handshake on two ranks and more."""


@contextmanager
def traced(comm: MPI.Intracomm) -> Iterator[Path]:
    """A folder on rank 0 for the files of all ranks; they are whole when the block ends."""
    folder = Path(comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None))
    os.environ["COMPCOLL_TRACE"] = str(folder / "new" / "folder")
    try:
        yield folder / "new" / "folder"
    finally:
        del os.environ["COMPCOLL_TRACE"]
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def values(comm: MPI.Intracomm, n: int = N) -> np.ndarray:
    return np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)


def check_blocking_calls(comm: MPI.Intracomm) -> None:
    usual, x, sent = Communicator(comm), values(comm), []
    with traced(comm) as folder:
        ours = Communicator(comm)
        for how, _ in CALLS:
            for _ in range(2):
                np.testing.assert_array_equal(ours.allreduce(x, **how), usual.allreduce(x, **how))
                assert ours.stats is not None and ours.stats.spans is None
                sent.append(ours.stats.wire_nbytes)
        np.testing.assert_array_equal(ours.allreduce(x[:1]), usual.allreduce(x[:1]))
        calls = chrome_trace.calls(folder / f"rank-{comm.rank}.json", comm.rank)
        assert [call.args["number"] for call in calls] == list(range(2 * len(CALLS) + 1))
        for call, nbytes, (how, kinds) in zip(calls, sent, [each for each in CALLS for _ in range(2)]):
            assert call.args["bytes"] == x.nbytes and call.args["wire_bytes"] == nbytes
            assert call.name.startswith("allreduce ") and call.name.endswith(" 195.3 KiB")
            if comm.size == 1:
                continue
            assert how.get("codec", how.get("algorithm")) in call.name
            assert kinds <= {step.kind for step in call.steps}, (how, call.steps)
            sends = [step for step in call.of("wire") if step.name.startswith("send to ")]
            if "wire" in kinds and "intsum" not in call.name:
                assert sum(step.args["bytes"] for step in sends) == nbytes
            if how.get("codec") == "int8":  # along a ring a rank encodes each chunk once
                assert sum(step.args["bytes"] for step in call.of("encode")) == x.nbytes
    usual.free()
    ours.free()


def check_requests(comm: MPI.Intracomm) -> None:
    """Six are in flight, more than there are slots; and a persistent request runs beside them, and alone."""
    usual = Communicator(comm)
    with traced(comm) as folder:
        ours = Communicator(comm)
        inputs = [values(comm, 1000 * (each + 1)) for each in range(6)]
        how: dict[str, Any] = {"codec": "minmax", "algorithm": "ring"}

        def together(communicator: Communicator) -> list[np.ndarray]:
            requests = [communicator.iallreduce(x, **how) for x in inputs]
            persistent = communicator.allreduce_init(inputs[0], **how)
            results = [request.wait() for request in (persistent.start(), *requests)]
            results += [communicator.iallreduce(inputs[1], algorithm="native").wait()]
            return [*results, persistent.start().wait()]

        for one, other in zip(together(ours), together(usual), strict=True):
            np.testing.assert_array_equal(one, other)
        calls = chrome_trace.calls(folder / f"rank-{comm.rank}.json", comm.rank)
        assert sorted(call.args["number"] for call in calls) == list(range(9))
        calls.sort(key=lambda call: (call.place, call.begun))
        for earlier, later in pairwise(calls):
            assert earlier.place != later.place or earlier.ended <= later.begun, "a thread has one call at a time"
        if comm.size > 1:
            assert all(call.of("encode") and call.of("wire") for call in calls if "minmax" in call.name)
            assert any(call.of("queue") for call in calls)
    usual.free()
    ours.free()


def check_several_communicators(comm: MPI.Intracomm) -> None:
    """Files have the numbers of COMM_WORLD, and threads are of one communicator."""
    with traced(comm) as folder:
        backwards = comm.Split(0, -comm.rank)
        halves = comm.Split(comm.rank % 2, comm.rank)
        communicators = [Communicator(each) for each in (comm, backwards, backwards, halves)]
        for communicator in communicators:
            communicator.allreduce(values(comm), codec="int8", algorithm="ring")
        calls = chrome_trace.calls(folder / f"rank-{comm.rank}.json", comm.rank)
        named = [call.args["communicator"] for call in calls]
        assert len(calls) == 4 and len({call.place for call in calls}) == 4
        assert len(set(named)) == 4
        every = comm.allgather(named)
        assert all(names[:3] == named[:3] for names in every), "all ranks of a communicator give it one name"
        assert all((names[3] == named[3]) == (rank % 2 == comm.rank % 2) for rank, names in enumerate(every))
        for communicator in communicators:
            communicator.free()
        backwards.Free()
        halves.Free()


def check_clocks(comm: MPI.Intracomm) -> None:
    """Ranks of one host agree: no rank leaves a handshake before the last one has begun it."""
    with traced(comm) as folder:
        ours = Communicator(comm)
        for _ in range(5):
            ours.allreduce(values(comm, 10))
        calls = chrome_trace.calls(folder / f"rank-{comm.rank}.json", comm.rank)
        handshakes = [call.of("handshake")[0] for call in calls]
        times = comm.allgather([(each.begun, each.ended) for each in handshakes])
        for same in zip(*times, strict=True):
            assert max(begun for begun, _ in same) <= min(ended for _, ended in same) + 20_000
        ours.free()


def check_folder_that_cannot_be_written(comm: MPI.Intracomm) -> None:
    """On one rank: no rank gets a communicator."""

    def message(call: Callable[[], object]) -> str:
        try:
            call()
        except InvalidArgument as error:
            return str(error)
        return ""

    with traced(comm) as folder:
        last = comm.size - 1
        if comm.rank == last:
            os.environ["COMPCOLL_TRACE"] = "/dev/null/folder"
        text = message(lambda: Communicator(comm))
        assert f"rank {last}" in text and "COMPCOLL_TRACE='/dev/null/folder'" in text, text
        os.environ["COMPCOLL_TRACE"] = str(folder)
        Communicator(comm).free()
