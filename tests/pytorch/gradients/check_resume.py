"""Runs of several buckets that go on from a state have the bits of those that were not interrupted."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from check_compress import Net, examples, make_net, wrapped
from check_shards import sharded
from mpi.world import raised
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import compcoll.torch
from compcoll import QSGD
from compcoll.errors import InvalidArgument

CODECS: list[dict[str, Any]] = [
    {"codec": "minmax", "bits": 2, "algorithm": "ring"},
    {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    {"codec": "topk", "density": 0.02, "algorithm": "sparse_ring"},
    {"codec": "topk", "density": 0.02, "algorithm": "sparse_direct", "selection": "bucket"},
    {"codec": "qsgd", "bits": 4, "algorithm": "ring"},
    {"codec": "terngrad", "feedback": False, "algorithm": "direct"},
    {"codec": "randomk", "density": 0.05, "algorithm": "sparse_ring"},
    {"codec": "randomk", "density": 0.05, "algorithm": "sparse_ring", "selection": "bucket"},
    {"codec": {"late.*": "qsgd:bits=4", "*": "minmax:bits=2"}, "algorithm": "ring"},
    {"codec": {"middle.*": "randomk:density=0.05", "*": "topk:density=0.02"}, "algorithm": "sparse_ring"},
    {"codec": None},
]


def train(comm: MPI.Intracomm, model: nn.Module, steps: range, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        model(examples(comm, step)).square().mean().backward()
        optimizer.step()


def check_same_bits(comm: MPI.Intracomm) -> None:
    for options in CODECS:
        model = wrapped(make_net())
        compression = compcoll.torch.compress(model, **options)
        assert compression.state_dict()["buckets"] == []
        train(comm, model, range(1))
        first = compression.state_dict()["buckets"]
        train(comm, model, range(1, 3))
        state, weights = compression.state_dict(), copy.deepcopy(model.module)
        assert state["buckets"] != first and len(state["buckets"]) > 1, "DDP's buckets stayed: this proves nothing"

        again = wrapped(weights)
        resumed = compcoll.torch.compress(again, **options)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["buckets"] == state["buckets"]
        for step in range(3, 6):
            train(comm, model, range(step, step + 1))
            train(comm, again, range(step, step + 1))
            for (name, one), other in zip(model.module.named_parameters(), again.module.parameters(), strict=True):
                assert torch.equal(one, other), (options, step, name)
        assert resumed.state_dict()["buckets"] == state["buckets"]
        early = {name: kept for name, kept in state.items() if name != "steps"}
        resumed.load_state_dict(early)
        assert resumed.state_dict()["steps"] == 0
        resumed.load_state_dict({**state, "buckets": [["late.weight"]]})  # of other parameters: they are made anew
        assert not resumed.state_dict()["buckets"]
        compression.free()
        resumed.free()


class Words(Net):
    """With a sparse gradient, which is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 60, sparse=True)


def check_the_same_bits_beside_sparse_gradients(comm: MPI.Intracomm) -> None:
    torch.manual_seed(1)
    model = wrapped(Words())
    compression = compcoll.torch.compress(model, "qsgd", bits=4, algorithm="ring")
    train(comm, model, range(3))
    state, again = compression.state_dict(), wrapped(model.module)
    resumed = compcoll.torch.compress(again, "qsgd", bits=4, algorithm="ring")
    resumed.load_state_dict(state)
    train(comm, model, range(3, 6))
    train(comm, again, range(3, 6))
    for (name, one), other in zip(model.module.named_parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other), name
    compression.free()
    resumed.free()


