"""Compressed collectives over any process group, with the names and arguments of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import Tensor

from ...codecs.base import Codec
from ...codecs.registry import as_codec
from ...errors import InvalidArgument, InvalidBuffer
from ...execute import observation
from ...feedback import ErrorFeedback
from ...plan import choose
from ...plan.plan import Plan
from ...stats import Stats
from ..buffers import Packed, array_of, copy_of, nbytes_of
from ..handles import Followed
from ..job_queue import Work
from ..linear import linear
from ..untraced import untraced
from . import operators
from .membership import Decision, Group, Member, check_tensors, coding, member_of, members
from .operators import traced_by

_Key = tuple[Any, ...]
_MOST_KEPT = 1024
_OWN = "the group's own all_reduce"


@traced_by(operators.all_reduce)
def all_reduce(
    tensor: Tensor,
    op: Any = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = choose.AUTO,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Work | dist.Work | None:
    """Sum or average all ranks' tensors in place, compressed; every rank gets the same bits.

    This works over any process group, whether torchrun or another launcher started its ranks. MPI is not needed.

    Parameters
    ----------
    tensor : torch.Tensor
        float16, bfloat16, float32 or float64, of any shape.
    op : str or torch.distributed.ReduceOp
        ``"sum"`` or ``"avg"``.
    group : torch.distributed.ProcessGroup or torch.distributed.DeviceMesh, optional
        The default group by default. The ranks of a two-dimensional mesh form one group. For
        ``algorithm="hierarchical"``, its rows are nodes (or parts of them).
    async_op : bool
        Whether to return a handle at once.
    codec : str or Codec
        As in `compcoll.allreduce`.
    algorithm : str
        As in `compcoll.allreduce`. ``"auto"`` compresses where that is faster; else it uses the group's own all_reduce,
        or memory that ranks of a node share. `stats` reports which. ``"hierarchical"`` sums exactly inside a node, and
        sends one compressed sum of each node to the other nodes.
    feedback : ErrorFeedback, optional
        Keeps the residual and adds it to the next call's values.
    **codec_options
        Configuration of a codec given by name, such as ``rate=8``.

    Returns
    -------
    Work or None
        With ``async_op``, a handle like PyTorch's own.

    Raises
    ------
    CompcollError
        See `compcoll.errors`. If a call is invalid on one rank only, all ranks raise an error, provided that they call
        the same algorithm; ``tensor`` is unchanged.

    Examples
    --------
    >>> tensor = torch.ones(1024)
    >>> compcoll.torch.all_reduce(tensor, op="avg", codec="int8")
    >>> bool((tensor == 1).all())
    True
    """
    # A fast path: after a wait for the network, these objects are not in the CPU caches, so each access costs time.
    member, decision, key = None, None, None
    if feedback is None:
        try:
            about = tensor.numel(), tensor.dtype, tensor.layout, tensor.is_cpu, tensor.is_contiguous()
            key = (*about, op, codec, algorithm, *codec_options.items())
            member = members.get(ref(dist.group.WORLD if group is None else group))
            decision = None if member is None else member.decided.get(key)
        except (AttributeError, TypeError):  # no tensor, no group, or an argument that cannot be a key
            key = None
    if member is None or decision is None:
        member, decision = _decide([tensor], op, group, codec, algorithm, codec_options, feedback, key)
    return _all_reduce(member, decision, [tensor], async_op)


@traced_by(operators.all_reduce_coalesced)
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = choose.AUTO,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Work | dist.Work | None:
    """Sum or average several tensors as if they were one. The parameters are those of `all_reduce`.

    Examples
    --------
    >>> tensors = [torch.ones(1024), torch.ones(64, 64)]
    >>> compcoll.torch.all_reduce_coalesced(tensors, op="avg", codec="int8")
    >>> bool((tensors[1] == 1).all())
    True
    """
    if not tensors:
        raise InvalidBuffer("no tensor was given")
    member, decision = _decide(tensors, op, group, codec, algorithm, codec_options, feedback)
    return _all_reduce(member, decision, list(tensors), async_op)


def _decide(
    tensors: Sequence[Tensor],
    op: Any,
    group: Group,
    codec: str | Codec,
    algorithm: str,
    options: dict[str, Any],
    feedback: ErrorFeedback | None,
    key: _Key | None = None,
) -> tuple[Member, Decision]:
    """Decide how a sum runs, and store the decision for equal calls under their key."""
    group, operation, codec = check_tensors(group, *tensors), linear(op), coding(codec, options)
    choose.check("allreduce", algorithm)
    member = member_of(group, tensors[0].device)
    decision = Decision(None, operation, codec, algorithm, feedback)
    memory = Packed(tensors, filled=False).memory
    if memory.numel() and feedback is None and operation.factor is None:
        values = array_of(memory)
        plan = member.communicator.explain(values, op=operation.name, codec=codec, algorithm=algorithm)
        if _is_the_groups(plan, algorithm, memory, member):
            decision = decision._replace(by_group=Stats("allreduce", None, choose.NATIVE, nbytes_of(memory)))
        if key is not None and (memory.is_cpu or member.gpu_transport_known) and len(member.decided) < _MOST_KEPT:
            member.decided[key] = decision
            if decision.by_group is not None:
                observation.log_plan(member.communicator.rank, replace(plan, algorithm=choose.NATIVE, codec=None))
    return member, decision


def _all_reduce(member: Member, decision: Decision, tensors: list[Tensor], async_op: bool) -> Work | dist.Work | None:
    """Sum tensors in place, by the member's communicator or by the group's own all_reduce."""
    by_group, operation, codec, algorithm, feedback = decision
    if by_group is not None:
        packed = Packed(tensors, filled=True)
        if operation.name == "mean":
            packed.memory.div_(member.communicator.size)
        with member.board.waits(_OWN):
            work = member.all_reduce([packed.memory], _options(async_op))
            member.stats = by_group  # while the network is busy
            if async_op:
                return Followed(work, member.board, _OWN, partial(_unpacked, packed, tensors))
            work.wait()
        packed.unpack()
        return None

    def run() -> None:
        packed = Packed(tensors, filled=True)
        if operation.factor is not None:
            packed.memory.mul_(operation.factor)
        values = array_of(packed.memory)
        member.communicator.allreduce(
            values, op=operation.name, out=values, codec=codec, algorithm=algorithm, feedback=feedback
        )
        packed.unpack()

    return member.start(run, tensors, async_op, *tensors)


def _is_the_groups(plan: Plan, algorithm: str, memory: Tensor, member: Member) -> bool:
    """Return whether the group's own all_reduce runs the planned sum.

    With ``algorithm="auto"``, it also replaces compcoll's sums without a codec, whose handshake alone takes as long.
    There are two exceptions: sums through shared memory, and 16-bit floats on CPUs, which compcoll sums more
    accurately.
    """
    if algorithm == choose.AUTO and memory.is_cpu and memory.dtype.itemsize < 4:
        return False
    if plan.algorithm == choose.NATIVE:
        return True
    if algorithm != choose.AUTO or plan.codec is not None:
        return False
    if not memory.is_cpu:  # the group sends from GPU to GPU, compcoll would copy to the host
        return True
    return not (member.in_one_node and plan.algorithm in (choose.SHARED_MEMORY, choose.DISSEMINATION))


@cache
def _options(async_op: bool) -> dist.AllreduceOptions:
    """Return PyTorch's options. They are made only once, as this takes microseconds after a wait for the network."""
    options = dist.AllreduceOptions()
    options.asyncOp = async_op
    return options


