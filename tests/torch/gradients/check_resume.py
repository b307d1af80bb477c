"""Runs of several buckets that go on from a state have the bits of those that were not interrupted."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from check_compress import examples, make_net, wrapped
from check_shards import sharded
from mpi.world import raised
from mpi4py import MPI
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import compcoll.torch
from compcoll.errors import InvalidArgument

CODECS: list[dict[str, Any]] = [
    {"codec": "minmax", "bits": 2, "algorithm": "ring"},
    {"codec": "zfp", "rate": 8, "algorithm": "ring"},
    {"codec": "topk", "density": 0.02, "algorithm": "sparse_ring"},
    {"codec": "topk", "density": 0.02, "algorithm": "sparse_direct", "selection": "bucket"},
    {"codec": None},
]


def train(comm: MPI.Intracomm, model: torch.nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
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
        foreign = {**state, "buckets": [["late.weight"]]}
        error = raised(lambda resumed=resumed, foreign=foreign: resumed.load_state_dict(foreign))
        assert isinstance(error, InvalidArgument) and "buckets" in str(error), error
        compression.free()
        resumed.free()


def check_distributed_checkpoint(comm: MPI.Intracomm) -> None:
    """torch.distributed.checkpoint saves every rank's state under a key of its own, and loads it into a new object."""
    key = f"compression of rank {comm.rank}"
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    makers: list[Callable[[], tuple[torch.nn.Module, Any]]] = [
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
        whole = compcoll.torch.WholeState(compression).state_dict()
        assert len(whole["ranks"]) == (comm.size if comm.rank == 0 else 0)
        other = compcoll.torch.WholeState(fresh)
        other.load_state_dict(comm.bcast(whole))
        again = fresh.state_dict()
        assert all(torch.equal(kept, again["residuals"][name]) for name, kept in wanted["residuals"].items()), number
        for bad, told in ((wanted, "no state of all ranks"), ({"ranks": []}, "save rank 0's")):
            error = raised(lambda other=other, bad=bad: other.load_state_dict(bad))
            assert isinstance(error, InvalidArgument) and told in str(error), error
        compression.free()
        fresh.free()
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder)


def compressed(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    return model, compcoll.torch.compress(model, "minmax", bits=2, algorithm="ring")


def low_rank(model: torch.nn.Module) -> tuple[torch.nn.Module, Any]:
    return model, compcoll.torch.ACPSGD(model, rank=2)
