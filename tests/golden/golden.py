"""Digests of results, residuals and messages: every codec, algorithm, collective and element type, on 1 to 9 ranks.

`tests/golden/digests.txt` holds them, so that no change of the library changes a bit unseen.

    python tests/golden/golden.py          # add the digests of new codecs and algorithms, drop those of former ones
    python tests/golden/golden.py --all    # compute all anew (minutes), after a change that is meant to change bits
"""

from __future__ import annotations

import functools
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.loopback import normals
from oracles.collectives import arguments, previous
from promises import EVERY

from compcoll import Codec, Communicator, CompcollError, ErrorFeedback
from compcoll.algorithms import ALGORITHMS
from compcoll.algorithms.record import REDUCTIONS
from compcoll.codecs.sparse.sparsifier import Sparsifier
from compcoll.dtypes import DTYPES, numpy_dtype
from compcoll.execute.compiled_plan import feedback_refused
from compcoll.sparse import VarianceFeedback
from compcoll.transports.loopback import Loopback

FILE = Path(__file__).with_name("digests.txt")
RANKS = {
    "float16": (1, 3, 9),
    "bfloat16": (1, 2, 6),
    "float32": range(1, 10),
    "float64": (1, 2, 5),
    "int32": (1, 3, 8),
}
"""Of each element type: who sends what to whom depends on the number of ranks, and not on the type."""
BLOCKING = (2, 3)
"""Numbers of ranks that also make blocking calls: a thread for each rank takes time."""
CALLS = 2
"""Of each kind: the first call of a plan may run otherwise than those that repeat it."""
REFUSED = "--"
_SEGMENT_NBYTES = 1024  # so that chunks have several segments
_PER_RANK, _WHOLE = 91, 1001  # elements
OTHER_ROOT = ("reduce", "gather", "scatter", "alltoallv")
"""The collectives whose root is not rank 0 here, and the one with counts."""


class Kind(NamedTuple):
    """What one line of the file is about."""

    collective: str
    algorithm: str
    dtype: str
    codec: Codec | None

    def __str__(self) -> str:
        return f"{self.collective} {self.algorithm} {self.dtype} {self.codec!r}"


def kinds(dtype: str) -> Iterator[Kind]:
    """All kinds of calls of one element type; what a kind refuses stands in the file as well."""
    codecs = [None, *EVERY] if dtype in DTYPES else [None]
    for record in ALGORITHMS.values():
        for collective in record.collectives:
            if record.by_mpi:  # needs MPI, whose messages are its own
                continue
            yield from (Kind(collective, record.name, dtype, codec) for codec in codecs)


class Recorded(Loopback):
    """A world that notes the bytes of every message behind the handshake, by source and destination."""

    def __init__(self, size: int) -> None:
        super().__init__(size, ranks_per_node=min(size, 2))
        self.sent: dict[tuple[int, int], bytearray] = defaultdict(bytearray)

    def post(self, transfer: Any, *, sending: bool) -> None:
        source, dest, tag = transfer.key
        if sending and tag > 1:
            self.sent[source, dest] += bytes(transfer.wire.content)
        super().post(transfer, sending=sending)


