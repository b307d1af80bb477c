"""The promises that every codec keeps: one list of codecs, and `check_codec`, which takes one through all of them.

`check_codec` runs on any `World`: ranks in one process (`fakes.loopback`), or those of an MPI job (`mpi.world`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from algorithms.references import reference
from fakes.loopback import exact_sum, normals

from compcoll import (
    SZP,
    ZFP,
    Cast,
    Codec,
    Communicator,
    CompcollError,
    ErrorFeedback,
    IntSum,
    Request,
    Sign,
    Stats,
)
from compcoll.algorithms import ALGORITHMS as RECORDS
from compcoll.algorithms import DENSE
from compcoll.codecs.registry import codec_classes
from compcoll.codecs.sparse.sparsifier import Sparsifier
from compcoll.errors import CollectiveMismatch
from compcoll.execute.slots import AT_ONCE


def is_vote(codec: Codec | None) -> bool:
    """Whether results are signs instead of sums."""
    return isinstance(codec, Sign) and codec.scale is None


# Every codec in the configurations that its class gives as examples.
EVERY = [cls(**one.options) for _, cls in sorted(codec_classes().items()) for one in cls.examples]


def paired(first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each of both at least once, instead of every pair."""
    longest = max(len(first), len(second))
    return [(first[number % len(first)], second[number % len(second)]) for number in range(longest)]


def one_of_each(codecs: Sequence[Any]) -> list[Any]:
    """For each name the codec of the smallest blocks, of which short buffers have many, or the first."""
    blocks: dict[str, list[Any]] = {}
    for codec in codecs:
        blocks.setdefault(codec.name, []).append(codec)
    return [min(same, key=lambda codec: getattr(codec, "block", 0)) for same in blocks.values()]


ADDITIVE = [codec for codec in EVERY if codec.additive]
SPARSE = [codec for codec in EVERY if isinstance(codec, Sparsifier)]
# That send how values differ from those that all ranks have, in collectives that do not add.
DIFFERENCES = [codec for codec in EVERY if codec.needs_reference]
ENCODED = [codec for codec in EVERY if codec not in [*ADDITIVE, *SPARSE, *DIFFERENCES]]
CODECS: list[Codec | None] = [None, *ENCODED]
# With wires whose length depends on that of the values alone.
FIXED = [codec for codec in ENCODED if codec.fixed_size]
# With kernels for devices.
ON_DEVICES = [codec for codec in ENCODED if codec.fixed_size or codec.homomorphic]
# Those that choose by the values alone, without second moments.
CHOOSING = [codec for codec in SPARSE if codec.state is ErrorFeedback]


def algorithms_of(collective: str) -> list[str]:
    """The algorithms with messages of their own that run this collective with every codec that is not a sparsifier."""
    return [record.name for record in DENSE if collective in record.steps and not record.restricted]


ALGORITHMS = algorithms_of("allreduce")
# Those that encode inside a node, too.
FLAT = [name for name in ALGORITHMS if RECORDS[name].encodings("allreduce", 2, 1).levels]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
ROUNDING = {np.float32: 2.0**-23, np.float64: 2.0**-52, np.float16: 2.0**-10, ml_dtypes.bfloat16: 2.0**-7}


