"""The collectives as PyTorch operators, for compiled functions.

The operators return new tensors. They find a group by its name, and a codec by its repr, since their schemas take only
tensors, numbers and text. Each takes and returns a tensor that counts calls, so that no compiler reorders, merges or
drops calls for which other ranks wait. (PyTorch's effect tokens do not keep the order in Inductor 2.13.) A call that no
operator supports breaks the graph, and runs as without torch.compile.

This module must not load torch._dynamo, which takes seconds. Programs that compile load it themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.library import custom_op

from ...codecs.base import Codec
from ...errors import CompcollError
from ...feedback import ErrorFeedback
from ...plan import choose
from .. import private
from ..linear import linear
from ..untraced import constant, untraced
from .membership import Group, check_fixed, check_group, coding

_Splits: TypeAlias = Sequence[int] | None
_Asked: TypeAlias = tuple[str, str, str, str]
"""Operation, group, codec and algorithm."""
_Result: TypeAlias = tuple[Any] | None
_Collective = TypeVar("_Collective", bound=Callable[..., Any])

_REASON = (
    "compcoll runs these calls outside of the graph: those with async_op=True, feedback=, a premultiplied sum, a codec "
    "that updates its output or is not a dataclass, or invalid arguments"
)

_eager: dict[str, Callable[..., Any]] = {}
"""The collectives as they run outside of graphs, by name; operators run them, too."""


def traced_by(traced: Callable[..., _Result]) -> Callable[[_Collective], _Collective]:
    """Make torch.compile trace another function instead of a collective.

    Parameters
    ----------
    traced : callable
        Takes the collective's arguments. Returns its result in a tuple, or None if no operator supports the call: then
        the collective itself runs outside of the graph.
    """

    def decorate(collective: _Collective) -> _Collective:
        @wraps(collective)
        def call(*arguments: Any, **named: Any) -> Any:
            result = traced(*arguments, **named) if is_dynamo_compiling() else None
            return collective(*arguments, **named) if result is None else result[0]

        _eager[collective.__name__] = untraced(collective, _REASON)
        return cast(_Collective, call)

    return decorate


_codecs: dict[str, Codec] = {}
"""The codecs that operators were traced with, by repr."""


@constant
def _options_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of a codec class's options; None if it is not a dataclass."""
    return tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else None


@constant
def _as_text(op: Any, group: Group, codec: str | type[Codec], /, **options: Any) -> tuple[str, str, str] | None:
    """Return the names of operation, group and codec; None if no operator supports the call, or if it is invalid."""
    try:
        operation = linear(op)
        name = check_group(group).group_name
        made = coding(codec, options) if isinstance(codec, str) else codec(**options)
    except CompcollError:
        return None
    if made.needs_reference:  # the operators return new tensors
        return None
    _codecs[repr(made)] = made
    return None if operation.factor is not None else (operation.name, name, repr(made))


