"""The choice of an algorithm: the candidates, and the decision of ``algorithm="auto"``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .. import config
from ..algorithms import ALGORITHMS, DENSE
from ..algorithms import SPARSE as OF_SPARSIFIERS
from ..algorithms.dissemination import largest
from ..algorithms.job import Job
from ..codecs.base import Codec
from ..codecs.registry import meant
from ..codecs.sparse.sparsifier import Sparsifier
from ..dtypes import DTYPES, HALVES
from ..errors import UnknownAlgorithm
from ..host.quantizer import IntegerQuantizer
from ..kernels._host import Gathered
from ..pending import Steps
from .accuracy import candidates, relative_error
from .call import SUMS, Call, Setting
from .cost import WireFormat, predict, raw
from .gpu_profiles import COPY_PER_BYTE
from .wire_formats import segment_nbytes, wire_format

AUTO = "auto"
NATIVE = "native"
HIERARCHICAL = "hierarchical"
DISSEMINATION = "dissemination"
SHARED_MEMORY = "shared_memory"
RING = "ring"
PAIRWISE = "pairwise"
DIRECT = "direct"

COPY = "copy"
"""The algorithm of every collective on one rank."""


def _steps(collective: str) -> Mapping[str, Callable[[Job], Steps]]:
    return {record.name: record.steps[collective] for record in DENSE if collective in record.steps}


ALLREDUCE, REDUCE_SCATTER, ALLGATHER = _steps("allreduce"), _steps("reduce_scatter"), _steps("allgather")
REDUCE, GATHER, SCATTER = _steps("reduce"), _steps("gather"), _steps("scatter")
BCAST, ALLTOALL, ALLTOALLV = _steps("bcast"), _steps("alltoall"), _steps("alltoallv")
"""The generators of our own dense collectives, by algorithm."""

SPARSE = tuple(record.name for record in OF_SPARSIFIERS)
"""The allreduce algorithms for sparsifiers. They take no other codec."""

RESTRICTED = tuple(record.name for record in ALGORITHMS.values() if record.restricted)
"""Allreduce algorithms limited to some sizes, types, ranks or transports, so not in `NAMES`."""

BY_MPI = tuple(record.name for record in ALGORITHMS.values() if record.by_mpi)
"""The algorithms that start MPI's own collectives."""

ORDERED = tuple(record.name for record in ALGORITHMS.values() if record.ordered)
"""The algorithms whose calls must run in the same order on all ranks: they call MPI, or use the shared memory."""

ON_THE_HOST = (NATIVE, DISSEMINATION, SHARED_MEMORY)
"""The algorithms that run on host copies of GPU arrays, unless their messages go from GPU to GPU."""


def streamed(nodes: Sequence[int]) -> tuple[str, ...]:
    """Return the algorithms whose messages can be sent in stream order among ranks on these nodes.

    They must know all messages of a phase before any arrives. For `HIERARCHICAL`, this requires several nodes with
    equally many ranks.
    """
    counts = Counter(nodes)
    return (NATIVE, DIRECT, HIERARCHICAL) if len(set(counts.values())) == 1 < len(counts) else (NATIVE, DIRECT)


NAMES: Mapping[str, tuple[str, ...]] = {
    collective: tuple(
        record.name for record in ALGORITHMS.values() if collective in record.collectives and not record.restricted
    )
    for collective in ALGORITHMS[NATIVE].collectives
}
"""The algorithms of each collective."""

CLEARLY = 0.95
"""An option is clearly faster than MPI's own if it takes less than this fraction of the time of MPI's own."""

ABOUT = 0.99
"""An option counts as equally fast if this fraction of its time is at most the time of the fastest option."""

MORE_TIME, MORE_ERROR = 1.5, 2.0
"""Among the algorithms with a codec: the largest time relative to the fastest, and the largest error relative to the
smallest."""

_ADDED_NBYTES = 128 * 1024
"""Bytes from which ``auto`` uses additive codecs. In smaller buffers they gain less than agreeing on scales costs."""

_UNBLOCKED = 2.0
"""Slowdown of MPI's own reductions between nodes if they must not block. Measured over TCP with Open MPI and MPICH: 1
to 2.4, largest with small arrays."""