class World(Protocol):
    """Ranks whose results are all known here.

    Attributes
    ----------
    size, nodes : int
        Ranks, and nodes that they are on.
    comms : list of Communicator
        Those of the ranks in this process.
    """

    size: int
    nodes: int
    comms: list[Communicator]

    def run(self, start: Callable[[Communicator, Any], Request], inputs: Sequence[Any]) -> list[Any]:
        """Start a collective on each rank's input; all ranks' results."""

    def errors(self, starts: Sequence[Callable[[Communicator], Request]]) -> list[CompcollError | None]:
        """What each rank's collective raises."""

    def fresh(self) -> World:
        """Another like this, in which nothing has happened yet."""

    def free(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class Case:
    """One allreduce: a codec, an algorithm and values."""

    codec: Any
    algorithm: str = "ring"
    n: int = 1001
    dtype: Any = np.float32
    op: str = "sum"
    seed: int = 0

    def inputs(self, world: World) -> list[np.ndarray]:
        return normals(world.size, self.n, self.dtype, self.seed)

    def start(self, comm: Communicator, x: np.ndarray, **more: Any) -> Request:
        return comm.iallreduce(x, op=self.op, codec=self.codec, algorithm=self.algorithm, **more)


def check_codec(case: Case, world: World) -> None:
    """Take a codec through every promise, by one algorithm on the ranks of one world."""
    check_same_bits_within_bound(case, world)
    check_not_finite_survives(case, world)
    check_in_place_and_out(case, world)
    check_stats(case, world)
    check_no_allocation(case, world)
    if world.size > 1:
        check_refused(case, world)


def check_same_bits_within_bound(case: Case, world: World) -> None:
    """Promises 1 and 2: the same bits on all ranks, no further from the exact sum than codec and encodings tell."""
    inputs = case.inputs(world)
    before = [x.tobytes() for x in inputs]
    results = world.run(case.start, inputs)
    assert [x.tobytes() for x in inputs] == before
    assert len({result.tobytes() for result in results}) == 1
    assert results[0].dtype == inputs[0].dtype
    error = np.abs(results[0].astype(np.float64) - exact(case, inputs)).max(initial=0.0)
    assert error <= error_bound(case, inputs, encodings(world, stats_of(world))), (case, error)


def check_not_finite_survives(case: Case, world: World, kind: float = np.nan, rank: int = -1, at: int = -1) -> None:
    """Promise 3: what is not finite on one rank is not finite in everybody's result."""
    inputs = case.inputs(world)
    if not case.n:
        return
    inputs[rank][at] = kind
    with np.errstate(invalid="ignore"):
        results = world.run(case.start, inputs)
    assert len({result.tobytes() for result in results}) == 1
    assert not np.isfinite(results[0][at].astype(np.float64)), case


def check_in_place_and_out(case: Case, world: World) -> None:
    """The same bits in a new array, in `out` and in the input itself."""
    found, random = [], hasattr(case.codec, "seed")
    for start, inputs in (
        (case.start, case.inputs(world)),
        (lambda comm, x: case.start(comm, x, out=np.full_like(x, 7)), case.inputs(world)),
        (lambda comm, x: case.start(comm, x, out=x), case.inputs(world)),
    ):
        used = world.fresh() if random else world  # random numbers depend on how many collectives came before
        found.append([result.tobytes() for result in used.run(start, inputs)])
        if random:
            used.free()
    assert found[0] == found[1] == found[2], case


def check_stats(case: Case, world: World) -> None:
    """Promise 5: stats name what ran and what was sent."""
    world.run(case.start, case.inputs(world))
    for stats in (comm.stats for comm in world.comms):
        assert stats is not None and stats.raw_nbytes == case.n * np.dtype(case.dtype).itemsize
        assert 0 <= stats.wait_seconds <= stats.total_seconds
        if world.size == 1:
            alone = case.codec if is_vote(case.codec) else None  # which gives signs on one rank, too
            assert (stats.codec, stats.wire_nbytes) == (alone and repr(alone), 0)
            continue
        assert case.algorithm in (stats.algorithm, "auto")
        if stats.algorithm in FLAT:
            assert stats.codec == (None if case.codec is None else repr(case.codec))
            assert (stats.wire_nbytes > 0) == (case.n > 0) or case.n < world.size * getattr(case.codec, "block", 1)


def check_no_allocation(case: Case, world: World) -> None:
    """Promise 6: memory for wires is kept from call to call."""
    inputs = case.inputs(world)
    for _ in range(2 * AT_ONCE):  # each lane is used, then rehearsed in
        world.run(case.start, inputs)
    allocated: list[int] = []
    for comm in world.comms:
        for slot in (comm._slots.alone, *comm._slots.rotating):
            slot.arena._allocate = lambda nbytes: allocated.append(nbytes) or np.empty(nbytes, np.uint8)
    for _ in range(AT_ONCE):
        world.run(case.start, inputs)
    assert allocated == [], case


def check_refused(case: Case, world: World) -> None:
    """Promise 4: where one rank asks for something else, all are told, no buffer changes, and the next call works."""
    inputs, other = case.inputs(world), Case(Cast("float32"), case.algorithm, case.n, case.dtype, case.op)
    outs = [np.full_like(x, 7) for x in inputs]
    odd = world.size - 1
    ways = [other if rank == odd else case for rank in range(world.size)]
    errors = world.errors(
        [lambda comm, way=way, x=x, out=out: way.start(comm, x, out=out) for way, x, out in zip(ways, inputs, outs)]
    )
    assert all(isinstance(error, CollectiveMismatch) for error in errors), (case, errors)
    assert all((out == 7).all() for out in outs)
    results = world.run(case.start, inputs)
    assert len({result.tobytes() for result in results}) == 1


def stats_of(world: World) -> Stats:
    """What the last collective says of itself, on a rank in this process."""
    stats = world.comms[0].stats
    assert stats is not None
    return stats


def exact(case: Case, inputs: list[np.ndarray]) -> np.ndarray:
    """The result in float64 without any loss: of votes the sign of the signs' sum."""
    if is_vote(case.codec):
        return np.sign(exact_sum([np.sign(x) for x in inputs]))
    return exact_sum(inputs) / (len(inputs) if case.op == "mean" else 1)


def encodings(world: World, stats: Stats) -> int:
    """The number of times that a value is encoded on its way, by the algorithm's reference."""
    if stats.algorithm == "copy":
        return 0
    return reference(stats.algorithm).encodings["allreduce"](world.size, world.nodes)[0]


def one_encoding(codec: Codec | None, largest: float) -> float:
    """Largest error of encoding values of at most that magnitude."""
    if codec is None:
        return 0.0
    if isinstance(codec, ZFP) and codec.rate is not None:  # of normal values, which the bound is far from
        return largest * 2.0 ** -(codec.rate - 6.0)
    bound = codec.error_bound("float32")
    assert bound is not None
    return largest * (bound.relative + 2 * bound.spread) + bound.absolute


def largest_sum(codec: Codec | None, inputs: list[np.ndarray]) -> float:
    """The ranks' largest magnitudes in a block, added up: those of partial sums that are encoded add up to no more."""
    starts = range(0, inputs[0].size, 1 if codec is None else codec.block)
    if not starts:
        return 0.0
    return float(sum(np.maximum.reduceat(np.abs(x.astype(np.float64)), starts) for x in inputs).max())


def error_bound(case: Case, inputs: list[np.ndarray], hops: int) -> float:
    """How far a result may be from the exact one, where values were encoded so often on their way."""
    size, codec = len(inputs), case.codec
    # Means are scaled before they are encoded, so that an absolute error is as large as that of sums.
    largest = largest_sum(codec, inputs) / (size if case.op == "mean" else 1)
    if isinstance(codec, IntSum):  # half a level for each rank, whatever the way
        lossy = size * 0.5001 * largest / codec.levels(size) if size > 1 else 0.0
    elif is_vote(codec):
        lossy = 0.0
    elif isinstance(codec, SZP):  # whatever the ranks and the way
        greatest = max(np.abs(x.astype(np.float64)).max(initial=0.0) for x in inputs)
        lossy = codec.tolerance or codec.relative * greatest
    elif isinstance(codec, ZFP) and codec.tolerance is not None:
        # Absolute errors do not shrink with the ranks' shares of the sum: they add up over ranks, not over hops.
        lossy = 2 * size * codec.tolerance if hops else 0.0
    else:
        # Each encoding enlarges what the next one sees by its own error.
        lossy = largest * ((1.0 + one_encoding(codec, 1.0)) ** hops - 1.0)
    # Uncompressed halves are rounded at every hop, every sum once for each addition.
    return lossy + ROUNDING[case.dtype] * largest * (size + 2) + 1e-30
