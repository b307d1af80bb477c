"""Compressed gradients of DistributedDataParallel, on gloo's process group, against means by MPI in float64."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi.check_observation import logged
from mpi.tensors import assert_same_bits
from mpi.world import raised
from mpi4py import MPI
from promises import FLAT, paired
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll import Int8
from compcoll.errors import CollectiveMismatch, HookTaken, InvalidArgument, UnknownAlgorithm, UnknownCodec
from osu_like_bench.training.processes import start

# Codec, and how large the relative error of a mean may be: root mean square, losses of five encodings.
CODECS: list[tuple[dict[str, Any], float]] = [
    ({}, 0.03),
    ({"codec": "zfp", "rate": 8}, 0.25),
    ({"codec": "zfp", "rate": 16}, 1e-3),
    ({"codec": "zfp", "tolerance": 1e-6}, 1e-2),
    ({"codec": "minmax", "bits": 8}, 0.03),
    ({"codec": "minmax", "bits": 2, "block": 64}, 2.0),
    ({"codec": "cast", "dtype": "float16"}, 5e-3),
    ({"codec": "cast", "dtype": "bfloat16"}, 2e-2),
]


class Net(nn.Module):
    """One of each kind of parameter; `late` is used first and so comes last in back-propagation."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(40, 60)
        self.embedding = nn.Embedding(64, 60)
        self.norm = nn.LayerNorm(60)
        self.middle = nn.Linear(60, 70)
        self.head = nn.Linear(70, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x[:, 0].abs() * 20).long() % 64
        hidden = self.norm(self.late(x) + self.embedding(tokens))
        return self.head(torch.relu(self.middle(hidden)))


def wrapped(net: nn.Module, **options: Any) -> DistributedDataParallel:
    if not dist.is_initialized():
        start("gloo")
    torch.set_num_threads(1)
    return DistributedDataParallel(copy.deepcopy(net), **{"bucket_cap_mb": 0.02, **options})


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def examples(comm: MPI.Intracomm, step: int = 0) -> torch.Tensor:
    return torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + comm.rank))


