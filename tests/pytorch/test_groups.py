"""Collectives, hooks and the backend over process groups of PyTorch's, on ranks without mpi4py."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
from mpi.environments import MPI, Completed
from ports import free_ports
from processes import output_of, run_ranks
from without_mpi4py import make_python

from compcoll.gpu.device_transport import DeviceTransport

pytest.importorskip("torch", "2.12")

HERE = Path(__file__).resolve().parent / "groups"
TESTS = HERE.parents[1]
TRAIN = TESTS.parent / "launch" / "train_ddp.py"
RANKS = 3  # neither a power of two nor few
PRETENDING = 4  # on two nodes of two
COMPILING = 2
SECONDS = 300.0

sys.path.insert(0, str(HERE))
from program import checks  # noqa: E402

Outcomes = list[dict[str, str]]


def environment(rank: int, ranks: int, ports: list[int], folder: Path, neighbours: int = 0) -> dict[str, str]:
    """The environment of one of torchrun's processes, on a machine without MPI."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMI_", "PMIX_", "PRTE_", "COMPCOLL_"))
    }
    return inherited | {
        "MPI4PY_LIBMPI": "/nowhere/libmpi.so",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, TESTS, TESTS.parent))),
        "COMPCOLL_PROFILE": "defaults",
        "XDG_CONFIG_HOME": str(folder),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
        "OTHER_PORTS": ",".join(map(str, ports[1:])),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % (neighbours or ranks)),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(neighbours or ranks),
        "TORCHELASTIC_RUN_ID": "none",
    }


def run(job: str, number: int, folder: Path, neighbours: int = 0) -> Outcomes:
    """Run the checks of a job on a number of ranks, and tell what became of each on each rank."""
    ports = free_ports(4)
    python = make_python(folder / "environment")
    command = [python, "-X", "faulthandler", HERE / "program.py", folder, job]
    environments = [environment(rank, number, ports, folder, neighbours) for rank in range(number)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        run_ranks([command] * number, folder, SECONDS, environments)
    written = [folder / f"{rank}.json" for rank in range(number)]
    output = output_of(folder, number)
    assert all(path.exists() for path in written), output
    return [{"output": output, **json.loads(path.read_text())} for path in written]


def assert_passed(outcomes: Outcomes, check: str) -> None:
    for rank, told in enumerate(outcomes):
        outcome = told.get(check, f"not reached\n{told['output']}")
        assert outcome == "passed", f"rank {rank}: {outcome}"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run("alike", RANKS, tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def outcomes_on_nodes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run("on nodes", PRETENDING, tmp_path_factory.mktemp("nodes"), neighbours=2)


@pytest.fixture(scope="module")
def compiled_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run("compiled", COMPILING, tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def outcomes_of_compilers(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run("by all compilers", COMPILING, tmp_path_factory.mktemp("compilers"))


@pytest.fixture(scope="module")
def long_outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run("long", RANKS, tmp_path_factory.mktemp("long"))


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", checks("alike"))
def test_check(outcomes: Outcomes, check: str) -> None:
    assert_passed(outcomes, check)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", checks("on nodes"))
def test_check_on_nodes(outcomes_on_nodes: Outcomes, check: str) -> None:
    assert_passed(outcomes_on_nodes, check)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", checks("compiled"))
def test_check_in_compiled_functions(compiled_outcomes: Outcomes, check: str) -> None:
    assert_passed(compiled_outcomes, check)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", checks("by all compilers"))
def test_check_by_all_compilers(outcomes_of_compilers: Outcomes, check: str) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if check == "check_compilers.check_inductor":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            pytest.skip("Inductor finds no C++ compiler")
    assert_passed(outcomes_of_compilers, check)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("check", checks("long"))
def test_long_check(long_outcomes: Outcomes, check: str) -> None:
    assert_passed(long_outcomes, check)


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.timeout(600)
@pytest.mark.with_torch
def test_training_has_the_losses_that_it_has_under_mpirun(
    mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    words = ["--codec", "zfp", "--rate", "8", "--algorithm", "direct", "--epochs", "1", "--steps", "8"]
    files = [tmp_path / name for name in ("mpi.npy", "mpi.json", "group.npy", "group.json")]
    mpirun(RANKS, TRAIN, *words, "--gradients", files[0], "--json", files[1], timeout=100)
    ports = free_ports(1)
    own = [str(word) for word in (*words, "--gradients", files[2], "--json", files[3])]
    started = [
        subprocess.Popen([mpi.prefix / "bin" / "python", TRAIN, *own], env=environment(rank, RANKS, ports, tmp_path))
        for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(100) for rank in started] == [0] * RANKS
    finally:
        for rank in started:
            rank.kill()
    losses = [[epoch["loss"] for epoch in json.loads(file.read_text())["epochs"]] for file in files[1::2]]
    assert losses[0] == losses[1]
    assert files[0].read_bytes() == files[2].read_bytes()


def test_the_wrapping_backend_leaves_no_collective_to_the_base_class() -> None:
    """Which would hold the GIL, that gloo's threads may wait for with their lock in hand: a deadlock now and then."""
    import re

    import torch

    from compcoll.torch.backend.wrapping import WrappingGroup

    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    if not header.exists():
        pytest.skip("this PyTorch has no headers")
    text = header.read_text()
    names = re.findall(r'WORK_OVERRIDE\([^;]*?ProcessGroup,[^;]*?(\w+), /\* Name|get_override\([^;]*?, "(\w+)"\)', text)
    called = {name for pair in names for name in pair if name} - {"get_future"}
    assert {"allgather", "broadcast", "barrier", "send"} <= called
    assert called <= set(vars(WrappingGroup))


def test_wires_leave_before_a_wait_that_blocks() -> None:
    """Kernels write them, so they leave later than they are sent; gloo's waits let nothing else go on."""
    from compcoll.torch.groups.transport import GroupTransport

    looks, sent, seen = [False, False, True], [], []
    transport = GroupTransport.__new__(GroupTransport)
    transport.leaving = WeakSet()
    transport.limit = timedelta(seconds=1)
    transport.board = SimpleNamespace(waits=lambda *_: contextlib.nullcontext())  # type: ignore[assignment]
    host: Any = SimpleNamespace(
        rank=0, size=2, nodes=[0, 0], leaving=transport.leaving, isend=lambda *w: sent.append(w)
    )
    timeline: Any = SimpleNamespace(departing=lambda wire: SimpleNamespace(Test=lambda: looks.pop(0)))
    device = DeviceTransport(host, timeline)
    device.isend(SimpleNamespace(staging=None, ready=None), 1, 0)  # type: ignore[arg-type]
    assert not sent
    work: Any = SimpleNamespace(wait=lambda limit: seen.append(len(sent)))
    transport.waiting(work, "a message from rank 1", 1)
    assert seen == [1] and not looks
