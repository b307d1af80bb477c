"""The private names of PyTorch that compcoll uses: they exist, and one file has them all."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", "2.12")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from compcoll.torch import private  # noqa: E402

PACKAGE = Path(private.__file__).parent
FILES = sorted(set(PACKAGE.rglob("*.py")) - {Path(private.__file__)})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


@cache
def defined() -> set[str]:
    """The names of compcoll's own functions, classes, variables and attributes."""
    found = {"_replace"}  # of a named tuple
    for path in PACKAGE.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node):
                found.add(node.attr)
    return found


def own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used(tree: ast.AST) -> Iterator[str]:
    """The private names that a file uses, unless they are attributes of its own classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from filter(is_private, (node.module or "").split("."))
            yield from filter(is_private, (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(is_private, (name for alias in node.names for name in alias.name.split(".")))
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and not own(node):
            yield node.attr


def strings(tree: ast.AST) -> Iterator[str]:
    """The private names in a file's strings, as the arguments of ``getattr`` and ``import_module`` are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = node.value.strip(".").split(".")
            yield from filter(is_private, names if all(map(str.isidentifier, names)) else ())


TREE = ast.parse(Path(private.__file__).read_text())
NAMES = {*used(TREE), *strings(TREE)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_file_uses_private_names_of_pytorch(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = set(used(tree))
    assert not found - defined(), "names that are not compcoll's: put their use into private.py"
    assert not (found | set(strings(tree))) & NAMES, "names that private.py has functions for"


OF_FSDP2 = ("group", "parameter", "mesh")
"""What private.py calls FSDP2's parameter groups, their parameters and their meshes, whose attributes are all private.
"""


def attributes_of_fsdp2() -> set[str]:
    """The attributes of FSDP2's objects in private.py, as in ``group.mesh_info.replicate_process_group``."""
    found = set()
    for function in filter(lambda node: isinstance(node, ast.FunctionDef), TREE.body):
        arguments = {arg.arg: arg.annotation for arg in function.args.args}
        for node in ast.walk(function):
            root, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
            typed = arguments.get(root)  # process groups and the model's parameters have other types
            if root in OF_FSDP2 and (typed is None or ast.unparse(typed) == "Any"):
                found.add(f"{root}.{rest}")
    return {name for name in found if all(map(str.isidentifier, name.split(".")))}


FSDP2 = attributes_of_fsdp2()


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(world: None) -> nn.Module:
    """An HSDP model of one rank after a backward pass."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    return model


@pytest.fixture(scope="module")
def of_fsdp2(sharded: nn.Module) -> dict[str, Any]:
    """An object for each name of `OF_FSDP2`."""
    (group,) = private.parameter_groups(sharded)
    found = {"group": group, "parameter": private.parameters_of(group)[0], "mesh": group.mesh_info}
    assert set(found) == set(OF_FSDP2)
    return found


@pytest.mark.parametrize("name", sorted(FSDP2))
def test_attributes_of_fsdp2_exist(of_fsdp2: dict[str, Any], name: str) -> None:
    root, *path = name.split(".")
    holder = of_fsdp2[root]
    for attribute in path:
        assert hasattr(holder, attribute), f"PyTorch {torch.__version__}: {type(holder).__name__} lacks {attribute}"
        holder = getattr(holder, attribute)


def test_attributes_of_fsdp2_are_found() -> None:
    """Also those that `divisors` passes on, and those that others replace."""
    expected = {
        *("group.gradient_divide_factor", "group.force_sum_reduction_for_comms", "group.post_backward"),
        *("group.mesh_info.replicate_process_group", "mesh.replicate_mesh_size", "parameter.fsdp_placement.dim"),
    }
    assert expected <= FSDP2


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_file_uses_attributes_of_fsdp2(of_fsdp2: dict[str, Any], path: Path) -> None:
    theirs = {name for holder in of_fsdp2.values() for name in dir(holder)}
    # Other objects have attributes of these names, too.
    usual = defined() | {name for owner in (torch, torch.Tensor, nn.Module, dist, type) for name in dir(owner)}
    found = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert (found & theirs) - usual == set(), "put their use into private.py"


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def test_gradients_that_fsdp2_will_reduce(world: None) -> None:
    """It reduces gradients of this pass and unreduced ones of earlier passes, and zeros if the model asks for them."""
    model = fully_shard(HalfUsed())
    (group,) = private.parameter_groups(model)
    numbers = []
    private.before_reductions(group, lambda: numbers.append(len(private.parameters_with_gradients(group))))
    for reduces in (False, True):
        model.set_requires_gradient_sync(reduces)
        model(torch.ones(1, 4)).backward()
    assert numbers == [2, 2]
    assert len(private.parameters_of(group)) == 4
    if hasattr(model, "set_reduce_scatter_unused_params"):  # since PyTorch 2.13
        model.set_reduce_scatter_unused_params(True)
        model(torch.ones(1, 4)).backward()
        assert numbers[2:] == [4]


@pytest.fixture(scope="module")
def holders(sharded: nn.Module) -> list[Any]:
    """Objects that have private names: modules, classes, and models of one rank."""
    replicated = DistributedDataParallel(nn.Linear(4, 4))
    parameters = private.parameter_groups(sharded)
    backend = private.backend_of(dist.group.WORLD, torch.device("cpu"))
    c10d = import_module("torch._C._distributed_c10d")
    modules = {node.module for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)} | set(
        private._LATER.values()
    )
    modules |= {
        "torch",
        "torch.distributed",
        "torch.distributed.fsdp",
        "torch.distributed.distributed_c10d",
        "torch._C",
    }
    modules |= {"torch._C._dynamo", "torch.distributed.rendezvous", "torch.distributed.fsdp._fully_shard"}
    return [
        *map(import_module, sorted(modules)),
        *(torch.autograd.Variable, torch.Tensor, dist.Work, dist.group.WORLD, c10d.FakeProcessGroup),
        *(backend, backend.options, replicated, torch.amp.GradScaler("cpu"), torch.compile(nn.Linear(4, 4))),
        *(sharded, sharded._get_fsdp_state(), *parameters, *private.parameters_of(parameters[0])),
        checkpoint_wrapper.CheckpointWrapper(nn.Linear(4, 4), checkpoint_wrapper.CheckpointImpl.NO_REENTRANT),
    ]


@pytest.mark.parametrize("name", sorted(NAMES - {"_LATER"}))
def test_private_names_exist(holders: list[Any], name: str) -> None:
    if any(hasattr(holder, name) for holder in holders):
        return
    # Names that PyTorch looks up in functions, optimizers and parameters.
    sources = ("torch._dynamo.eval_frame", "torch._dynamo.decorators", "torch.amp.grad_scaler")
    found = any(name in inspect.getsource(import_module(source)) for source in sources)
    assert found, f"PyTorch {torch.__version__} lacks {name}"
