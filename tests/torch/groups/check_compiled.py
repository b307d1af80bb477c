"""Collectives in compiled functions: what they do without torch.compile, for every codec, in one graph where that can be."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from check_collectives import standing
from torch.distributed.device_mesh import init_device_mesh

import compcoll.torch
from compcoll import ErrorFeedback, Int8, MinMax
from compcoll.collectives.choose import NAMES
from compcoll.errors import CompcollError, InvalidArgument, InvalidBuffer, UnknownAlgorithm, UnknownCodec
from compcoll.registry import codec_classes, get_codec

Call = Callable[..., Any]
N = 600
NATIVE_BACKENDS = ("eager", "aot_eager")


def values(n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(dist.get_rank()))


def compiled(function: Call, backend: str = "aot_eager", *, fullgraph: bool = True, **options: Any) -> Call:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=fullgraph, **options)


@cache
def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two of all ranks: codecs that round at random draw by the number of a group's call."""
    everybody = list(range(dist.get_world_size()))
    return dist.new_group(everybody), dist.new_group(everybody)


def assert_alike(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), number


def allowed(calls: list[Call]) -> list[Call]:
    """Those that are not refused without torch.compile."""
    found = []
    for call in calls:
        try:
            call(values(), groups()[0])
        except CompcollError:
            continue
        found.append(call)
    return found


def sums(**how: Any) -> list[Call]:
    """Calls of every collective, each of its algorithms, by a codec."""

    def all_reduce(algorithm: str) -> Call:
        def call(x: torch.Tensor, group: Any) -> torch.Tensor:
            x = x * 2
            compcoll.torch.all_reduce(x, group=group, algorithm=algorithm, **how)
            return x + 1

        return call

    def reduce_scatter(algorithm: str) -> Call:
        def call(x: torch.Tensor, group: Any) -> torch.Tensor:
            part = x.new_empty(len(x) // dist.get_world_size())
            compcoll.torch.reduce_scatter_tensor(part, x * 3, "avg", group, algorithm=algorithm, **how)
            return part + 1

        return call

    def all_gather(algorithm: str) -> Call:
        def call(x: torch.Tensor, group: Any) -> torch.Tensor:
            whole = x.new_empty(len(x) * dist.get_world_size())
            compcoll.torch.all_gather_into_tensor(whole, x * 4, group, algorithm=algorithm, **how)
            return whole + 1

        return call

    def all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
        came = torch.empty_like(x)
        compcoll.torch.all_to_all_single(came, x * 5, group=group, **how)
        return came + 1

    def coalesced(x: torch.Tensor, group: Any) -> torch.Tensor:
        parts = [x[:100].view(10, 10).t() * 2, x[100:] + 1]
        compcoll.torch.all_reduce_coalesced(parts, group=group, algorithm="direct", **how)
        return torch.cat([part.reshape(-1) for part in parts])

    made = {"allreduce": all_reduce, "reduce_scatter": reduce_scatter, "allgather": all_gather}
    return [
        *(make(algorithm) for collective, make in made.items() for algorithm in ("auto", *NAMES[collective])),
        all_to_all,
        coalesced,
    ]


def codecs() -> list[dict[str, Any]]:
    """The arguments that name every codec, and one given as an object."""
    named = [
        {"codec": name, **example.options} for name, cls in codec_classes().items() for example in cls.examples[:1]
    ]
    return [*named, {"codec": get_codec("minmax", bits=5)}]


def bits_of_eager(backend: str) -> None:
    calls = allowed([call for how in codecs() for call in sums(**how)])
    assert len(calls) > 5 * len(codec_classes())
    dist.barrier()
    one, other = dist.new_group([0, 1]), dist.new_group([0, 1])

    def step(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return [call(x.sin(), group) for call in calls]

    function = compiled(step, backend)
    for _ in range(2):
        assert_alike(function(values(), other), step(values(), one))


def check_every_codec_has_the_bits_of_eager() -> None:
    for backend in NATIVE_BACKENDS:
        bits_of_eager(backend)


def check_every_codec_has_the_bits_of_eager_by_inductor() -> None:
    bits_of_eager("inductor")
