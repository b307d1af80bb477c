"""Host arrays of other libraries: taken as they lie, with results of the same kind."""

from __future__ import annotations

import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fakes.loopback import World, exact_sum, normals

import compcoll
from compcoll.errors import InvalidBuffer

RANKS = 3


class Strange:
    """An array that shows itself by DLPack only, as JAX's do, and says who makes arrays of its kind."""

    device = 1  # DLPack's number of host memory

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.dtype = memory, memory.dtype

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:  # as JAX's do, for bfloat16
        assert self.dtype == ml_dtypes.bfloat16
        return self.memory

    def __array_namespace__(self) -> Any:
        class Namespace:
            asarray = Strange

        return Namespace


def tensor(memory: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    if memory.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(memory)


def bits(x: Any) -> bytes:
    if isinstance(x, Strange):
        return x.memory.tobytes()
    if isinstance(x, np.ndarray | memoryview | array.array):
        return x.tobytes()
    import torch

    return bytes(x.view(torch.uint8).numpy().tobytes())


KINDS: dict[str, Callable[[np.ndarray], Any]] = {"tensor": tensor, "DLPack": Strange, "buffer": memoryview}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("collective", "options"),
    [
        ("allreduce", {}),
        ("allreduce", {"codec": "zfp", "rate": 8, "algorithm": "ring"}),
        ("allreduce", {"codec": "topk", "density": 0.1, "algorithm": "sparse_ring"}),
        ("reduce_scatter", {"codec": "minmax", "algorithm": "ring"}),
        ("allgather", {}),
        ("allgatherv", {"codec": "cast", "algorithm": "ring"}),
        ("bcast", {"codec": "zfp", "rate": 16}),
        ("alltoall", {}),
        ("alltoallv", {"counts": [333] * 3}),
        ("reduce", {"codec": "minmax", "algorithm": "ring", "root": 1}),
        ("gather", {"root": 2}),
        ("scatter", {"codec": "cast", "algorithm": "linear"}),
    ],
)
def test_same_bits_and_kind(kind: str, collective: str, options: dict[str, Any]) -> None:
    inputs = normals(RANKS, 999)

    def start(comm: Any, x: Any) -> Any:
        return getattr(comm, f"i{collective}")(x, **options)

    wanted = World(RANKS).run(start, inputs)
    given = [KINDS[kind](x.copy()) for x in inputs]
    found = World(RANKS).run(start, given)
    for own, x, result in zip(wanted, given, found, strict=True):
        if own is None:  # on ranks other than the root
            assert result is None
        else:
            assert type(result) is type(x) and bits(result) == own.tobytes()
    assert [bits(x) for x in given] == [x.tobytes() for x in inputs]


