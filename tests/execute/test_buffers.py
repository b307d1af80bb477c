"""Buffers of every type, size and place in memory, in every collective: right values, or a refusal by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World
from oracles.collectives import arguments, expected

from compcoll import Communicator, CompcollError, Request
from compcoll.algorithms import native
from compcoll.algorithms.record import REDUCTIONS, ROOTED, UNEVEN
from compcoll.codecs.sparse.sparsifier import MOST_ELEMENTS
from compcoll.errors import CollectiveFailed, InvalidBuffer, UnknownAlgorithm
from compcoll.host.device import HostDevice
from compcoll.layout import World as Ranks
from compcoll.plan import choose
from compcoll.plan.call import NO_REDUCTION, Call, Setting
from compcoll.plan.cost import DEFAULTS
from compcoll.plan.plan import make_plan
from compcoll.sparse import TopK

RANKS = 3
TYPES = ["?", *np.typecodes["AllInteger"], *np.typecodes["AllFloat"], ml_dtypes.bfloat16]
OWN = [(c, a) for c, names in choose.NAMES.items() for a in names if a not in (*choose.BY_MPI, *choose.SPARSE)]
MOVING = [(collective, algorithm) for collective, algorithm in OWN if collective not in REDUCTIONS]
WITH_OUT = [collective for collective in choose.NAMES if collective not in UNEVEN]
ROOT = 1


def numbers(dtype: Any = np.float32, n: int = 6) -> list[np.ndarray]:
    """Small whole numbers, others on each rank."""
    return [(np.arange(n) % 5 + rank).astype(dtype) for rank in range(RANKS)]


def more(collective: str, rank: int) -> dict[str, Any]:
    """A rank's arguments of a collective on `numbers`."""
    return arguments(collective, 6, RANKS, rank, ROOT)


def unaligned(x: np.ndarray) -> np.ndarray:
    """The same values, a byte behind where they should be."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    there = memory[1:].view(x.dtype).reshape(x.shape)
    there[...] = x
    assert x.itemsize == 1 or not there.flags.aligned
    return there


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_what_is_only_moved_may_be_of_any_type(collective: str, algorithm: str, checksum: bool) -> None:
    world = World(RANKS, checksum=checksum)
    for dtype in TYPES:
        inputs = numbers(dtype)
        for asked in (algorithm, "auto"):
            results = world.run(
                lambda comm, x: getattr(comm, f"i{collective}")(x, algorithm=asked, **more(collective, comm.rank)),  # noqa: B023
                inputs,
            )
            for rank, result in enumerate(results):
                right = expected(collective, inputs, rank, ROOT)
                if right is None:
                    assert result is None
                else:
                    assert result.dtype == right.dtype and result.tobytes() == right.tobytes(), (dtype, asked)


def blocking(world: World, collective: str, inputs: list[np.ndarray], outs: list[Any], **options: Any) -> list[Any]:
    """What each rank's call returns or raises, to whose end it waits."""

    def call(rank: int) -> Any:
        given = more(collective.removeprefix("i"), rank) | ({} if outs[rank] is None else {"out": outs[rank]})
        try:
            result = getattr(world.comms[rank], collective)(inputs[rank], **given, **options)
            return result.wait() if isinstance(result, Request) else result
        except CompcollError as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(call, range(RANKS)))