def backward(model: DistributedDataParallel, x: torch.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    model(x).square().mean().backward()
    return {name: p.grad.double().numpy().copy() for name, p in model.module.named_parameters() if p.grad is not None}


def true_mean(comm: MPI.Intracomm, model: DistributedDataParallel, x: torch.Tensor) -> dict[str, np.ndarray]:
    with model.no_sync():
        own = backward(model, x)
    return {name: total(comm, values) / comm.size for name, values in own.items()}


def total(comm: MPI.Intracomm, values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    comm.Allreduce(np.ascontiguousarray(values), out)
    return out


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


def check_means(comm: MPI.Intracomm) -> None:
    net, x = make_net(), examples(comm)
    for options, bound in CODECS:
        for view in (True, False):
            model = wrapped(net, gradient_as_bucket_view=view)
            compression = compcoll.torch.compress(model, **options, algorithm="ring", feedback=False)
            wanted = true_mean(comm, model, x)
            for _ in range(2):  # before and after DDP has made its buckets anew
                got = backward(model, x)
                for name, exact in compression.exact.items():
                    error = relative(got[name], wanted[name])
                    assert error <= (1e-6 if exact else bound), (options, name, error)
                    # Exact ones prove nothing about compression, and lossy ones must show that they are.
                    assert exact or comm.size == 1 or error > 1e-9, (options, name)
            if comm.size > 1:
                assert compression.stats.ratio > 1.2, (options, compression.stats)
            compression.free()


def check_the_default(comm: MPI.Intracomm) -> None:
    """int8 with feedback, of which `compress` does not warn under AdamW."""
    model = wrapped(make_net())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer = torch.optim.AdamW(model.parameters())
        compression = compcoll.torch.compress(model, algorithm="ring", optimizer=optimizer)
    backward(model, examples(comm))
    assert compression.codec == Int8()
    assert comm.size == 1 or all(each.any() for each in compression.state_dict()["residuals"].values())
    compression.free()


def check_same_bits_after_every_step(comm: MPI.Intracomm) -> None:
    for (options, _), algorithm in paired(CODECS, FLAT):
        model = wrapped(make_net(), gradient_as_bucket_view=True)
        compression = compcoll.torch.compress(model, **options, algorithm=algorithm)
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            backward(model, examples(comm, step))
            optimizer.step()
            assert_same_bits(comm, model.parameters())
        compression.free()


def check_exact_mode_is_gloo_within_rounding(comm: MPI.Intracomm) -> None:
    models = [wrapped(make_net()) for _ in range(2)]
    compression = compcoll.torch.compress(models[0], None)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(6):
        for model, optimizer in zip(models, optimizers):
            backward(model, examples(comm, step))
            optimizer.step()
    assert_same_bits(comm, models[0].parameters())
    for (name, ours), gloos in zip(models[0].module.named_parameters(), models[1].module.parameters()):
        assert torch.allclose(ours, gloos, rtol=1e-5, atol=1e-7), name
    compression.free()


def check_no_loss_is_lost(comm: MPI.Intracomm) -> None:
    """What all steps were short of is what the ranks hold for the next, also when DDP makes its buckets anew."""
    for (options, _), algorithm in paired(CODECS, FLAT):
        model, x = wrapped(make_net()), examples(comm)
        compression = compcoll.torch.compress(model, **options, algorithm=algorithm)
        wanted = true_mean(comm, model, x)
        sums = {name: np.zeros_like(values) for name, values in wanted.items()}
        layouts = []
        for step in range(1, 5):
            for name, values in backward(model, x).items():
                sums[name] += values
            layouts.append(tuple(bucket.names for bucket in compression._buckets.values()))
            held = compression.state_dict()["residuals"]
            for name, exact in compression.exact.items():
                if not exact:
                    due = step * wanted[name] - sums[name]
                    kept = total(comm, held[name].double().numpy()).reshape(due.shape)
                    room = 1e-5 * np.abs(step * wanted[name]).max()
                    assert np.abs(kept - due).max() <= room, (options, algorithm, step, name)
        assert len(set(layouts)) > 1, "DDP did not make its buckets anew: this check proves nothing"
        compression.free()


def check_state(comm: MPI.Intracomm) -> None:
    """Losses go to another object, and to another number of ranks."""
    model = wrapped(make_net())
    compression = compcoll.torch.compress(model, "minmax", bits=2, algorithm="ring")
    for step in range(3):
        backward(model, examples(comm, step))
    state = compression.state_dict()
    states = comm.allgather(state)
    held = {name: total(comm, kept.double().numpy()) for name, kept in state["residuals"].items()}
    assert held and (comm.size == 1 or any(np.abs(values).max() > 0 for values in held.values()))

    again = compcoll.torch.compress(wrapped(make_net()), "minmax", bits=2, algorithm="ring")
    again.load_state_dict(state)
    for name, kept in again.state_dict()["residuals"].items():
        assert torch.equal(kept, state["residuals"][name])

    fewer = list(range(max(comm.size - 1, 1)))
    group = dist.new_group(fewer)
    if comm.rank in fewer:
        smaller = wrapped(make_net(), process_group=group)
        resized = compcoll.torch.compress(smaller, "minmax", bits=2, algorithm="ring")
        if comm.size > 1:
            error = raised(lambda: resized.load_state_dict(state))
            assert isinstance(error, InvalidArgument) and "all ranks" in str(error)
        resized.load_state_dict(states)
        backward(smaller, examples(comm))  # usable
        resized.load_state_dict(states)
    few = comm.Split(0 if comm.rank in fewer else MPI.UNDEFINED)
    if few != MPI.COMM_NULL:
        for name, kept in resized.state_dict()["residuals"].items():
            assert np.allclose(total(few, kept.double().numpy()), held[name], rtol=1e-5, atol=1e-9), name
        resized.free()
        few.Free()
    for wrong in ([state], [*states, state], []):
        if len(wrong) != comm.size:
            assert isinstance(raised(lambda wrong=wrong: again.load_state_dict(wrong)), InvalidArgument)
    foreign = {**state, "residuals": {"nobody": torch.zeros(3)}}
    assert isinstance(raised(lambda: again.load_state_dict(foreign)), InvalidArgument)
    again.reset()
    left = again.state_dict()["residuals"]
    assert left.keys() == held.keys() and not any(kept.any() for kept in left.values())
    assert again.stats.raw_nbytes == 0
    again.free()
    compression.free()


class Given(nn.Module):
    """Its parameters' gradients are what is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2000, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(10, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum() + (self.bias * gradient[:10]).sum()


def check_halves_neither_overflow_nor_underflow(comm: MPI.Intracomm) -> None:
    for dtype, extremes in ((torch.float16, (60000.0, 6e-8)), (torch.bfloat16, (1e37, 1e-25))):
        for options in ({"codec": "zfp", "rate": 16}, {"codec": "minmax"}, {"codec": None}):
            for value in extremes:
                model = wrapped(Given(dtype))
                compression = compcoll.torch.compress(
                    model, **options, algorithm="ring" if options["codec"] else "auto"
                )
                wanted = torch.full((2000,), value, dtype=dtype)
                model(wanted).backward()
                for parameter in model.module.parameters():
                    wrong = (parameter.grad.float() / wanted[0].float() - 1).abs().max()
                    assert wrong < 0.01, (dtype, options, value, parameter.grad[:4])
                compression.free()


class Between(nn.Module):
    """A small parameter that stays exact between two that do not; gradients are what is given."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("one", 2000), ("bias", 60), ("two", 3000)):
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[name]).sum() for name, p in self.named_parameters())