_HALVES_BY_MPI_NBYTES = 32 * 1024
"""Bytes from which our own algorithms sum 16-bit floats: MPI's own would send them as float32."""


class Option(NamedTuple):
    """A candidate: an algorithm with a codec.

    Attributes
    ----------
    seconds : float
        Predicted time.
    error : float or None
        Estimate of the result's relative error; None if the codec's error is unknown.
    refused : str
        Why the option may not be chosen; empty if it may.
    """

    algorithm: str
    codec: Codec | None
    seconds: float
    error: float | None
    refused: str = ""


def check(collective: str, algorithm: str) -> None:
    """Raise `UnknownAlgorithm` if the collective has no such algorithm."""
    allowed = (AUTO, *NAMES[collective], *(RESTRICTED if collective == "allreduce" else ()))
    if not isinstance(algorithm, str) or algorithm not in allowed:
        asked = f"{algorithm!r}{meant(algorithm, allowed)}"
        raise UnknownAlgorithm(f"{collective} has no algorithm {asked}: there are {', '.join(allowed)}")


def quantizer_of(codec: Codec | None, call: Call, setting: Setting) -> IntegerQuantizer | None:
    """Return the quantizer of an additive codec; None with other codecs."""
    if codec is None or call.collective != "allreduce":
        return None
    return codec.quantizer(setting.device, call.dtype, setting.world.size)


def gathers(algorithm: str, quantizer: IntegerQuantizer | None) -> bool:
    """Return whether an algorithm gathers an additive codec's numbers, so that each rank adds them itself."""
    return quantizer is not None and quantizer.gathered is not None and algorithm in ALLGATHER


def format_on_wire(algorithm: str, codec: Codec | None, call: Call, setting: Setting) -> WireFormat:
    """Return the wire format. With additive codecs, its bits are those of the numbers that are added."""
    way = wire_format(codec, setting.device, call.dtype, call.itemsize)
    quantizer = quantizer_of(codec, call, setting)
    if quantizer is None:
        return way
    if gathers(algorithm, quantizer):
        # Each rank receives 1 bit a value from p - 1 others. The model's allreduce moves 2 (p - 1) / p times `bits`.
        return way._replace(bits=setting.world.size / 2)
    return way._replace(bits=8.0 * quantizer.number_dtype.itemsize * quantizer.per_value)


def may_share(call: Call, setting: Setting) -> bool:
    """Return whether the values may go through shared memory."""
    return (
        (setting.shared or setting.world.size == 1)
        and call.collective == "allreduce"
        and call.movable
        and not call.checksum
    )


def small(call: Call, setting: Setting) -> bool:
    """Return whether an allreduce's arrays can travel with its handshake.

    They cannot if all ranks' arrays are known to be on GPUs: the handshake is over then.
    """
    return (
        call.collective == "allreduce"
        and not call.checksum
        and not setting.gpus
        and call.nbytes <= largest(setting.world.size)
        and Gathered.reducible(call.dtype, call.op)
    )


def _codecs(call: Call, setting: Setting) -> list[Codec]:
    """Return the candidate codecs."""
    if call.tolerance is None:
        return [] if call.codec is None else [call.codec]
    if not call.movable or call.dtype not in DTYPES:
        return []
    found = candidates(setting.device, call.dtype, setting.world.size)
    return [codec for codec in found if call.collective == "allreduce" or not codec.additive]


class _Known(NamedTuple):
    """Facts about a call that decide which options are refused.

    Attributes
    ----------
    small : bool
        Whether the arrays may travel with the handshake.
    mpi : str
        Why no algorithm based on MPI can run the call; empty if one can.
    native : str
        Why MPI's own collective may not be chosen; empty if it may.
    plain : bool
        Whether our own algorithms may send values uncompressed.
    blocks : bool
        Whether MPI's own collective may block. Otherwise it progresses only while its request is tested.
    slowed : bool
        Whether MPI's own collective is much slower because it must not block. Our own may then send values
        uncompressed even if they were not measured here.
    """

    small: bool
    mpi: str
    native: str
    plain: bool
    blocks: bool
    slowed: bool


