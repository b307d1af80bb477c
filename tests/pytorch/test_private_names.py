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


@pytest.fixture(scope="module")
def holders() -> Iterator[list[Any]]:
    """Objects that have private names: modules, classes, and models of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded, replicated = fully_shard(nn.Linear(4, 4)), DistributedDataParallel(nn.Linear(4, 4))
    sharded(torch.ones(1, 4)).sum().backward()
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
    yield [
        *map(import_module, sorted(modules)),
        *(torch.autograd.Variable, torch.Tensor, dist.Work, dist.group.WORLD, c10d.FakeProcessGroup),
        *(backend, backend.options, replicated, torch.amp.GradScaler("cpu"), torch.compile(nn.Linear(4, 4))),
        *(sharded, sharded._get_fsdp_state(), *parameters, *parameters[0].fsdp_params),
        checkpoint_wrapper.CheckpointWrapper(nn.Linear(4, 4), checkpoint_wrapper.CheckpointImpl.NO_REENTRANT),
    ]
    dist.destroy_process_group()


@pytest.mark.parametrize("name", sorted(NAMES - {"_LATER"}))
def test_private_names_exist(holders: list[Any], name: str) -> None:
    if any(hasattr(holder, name) for holder in holders):
        return
    # Names that PyTorch looks up in functions, optimizers and parameters.
    sources = ("torch._dynamo.eval_frame", "torch._dynamo.decorators", "torch.amp.grad_scaler")
    found = any(name in inspect.getsource(import_module(source)) for source in sources)
    assert found, f"PyTorch {torch.__version__} lacks {name}"