def check_exact_gradients_do_not_go_through_the_codec(comm: MPI.Intracomm) -> None:
    """However large they are, compressed ones keep their bits, and so do losses; and NaN stays where it is."""
    random = torch.Generator().manual_seed(comm.rank)
    given = [{"one": torch.randn(2000, generator=random), "two": torch.randn(3000, generator=random)} for _ in range(3)]
    for codec, algorithm in (("minmax", "ring"), ("topk", "sparse_ring")):
        found = []
        for size in (0.0, 1e20, float("nan")):
            model = wrapped(Between(), bucket_cap_mb=25)
            compression = compcoll.torch.compress(model, codec, algorithm=algorithm, selection="bucket")
            found.append([])
            for gradients in given:
                model.zero_grad()
                model({**gradients, "bias": torch.full((60,), size)}).backward()
                found[-1] += [model.module.one.grad.clone(), model.module.two.grad.clone()]
                exact = model.module.bias.grad
                assert torch.allclose(exact, torch.full((60,), size), equal_nan=True), (codec, size, exact)
            (bucket,) = compression._buckets.values()
            assert [len(span.parts) for span in bucket.spans] == [2], "nothing lies between: this check proves nothing"
            found[-1] += compression.state_dict()["residuals"].values()
            compression.free()
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other)), f"exact gradients went through {codec}"


def check_not_finite(comm: MPI.Intracomm) -> None:
    """A gradient that is not finite on one rank is so on all, as loss scaling needs it."""
    model = wrapped(Given(torch.float32))
    compression = compcoll.torch.compress(model, "zfp", rate=8, algorithm="ring")
    for bad in (float("nan"), float("inf")):
        gradient = torch.ones(2000)
        gradient[7] = bad if comm.rank == comm.size - 1 else 1.0
        model.zero_grad()
        model(gradient).backward()
        assert not model.module.weight.grad[7].isfinite()
        assert model.module.weight.grad[100].isfinite()
        model.zero_grad()
        model(torch.ones(2000)).backward()
        assert model.module.weight.grad.isfinite().all()
    compression.free()


def check_unused_and_accumulated(comm: MPI.Intracomm) -> None:
    model, x = wrapped(make_net(), find_unused_parameters=True), examples(comm)
    unused = nn.Linear(50, 50)
    model = wrapped(nn.ModuleDict({"net": make_net(), "unused": unused}), find_unused_parameters=True)
    model.module.forward = lambda x: model.module["net"](x)
    compression = compcoll.torch.compress(model, "zfp", rate=16, algorithm="ring")
    wanted = true_mean(comm, model, x)
    with model.no_sync():
        model.zero_grad()
        model(x).square().mean().backward()
    model(x).square().mean().backward()
    for name, parameter in model.module["net"].named_parameters():
        assert relative(parameter.grad.double().numpy(), 2 * wanted[f"net.{name}"]) < 1e-3, name
    assert unused.weight.grad is None
    compression.free()