def _known(call: Call, setting: Setting, blocks: bool) -> _Known:
    mpi = "no MPI for it" if not setting.library else "carries no checksums" * call.checksum
    quantizer, native = (
        quantizer_of(call.codec, call, setting),
        mpi or "too many elements" * (not setting.countable(call)),
    )
    if quantizer is not None and not quantizer.is_sum:
        native = mpi or "adds, and does not vote"
    plain = not native or call.codec is None  # without MPI's own, a requested codec is used
    halves = call.dtype in HALVES and call.op in SUMS and call.nbytes >= _HALVES_BY_MPI_NBYTES
    if not native and halves and call.algorithm == AUTO:
        native = "converts halves"
    # A library whose test waits has threads that send meanwhile, as gloo has.
    slowed = not (blocks or setting.blocks or native or setting.gpus) and setting.world.nodes > 1
    # The handshake decides whether an algorithm that replaces MPI's own runs, so its arrays cannot travel with it.
    return _Known(not slowed and small(call, setting), mpi, native, plain, blocks, slowed)


def options(call: Call, setting: Setting, *, blocks: bool = True, allowed: bool = False) -> list[Option]:
    """List the options of a call with their predicted times, MPI's own first.

    Parameters
    ----------
    call, setting : Call, Setting
        The call and its environment.
    blocks : bool
        Whether MPI's own collective may block.
    allowed : bool
        Whether to leave out refused options, which saves their predictions.
    """
    found, known, nbytes = [], _known(call, setting, blocks), call.nbytes
    own = [name for name in NAMES[call.collective] if name != NATIVE] if call.movable else []
    shared = [SHARED_MEMORY] * may_share(call, setting)
    compressing = _codecs(call, setting)
    for algorithm in [NATIVE, *[DISSEMINATION] * known.small, *shared, *own]:
        codecs = [None, *compressing] if algorithm in own else [None]
        ways = [(codec, format_on_wire(algorithm, codec, call, setting)) for codec in codecs]
        if call.collective == "allreduce":
            ways = [(codec, way) for codec, way in ways if isinstance(codec, Sparsifier) == (algorithm in SPARSE)]
        for codec, way in ways:
            refused = _refused(algorithm, codec, call, setting, known, nbytes / way.ratio)
            if refused and allowed:
                continue
            length = segment(codec, way.ratio, call, setting)
            profile = setting.profile if algorithm in ON_THE_HOST else setting.between_gpus or setting.profile
            seconds = predict(profile, call.collective, algorithm, nbytes, setting.world, way, length)
            if setting.gpus and not setting.streamed and algorithm in ON_THE_HOST:
                seconds += 2 * nbytes * COPY_PER_BYTE
            if codec is not None and codec.additive:
                seconds += _numbers_seconds(codec, way, call, setting)
            if algorithm == NATIVE and known.slowed:
                seconds *= _UNBLOCKED
            found.append(Option(algorithm, codec, seconds, _error(algorithm, codec, call, setting), refused))
    return found


