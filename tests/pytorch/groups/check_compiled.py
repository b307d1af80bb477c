"""Collectives in compiled functions do what they do without torch.compile, in one graph where they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import compcoll.torch
from compcoll import ErrorFeedback, Int8, MinMax
from compcoll.codecs.registry import codec_classes, get_codec
from compcoll.errors import CompcollError, InvalidArgument, InvalidBuffer, UnknownAlgorithm, UnknownCodec
from compcoll.plan.choose import NAMES

Call = Callable[..., Any]
N = 600


def standing() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def values(n: int = N) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(dist.get_rank()))


def compiled(function: Call, backend: str = "aot_eager", *, fullgraph: bool = True, **options: Any) -> Call:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=fullgraph, **options)


def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Two new groups of all ranks: codecs that round at random draw by the number of a group's call."""
    return dist.new_group(), dist.new_group()


def assert_alike(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), number


def calls_of(**codec: Any) -> Iterator[Call]:
    """Calls of each collective by a codec, with the first algorithm that compresses by it."""

    def reduced(x: torch.Tensor, group: Any, **how: Any) -> torch.Tensor:
        x = x * 2
        compcoll.torch.all_reduce(x, group=group, **how)
        return x + 1

    def coalesced(x: torch.Tensor, group: Any, **how: Any) -> torch.Tensor:
        parts = [x[:100].view(10, 10).t() * 2, x[100:] + 1]
        compcoll.torch.all_reduce_coalesced(parts, "avg", group, **how)
        return torch.cat([part.reshape(-1) for part in parts])

    def scattered(x: torch.Tensor, group: Any, **how: Any) -> torch.Tensor:
        part = x.new_empty(len(x) // dist.get_world_size())
        compcoll.torch.reduce_scatter_tensor(part, x * 3, "avg", group, **how)
        return part + 1

    def gathered(x: torch.Tensor, group: Any, **how: Any) -> torch.Tensor:
        whole = x.new_empty(len(x) * dist.get_world_size())
        compcoll.torch.all_gather_into_tensor(whole, x * 4, group, **how)
        return whole + 1

    def exchanged(x: torch.Tensor, group: Any, **how: Any) -> torch.Tensor:
        came = torch.empty_like(x)
        compcoll.torch.all_to_all_single(came, x * 5, group=group, **how)
        return came + 1

    collectives = {reduced: "allreduce", coalesced: "allreduce", scattered: "reduce_scatter", gathered: "allgather"}
    for call, collective in collectives.items():
        for algorithm in NAMES[collective]:
            if algorithm != "native" and accepted(found := partial(call, algorithm=algorithm, **codec)):
                yield found
                break
    if accepted(found := partial(exchanged, **codec)):
        yield found


def accepted(call: Call) -> bool:
    try:
        call(values(), None)
    except CompcollError:
        return False
    return True


@cache
def some_calls() -> list[Call]:
    """An all_reduce by every codec, and every collective by one that is given as an object."""
    classes = {name: cls for name, cls in codec_classes().items() if not cls.needs_reference}
    named = [{"codec": name, **cls.examples[0].options} for name, cls in classes.items()]
    return [*(next(calls_of(**codec)) for codec in named), *calls_of(codec=get_codec("minmax", bits=5))]


def bits_are_those_of_eager(backend: str) -> None:
    calls = some_calls()
    one, other = groups()

    def step(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return [call(x * 3, group) for call in calls]

    function = compiled(step, backend)
    for _ in range(2):
        assert_alike(function(values(), other), step(values(), one))


def check_every_codec_has_the_bits_of_eager() -> None:
    bits_are_those_of_eager("aot_eager")


def check_groups_operations_and_objects_in_a_graph() -> None:
    _, size = standing()
    mesh = init_device_mesh("cpu", (size,))
    of_nodes = init_device_mesh("cpu", (1, size))
    codec = Int8(block=64)
    calls = [
        *({"group": group} for group in (None, dist.group.WORLD, groups()[0], mesh, of_nodes)),
        *({"op": op} for op in ("mean", dist.ReduceOp.SUM, dist.ReduceOp.AVG)),
        {"codec": codec},
        {"codec": "int8", "block": 64},
        {"codec": "minmax:bits=4,block=64"},
    ]

    def step(x: torch.Tensor, given: Any, bits: int) -> list[torch.Tensor]:
        found = [x * (2 + number) for number in range(len(calls) + 2)]
        for one, call in zip(found, calls, strict=False):
            compcoll.torch.all_reduce(one, **{"algorithm": "direct", **call})
        compcoll.torch.all_reduce(found[-2], codec=given, algorithm="direct")
        compcoll.torch.all_reduce(found[-1], codec=Int8(block=96), algorithm="direct")
        compcoll.torch.all_reduce(found[-1], codec="minmax", bits=bits, algorithm="direct")
        return found

    function = compiled(step, "eager")
    for bits, given in enumerate((codec, Int8(block=128), Int8(block=192), MinMax(bits=3), codec), 3):
        assert_alike(function(values(), given, bits), step(values(), given, bits))
    # A tensor of the caller's, and one that back-propagation goes through.
    leaf, given = values().requires_grad_(), values()
    for found in (given, other := values()):
        function = compiled(changed) if found is given else changed
        function(leaf, found).sum().backward()
    assert torch.equal(given, other) and torch.equal(leaf.grad, torch.full_like(leaf, 4))


def changed(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    y = x * 2
    compcoll.torch.all_reduce(y, codec="int8", algorithm="direct")
    compcoll.torch.all_reduce(given, codec="int8", algorithm="direct")
    return y + given


def calls_keep_their_number_and_order(backend: str) -> None:
    one, other = groups()

    def call(x: torch.Tensor, group: Any) -> torch.Tensor:
        compcoll.torch.all_reduce(x, group=group, codec="qsgd", algorithm="direct")
        return x

    def step(x: torch.Tensor, group: Any) -> list[torch.Tensor]:
        call(x * 2, group)  # whose result nobody takes
        twice = [call(x + 0, group), call(x + 0, group)]
        return [*twice, *(call(x[:n] * 3, group) * 2 for n in (500, 10, 400, 20, 300, 30))]

    found, expected = compiled(step, backend)(values(), other), step(values(), one)
    assert_alike(found, expected)
    assert not torch.equal(*found[:2])


def check_calls_keep_their_number_and_order() -> None:
    calls_keep_their_number_and_order("aot_eager")


class Experts(torch.nn.Module):
    """Rows go to the ranks and come back, each way by a codec of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gate, self.expert = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, coming: list[int], going: list[int]) -> torch.Tensor:
        how: dict[str, Any] = {"codec": "fp8", "backward_codec": MinMax(bits=8, block=24)}
        came = compcoll.torch.all_to_all_single_autograd(self.gate(x), coming, going, **how)
        back = compcoll.torch.all_to_all_single_autograd(self.expert(came), going, coming, **how)
        even = compcoll.torch.all_to_all_single_autograd(x * 2, codec="int8")
        return (back * even).square().mean()


def gradients_go_back_the_same_way(backend: str) -> None:
    rank, size = standing()
    results = []
    for model in (Experts(), compiled(Experts(), backend)):
        for extra in (0, 1, 2):  # other numbers of rows: the graph is then made for any
            rows = [[1 + extra + (source + dest) % 2 for dest in range(size)] for source in range(size)]
            rows = [[size * row for row in line] for line in rows]
            coming, going = [rows[source][rank] for source in range(size)], rows[rank]
            x = torch.randn(sum(going), 24, generator=torch.Generator().manual_seed(rank)).requires_grad_()
            loss = model(x, coming, going)
            loss.backward()
            results.append([loss.detach().view(1), x.grad, *(p.grad.clone() for p in model.parameters())])
    for found, expected in zip(results[3:], results[:3], strict=True):
        if backend == "inductor":  # which adds in another order
            torch.testing.assert_close(found, expected, rtol=0.01, atol=1e-4)
        else:
            assert_alike(found, expected)


def check_gradients_go_back_the_same_way() -> None:
    gradients_go_back_the_same_way("aot_eager")


def check_what_no_operator_does_breaks_the_graph() -> None:
    other = (standing()[0] + 1) % standing()[1]
    losses = {"kept": ErrorFeedback(), "compiled": ErrorFeedback()}

    def waited(x: torch.Tensor, _: str) -> None:
        compcoll.torch.all_reduce(x, async_op=True, codec="int8", algorithm="direct").wait()

    def fed_back(x: torch.Tensor, which: str) -> None:
        compcoll.torch.all_reduce(x, codec="minmax", bits=2, algorithm="direct", feedback=losses[which])

    def told(x: torch.Tensor, _: str) -> None:
        compcoll.torch.all_reduce(x, codec="int8", algorithm="direct")
        x += compcoll.torch.stats().raw_nbytes

    def sent(x: torch.Tensor, _: str) -> None:
        if other:
            compcoll.torch.send(x, other, codec="int8")
        else:
            compcoll.torch.recv(x, dist.get_world_size() - 2, codec="int8")

    def broadcast(x: torch.Tensor, _: str) -> None:
        compcoll.torch.broadcast(x, 0, codec="int8", algorithm="binomial")

    def updated(x: torch.Tensor, _: str) -> None:
        whole = torch.zeros(standing()[1] * len(x))
        compcoll.torch.all_gather_into_tensor(whole, x, codec="delta", algorithm="ring")
        x += whole[: len(x)]

    for call in (waited, fed_back, told, sent, broadcast, updated):

        def step(x: torch.Tensor, which: str, call: Call = call) -> torch.Tensor:
            y = x * 2
            call(y, which)
            return y + 1

        function = compiled(step, fullgraph=False)
        for _ in range(2):
            assert_alike([function(values(), "compiled")], [step(values(), "kept")])
    for call in (waited, fed_back, updated):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compcoll runs these calls outside of the graph"):
            compiled(call)(values(), "compiled")


def check_errors_are_those_of_eager() -> None:
    x, exchange = values(), compcoll.torch.all_to_all_single_autograd
    for error, text, call in (
        (UnknownCodec, "int9", lambda x: compcoll.torch.all_reduce(x, codec="int9")),
        (InvalidArgument, "no option 'bits'", lambda x: compcoll.torch.all_reduce(x, codec="int8", bits=3)),
        (InvalidArgument, "'max' cannot", lambda x: compcoll.torch.all_reduce(x, "max", codec="int8")),
        (InvalidArgument, "codec=None", lambda x: compcoll.torch.all_reduce(x, codec=None)),
        (InvalidArgument, "name of one", lambda x: compcoll.torch.all_reduce(x, codec=3)),
        (InvalidBuffer, "no tensor", lambda x: compcoll.torch.all_reduce_coalesced([], codec="int8")),
        (UnknownAlgorithm, "rang", lambda x: compcoll.torch.all_reduce(x, codec="int8", algorithm="rang")),
        (InvalidBuffer, "outputs of", lambda x: compcoll.torch.reduce_scatter_tensor(x, x, codec="int8")),
        (InvalidArgument, "sizes that receivers", lambda x: exchange(x, codec="int8", backward_codec="topk")),
        (InvalidArgument, "for both", lambda x: exchange(x, None, [N // standing()[1]] * standing()[1], codec="int8")),
    ):
        for function in (call, compiled(call, fullgraph=False)):
            with pytest.raises(error, match=text):
                function(x)