@pytest.mark.parametrize("codec", [None, "cast"])
@pytest.mark.parametrize(("collective", "algorithm"), OWN)
def test_arrays_that_are_not_aligned(collective: str, algorithm: str, codec: str | None) -> None:
    """As x, as out, as both and in place; blocking, three times, of which the first runs otherwise, and not."""
    world, options = World(RANKS, seed=None), {"codec": codec, "algorithm": algorithm}
    if codec:
        options["dtype"] = "float32"
    for _ in range(3):
        for there, given in ((False, "none"), (True, "none"), (True, "out"), (False, "out"), (True, "x")):
            inputs = [unaligned(x) if there else x for x in numbers()]
            right = [expected(collective, inputs, rank, ROOT) for rank in range(RANKS)]
            outs: list[Any] = [None] * RANKS
            if given == "out" and collective in WITH_OUT:
                outs = [None if result is None else unaligned(np.zeros_like(result)) for result in right]
            if given == "x" and collective in ("allreduce", "bcast", "reduce"):
                outs = inputs
            before = [x.tobytes() for x in inputs]
            for results in (
                blocking(world, collective, inputs, outs, **options),
                world.loopback.run(
                    getattr(comm, f"i{collective}")(
                        x, **({} if out is None else {"out": out}), **options, **more(collective, comm.rank)
                    )
                    for comm, x, out in zip(world.comms, map(np.copy, map(np.array, numbers())), outs, strict=True)
                )
                if outs is not inputs
                else [],
            ):
                for rank, result in enumerate(results):
                    assert np.array_equal(result, right[rank]), (rank, there, given, result)
                    assert outs[rank] is None or result is outs[rank] or right[rank] is None
            assert outs is inputs or [x.tobytes() for x in inputs] == before