def _numbers_seconds(codec: Codec, way: WireFormat, call: Call, setting: Setting) -> float:
    """Predict the seconds to agree on an additive codec's scales, and to make and read its numbers.

    Each of these runs over the whole buffer before or after the sum, so that nothing overlaps.
    """
    speed, scales = setting.profile.speed(way.codec, way.bits), max(call.n // codec.block, 1)
    agree = predict(setting.profile, "allreduce", "recursive_doubling", 4 * scales, setting.world, raw())
    return agree + call.nbytes * (1 / speed.encode + 1 / speed.decode)


def segment(codec: Codec | None, ratio: float, call: Call, setting: Setting) -> int:
    """Return the uncompressed bytes of a segment; ``ratio`` is the compression ratio."""
    if setting.gpus:
        # NCCL overlaps the parts of a message itself, so messages are not split.
        return max(call.nbytes, 1) * setting.world.size if setting.streamed else config.segment_nbytes_on_gpus()
    return segment_nbytes(codec, ratio, setting.world.nodes, blocks=setting.blocks)


def _error(algorithm: str, codec: Codec | None, call: Call, setting: Setting) -> float | None:
    return relative_error(codec, call.dtype, call.collective, algorithm, setting.world)


def _refused(
    algorithm: str, codec: Codec | None, call: Call, setting: Setting, known: _Known, wire_nbytes: float
) -> str:
    record, profile, world = ALGORITHMS[algorithm], setting.profile, setting.world
    if setting.streamed and algorithm not in setting.streamed:
        return "not by NCCL"
    if setting.streamed and algorithm == HIERARCHICAL and call.algorithm == AUTO:
        return "no model of it by NCCL"
    if call.algorithm not in (AUTO, record.name):
        return f"not {call.algorithm}"
    if record.by_mpi and known.mpi:
        return known.mpi
    if codec is None and isinstance(call.codec, Sparsifier):
        return "sparse training chooses what it sends"
    if record.name == NATIVE:
        return known.native
    if call.tolerance is not None:
        error = _error(algorithm, codec, call, setting)
        if error is None or error > call.tolerance:
            return "error unknown" if error is None else "error too large"
    if call.algorithm != AUTO:
        return ""
    if codec is None and not known.plain:
        return "uncompressed"
    # Uncompressed values take one pass, by MPI's own or shared memory. Additive codecs need another round for scales.
    if codec is not None and codec.additive and known.plain and (world.nodes == 1 or call.nbytes < _ADDED_NBYTES):
        return "slow to agree on scales"
    if unfit := record.unfit(world):
        return unfit
    if record.always_faster is not None:
        # Shared memory is also faster than MPI's own if that must not block.
        alone = record.inside_node and bool(known.native or not known.blocks)
        measured = alone or record.always_faster(wire_nbytes, world.size) or profile.measured(world, record.name)
        return "" if measured else "not measured here"
    # A quick profile times few uncompressed allreduces. The formula for ranks of one node is good enough.
    timed = record.name if call.collective == "allreduce" and world.per_node == 1 else None
    comparable = known.native or known.slowed or setting.between_gpus is not None or profile.measured(world, timed)
    if codec is None and not comparable:
        return "not measured here"
    if codec is None and call.dtype in HALVES and not record.rounds_once and call.collective == "allreduce":
        return "rounds at every hop"
    return ""


def best(found: Sequence[Option], *, tolerant: bool = False) -> Option:
    """Return the best of the options that may be chosen.

    Among options about as fast as the fastest, the smallest error decides. If that option compresses, others with its
    codec may take up to `MORE_TIME` times as long as the fastest, and the fastest of those is chosen whose error is at
    most `MORE_ERROR` times their smallest. MPI's own or an uncompressed algorithm of `RESTRICTED` is preferred to that
    option, unless it is clearly faster.

    Parameters
    ----------
    found : sequence of Option
        The options.
    tolerant : bool
        Whether the errors of all options that may be chosen are within a tolerance that the caller gave, so that only
        time counts.

    Raises
    ------
    UnknownAlgorithm
        If all options are refused.
    """
    allowed = [option for option in found if not option.refused]
    if not allowed:
        raise UnknownAlgorithm("; ".join(f"{option.algorithm}: {option.refused}" for option in found))
    least = min(option.seconds for option in allowed)
    first = min(
        (option for option in allowed if ABOUT * option.seconds <= least),
        key=lambda option: (_error_of(option), option.seconds),
    )
    if first.codec is not None and not tolerant:
        near = [option for option in allowed if option.codec == first.codec and option.seconds <= MORE_TIME * least]
        smallest = min(map(_error_of, near))
        if _error_of(first) > MORE_ERROR * smallest:
            right = [option for option in near if _error_of(option) <= MORE_ERROR * smallest]
            first = min(right, key=lambda option: option.seconds)
    usual = [option for option in allowed if option.codec is None and option.algorithm in (NATIVE, *RESTRICTED)]
    fastest = min(usual, key=lambda option: option.seconds, default=None)
    return fastest if fastest is not None and CLEARLY * fastest.seconds <= first.seconds else first


def _error_of(option: Option) -> float:
    return math.inf if option.error is None else option.error


def chosen(call: Call, setting: Setting, *, blocks: bool = True) -> Option:
    """Return the best of a call's options. The parameters are those of `options`."""
    found = options(call, setting, blocks=blocks, allowed=True) or options(call, setting, blocks=blocks)
    return best(found, tolerant=call.tolerance is not None)