@pytest.mark.parametrize("kind", ["tensor", "DLPack"])
def test_bfloat16(kind: str) -> None:
    inputs = normals(2, 500, ml_dtypes.bfloat16)
    found = World(2).allreduce([KINDS[kind](x) for x in inputs], codec="zfp", rate=16, algorithm="ring")
    wanted = World(2).allreduce(inputs, codec="zfp", rate=16, algorithm="ring")
    assert all(type(x) is type(KINDS[kind](inputs[0])) for x in found)
    assert [bits(x) for x in found] == [x.tobytes() for x in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_results_in_place_and_elsewhere(kind: str) -> None:
    inputs = normals(2, 100)
    given = [KINDS[kind](x.copy()) for x in inputs]
    outs = [KINDS[kind](np.empty_like(x)) for x in inputs]
    world = World(2)
    starts = [comm.iallreduce(x, out=out) for comm, x, out in zip(world.comms, given, outs, strict=True)]
    assert all(result is out for result, out in zip(world.loopback.run(starts), outs, strict=True))
    assert bits(outs[0]) == exact_sum(inputs).astype(np.float32).tobytes()
    starts = [comm.iallreduce(x, out=x) for comm, x in zip(world.comms, given, strict=True)]
    assert all(result is x for result, x in zip(world.loopback.run(starts), given, strict=True))
    assert bits(given[1]) == bits(outs[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collective", ["reduce", "gather"])
def test_only_the_root_has_a_result(kind: str, collective: str) -> None:
    """Of requests, persistent ones and blocking calls; only on the root is ``out`` used."""
    inputs = normals(2, 100)
    world, outs = World(2), [KINDS[kind](np.zeros(200, np.float32)) for _ in range(2)]
    if collective == "reduce":
        outs = [KINDS[kind](np.zeros(100, np.float32)) for _ in range(2)]
    elif kind == "tensor":
        outs = [out.reshape(2, 100) for out in outs]
    else:
        outs = [KINDS[kind](np.zeros((2, 100), np.float32)) for _ in range(2)]
    given = [KINDS[kind](x) for x in inputs]
    pairs = list(zip(world.comms, given, outs, strict=True))
    started = [getattr(comm, f"i{collective}")(x, 1, out=out) for comm, x, out in pairs]
    prepared = [getattr(comm, f"{collective}_init")(x, 1, out=out) for comm, x, out in pairs]
    for results in (world.loopback.run(started), world.loopback.run([each.start() for each in prepared])):
        assert results[0] is None and results[1] is outs[1]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda pair: getattr(pair[0], collective)(pair[1], 1, out=pair[2]), pairs))
    assert results[0] is None and results[1] is outs[1]
    right = exact_sum(inputs).astype(np.float32) if collective == "reduce" else np.stack(inputs)
    assert bits(outs[1]) == right.tobytes() and not any(bits(outs[0]))


def test_one_rank_alone() -> None:
    """Blocking calls, and the plan, the feedback and the codecs without ranks."""
    comm, values = World(1).comms[0], normals(1, 4096)[0]
    held = array.array("f", values)
    result = comm.allreduce(held)
    assert isinstance(result, memoryview) and result.tobytes() == values.tobytes()
    assert comm.allreduce(held, out=held) is held
    assert comm.explain(held).algorithm == comm.explain(values).algorithm
    feedback = compcoll.ErrorFeedback()
    comm._prepare_feedback(feedback, held)
    assert feedback.residual.size == values.size
    wire = compcoll.encode(tensor(values), codec="minmax", bits=4)
    assert bits(wire) == compcoll.encode(values, codec="minmax", bits=4).tobytes()
    decoded = compcoll.decode(wire, values.shape, values.dtype, codec="minmax", bits=4)
    assert type(decoded) is type(wire)
    assert bits(decoded) == compcoll.decode(np.asarray(wire), values.shape, values.dtype, "minmax", bits=4).tobytes()


def test_refusals() -> None:
    torch = pytest.importorskip("torch")
    comm = World(1).comms[0]
    elsewhere = Strange(np.ones(4))
    elsewhere.device = 7  # Vulkan's
    for x, told in (
        (torch.ones(4, 4).t(), "not C-contiguous"),
        (torch.ones(4).to_sparse(), "x, a torch.Tensor"),
        (np.float32(1), "numpy.float32: a numpy.ndarray is needed"),
        (elsewhere, "Strange: a numpy.ndarray is needed, or an array with DLPack"),
    ):
        with pytest.raises(InvalidBuffer, match=told):
            comm.allreduce(x)
    frozen = memoryview(bytes(32)).cast("f")
    with pytest.raises(InvalidBuffer, match="out is read-only"):
        comm.allreduce(frozen, out=frozen)
    with pytest.raises(InvalidBuffer, match="the result is"):
        comm.allreduce(torch.ones(4), out=torch.ones(5))


def test_a_refusal_reaches_all_ranks() -> None:
    torch = pytest.importorskip("torch")
    good, bad = np.ones(4, np.float32), torch.ones(4).to_sparse()
    errors = World(2).errors([lambda comm: comm.iallreduce(good), lambda comm: comm.iallreduce(bad)])
    assert "refused" in str(errors[0]) and isinstance(errors[1], InvalidBuffer)
