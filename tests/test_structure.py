"""The shape of the package: its public names, and imports that point down only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import compcoll

PACKAGE = Path(compcoll.__file__).parent

PUBLIC = """FP8 QSGD ZFP Cast Codec Communicator CompcollError ErrorFeedback IntSum MinMax OneBit Request Sign Stats
TernGrad allgather allgatherv allreduce alltoall bcast decode encode errors get_codec get_communicator iallreduce
list_codecs reduce_scatter"""

# Each floor may import from itself and from those below it.
FLOORS = [
    {"torch"},
    {"__init__", "__main__"},
    {
        "tuning",
        "explain",
        "simulate",
        "simulation",
        "simulation_plot",
        "doctor",
        "selftest",
        "surroundings",
        "codec_options",
    },
    {"api"},
    {"communicator"},
    {"calls"},
    {"device_collectives"},
    {"collectives"},
    {"recording", "travelling"},
    {"recipe"},
    {"plan", "arena"},
    {"algorithms", "profile", "roll_call", "stopwatch"},
    {"ways", "accuracy"},
    {"model"},
    {"model_parts"},
    {"transports"},
    {"encoding"},
    {"codecs", "sparse"},
    {"devices"},
    {"feedback"},
    {"request"},
    {"errors", "config", "layout", "stats", "units", "_host"},
]
# codecs never import transports, nor transports codecs: asserted on its own.
ONLY_IMPORTER = {
    "mpi4py": {
        "api",
        "transports/mpi",
        "torch/buffers",
        "torch/channel",
        "torch/messages",
        "torch/movements",
        "torch/operations",
        "torch/reductions",
        "torch/rendezvous",
    },
    "cupy": {"devices/cuda"},
    "torch": {"torch"},
    "zfpy": {"codecs/zfpy_coder"},
}


def modules() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(PACKAGE).with_suffix("")), ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")
    ]


def imports(name: str, tree: ast.Module) -> list[str]:
    """Modules of the package that a module imports, as paths; type-checking blocks do not count."""
    found = []
    package = Path(name).parent
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in guarded:
            base = package
            for _ in range(node.level - 1):
                base = base.parent
            if node.module:
                found.append(str(base / node.module.replace(".", "/")))
            else:
                found += [str(base / alias.name) for alias in node.names]
    return found


def floor(path: str) -> int:
    first = Path(path).parts[0]
    return next(number for number, names in enumerate(FLOORS) if first in names)


def test_public_names() -> None:
    assert sorted(compcoll.__all__) == sorted(PUBLIC.split())
    for name in compcoll.__all__:
        assert getattr(compcoll, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = compcoll.nonsense


@pytest.mark.parametrize(("name", "tree"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(name: str, tree: ast.Module) -> None:
    for imported in imports(name, tree):
        assert floor(imported) >= floor(name), f"{name} imports {imported}, which stands above it"
        pair = {Path(name).parts[0], Path(imported).parts[0]}
        assert pair != {"codecs", "transports"}, f"{name} imports {imported}"


@pytest.mark.parametrize("library", ONLY_IMPORTER)
def test_foreign_libraries_have_one_door(library: str) -> None:
    importers = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if any(imported.split(".")[0] == library for imported in names):
                importers.add(library if name.startswith(f"{library}/") else name)
    assert importers == ONLY_IMPORTER[library]


def test_algorithms_know_no_array_library() -> None:
    for name, tree in modules():
        if name.startswith("algorithms/"):
            assert not {"numpy", "cupy", "torch"} & {
                alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
            }, name


@pytest.mark.parametrize("name", ["codecs", "sparse", "sparse.base", "sparse.codecs", "feedback"])
def test_packages_can_be_imported_first(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import compcoll.{name}"], check=True, timeout=60)


def test_importing_starts_no_mpi() -> None:
    code = "import sys, compcoll; compcoll.encode; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
