"""Simulated collectives: our own algorithms, unchanged, on a virtual clock.

A rank's kernels take the times of a `Profile`, and its messages those of a `Network`. Nothing is sent or computed. If
all nodes do the same, one node is simulated for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..algorithms import ALGORITHMS as RECORDS
from ..algorithms.job import Job, Operands, Window
from ..algorithms.record import Symmetry
from ..codecs.base import Codec, Coders
from ..dtypes import DTYPES
from ..errors import InvalidArgument
from ..execute.handshake import partners
from ..host.device import HostDevice
from ..layout import SIGNATURE_NBYTES, Chunk, World, balanced_chunks, in_pairs
from ..pending import Steps
from ..plan import choose
from ..plan.call import Call, Setting
from ..plan.cost import DEFAULTS, RAW, Profile, Speed
from ..plan.plan import Plan, make_plan
from ..stats import Stats
from ..transports.base import Group, Transport, Wire
from .network import Account, Network, Simulated, SimulatedTransport, has_symmetry
from .sizes import Extent, SizesCoder

# The algorithms that can be simulated. MPI's allreduce cannot, since its algorithm is unknown.
ALGORITHMS = tuple(choose.ALLREDUCE)

# Up to this number, messages are simulated one by one, with the exact size.
_FEW_MESSAGES = 300_000

# More messages than this take minutes and much memory.
_MANY_MESSAGES = 5_000_000

# Sizes may be rounded up by this factor, so that all ranks have chunks of equal size.
_ROUNDED = 1.02


@dataclass(frozen=True)
class Scenario:
    """An allreduce to simulate.

    Parameters
    ----------
    ranks : int
        Number of ranks, at least 2.
    network : Network
        The network between them.
    nbytes : int
        Bytes of a rank's buffer.
    dtype : str
        Element type.
    profile : Profile
        Speeds of the codecs.
    call : float
        Host seconds before the algorithm begins.
    segment : int, optional
        Uncompressed bytes of a segment; by default as our algorithms choose for this number of nodes.
    """

    ranks: int
    network: Network
    nbytes: int
    dtype: str = "float32"
    profile: Profile = DEFAULTS
    call: float = 0.0
    segment: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise InvalidArgument(f"{self.ranks} ranks: at least 2 are needed")
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.nbytes < 1 or self.nbytes % DTYPES[self.dtype].itemsize:
            raise InvalidArgument(f"{self.nbytes} bytes: a positive number of whole {self.dtype} values is needed")
        if self.segment is not None and self.segment < 1:
            raise InvalidArgument(f"segments of {self.segment} bytes: at least 1 is needed")
        if self.network.ranks_per_node > self.ranks:
            raise InvalidArgument(f"{self.network.ranks_per_node} ranks per node, but there are {self.ranks} in all")

    @property
    def world(self) -> World:
        return World(self.ranks, self.network.ranks_per_node)

    @property
    def bound(self) -> float:
        """Lower bound in seconds of an uncompressed allreduce on the links between nodes, or inside a single node."""
        link = self.network.between if self.world.nodes > 1 else self.network.inside
        return 2 * (self.ranks - 1) / self.ranks * self.nbytes * link.per_byte


class Outcome(NamedTuple):
    """The outcome of a simulated allreduce.

    Attributes
    ----------
    algorithm, codec : str, Codec or None
        The algorithm and codec that ran.
    seconds : float
        The time when the last rank has its result.
    wire_nbytes, raw_sent_nbytes : int
        Most bytes that a rank sends, compressed and uncompressed.
    messages : float
        Messages that a rank sends, on average.
    encode_seconds, decode_seconds : float
        Most seconds that a rank's kernels take.
    nbytes : int
        The simulated size in bytes.
    symmetry : str
        The symmetry by which one node stood for all.
    """

    algorithm: str
    codec: Codec | None
    seconds: float
    wire_nbytes: int
    raw_sent_nbytes: int
    messages: float
    encode_seconds: float
    decode_seconds: float
    nbytes: int
    symmetry: Symmetry


class _Cut(NamedTuple):
    """The values and chunks of a buffer, and the symmetry by which nodes stand for each other."""

    n: int
    chunks: tuple[Chunk, ...]
    symmetry: Symmetry


def allreduce(
    scenario: Scenario,
    algorithm: str,
    codec: Codec | None = None,
    *,
    symmetric: bool = True,
    patient: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Outcome:
    """Run an allreduce on the virtual clock.

    Parameters
    ----------
    scenario : Scenario
        Ranks, network and size.
    algorithm : str
        One of `ALGORITHMS`.
    codec : Codec, optional
        The codec; None for no compression. Wires of varying size are assumed to be half as long as the values.
    symmetric : bool
        Whether one node may be simulated for all if the result is the same.
    patient : bool
        Whether millions of messages may be simulated one by one.
    progress : callable, optional
        Called regularly with the number of events since the last call.

    Raises
    ------
    InvalidArgument, UnknownAlgorithm, UnsupportedDType
        If the allreduce cannot run, or its simulation would take too long.
    """
    if algorithm not in ALGORITHMS:
        choose.check("allreduce", algorithm)
        raise InvalidArgument(f"algorithm {algorithm!r} cannot be simulated: {', '.join(ALGORITHMS)} can")
    device, itemsize, profile = HostDevice(), DTYPES[scenario.dtype].itemsize, scenario.profile
    n = scenario.nbytes // itemsize
    call = Call("allreduce", n, scenario.dtype, itemsize, "sum", codec, algorithm)
    plan = make_plan(call, Setting(scenario.world, device, profile, library="", shared=False))
    if scenario.segment is not None:
        plan = replace(plan, lengths=plan.lengths._replace(segment=max(scenario.segment // itemsize, 1)))
    cut = _cut(plan, n, scenario, symmetric)
    count = messages(scenario, algorithm, cut.chunks)
    if cut.symmetry == "none" and count > _MANY_MESSAGES and not patient:
        raise InvalidArgument(_too_many(scenario, plan, count))
    simulated = Simulated(scenario.ranks, scenario.network, cut.symmetry, progress)
    begun = handshake(scenario.ranks, scenario.network)
    opened = [scenario.call + begun.seconds[t.rank % len(begun.seconds)] for t in simulated.transports]
    ahead = plan.coders is not None and plan.coders.coder.fixed_size  # as in blocking calls that run a compiled plan
    starts = [scenario.call] * len(opened) if ahead else opened
    raw = profile.speed(RAW, 8.0 * itemsize)
    speed = raw if codec is None else profile.speed(codec.kind, codec.wire_bits(device, scenario.dtype))
    allocate = lru_cache(maxsize=None)(Extent)
    jobs = [_job(transport, plan, cut, (speed, raw), allocate) for transport in simulated.transports]
    account = simulated.run([choose.ALLREDUCE[algorithm](job) for job in jobs], starts, opened)
    return Outcome(
        algorithm,
        codec,
        max(account.seconds),
        max(job.stats.wire_nbytes for job in jobs),
        max(job.stats.raw_sent_nbytes for job in jobs),
        account.messages / len(jobs),
        max(sum(coder.encode_seconds for coder in job.coders) for job in jobs),
        max(sum(coder.decode_seconds for coder in job.coders) for job in jobs),
        cut.n * itemsize,
        cut.symmetry,
    )


def _handshake(transport: Transport) -> Steps:
    """Exchange the messages of `compcoll.execute.handshake` on one rank."""
    for number in range((transport.size - 1).bit_length()):
        dest, source = partners(transport.rank, transport.size, number)
        arriving, leaving = (Wire(memoryview(bytearray(SIGNATURE_NBYTES))) for _ in range(2))
        received = transport.irecv(arriving, source, 0)
        sent = transport.isend(leaving, dest, 0)
        yield received
        yield sent


def _job(
    transport: SimulatedTransport,
    plan: Plan,
    cut: _Cut,
    speeds: tuple[Speed, Speed],
    allocate: Callable[[int], Any],
) -> Any:
    """Make the job that `compcoll.execute.host` gives to an algorithm, with coders that only advance the clock."""
    assert plan.coders is not None
    itemsize, coder = plan.call.itemsize, plan.coders.coder
    wire_nbytes = coder.wire_nbytes if coder.fixed_size else lambda n: -(-n * itemsize // 2)
    return Job(
        group=Group(transport, tag=1),
        coders=Coders(
            SizesCoder(transport, wire_nbytes, speeds[0], itemsize),
            SizesCoder(transport, lambda n: itemsize * n, speeds[1], itemsize),
        ),
        operands=Operands(Window(Extent(0)), Window(Extent(0)), itemsize),
        chunks=cut.chunks,
        allocate=allocate,
        stats=Stats("allreduce", None, plan.algorithm, plan.call.nbytes),
        cut=partial(balanced_chunks, cut.n, lengths=plan.lengths),
        homomorphic=plan.homomorphic,
    )


@lru_cache(maxsize=32)
def handshake(ranks: int, network: Network) -> Account:
    """Simulate the handshake, which is the same for all algorithms."""
    symmetry: Symmetry = "none" if ranks % network.ranks_per_node else "exclusive" if in_pairs(ranks) else "rotation"
    simulated = Simulated(ranks, network, symmetry)
    return simulated.run([_handshake(transport) for transport in simulated.transports])


def messages(scenario: Scenario, algorithm: str, chunks: Sequence[Chunk]) -> int:
    """Estimate the number of messages of all ranks.

    A rank sends two for each segment of a chunk, or one for each segment in each exchange of the whole buffer.
    """
    p, segments, record = scenario.ranks, sum(len(chunk) for chunk in chunks), RECORDS[algorithm]
    exchanges = record.symmetry == "exclusive" and not record.chunked
    return p * segments * (p.bit_length() if exchanges else 2)


def _cut(plan: Plan, n: int, scenario: Scenario, symmetric: bool) -> _Cut:
    """Cut a buffer into chunks. If they have equal size, perhaps after rounding up, one node stands for all."""
    ranks, record = scenario.ranks, RECORDS[plan.algorithm]
    chunks = balanced_chunks(n, record.parts(ranks), plan.lengths)
    exact = _Cut(n, chunks, "none")
    if not symmetric or not has_symmetry(record.symmetry, ranks, scenario.network.ranks_per_node):
        return exact
    if _equal(balanced_chunks(n, _parts(plan, scenario), plan.lengths)):
        return exact._replace(symmetry=record.symmetry)
    unit = _unit(plan, n, scenario)
    rounded = -(-n // unit) * unit
    if messages(scenario, plan.algorithm, chunks) <= _FEW_MESSAGES or rounded > _ROUNDED * n:
        return exact
    chunks = balanced_chunks(rounded, record.parts(ranks), plan.lengths)
    return _Cut(rounded, chunks, record.symmetry)


def _parts(plan: Plan, scenario: Scenario) -> int:
    """Return the number of parts of a buffer that must have equal size so that all nodes do the same."""
    if plan.algorithm == choose.HIERARCHICAL:
        return scenario.ranks // scenario.network.ranks_per_node
    return RECORDS[plan.algorithm].parts(scenario.ranks)


def _unit(plan: Plan, n: int, scenario: Scenario) -> int:
    """Return a number of values whose multiples can be cut into parts of equal size."""
    unit = _parts(plan, scenario) * plan.lengths.block
    return unit * (64 if n >= 1024 * unit else 1)


def _too_many(scenario: Scenario, plan: Plan, count: int) -> str:
    """Return the error text for too many messages, with a remedy."""
    ranks, per_node, itemsize = scenario.ranks, scenario.network.ranks_per_node, DTYPES[scenario.dtype].itemsize
    symmetry, remedy = RECORDS[plan.algorithm].symmetry, "fewer ranks"
    if has_symmetry(symmetry, ranks, per_node):
        remedy += f", or a multiple of {_unit(plan, scenario.nbytes // itemsize, scenario) * itemsize} bytes,"
    elif symmetry == "exclusive":
        remedy += ", or powers of two,"
    elif symmetry == "rotation":
        remedy += f", or a multiple of {per_node},"
    return (
        f"{plan.algorithm} of {scenario.nbytes} bytes on {ranks} ranks: {count} messages would be simulated one by "
        f"one, since not all nodes do the same: {remedy} would be fast; or set patient"
    )


def _equal(chunks: Sequence[Chunk]) -> bool:
    return len({tuple(end - begin for begin, end in chunk) for chunk in chunks}) == 1


def resized(scenario: Scenario, *, ranks: int | None = None, nbytes: int | None = None) -> Scenario:
    """Return a scenario with another number of ranks or bytes; ranks per node are at most the ranks."""
    ranks = scenario.ranks if ranks is None else ranks
    network = replace(scenario.network, ranks_per_node=min(scenario.network.ranks_per_node, ranks))
    return replace(scenario, ranks=ranks, network=network, nbytes=scenario.nbytes if nbytes is None else nbytes)


def step_seconds(nbytes: float, computing: float, network: Network, ranks: int) -> float:
    """Predict the seconds of a step of data-parallel training without overlap of communication and computation.

    The authors of the sparsifier LDTE-BS extrapolated to clusters by this model. For i GPUs per node, j nodes, g bytes
    of gradients sent, and T_B seconds of a step on one GPU::

        T_comm = g / C_gpu log2 i + g / C_cpu + (C_lat + g / C_net) log2 j
        T_comp = T_B - g / C_cpu

    With batches of B, training processes i j B / (T_comm + T_comp) examples per second. T_B includes the copies between
    GPU and CPU, g / C_cpu, so that they cancel.

    Parameters
    ----------
    nbytes : float
        Bytes that a rank sends for its gradients: g.
    computing : float
        Seconds of a step on one GPU: T_B.
    network : Network
        Links inside nodes carry C_gpu bytes per second; those between nodes carry C_net, with a latency of C_lat.
    ranks : int
        Number of ranks, one per GPU, on whole nodes.

    Raises
    ------
    InvalidArgument
        If the ranks do not fill whole nodes, or ``computing`` is not positive.
    """
    if ranks % network.ranks_per_node:
        raise InvalidArgument(f"{ranks} ranks, {network.ranks_per_node} a node: whole nodes are needed")
    if not 0 < computing < math.inf:
        raise InvalidArgument(f"computing={computing!r} s: a positive time is needed")
    inside, between = network.inside, network.between
    near = nbytes * inside.per_byte * math.log2(network.ranks_per_node)
    far = (between.latency + nbytes * between.per_byte) * math.log2(ranks // network.ranks_per_node)
    return computing + near + far