class World:
    """Ranks in one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loopback = Recorded(size)
        self.comms = [Communicator(transport, timeout=60) for transport in self.loopback.transports]
        self.pool = ThreadPoolExecutor(size)

    def digest(self, kind: Kind) -> str:
        """Two hexadecimal digits of all that calls of a kind gave; the routes that a call can take must not differ."""
        x = inputs(kind.collective, kind.dtype, self.size, 0)[0]
        try:
            plan = self.comms[0].explain(x, collective=kind.collective, codec=kind.codec, algorithm=kind.algorithm)
        except CompcollError:
            return REFUSED
        fed = kind.codec is not None and not feedback_refused(plan)
        first = self._digest(kind, fed, blocking=False)
        if self.size in BLOCKING:
            assert self._digest(kind, fed, blocking=True) == first, (
                f"{kind}: blocking calls differ on {self.size} ranks"
            )
        return first

    def _digest(self, kind: Kind, fed: bool, *, blocking: bool) -> str:
        digest = blake2b(digest_size=2)
        reductions = kind.collective in REDUCTIONS
        for comm in self.comms:
            comm.sequence_number = 0  # of which random numbers are drawn
        runs: list[tuple[dict[str, Any], bool]] = (
            [({"op": op}, False) for op in ("sum", "mean")] if reductions else [({}, False)]
        )
        if dtype_is_whole(kind.dtype):
            runs = runs[:1]
        if reductions and fed:
            runs.append(({"op": "mean"}, True))
        if (
            isinstance(kind.codec, Sparsifier)
            and kind.codec.state is VarianceFeedback
            and kind.collective == "allreduce"
        ):
            runs = [({"op": op}, True) for op in ("sum", "mean")]  # without its state it does nothing
        for options, feeds in runs:
            feedback = [self._feedback(kind) if feeds else None for _ in self.comms]
            for number in range(CALLS):
                for each, x in zip(feedback, inputs(kind.collective, kind.dtype, self.size, number), strict=True):
                    if isinstance(each, VarianceFeedback):
                        each.observe(np.abs(x.astype(np.float32)))
                self.loopback.sent.clear()
                results = self._call(kind, number, options, feedback, blocking=blocking)
                for result in results[:1] if kind.collective == "allreduce" else results:
                    digest.update(b"" if result is None else result.tobytes())
                for route in sorted(self.loopback.sent):
                    digest.update(bytes(route) + bytes(self.loopback.sent[route]))
                for each in feedback:
                    for name in () if each is None else each.arrays:
                        if (array := getattr(each, name)) is not None:
                            digest.update(array.tobytes())
        return digest.hexdigest()[:2]

    @staticmethod
    def _feedback(kind: Kind) -> ErrorFeedback:
        sparse = isinstance(kind.codec, Sparsifier) and kind.algorithm.startswith("sparse")
        return kind.codec.state() if sparse else ErrorFeedback()  # type: ignore[union-attr]

    def _call(
        self, kind: Kind, number: int, options: dict[str, Any], feedback: Sequence[Any], *, blocking: bool
    ) -> list[np.ndarray]:
        arrays = inputs(kind.collective, kind.dtype, self.size, number)

        def start(rank: int) -> Any:
            comm = self.comms[rank]
            call = getattr(comm, kind.collective if blocking else f"i{kind.collective}")
            given = {"codec": kind.codec, "algorithm": kind.algorithm, **options}
            if kind.collective in OTHER_ROOT:
                given |= arguments(kind.collective, arrays[rank].size, self.size, rank, root=self.size // 2)
            given |= previous(kind.codec, kind.collective, arrays)
            if feedback[rank] is not None:
                given["feedback"] = feedback[rank]
            return call(arrays[rank], **given)

        if not blocking:
            return self.loopback.run([start(rank) for rank in range(self.size)])
        return [call.result(60) for call in [self.pool.submit(start, rank) for rank in range(self.size)]]


def dtype_is_whole(dtype: str) -> bool:
    return dtype not in DTYPES


@functools.cache
def inputs(collective: str, dtype: str, size: int, number: int) -> list[np.ndarray]:
    """Each rank's array: normal values of several magnitudes, and some zeros."""
    n = _WHOLE if collective in ("allreduce", "bcast", "reduce") else _PER_RANK
    if collective in ("reduce_scatter", "alltoall", "alltoallv", "scatter"):
        n *= size
    arrays = normals(size, n, np.float64, seed=number)
    for rank, x in enumerate(arrays):
        x *= np.exp2(np.arange(n) % 23 - 12 + rank % 2)
        x[::17] = 0
    if dtype_is_whole(dtype):
        return [np.rint(x * 100).astype(dtype) for x in arrays]
    if collective == "allgatherv":
        arrays = [x[: n - 7 * rank] for rank, x in enumerate(arrays)]
    return [x.astype(numpy_dtype(dtype)) for x in arrays]


@contextmanager
def small_segments() -> Iterator[None]:
    """Communicators cut chunks into many segments meanwhile."""
    before = os.environ.get("COMPCOLL_SEGMENT")
    os.environ["COMPCOLL_SEGMENT"] = str(_SEGMENT_NBYTES)
    try:
        yield
    finally:
        del os.environ["COMPCOLL_SEGMENT"]
        if before is not None:
            os.environ["COMPCOLL_SEGMENT"] = before


def lines(ranks: Mapping[str, Sequence[int]] = RANKS, known: Mapping[str, str] | None = None) -> dict[Kind, str]:
    """For each kind of these element types its digests on these numbers of ranks. Known ones are not computed."""
    known = known or {}
    with small_segments():
        worlds = {size: World(size) for sizes in ranks.values() for size in sizes}
        return {
            kind: known.get(str(kind)) or "".join(worlds[size].digest(kind) for size in sizes)
            for dtype, sizes in ranks.items()
            for kind in kinds(dtype)
        }


def kept() -> dict[str, str]:
    """The file's digests, by what each is about."""
    found: dict[str, str] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("# "):
            head = line[2:]
            continue
        codec, _, digests = line.partition(" | ")
        found |= {f"{head} {dtype} {codec}": digest for dtype, digest in zip(RANKS, digests.split(), strict=False)}
    return found


def write(found: dict[Kind, str]) -> None:
    """Write the file: a paragraph for each algorithm, a line for each codec, a column for each element type."""
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, digests in found.items():
        rows[f"# {kind.collective} {kind.algorithm}"][repr(kind.codec)].append(digests)
    text = [
        [head, *(f"{codec} | {' '.join(each)}" for codec, each in by_codec.items())] for head, by_codec in rows.items()
    ]
    FILE.write_text("\n".join("\n".join(part) for part in text) + "\n")


if __name__ == "__main__":
    write(lines(known=None if "--all" in sys.argv else kept()))