def check_refusals(comm: MPI.Intracomm) -> None:
    odd = comm.rank == comm.size - 1
    model = wrapped(make_net())
    refused = [
        (InvalidArgument, "wrap it", lambda: compcoll.torch.compress(make_net())),
        (UnknownCodec, "nope", lambda: compcoll.torch.compress(model, "nope")),
        (UnknownAlgorithm, "nope", lambda: compcoll.torch.compress(model, algorithm="nope")),
        (InvalidArgument, "rate", lambda: compcoll.torch.compress(model, "zfp", rate=1)),
        (InvalidArgument, "hed", lambda: compcoll.torch.compress(model, exclude=["hed.*"])),
        (InvalidArgument, "sequence", lambda: compcoll.torch.compress(model, exclude="norms")),
    ]
    if comm.size > 1:
        refused += [
            (CollectiveMismatch, "ZFP", lambda: compcoll.torch.compress(model, f"zfp:rate={12 if odd else 8}")),
            (CollectiveMismatch, "head", lambda: compcoll.torch.compress(model, exclude=["head.*"] if odd else [])),
            (CollectiveMismatch, "feedback", lambda: compcoll.torch.compress(model, feedback=odd)),
        ]
    for kind, word, call in refused:
        error = raised(call)
        assert isinstance(error, kind) and word in str(error), (kind, error)
    compression = compcoll.torch.compress(model, "zfp", rate=16, algorithm="ring")
    error = raised(lambda: compcoll.torch.compress(model))
    assert isinstance(error, HookTaken) and "ZFP" in str(error), error
    x = examples(comm)
    wanted = true_mean(comm, model, x)
    assert relative(backward(model, x)["head.weight"], wanted["head.weight"]) < 1e-3
    compression.free()


def check_what_is_compressed_is_logged(comm: MPI.Intracomm) -> None:
    """Rank 0 says what will be compressed, and warns if nothing will be."""
    cases: list[tuple[dict[str, Any], int, str]] = [
        (
            {"codec": "int8", "algorithm": "direct"},
            logging.INFO,
            "compress: 3 of 9 parameters (8700 of 12820 elements) for Int8(block=256): allreduce of 20.48 KiB float32",
        ),
        ({"codec": "int8"}, logging.WARNING, "nothing will be compressed: allreduce of 20.48 KiB float32"),
        ({"codec": "int8", "exclude": ["*"]}, logging.WARNING, "compress: 0 of 9 parameters (0 of 12820 elements)"),
        ({"codec": None}, logging.INFO, "compress: no codec was given"),
    ]
    for options, level, text in cases:
        with logged(logging.INFO) as records:
            compcoll.torch.compress(wrapped(make_net()), **options).free()
        found = [record for record in records if record.getMessage().startswith("compress: ")]
        assert len(found) == (comm.rank == 0), records
        for record in found:
            assert record.levelno == level and text in record.getMessage(), record.getMessage()
    with logged(logging.INFO) as records:
        compcoll.torch.compress(fully_shard(nn.Linear(60, 70)), codec="int8", algorithm="direct").free()
    found = [record for record in records if record.getMessage().startswith("compress: ")]
    assert len(found) == (comm.rank == 0)
    assert all("1 of 2 parameters (4200 of 4270 elements)" in record.getMessage() for record in found)
    assert all(": reduce_scatter of 16.41 KiB float32 on " in record.getMessage() for record in found)


def check_only_training_without_feedback_warns(comm: MPI.Intracomm) -> None:
    for feedback in (True, False):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = wrapped(make_net())
            compression = compcoll.torch.compress(model, codec="minmax", bits=1, algorithm="ring", feedback=feedback)
            assert not found, "a trial on zeros does not"
            backward(model, examples(comm))
            compression.free()
        warned = any(each.category is compcoll.AccuracyWarning for each in found)
        assert warned == (comm.rank == 0 and comm.size > 1 and not feedback)