def _guarded(value: Any) -> Any:
    """Make torch.compile use a number's value instead of a symbol, and recompile if the value changes."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    return guard_scalar(value) if isinstance(value, (int, float)) else value


def _asked(
    op: Any,
    group: Group,
    outside: bool,
    *,
    codec: str | Codec = "int8",
    algorithm: str = choose.AUTO,
    feedback: ErrorFeedback | None = None,
    **options: Any,
) -> _Asked | None:
    """Return the text arguments with which an operator runs a call; None if the call must run outside of the graph.

    If an option of the codec changes, torch.compile compiles the graph again.
    """
    if outside or feedback is not None:
        return None
    kind: str | type[Codec] = codec if isinstance(codec, str) else type(codec)
    if not isinstance(codec, str):
        names = _options_of(type(codec))
        if options or names is None:
            return None
        options = {name: getattr(codec, name) for name in names}
    text = _as_text(op, group, kind, **{name: _guarded(value) for name, value in options.items()})
    return None if text is None else (*text, algorithm)


def _group(name: str) -> dist.ProcessGroup:
    return private.group_named(name)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@custom_op("compcoll::all_reduce", mutates_args=())
def _all_reduce(
    ticket: Tensor, tensors: list[Tensor], op: str, group: str, codec: str, algorithm: str
) -> tuple[Tensor, list[Tensor]]:
    sums = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    _eager["all_reduce_coalesced"](sums, op, _group(group), codec=_codecs[codec], algorithm=algorithm)
    return ticket + 1, sums


@_all_reduce.register_fake
def _(ticket: Tensor, tensors: list[Tensor], *_: str) -> tuple[Tensor, list[Tensor]]:
    return _like(ticket), [_like(tensor) for tensor in tensors]


@custom_op("compcoll::reduce_scatter", mutates_args=())
def _reduce_scatter(
    ticket: Tensor, output: Tensor, input: Tensor, op: str, group: str, codec: str, algorithm: str
) -> tuple[Tensor, Tensor]:
    result = _like(output)
    _eager["reduce_scatter_tensor"](result, input, op, _group(group), codec=_codecs[codec], algorithm=algorithm)
    return ticket + 1, result


@custom_op("compcoll::all_gather", mutates_args=())
def _all_gather(
    ticket: Tensor, output: Tensor, input: Tensor, op: str, group: str, codec: str, algorithm: str
) -> tuple[Tensor, Tensor]:
    result = _like(output)
    _eager["all_gather_into_tensor"](result, input, _group(group), codec=_codecs[codec], algorithm=algorithm)
    return ticket + 1, result


@custom_op("compcoll::all_to_all", mutates_args=())
def _all_to_all(
    ticket: Tensor,
    output: Tensor,
    input: Tensor,
    coming: Sequence[int],
    going: Sequence[int],
    group: str,
    codec: str,
    backward_codec: str,
) -> tuple[Tensor, Tensor]:
    check_fixed(_codecs[backward_codec])
    result = _like(output)
    _eager["all_to_all_single"](result, input.contiguous(), coming, going, _group(group), codec=_codecs[codec])
    return ticket + 1, result


for _operator in (_reduce_scatter, _all_gather, _all_to_all):
    _operator.register_fake(lambda ticket, output, *_: (_like(ticket), _like(output)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.ticket, _, rows, *ctx.how = inputs
    ctx.shape = rows.shape


def _exchange_back(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Any, ...]:
    coming, going, group, codec, backward_codec = ctx.how
    output = gradient.new_empty(ctx.shape)
    ticket, rows = _all_to_all(ctx.ticket, output, gradient, going, coming, group, backward_codec, codec)
    ctx.ticket.copy_(ticket)
    return None, None, rows, *[None] * len(ctx.how)


_all_to_all.register_autograd(_exchange_back, setup_context=_keep)

with torch.inference_mode(False):
    _ticket = torch.zeros((), dtype=torch.int64, device="cpu")
"""The number of calls so far, which each call reads and increments."""


def _ordered(operator: Callable[..., tuple[Tensor, Any]], *arguments: Any) -> Any:
    """Call an operator after all earlier calls: the compiler sees that each call needs the count of the one before."""
    ticket, result = operator(_ticket, *arguments)
    _ticket.copy_(ticket)
    return result


def all_reduce(tensor: Tensor, op: Any = "sum", group: Group = None, async_op: bool = False, **call: Any) -> _Result:
    """Trace `compcoll.torch.all_reduce`. The other functions trace the collectives of their names."""
    return all_reduce_coalesced([tensor], op, group, async_op, **call)


def all_reduce_coalesced(
    tensors: Sequence[Tensor], op: Any = "sum", group: Group = None, async_op: bool = False, **call: Any
) -> _Result:
    asked = _asked(op, group, async_op or not tensors, **call)
    if asked is None:
        return None
    own = [tensor.detach() for tensor in tensors]
    for tensor, result in zip(own, _ordered(_all_reduce, own, *asked), strict=True):
        tensor.copy_(result)
    return (None,)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Any = "sum", group: Group = None, async_op: bool = False, **call: Any
) -> _Result:
    asked = _asked(op, group, async_op, **call)
    return (
        None if asked is None else _copied(output, _ordered(_reduce_scatter, output.detach(), input.detach(), *asked))
    )


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False, **call: Any
) -> _Result:
    asked = _asked("sum", group, async_op, **call)
    if asked is None:
        return None
    return _copied(output_tensor, _ordered(_all_gather, output_tensor.detach(), input_tensor.detach(), *asked))


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: _Splits = None,
    input_split_sizes: _Splits = None,
    group: Group = None,
    async_op: bool = False,
    **call: Any,
) -> _Result:
    asked = _asked("sum", group, async_op, **call)
    if asked is None:
        return None
    _, name, codec, _ = asked
    splits = output_split_sizes or (), input_split_sizes or ()
    return _copied(output, _ordered(_all_to_all, output.detach(), input.detach(), *splits, name, codec, codec))


def _copied(output: Tensor, result: Tensor) -> _Result:
    output.detach().copy_(result)
    return (None,)


def all_to_all_single_autograd(
    input: Tensor,
    output_split_sizes: _Splits = None,
    input_split_sizes: _Splits = None,
    group: Group = None,
    *,
    backward_codec: str | Codec | None = None,
    **call: Any,
) -> _Result:
    coming, going = output_split_sizes or (), input_split_sizes or ()
    asked = _asked("sum", group, bool(coming) != bool(going) or not input.dim(), **call)
    back = asked if backward_codec is None else _asked("sum", group, False, codec=backward_codec)
    if asked is None or back is None:
        return None
    output = input.new_empty(sum(coming) if coming else len(input), *input.shape[1:])
    return (_ordered(_all_to_all, output, input, coming, going, asked[1], asked[2], back[2]),)
