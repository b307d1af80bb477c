"""The shape of the package: its public names, and imports that point down only."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import compcoll
from compcoll import codecs

PACKAGE = Path(compcoll.__file__).parent

# Besides the codecs of compcoll's own, which `compcoll.codecs.ALL` lists.
PUBLIC = """AccuracyWarning Codec Communicator CompcollError ErrorFeedback Intracomm NumpyCodec PersistentRequest
Request Stats allgather allgather_init allgatherv allreduce allreduce_init alltoall alltoall_init alltoallv bcast
bcast_init check_codec decode encode errors gather gather_init get_codec get_communicator iallgather iallgatherv
iallreduce ialltoall ialltoallv ibcast igather ireduce ireduce_scatter iscatter list_codecs reduce reduce_init
reduce_scatter reduce_scatter_init scatter scatter_init"""

# From the top: a module imports its own layer and those below. A name is a folder of the package, or a file.
LAYERS = [
    {"__main__", "simulation", "tools", "torch"},
    {"mpi"},
    {"api", "communicator", "encoding", "sparse"},
    {"execute"},
    {"plan"},
    {"algorithms", "codecs", "transports"},
    {"gpu", "host"},
    {
        *(
            "__init__",
            "config",
            "deprecated",
            "dtypes",
            "errors",
            "feedback",
            "kernels",
            "layout",
            "lifetime",
            "pending",
            "stats",
        ),
        *("transports/base", "transports/shared"),
    },
]
ONLY_IMPORTER = {
    "mpi4py": {"tools/run", "transports/library"},
    "cupy": {"gpu/device", "gpu/ipc", "gpu/nccl", "gpu/runtime"},
    "torch": {"torch"},
    "zfpy": {"codecs/zfp"},
    "pickle": set(),  # what comes from another rank runs nothing
}

# Former names of what docs/architecture.md explains. Some are English words: identifiers alone count.
FORMER = """Along Apart Body Carrier Contention EncodedSum Executor Joining Joins KnownCalls LIMITED Lane Lanes MOVED
Making Mortal NeedsLooks Patience Recipe RollCall SentAhead Summands Summands32 Summands64 Together Turn TwoWays
WatchedCarrier WholeState concerns fresh_nbytes in_passing invitation naps_within resembles run_ahead seconds_of_looks
summands surely told_by"""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    return [
        (str(path.relative_to(PACKAGE).with_suffix("")), ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")
    ]


def imports(name: str, tree: ast.Module) -> list[str]:
    """Modules of the package that a module imports, as paths; type-checking blocks do not count."""
    found = []
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in guarded:
            base = Path(name).parents[node.level - 1] / (node.module or "").replace(".", "/")
            inside = [(base / alias.name) for alias in node.names]
            package = Path("__init__") if base == Path() else base
            found += [str(path if is_module(path) else package) for path in inside]
    return found


def is_module(path: Path) -> bool:
    return (PACKAGE / path).is_dir() or any((PACKAGE / path).with_suffix(kind).exists() for kind in (".py", ".pyi"))


def layer(path: str) -> int:
    """Number of the layer of the longest beginning of a path that has one."""
    parts = Path(path).parts
    beginnings = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next(number for name in beginnings for number, names in enumerate(LAYERS) if name in names)


def test_public_names() -> None:
    assert compcoll.__all__ == sorted([*PUBLIC.split(), *(cls.__name__ for cls in codecs.ALL)])
    for name in compcoll.__all__:
        assert getattr(compcoll, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = compcoll.nonsense


@pytest.mark.slow
def test_type_checkers_know_every_codec(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = "; ".join(f"reveal_type(compcoll.{cls.__name__})" for cls in codecs.ALL)
    words = ["--config-file=", "--strict", "--cache-dir", tmp_path, "-c", f"import compcoll; {lines}"]
    done = subprocess.run([sys.executable, "-m", "mypy", *words], capture_output=True, text=True, timeout=200)
    for cls in codecs.ALL:
        assert f"-> {cls.__module__}.{cls.__name__}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "tree"), modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(name: str, tree: ast.Module) -> None:
    for imported in imports(name, tree):
        assert layer(imported) >= layer(name), f"{name} imports {imported}, which is in a layer above it"


def test_every_module_is_in_one_layer() -> None:
    names = [name for names in LAYERS for name in names]
    assert len(names) == len(set(names)) and all(is_module(Path(name)) for name in names)
    assert len(list(PACKAGE.glob("*.py"))) <= 15


def test_no_modules_import_each_other() -> None:
    """Not by way of others, either, nor inside of functions."""
    graph = {name: set(imports(name, tree)) - {"__init__"} for name, tree in modules() if name != "__init__"}
    packages = {name.removesuffix("/__init__"): name for name in graph if name.endswith("/__init__")}
    sorter = TopologicalSorter({name: {packages.get(each, each) for each in found} for name, found in graph.items()})
    sorter.prepare()  # raises CycleError, which names the circle


def test_former_names_do_not_come_back() -> None:
    for path in PACKAGE.rglob("*.py"):
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        found = {token.string for token in tokens if token.type == tokenize.NAME}.intersection(FORMER.split())
        assert not found, f"{path.relative_to(PACKAGE)}: {found}"


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


@pytest.mark.parametrize("name", ["codecs", "sparse", "codecs.sparse", "feedback"])
def test_packages_can_be_imported_first(name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import compcoll.{name}"], check=True, timeout=60)


def test_importing_starts_no_mpi() -> None:
    code = "import sys, compcoll; compcoll.encode; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