def check_deep_gradient_compression_goes_on_with_the_same_bits(comm: MPI.Intracomm) -> None:
    def compressed(net: nn.Module) -> tuple[Any, torch.optim.Optimizer, Any]:
        model = wrapped(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        options: dict[str, Any] = {"select": "hierarchical", "algorithm": "sparse_ring", "clip": 1.0}
        return model, optimizer, compcoll.torch.DGC(model, optimizer, 0.05, **options)

    model, optimizer, compression = compressed(make_net())
    train(comm, model, range(3), optimizer)
    again, fresh, resumed = compressed(model.module)
    resumed.load_state_dict(compression.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(comm, model, range(3, 6), optimizer)
    train(comm, again, range(3, 6), fresh)
    for (name, one), other in zip(model.module.named_parameters(), again.module.parameters(), strict=True):
        assert torch.equal(one, other), name
    compression.free()
    resumed.free()


def uneven_net() -> nn.Module:
    """In which blocks of a codec hold elements of a compressed parameter and of an exact one."""
    net = make_net()
    net.middle, net.head = nn.Linear(60, 71), nn.Linear(71, 30)
    return net


def check_shards_go_on_with_the_same_bits(comm: MPI.Intracomm) -> None:
    chosen: list[dict[str, Any]] = [
        {"codec": "qsgd", "bits": 4, "algorithm": "ring"},
        {"codec": "terngrad", "feedback": False, "algorithm": "ring"},
        {"codec": "zfp", "rate": 8, "parameters": QSGD(bits=8), "algorithm": "ring"},
    ]
    for options in chosen:
        model = sharded(uneven_net())
        compression = compcoll.torch.compress(model, **options)
        train(comm, model, range(3))
        state, net = compression.state_dict(), uneven_net()
        with torch.no_grad():
            for parameter, kept in zip(net.parameters(), model.parameters(), strict=True):
                parameter.copy_(kept.full_tensor())
        again = sharded(net)
        resumed = compcoll.torch.compress(again, **options)
        resumed.load_state_dict(state)
        train(comm, model, range(3, 6))
        train(comm, again, range(3, 6))
        for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local()), (options, name)
        resumed.load_state_dict({name: kept for name, kept in state.items() if name != "begun"})  # an early one
        compression.free()
        resumed.free()


def check_distributed_checkpoint(comm: MPI.Intracomm) -> None:
    """torch.distributed.checkpoint saves every rank's state under a key of its own, and loads it into a new object."""
    key = f"compression of rank {comm.rank}"
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    makers: list[Callable[[], tuple[nn.Module, Any]]] = [
        lambda: compressed(wrapped(make_net())),
        lambda: compressed(sharded(make_net())),
        lambda: low_rank(wrapped(make_net())),
    ]
    for number, make in enumerate(makers):
        model, compression = make()
        train(comm, model, range(3))
        place = f"{folder}/{number}"
        dcp.save({key: compression}, checkpoint_id=place)
        _, fresh = make()
        dcp.load({key: fresh}, checkpoint_id=place)
        wanted, got = compression.state_dict(), fresh.state_dict()
        assert any(kept.any() for kept in wanted["residuals"].values()), "nothing was lost: this check proves nothing"
        assert wanted["residuals"].keys() == got["residuals"].keys() and wanted.keys() == got.keys()
        for name, kept in wanted["residuals"].items():
            assert torch.equal(kept, got["residuals"][name]), (number, name)
        assert all(wanted[kept] == got[kept] for kept in wanted.keys() - {"residuals", "factors"}), (wanted, got)
        if comm.rank == 0:
            dcp_to_torch_save(place, f"{place}.pt")
        comm.Barrier()
        every = torch.load(f"{place}.pt", weights_only=False)
        fresh.load_state_dict([every[f"compression of rank {rank}"] for rank in range(comm.size)])
        # One state of all ranks, which rank 0 saves: for Accelerate, Lightning and others.
        whole = compcoll.torch.GatheredState(compression).state_dict()
        assert len(whole["ranks"]) == (comm.size if comm.rank == 0 else 0)
        other = compcoll.torch.GatheredState(fresh)
        other.load_state_dict(comm.bcast(whole))
        again = fresh.state_dict()
        assert all(torch.equal(kept, again["residuals"][name]) for name, kept in wanted["residuals"].items()), number
        for bad, told in ((wanted, "no state of all ranks"), ({"ranks": []}, "the state of rank 0")):
            error = raised(lambda other=other, bad=bad: other.load_state_dict(bad))
            assert isinstance(error, InvalidArgument) and told in str(error), error
        compression.free()
        fresh.free()
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def compressed(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, compcoll.torch.compress(model, "minmax", bits=2, algorithm="ring")


def low_rank(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, compcoll.torch.ACPSGD(model, rank=2)
