"""Rows exchanged among experts, with gradients, and activations sent from stage to stage."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from check_collectives import standing

import compcoll.torch
from compcoll import Cast, MinMax
from compcoll.errors import CollectiveMismatch, InvalidArgument, InvalidBuffer, UnsupportedDType


def passed(values: torch.Tensor, codec: compcoll.Codec) -> torch.Tensor:
    """What a rank's rows are after a codec."""
    return compcoll.decode(compcoll.encode(values.flatten(), codec), values.shape, values.dtype, codec)


def check_experts_train_as_in_one_process() -> None:
    rank, size = standing()
    rows = [[(3 * source + 5 * dest) % 4 for dest in range(size)] for source in range(size)]
    seeded = [torch.Generator().manual_seed(source) for source in range(size)]
    tokens = [torch.randn(sum(rows[source]), 24, generator=seeded[source]) for source in range(size)]
    weights = [torch.randn(24, 24, generator=torch.Generator().manual_seed(50 + r)) for r in range(size)]
    there, back = Cast("bfloat16"), MinMax(bits=8, block=24)
    exact = Cast("float32")
    for codecs in ((exact, exact), (there, back)):
        own = tokens[rank].clone().requires_grad_()
        coming = [rows[source][rank] for source in range(size)]
        call = {"codec": codecs[0], "backward_codec": codecs[1]}
        came = compcoll.torch.all_to_all_single_autograd(own, coming, rows[rank], **call)
        done = compcoll.torch.all_to_all_single_autograd((came @ weights[rank]).tanh(), rows[rank], coming, **call)
        loss = (done * torch.arange(1.0, 25.0)).sum()
        loss.backward()
        # This rank's rows, expert by expert, in one process.
        alone = tokens[rank].clone().requires_grad_()
        for expert, part in enumerate(alone.split(rows[rank])):
            if not len(part):
                continue
            seen = passed(part.detach(), codecs[0]).requires_grad_()
            result = (seen @ weights[expert]).tanh()
            found = passed(result.detach(), codecs[0])
            torch.testing.assert_close(done.split(rows[rank])[expert], found, rtol=2.0**-7, atol=1e-5)
            due = passed(torch.arange(1.0, 25.0).expand_as(result).contiguous(), codecs[1])
            (gradient,) = torch.autograd.grad(result, seen, due)
            given = own.grad.split(rows[rank])[expert]
            level = 1.01 * float(gradient.max() - gradient.min()) / 255 if codecs[1] is back else 0.0
            torch.testing.assert_close(given, passed(gradient, codecs[1]), rtol=1e-4, atol=1e-4 + level)
        assert own.grad.shape == own.shape and bool(torch.isfinite(own.grad).all())
    even = torch.randn(2 * size, 8, dtype=torch.float64, requires_grad=True)
    twice = compcoll.torch.all_to_all_single_autograd(
        compcoll.torch.all_to_all_single_autograd(even, codec="cast", dtype="float64"), codec="cast", dtype="float64"
    )
    assert torch.equal(twice, even)
    twice.square().sum().backward()
    assert torch.equal(even.grad, 2 * even)


def check_activations_go_from_stage_to_stage() -> None:
    rank, size = standing()
    codec = Cast("bfloat16")
    for shape, dtype in (((5, 40), torch.float32), ((300,), torch.float16), ((0, 3), torch.float32)):
        first = torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        values = first.clone() if rank == 0 else torch.full(shape, torch.nan, dtype=dtype)
        if rank > 0:
            compcoll.torch.recv(values, rank - 1, codec=codec)
        if rank + 1 < size:
            compcoll.torch.send(values, rank + 1, codec=codec)
        assert torch.equal(values, first if rank == 0 else first.bfloat16().to(dtype))
        gradients = values.clone() if rank + 1 == size else torch.empty(shape, dtype=dtype)
        if rank + 1 < size:
            compcoll.torch.recv(gradients, rank + 1, tag=3, codec="minmax", bits=8)
        if rank > 0:
            compcoll.torch.send(gradients, rank - 1, tag=3, codec="minmax", bits=8)
        torch.testing.assert_close(gradients, first, rtol=0, atol=0.05)
    # What was not meant is told by who receives it, and the next message comes all the same.
    if rank == 0:
        compcoll.torch.send(torch.ones(70), 1, codec="cast", dtype="float16")
        compcoll.torch.send(torch.ones(64), 1, codec="cast", dtype="float16")
    if rank == 1:
        got = torch.zeros(64)
        with pytest.raises(CollectiveMismatch, match=r"rank 0 did not send the 64 .* sent 140 bytes"):
            compcoll.torch.recv(got, 0, codec="cast", dtype="float16")
        assert not got.any()
        compcoll.torch.recv(got, 0, codec="cast", dtype="float16")
        assert got.all()
    for sent, expected in ((0, 64), (64, 0), (0, 0)):
        if rank == 0:
            compcoll.torch.send(torch.ones(sent), 1, codec="cast", dtype="float16")
        if rank == 1 and sent != expected:
            with pytest.raises(CollectiveMismatch):
                compcoll.torch.recv(torch.zeros(expected), 0, codec="cast", dtype="float16")
        elif rank == 1:
            compcoll.torch.recv(torch.zeros(expected), 0, codec="cast", dtype="float16")


def check_what_cannot_be_exchanged_is_named() -> None:
    rank, size = standing()
    x, exchange = torch.ones(2 * size, 4), compcoll.torch.all_to_all_single_autograd
    other = (rank + 1) % size
    for error, text, call in (
        (InvalidArgument, "sizes that receivers", lambda: exchange(x, codec="cast", backward_codec="topk")),
        (InvalidArgument, "sizes that receivers", lambda: exchange(x, codec="zfp", tolerance=1e-3)),
        (InvalidArgument, "whose sum", lambda: exchange(x, [1] * size, [1] * size, codec="cast")),
        (InvalidArgument, "for both", lambda: exchange(x, None, [2] * size, codec="cast")),
        (InvalidBuffer, "rows", lambda: exchange(torch.tensor(1.0), codec="cast")),
        (UnsupportedDType, "int64", lambda: exchange(x.long(), codec="cast")),
        (InvalidArgument, "one of the group", lambda: compcoll.torch.send(x, rank, codec="cast")),
        (InvalidArgument, "one of the group", lambda: compcoll.torch.recv(x, size, codec="cast")),
        (InvalidArgument, "sizes that receivers", lambda: compcoll.torch.send(x, other, codec="topk")),
        (UnsupportedDType, "int64", lambda: compcoll.torch.send(x.long(), other, codec="cast")),
    ):
        with pytest.raises(error, match=text):
            call()
    dist.barrier()