def _unpacked(packed: Packed, result: list[Tensor]) -> list[Tensor]:
    """Copy the sums to their tensors, and return these."""
    packed.unpack()
    return result


@traced_by(operators.reduce_scatter_tensor)
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Any = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec = "int8",
    algorithm: str = choose.AUTO,
    feedback: ErrorFeedback | None = None,
    **codec_options: Any,
) -> Work | None:
    """Sum or average all ranks' inputs; rank r's output gets block r. The parameters are those of `all_reduce`.

    Raises
    ------
    InvalidBuffer
        If the input does not have as many elements as all ranks' outputs together.

    Examples
    --------
    >>> ranks = dist.get_world_size()
    >>> part = torch.empty(1024)
    >>> compcoll.torch.reduce_scatter_tensor(part, torch.ones(1024 * ranks), op="avg", codec="int8")
    >>> bool((part == 1).all())
    True
    """
    group, operation = check_tensors(group, output, input), linear(op)
    codec = coding(codec, codec_options)
    choose.check("reduce_scatter", algorithm)
    _check_sizes("reduce_scatter_tensor", "input", input, "outputs", output, group.size())
    member = member_of(group, output.device)

    def run() -> None:
        source, target = input.contiguous(), Packed([output], filled=False)
        if operation.factor is not None:
            source = source * operation.factor
        member.communicator.reduce_scatter(
            array_of(source).reshape(group.size(), -1),
            op=operation.name,
            out=array_of(target.memory).reshape(1, -1),
            codec=codec,
            algorithm=algorithm,
            feedback=feedback,
        )
        target.unpack()

    return member.start(run, output, async_op, output, input)