@pytest.mark.parametrize("collective", choose.NAMES)
@pytest.mark.parametrize("start", ["", "i"])
def test_no_memory_for_a_result(collective: str, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that lacks it has it as the cause, the others are told which rank that is; all can go on."""
    world = World(RANKS)
    lacks = world.comms[1]._collectives
    real = HostDevice.buffers

    def none(self: HostDevice, x: Any, shape: Any, out: Any) -> Any:
        if self is lacks._device and out is None:
            raise MemoryError("none left")
        return real(self, x, shape, out)

    def no_rows(*arguments: Any) -> Any:
        raise MemoryError("none left")

    algorithm = next(name for where, name in OWN if where == collective)
    with monkeypatch.context() as patched:
        patched.setattr(HostDevice, "buffers", none)
        patched.setattr(lacks, "_empty", no_rows)
        told = failures(world, start + collective, algorithm=algorithm)
    check_told(told, 1)
    if collective in WITH_OUT:  # else the size is known only halfway
        for rank, result in enumerate(blocking(world, collective, numbers(), [None] * RANKS, algorithm=algorithm)):
            assert np.array_equal(result, expected(collective, numbers(), rank, ROOT))


@pytest.mark.parametrize(("collective", "algorithm"), OWN)
@pytest.mark.parametrize("start", ["", "i"])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_no_memory_for_wires(collective: str, algorithm: str, start: str, calls: int) -> None:
    """At the first call, the second, which is rehearsed, or the third, which is repeated."""
    world = World(RANKS)
    for _ in range(calls):
        assert not any(isinstance(each, Exception) for each in failures(world, start + collective, algorithm=algorithm))

    def none(nbytes: int) -> Any:
        raise MemoryError("none left")

    slots = world.comms[2]._slots
    for slot in (slots.alone, *slots.rotating):
        slot.arena.slabs.clear()
        slot.arena._taken.clear()
        slot.arena._allocate = none
    told = failures(world, start + collective, algorithm=algorithm)
    if isinstance(told[2], CompcollError):  # else it has what a call before took
        check_told(told, 2, collective)


def failures(world: World, method: str, **options: Any) -> list[Any]:
    """What each rank's call returns or raises."""
    return blocking(world, method, numbers(), [None] * RANKS, timeout=20, **options)


def check_told(told: list[Any], lacking: int, collective: str = "") -> None:
    for rank, error in enumerate(told):
        if rank != lacking and not isinstance(error, CompcollError) and collective:
            right = expected(collective, numbers(), rank, ROOT)
            assert np.array_equal(error, right)  # it had all that it needed before
            continue
        assert isinstance(error, CompcollError) and f"rank {lacking}" in str(error), told
        assert "MemoryError: none left" in str(error)
        assert rank != lacking or (type(error) is CollectiveFailed and isinstance(error.__cause__, MemoryError))


def call(collective: str, n: int, dtype: str = "float32", algorithm: str = "auto", **more: Any) -> Call:
    op = more.pop("op", "sum" if collective in REDUCTIONS else NO_REDUCTION)
    rows = () if collective in UNEVEN else None
    root = 0 if collective in ROOTED else None
    return Call(
        collective, n, dtype, np.dtype(dtype).itemsize, op, more.pop("codec", None), algorithm, root, rows, **more
    )


def setting(library: str = "MPI") -> Setting:
    return Setting(Ranks(4), HostDevice(), DEFAULTS, library, shared=False)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
@pytest.mark.parametrize("collective", choose.NAMES)
def test_more_than_mpi_counts(collective: str, dtype: str) -> None:
    """Up to the largest int MPI's own is chosen, beyond it another algorithm, and none without a word of it."""
    ranks = 4 if collective in ("allgather", "gather") else 1  # whose parts have displacements
    for n, fits in (((2**31 - 1) // ranks, True), (2**31 // ranks, False), (2**40, False)):
        if collective in UNEVEN:
            continue  # whose sizes are known only after the handshake
        asked = call(collective, n, dtype, algorithm="native")
        if fits:
            assert make_plan(asked, setting()).algorithm == "native"
            continue
        with pytest.raises(InvalidBuffer, match=f"at most 2147483647 elements, not {n * ranks}: .*send parts") as told:
            make_plan(asked, setting())
        another = "use another algorithm" in str(told.value)
        assert another == (collective not in REDUCTIONS or dtype == "float32")
        if another:
            assert make_plan(asked._replace(algorithm="auto"), setting()).algorithm != "native"


def test_more_elements_than_sparse_wires_hold() -> None:
    sparse = call("allreduce", MOST_ELEMENTS + 1, codec=TopK(), algorithm="sparse_ring")
    with pytest.raises(InvalidBuffer, match="sparse wires hold at most 4294967295"):
        make_plan(sparse, setting())
    assert make_plan(sparse._replace(n=MOST_ELEMENTS), setting()).algorithm == "sparse_ring"


def test_sparse_messages_longer_than_mpi_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a region's message could be longer, all go around the ring, which is cut into blocks."""
    inputs = [np.random.default_rng(rank).standard_normal(300).astype(np.float32) for rank in range(RANKS)]
    options: dict[str, Any] = {"codec": TopK(density=0.1, select="exact"), "algorithm": "sparse_direct"}
    monkeypatch.setattr(native, "MOST", 60)
    world = World(RANKS)
    right = sum(largest(x, 30) for x in inputs)
    for result in world.allreduce(inputs, **options):
        np.testing.assert_allclose(result, right, rtol=1e-6)
    stats = world.comms[0].stats
    assert stats is not None and stats.algorithm == "sparse_ring"


def largest(x: np.ndarray, k: int) -> np.ndarray:
    kept = np.zeros_like(x)
    at = np.argsort(-np.abs(x))[:k]
    kept[at] = x[at]
    return kept


ADVICE: dict[str, Any] = {
    "codec=None": lambda call, world: (call._replace(codec=None), world),
    'algorithm="native"': lambda call, world: (call._replace(algorithm="native"), world),
    "transport has none": lambda call, world: (call, setting()),
    "under MPI": lambda call, world: (call, setting()),
    "without checksums": lambda call, world: (call._replace(checksum=False), world),
    "convert x": lambda call, world: (call._replace(dtype="float32", itemsize=4), world),
    "another algorithm": lambda call, world: (call._replace(algorithm="auto"), world),
    "parts": lambda call, world: (call._replace(n=1000), world),
    "op sum or mean": lambda call, world: (call._replace(op="sum"), world),
}


def refusal(asked: Call, world: Setting) -> CompcollError | None:
    try:
        make_plan(asked, world)
    except CompcollError as error:
        return error
    return None


def follow(asked: Call, world: Setting, seen: tuple[str, ...] = ()) -> None:
    """Do what refusals advise, each way of it: no refusal comes twice, and an algorithm that is named is one."""
    if (refused := refusal(asked, world)) is None:
        return
    text = f"{type(refused).__name__}: {refused}"
    assert text not in seen, (asked, *seen, text)
    for way in text.partition(": ")[2].rpartition(": ")[2].split(", or "):
        nexts = [(asked, world)]
        named = way.startswith("algorithm ")
        if named:
            names = [name.strip() for name in way.removeprefix("algorithm ").split(",")]
            nexts = [(asked._replace(algorithm=name), world) for name in names]
        for words, change in ADVICE.items():
            if words in way:
                nexts = [change(*each) for each in nexts]
        for each in nexts:
            if each != (asked, world):
                assert not named or not isinstance(refusal(*each), UnknownAlgorithm), (each, text)
                follow(*each, (*seen, text))


@pytest.mark.parametrize("collective", choose.NAMES)
def test_advice_never_leads_in_a_circle(collective: str) -> None:
    from promises import EVERY, one_of_each

    for codec in (None, *one_of_each(EVERY)):
        for dtype in ("float32", "int32", "bool", "complex64"):
            for algorithm in (*choose.NAMES[collective], "auto"):
                for op in ("sum", "max", "band") if collective in REDUCTIONS else (NO_REDUCTION,):
                    for checksum in (False, True):
                        for library in ("MPI", ""):
                            for n in (1000, 2**33):
                                asked = call(collective, n, dtype, algorithm, op=op, codec=codec, checksum=checksum)
                                follow(asked, setting(library))


@pytest.mark.parametrize("collective", choose.NAMES)
@pytest.mark.parametrize("start", ["", "i"])
def test_what_is_no_array(collective: str, start: str) -> None:
    """Refused with what to give instead, as x and as out, on the rank that gave it; nothing is touched."""
    world, algorithm = World(RANKS), next(name for where, name in OWN if where == collective)
    instead = {
        "every rank must pass one": None,
        "numpy.asarray": [1.0, 2.0],
        "pass the array alone": [np.ones(6, np.float32), "MPI.FLOAT"],
        "numpy.frombuffer": "text",
        "filled": np.ma.ones(6, np.float32),
    }
    for advice, given in instead.items():
        for argument in ("x", "out") if collective in WITH_OUT and given is not None else ("x",):
            inputs, outs = numbers(), [np.zeros(6) for _ in range(RANKS)]
            if collective in WITH_OUT:
                outs = [np.zeros_like(expected(collective, inputs, rank, rank)) for rank in range(RANKS)]
            arguments: list[dict[str, Any]] = [
                {"x": x, **({"out": out} if collective in WITH_OUT else {})}
                for x, out in zip(inputs, outs, strict=True)
            ]
            arguments[1][argument] = given

            def method(comm: Communicator, rank: int) -> Any:
                options = dict(arguments[rank])  # noqa: B023
                return getattr(comm, start + collective)(
                    options.pop("x"), algorithm=algorithm, **options, **more(collective, rank)
                )

            with ThreadPoolExecutor(RANKS) as pool:
                futures = [pool.submit(method, comm, rank) for rank, comm in enumerate(world.comms)]
            told: list[Any] = []
            for future in futures:
                try:
                    told.append(future.result().wait())
                except CompcollError as error:
                    told.append(error)
            assert type(told[1]) is InvalidBuffer and advice in str(told[1]) and f"{argument} is a" in str(told[1])
            assert all("rank 1: " in str(told[rank]) and "InvalidBuffer" in str(told[rank]) for rank in (0, 2)), told
            assert [x.tolist() for x in inputs] == [x.tolist() for x in numbers()]
            assert not any(out.any() for out in outs)
    for rank, result in enumerate(blocking(world, collective, numbers(), [None] * RANKS, algorithm=algorithm)):
        assert np.array_equal(result, expected(collective, numbers(), rank, ROOT))
