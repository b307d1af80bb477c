"""Ranks of two nodes, as LOCAL_WORLD_SIZE tells: sums by way of each node's first rank, and device meshes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from check_collectives import CPU, bytes_of, standing
from check_training import backward, gradients_of, model_of
from fakes.loopback import normals
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import compcoll.torch
from compcoll import QSGD, get_codec
from compcoll.errors import CollectiveMismatch, InvalidArgument
from compcoll.plan.cost import DEFAULTS, Link
from compcoll.plan.profile import Place, Stored, save
from compcoll.torch.gradients.fsdp import ShardCompression
from compcoll.torch.groups.membership import check_group, member_of
from compcoll.torch.groups.transport import node_name
from compcoll.transports.nodes import host_name


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def bound(codec: str, options: dict[str, int], values: np.ndarray) -> float:
    """What one encoding of values of any block among these loses at most."""
    told = get_codec(codec, **options).error_bound("float32")
    assert told is not None
    return told.relative * np.abs(values).max() + told.spread * float(np.ptp(values)) + told.absolute


def check_a_node_is_what_the_launcher_says() -> None:
    rank, _ = standing()
    assert node_name() == f"{host_name()} {rank - rank % 2}"
    told = dict(os.environ)
    try:
        for changed in ({"LOCAL_WORLD_SIZE": ""}, {"LOCAL_RANK": "2"}, {"LOCAL_RANK": "one"}, {"RANK": "-1"}):
            os.environ.update({**told, **changed})
            assert node_name() == host_name(), changed
    finally:
        os.environ.update(told)


def check_hierarchical_sums_are_exact_inside_a_node() -> None:
    rank, size = standing()
    for number, (name, options, group) in enumerate(
        (
            ("zfp", {"rate": 12}, None),
            ("minmax", {"bits": 8}, None),
            ("minmax", {"bits": 8}, init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))),
        )
    ):
        for n in (1, 700, 20011):
            inputs = normals(size, n, seed=n + number)
            for _ in range(3):  # opened, rehearsed, replayed
                tensor = torch.tensor(inputs[rank])
                compcoll.torch.all_reduce(tensor, "avg", group, codec=name, algorithm="hierarchical", **options)
                assert len({bytes_of(part) for part in gathered(tensor)}) == 1, (name, n)
            # What is encoded: each node's mean times its share, then the sum of both, once.
            shares = [np.sum(inputs[node : node + 2], axis=0, dtype=np.float64) / size for node in (0, 2)]
            exact = shares[0] + shares[1]
            allowed = sum(bound(name, options, share) for share in shares)
            allowed += bound(name, options, np.r_[exact - allowed, exact + allowed]) + 1e-6
            assert np.abs(tensor.numpy() - exact).max() <= allowed, (name, n)
        stats = compcoll.torch.stats(group)
        assert stats is not None and stats.algorithm == "hierarchical" and name in repr(stats.codec).lower()
        # Not the first rank of its node, it hands in its values as they are.
        sent = stats.raw_sent_nbytes / stats.wire_nbytes
        assert sent == 1 if rank % 2 else sent > 1.2, sent


def check_auto_takes_it_where_links_between_nodes_are_slow() -> None:
    slow = replace(DEFAULTS, between=Link(latency=1e-4, per_byte=8 / 1e8))
    path = Path(os.environ["XDG_CONFIG_HOME"], f"slow-{dist.get_rank()}.json")
    save(Stored(slow, Place("gloo", ("here",), "host"), "now"), path)
    named, os.environ["COMPCOLL_PROFILE"] = os.environ["COMPCOLL_PROFILE"], str(path)
    try:
        group = dist.new_group()
        tensor = torch.full((1 << 20,), 1.5)
        compcoll.torch.all_reduce(tensor, "avg", group, codec="zfp", rate=8)
    finally:
        os.environ["COMPCOLL_PROFILE"] = named
    stats = compcoll.torch.stats(group)
    assert stats is not None and stats.algorithm == "hierarchical", stats
    assert torch.equal(tensor, torch.full_like(tensor, 1.5))


def check_meshes_are_groups() -> None:
    rank, size = standing()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    group = check_group(mesh)
    assert check_group(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))) is group and group.size() == size
    assert check_group(mesh["ranks"]) is mesh.get_group("ranks")
    assert list(member_of(group, CPU).communicator.nodes) == [0, 0, 1, 1]
    tensor = torch.full((3000,), float(rank))
    compcoll.torch.all_reduce(tensor, group=mesh["nodes"], codec="zfp", rate=8, algorithm="direct")
    assert torch.equal(tensor, torch.full((3000,), float(2 * (rank % 2) + 2)))
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(InvalidArgument, match="3 dimensions"):
        compcoll.torch.all_reduce(tensor, group=cube, codec="zfp")


def check_a_mesh_of_some_ranks() -> None:
    """Only its ranks make its group, whose name PyTorch makes from how many groups a rank has made."""
    rank, _ = standing()
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("nodes", "ranks"))
    tensor = torch.full((3000,), float(rank))
    if rank != 1:
        dist.new_group([rank], use_local_synchronization=True)
    if rank > 1:
        with pytest.raises(InvalidArgument, match="not in that mesh"):
            check_group(mesh)
        return
    with pytest.raises(CollectiveMismatch, match="different numbers of process groups"):
        check_group(mesh)
    if rank == 1:
        dist.new_group([rank], use_local_synchronization=True)
    compcoll.torch.all_reduce(tensor, group=mesh, codec="zfp", rate=8, algorithm="direct")
    assert torch.equal(tensor, torch.full((3000,), 1.0))


def hybrid(**options: Any) -> tuple[nn.Module, ShardCompression]:
    model = model_of()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    compression = compcoll.torch.compress(model, algorithm="direct", **options)
    assert isinstance(compression, ShardCompression)
    return model, compression


def stepped(model: nn.Module, step: int) -> list[np.ndarray]:
    backward(model, step)
    return [gradient.full_tensor().double().numpy() for gradient in gradients_of(model)]


def true_means(steps: int) -> list[np.ndarray]:
    alone, sums = model_of(), [0.0, 0.0]
    for step in range(steps):
        backward(alone, step)
        for number, gradient in enumerate(gradients_of(alone)):
            sums[number] = sums[number] + np.mean([part.double().numpy() for part in gathered(gradient)], axis=0)
    return sums


def check_replicas_of_shards_are_averaged_compressed() -> None:
    """What came and what is kept make what was due, at every step, and a state goes on with the same bits."""
    model, compression = hybrid(codec="minmax", bits=3)
    names, sums = [name for name, _ in model.named_parameters()], [0.0, 0.0]
    for step in range(3):
        got = stepped(model, step)
        sums = [total + each for total, each in zip(sums, got, strict=True)]
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, compression.state_dict())
        assert [state["rank"] for state in states] == list(range(4)) and {state["replicas"] for state in states} == {2}
        for name, due, came in zip(names, true_means(step + 1), sums, strict=True):
            kept = sum(state["residuals"][name].double().numpy() for state in states)
            between = sum(state["between"][name].double() for state in states)
            assert float(between.abs().max()) > 0  # so between replicas was compressed, too
            kept = kept + between.numpy()
            assert np.abs(due - came - kept.reshape(due.shape)).max() < 1e-5 * np.abs(due).max(), (name, step)
        for each in got:
            assert len({bytes_of(part) for part in gathered(torch.from_numpy(each))}) == 1
    calls = compression.stats.calls
    assert calls["direct, MinMax(bits=3, block=2048)"] == 2 * 2 * 3, calls  # modules, collectives, steps
    expected = stepped(model, 3)
    other, again = hybrid(codec="minmax", bits=3)
    again.load_state_dict(states)
    assert all(map(np.array_equal, stepped(other, 3), expected))
    again.load_state_dict(states[dist.get_rank()])
    assert all(map(np.array_equal, stepped(other, 3), expected))
    for one in (compression, again):
        one.free()
    # On as many ranks that are no replicas any more nothing is lost either.
    whole = model_of()
    fully_shard(whole)
    flat = compcoll.torch.compress(whole, "minmax", bits=3, algorithm="direct")
    for given in (states, states[dist.get_rank()]):
        flat.load_state_dict(given)
        held: list[Any] = [None] * 4
        dist.all_gather_object(held, flat.state_dict()["residuals"])
        for name in names:
            total = sum(state["residuals"][name] + state["between"][name] for state in states)
            torch.testing.assert_close(sum(each[name] for each in held), total)
    flat.free()


def check_replicas_go_on_with_the_same_random_numbers() -> None:
    for options in ({"codec": "qsgd", "bits": 4}, {"codec": "qsgd", "bits": 4, "parameters": QSGD(bits=8)}):
        model, compression = hybrid(**options)
        for step in range(3):
            stepped(model, step)
        state = compression.state_dict()
        expected = stepped(model, 3)
        other, again = hybrid(**options)
        again.load_state_dict(state)
        assert all(map(np.array_equal, stepped(other, 3), expected)), options
        again.load_state_dict({name: kept for name, kept in state.items() if name != "begun"})  # an early one
        assert not all(map(np.array_equal, stepped(other, 3), expected)), "nothing was drawn: this proves nothing"
        for one in (compression, again):
            one.free()


def check_the_error_of_gathered_parameters_is_told() -> None:
    model, compression = hybrid(codec=None, param_codec="int8")
    assert compression.parameters_error == 0.0
    backward(model, 0)
    # Uniform weights: half a step of 127 levels, uniformly, over the root mean square of the largest.
    assert compression.parameters_error == pytest.approx(np.sqrt(1 / 12) / 127 * np.sqrt(3), rel=0.1)
    for gradient, due in zip(gradients_of(model), true_means(1), strict=True):
        np.testing.assert_allclose(gradient.full_tensor().numpy(), due, atol=0.05 * np.abs(due).max())
    compression.free()