@traced_by(operators.all_gather_into_tensor)
def all_gather_into_tensor(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    *,
    codec: str | Codec | None = "int8",
    algorithm: str = choose.AUTO,
    **codec_options: Any,
) -> Work | None:
    """Gather all ranks' tensors in the order of their ranks. The parameters are those of `all_reduce`.

    Every rank gets the same bits, also for its own tensor. With ``codec=None``, the values are sent as they are. With
    ``codec="delta"``, the output must hold the previous result, which the call updates, and the input must not be a
    part of the output.

    Raises
    ------
    InvalidBuffer
        If the output does not have as many elements as all ranks' inputs together.

    Examples
    --------
    >>> ranks = dist.get_world_size()
    >>> whole = torch.empty(1024 * ranks)
    >>> compcoll.torch.all_gather_into_tensor(whole, torch.ones(1024), codec="int8")
    >>> bool((whole == 1).all())
    True
    """
    group = check_tensors(group, output_tensor, input_tensor)
    codec = as_codec(codec, codec_options)
    choose.check("allgather", algorithm)
    _check_sizes("all_gather_into_tensor", "output", output_tensor, "inputs", input_tensor, group.size())
    member = member_of(group, output_tensor.device)

    def run() -> None:
        in_place = codec is not None and codec.needs_reference
        target = Packed([output_tensor], filled=in_place)
        own = array_of(input_tensor.contiguous())
        if not in_place:
            own = copy_of(own)  # the input may be a part of the output
        out = array_of(target.memory).reshape(group.size(), -1)
        member.communicator.allgather(own, out=out, codec=codec, algorithm=algorithm)
        target.unpack()

    return member.start(run, output_tensor, async_op, output_tensor, input_tensor)


@untraced
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: str | Codec | None = "int8",
    algorithm: str = choose.AUTO,
    reference: Tensor | None = None,
    **codec_options: Any,
) -> Work | None:
    """Copy one rank's tensor to all ranks, compressed. Every rank gets the same bits, the source too.

    Parameters
    ----------
    tensor : torch.Tensor
        The source's values; on the other ranks, the tensor to receive into.
    src, group_src : int
        The source, as a rank of the default group, or as one of ``group``. Give one of them.
    group, async_op, codec, algorithm, **codec_options
        As in `all_reduce`. ``codec=None`` sends the values as they are.
    reference : torch.Tensor, optional
        With ``codec="delta"``, on the source: the previous values, which the call replaces by the new ones. On the
        other ranks, ``tensor`` holds the previous values. ``codec=None`` replaces them, too, whatever they are.

    Raises
    ------
    CollectiveMismatch
        If the calls differ between ranks. All tensors are unchanged.
    ReferenceMismatch
        If the previous values differ between ranks, with ``codec="delta"``. All tensors are unchanged.

    Examples
    --------
    >>> weights = torch.zeros(1024, dtype=torch.bfloat16)  # the same on all ranks
    >>> previous = weights.clone()
    >>> if dist.get_rank() == 0:
    ...     weights[::50] = 1
    >>> compcoll.torch.broadcast(weights, 0, codec="delta", reference=previous)
    >>> float(weights.sum())
    21.0
    """
    group = check_tensors(group, tensor)
    codec = as_codec(codec, codec_options)
    choose.check("bcast", algorithm)
    root = _group_rank(group, src, group_src)
    kept = reference if group.rank() == root else None
    member = member_of(group, tensor.device)

    def run() -> None:
        if kept is not None and codec is not None and not codec.needs_reference:
            # Only the source knows this, so it informs the others.
            refused = InvalidArgument(
                f'reference= is for codec="delta", which sends differences, and for codec=None, not for {codec!r}'
            )
            member.communicator._refuse("bcast", refused)
        values = Packed([tensor], filled=True)
        result = values if kept is None else Packed([kept], filled=True)
        member.communicator.bcast(
            array_of(values.memory), root, out=array_of(result.memory), codec=codec, algorithm=algorithm
        )
        result.unpack()

    return member.start(run, tensor, async_op, tensor, *([] if kept is None else [kept]))


def _group_rank(group: dist.ProcessGroup, src: int | None, group_src: int | None) -> int:
    """Return the rank in a group that is given by its rank in the default group, or by that rank itself."""
    ranks = dist.get_process_group_ranks(group) if group_src is None else list(range(group.size()))
    given = src if group_src is None else group_src
    if given is None or given not in ranks or None not in (src, group_src):
        raise InvalidArgument(f"src={src!r}, group_src={group_src!r}: give one of them, out of {ranks}")
    return ranks.index(given)


def _check_sizes(what: str, name: str, whole: Tensor, names: str, part: Tensor, ranks: int) -> None:
    if whole.numel() != part.numel() * ranks:
        raise InvalidBuffer(
            f"{what}: the {name} has {whole.numel()} elements, but {ranks} ranks' {names} of {part.numel()} have "
            f"{part.numel() * ranks}"
        )
