"""FSDP2 models whose modules are on different meshes, as experts are, against means in float64."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from logs import logged
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import compcoll.torch
from compcoll.errors import InvalidArgument

SHAPES = {"weight": (48, 40), "dense.weight": (32, 50), "dense.bias": (32,), "expert.weight": (64, 30)}
EVERY: dict[str, Any] = {"exclude": (), "min_numel": 64}
"""All but the bias are compressed."""
MIXED = {"expert.*": "qsgd:bits=4", "dense.*": "minmax:bits=3", "*": "qsgd:bits=4"}

GRID: list[DeviceMesh] = []
"""Meshes of the job's four ranks: two by two, and one by four. Making them again would make groups again."""


def grid() -> tuple[DeviceMesh, DeviceMesh]:
    if not GRID:
        GRID.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp")))
        GRID.append(init_device_mesh("cpu", (4,), mesh_dim_names=("whole",)))
    return GRID[0], GRID[1]


class Layer(nn.Module):
    """Its parameters' gradients are what is given; ``x`` makes a chain of layers, as in any model."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        for name in SHAPES:
            owner, _, own = name.rpartition(".")
            if owner == prefix:
                self.register_parameter(own, nn.Parameter(torch.zeros(SHAPES[name])))

    def add_to(self, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        for own, p in self.named_parameters(recurse=False):
            local = p.to_local() if isinstance(p, DTensor) else p
            x = x + (local * given[f"{self.prefix}.{own}".lstrip(".")]).sum()
        return x

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return self.add_to(x, given)


class Net(Layer):
    def __init__(self) -> None:
        super().__init__("")
        self.dense, self.expert = Layer("dense"), Layer("expert")

    def forward(self, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return self.expert(self.dense(self.add_to(x, given), given), given)


Groups = tuple[dist.ProcessGroup, ...]


def net_on(layout: str) -> tuple[Net, dict[str, Groups]]:
    """A model, and the groups that average each parameter: over shards, and then over replicas."""
    pairs, four = grid()
    net = Net()
    dp, ep, whole = pairs["dp"], pairs["ep"], four
    meshes = {
        "axes": (dp, ep),
        "whole": (whole, dp),
        "hsdp": (pairs, dp),
        "hsdp experts": (whole, pairs),
        "tensors": (whole, dp),  # the expert's weight is sharded over "ep", too
        "parameters": (whole, dp),  # of one module
        "one": (whole, whole),
    }
    rest, experts = meshes[layout]
    if layout == "tensors":
        net.expert.weight = nn.Parameter(distribute_tensor(net.expert.weight.data, ep, [Shard(0)]))
    if layout == "parameters":
        here = ShardPlacementResult(Shard(0), FSDPMeshInfo(experts, shard_mesh_dim=0))
        there = net.expert.weight
        fully_shard(net, mesh=rest, shard_placement_fn=lambda p: here if p is there else None)
    else:
        fully_shard(net.expert, mesh=experts)
        for part in (net.dense, net):
            fully_shard(part, mesh=rest)

    def groups(mesh: DeviceMesh) -> Groups:
        return tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)))

    return net, {name: groups(experts if name.startswith("expert") else rest) for name in SHAPES}


def summed(values: np.ndarray, groups: Groups) -> np.ndarray:
    total = torch.from_numpy(values.copy())
    for group in groups:
        dist.all_reduce(total, group=group)
    return total.numpy()


def size_of(groups: Groups) -> int:
    return int(np.prod([group.size() for group in groups]))


def gradients(step: int, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Training:
    """A model on some meshes, its compression, and what its ranks are owed."""

    def __init__(self, layout: str, codec: Any = "int8", **options: Any) -> None:
        self.net, self.groups = net_on(layout)
        self.shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
        if layout == "tensors":
            self.shapes["expert.weight"] = torch.Size((32, 30))
        self.compression: Any = compcoll.torch.compress(self.net, codec, algorithm="direct", **EVERY, **options)
        self.due = {name: np.zeros(shape) for name, shape in self.shapes.items()}

    def step(self, given: Mapping[str, Tensor], scale: float = 1.0, late: float = 0.0) -> dict[str, np.ndarray]:
        """The gradients that a step gives, whole."""
        for p in self.net.parameters():
            p.grad = None
        x = torch.zeros((), requires_grad=True)
        if late:
            x.register_hook(lambda g: time.sleep(late))
        (self.net(x, given) * scale).backward()
        return {name: self.whole(name, p.grad) for name, p in self.net.named_parameters()}

    def whole(self, name: str, gradient: DTensor) -> np.ndarray:
        own = gradient.to_local().double()
        shards = self.groups[name][0]
        parts = [torch.empty_like(own) for _ in range(shards.size())]
        dist.all_gather(parts, own, group=shards)
        return torch.cat(parts).numpy()

    def mean(self, name: str, given: Mapping[str, Tensor]) -> np.ndarray:
        groups = self.groups[name]
        return summed(given[name].double().numpy(), groups) / size_of(groups)

    def account(self, given: Mapping[str, Tensor], got: Mapping[str, np.ndarray]) -> None:
        for name in self.shapes:
            self.due[name] += self.mean(name, given) - got[name]

    def kept(self) -> dict[str, np.ndarray]:
        """The residuals of all ranks that average a parameter together, added up."""
        state = self.compression.state_dict()
        return {
            name: summed(
                sum(
                    each[name].double().numpy()
                    for each in (state["residuals"], state.get("between", {}))
                    if name in each
                ),
                self.groups[name],
            )
            for name in state["residuals"]
        }

    def check_conserved(self, what: object) -> None:
        kept = self.kept()
        assert set(kept) == set(self.shapes) - {"dense.bias"}
        for name, due in self.due.items():
            error = np.abs(due - kept.get(name, 0.0)).max()
            assert error < 2e-5, (what, name, error)

    def states(self) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.compression.state_dict())
        return every


def check_modules_on_several_meshes() -> None:
    """Each mean is that of its mesh's ranks, what was given and what is kept make what was due, and no rank waits for
    ever, however late others are.
    """
    late = random.Random(dist.get_rank())
    for layout in ("axes", "whole", "hsdp", "hsdp experts", "tensors", "parameters"):
        training = Training(layout)
        for step in range(4):
            given = gradients(step, training.shapes)
            got = training.step(given, late=late.choice((0.0, 0.02)))
            training.account(given, got)
            training.check_conserved((layout, step))
            for name in training.shapes if step == 0 else ():
                mean = training.mean(name, given)
                largest = max(float(g.abs().max()) for g in given.values())
                groups = training.groups[name]
                largest = summed(np.array([largest]), groups)[0]  # at least the maximum
                bound = 1e-6 if name == "dense.bias" else len(groups) * largest / 127
                error = np.abs(got[name] - mean).max()
                assert error <= bound, (layout, name, error)
                assert name == "dense.bias" or error > 1e-7, (layout, name)
        training.compression.free()


def check_rank_0_logs_all_averages_in_one_line() -> None:
    """It warns only if neither the reduce-scatter nor the all-reduce between replicas compresses anything."""
    _, whole = grid()
    replicated, alone = (init_device_mesh("cpu", (4, 1), mesh_dim_names=names) for names in (("r", "s"), ("o", "e")))

    def net_of(expert: DeviceMesh, rest: DeviceMesh) -> Net:
        net = Net()
        fully_shard(net.expert, mesh=expert)
        for part in (net.dense, net):
            fully_shard(part, mesh=rest)
        return net

    scatter, between = "reduce_scatter of ", "allreduce of "
    cases: list[tuple[Net, str, int, list[str], list[str]]] = [
        (net_of(replicated, replicated), "direct", logging.INFO, [between], [scatter, "one rank"]),
        (net_on("hsdp")[0], "direct", logging.INFO, [scatter, between], ["nothing"]),
        (net_on("hsdp experts")[0], "auto", logging.WARNING, [scatter, between, "nothing will be compressed"], []),
        (net_of(alone["e"], whole), "direct", logging.INFO, [scatter], [between, "one rank"]),
    ]
    for net, algorithm, expected, present, absent in cases:
        with logged(logging.INFO) as records:
            compression: Any = compcoll.torch.compress(net, "int8", algorithm=algorithm, **EVERY)
        compression.free()
        own = [(record.levelno, record.getMessage()) for record in records]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, [each for each in own if each[1].startswith("compress: ")])
        ((level, message),) = every[0]
        assert not any(every[1:]), every
        assert level == expected, message
        assert all(text in message for text in present) and not any(text in message for text in absent), message


def check_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no module with parameters was sharded"):
        compcoll.torch.compress(fully_shard(nn.Sequential(nn.Tanh()), mesh=grid()[1]))


def check_states_of_several_meshes() -> None:
    """A state goes on with the same bits; on other meshes, sums of residuals stay, or the state is refused."""
    rank = dist.get_rank()
    for layout in ("axes", "whole", "hsdp", "hsdp experts", "tensors"):
        first = Training(layout, MIXED)
        for step in range(2):
            given = gradients(step, first.shapes)
            first.account(given, first.step(given))
        states = first.states()
        assert [(state["rank"], state["size"]) for state in states] == [(each, 4) for each in range(4)]
        given = gradients(2, first.shapes)
        expected = first.step(given)
        again = Training(layout, MIXED)
        for taken in (states, states[rank]):
            again.compression.load_state_dict(taken)
            got = again.step(given)
            assert all(np.array_equal(got[name], expected[name]) for name in got), layout
        with pytest.raises(InvalidArgument, match=f"state of rank {(rank + 1) % 4} of 4"):
            again.compression.load_state_dict(states[(rank + 1) % 4])
        for other in {"whole": ("hsdp", "parameters"), "hsdp": ("whole",), "hsdp experts": ("one",)}.get(layout, ()):
            moved = Training(other, MIXED)
            moved.compression.load_state_dict(states)
            moved.due = {name: due.copy() for name, due in first.due.items()}
            moved.check_conserved((layout, other, "loaded"))
            for step in range(3):
                given = gradients(3 + step, moved.shapes)
                moved.account(given, moved.step(given))
                moved.check_conserved((layout, other, step))
            moved.compression.free()
        if layout == "whole":
            flat = Training("one", MIXED)
            plain = compcoll.torch.compress(DistributedDataParallel(Net()), **EVERY)
            for compression in (flat.compression, plain):
                with pytest.raises(InvalidArgument, match=r"2 sets of ranks .*'expert.weight' separately, but here 1"):
                    compression.load_state_dict(states)
                compression.free()
        for one in (first, again):
            one.compression.free()


def check_states_on_another_number_of_ranks() -> None:
    """From four ranks to two, and back: each sum of residuals stays what it is."""
    rank = dist.get_rank()
    first = Training("hsdp experts")
    given = gradients(0, first.shapes)
    first.account(given, first.step(given))
    states, owed = first.states(), first.due
    pair = dist.new_group([0, 1])
    held: list[Any] = [None] * 4
    own = None
    if rank < 2:
        mesh = DeviceMesh.from_group(pair, "cpu")
        net = Net()
        for part in (net.dense, net.expert, net):
            fully_shard(part, mesh=mesh)
        compression: Any = compcoll.torch.compress(net, "int8", algorithm="direct", **EVERY)
        compression.load_state_dict(states)
        own = compression.state_dict()
        compression.free()
    dist.all_gather_object(held, own)
    for name in set(SHAPES) - {"dense.bias"}:
        kept = sum(state["residuals"][name].double().numpy() for state in held[:2])
        assert np.abs(kept - owed[name]).max() < 2e-5, name
    again = Training("hsdp experts")
    again.compression.load_state_dict(held[:2])
    again.due = {name: due.copy() for name, due in owed.items()}
    again.check_conserved("back")
    for step in range(2):
        given = gradients(step, again.shapes)
        again.account(given, again.step(given))
    again.check_conserved("on four")
    for one in (first, again):
        one.compression.free()


def check_a_step_that_overflows_in_one_expert_is_skipped_everywhere() -> None:
    """Its ranks are half of all, and the others' modules are finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    training = Training("whole")
    parameters = list(training.net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for step, overflows in enumerate((False, True, False)):
        given = gradients(step, training.shapes)
        before = training.compression.state_dict()["residuals"]
        if overflows and dist.get_rank() == 3:
            given["expert.weight"][0, 0] = np.inf
        weights = [p.to_local().clone() for p in parameters]
        scale = float(scaler.scale(torch.ones(())))
        got = training.step(given, scale)
        scaler.step(optimizer)
        scaler.update()
        assert overflows == all(torch.equal(p.to_local(), w) for p, w in zip(parameters, weights, strict=True)), step
        after = training.compression.state_dict()["residuals"]
        assert overflows == all(torch.equal(kept, after[name]) for name, kept in before.items()), step
        if not overflows:
            training.account(given, {name: values / scale for name, values in got.items()})
            training.check_conserved(step)
    training.compression.free()
