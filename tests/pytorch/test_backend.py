"""The checks in tests/pytorch/backend/check_*.py: one job on 4 ranks with Open MPI, some of them on 2 with MPICH."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mpi.checks import THE_END, CheckJob
from mpi.environments import MPI, Completed
from mpi.run import expand

pytestmark = pytest.mark.with_torch

HERE = Path(__file__).resolve().parent / "backend"
CHECKS = expand([], HERE)
LONG_ONES = {"check_torch_compiled.check_compiled_collectives", "check_torch_training.check_compiled_ddp"}
ON_MPICH = [
    "check_torch_reductions.check_allreduce",
    "check_torch_data_movement.check_moving",
    "check_torch_data_movement.check_messages",
    "check_torch_groups.check_groups",
    "check_torch_training.check_ddp",
    "check_torch_training.check_compressed_gradients",
    "check_torch_training.check_low_rank",
    THE_END,
]
OF_PYTORCH = [
    "test_Backend_enum_class",
    "test_all_gather",
    "test_all_reduce_sum_async",
    "test_all_to_all_single_unequal_split",
    "test_all_to_all_full_group",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_gather_object",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_reduce_full_group_max",
    "test_scatter",
    "test_send_recv_any_source",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync",
]


@pytest.fixture(scope="session")
def job_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[MPI], CheckJob]]:
    current: dict[MPI, CheckJob] = {}

    def get(mpi: MPI) -> CheckJob:
        if mpi not in current:
            for job in current.values():
                job.close()
            current.clear()
            items = [item for item in request.session.items if "job_of" in getattr(item, "fixturenames", ())]
            chosen = [item.callspec.params for item in items if item.path == Path(__file__)]
            names = [p["check"] for p in chosen if p["mpi"] == mpi and p["check"] != THE_END]
            ranks = 4 if mpi.name == "openmpi" else 2
            folder = tmp_path_factory.mktemp(f"torch-{mpi.name}-")
            current[mpi] = CheckJob(ranks, names, folder, mpi.prefix, HERE, timeout=100.0)
        return current[mpi]

    yield get
    for job in current.values():
        job.close()


@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "check",
    [*(pytest.param(check, marks=pytest.mark.slow if check in LONG_ONES else ()) for check in CHECKS), THE_END],
)
def test_torch(mpi: MPI, check: str, job_of: Callable[[MPI], CheckJob]) -> None:
    job_of(mpi).report(check)


@pytest.mark.only_on("mpich")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", ON_MPICH)
def test_torch_on_mpich(mpi: MPI, check: str, job_of: Callable[[MPI], CheckJob]) -> None:
    """The process group, hooks of DDP and low rank, in one start of ranks."""
    job_of(mpi).report(check)


@pytest.mark.slow
@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(300)
def test_tests_of_pytorch(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    """A part of PyTorch's own tests; `make test-torch` runs all."""
    results = tmp_path / "results.json"
    done = mpirun(4, HERE / "pytorch_suite.py", "--results", results, *OF_PYTORCH, timeout=200)
    outcomes = {name: status for name, (status, _) in json.loads(results.read_text()).items()}
    assert outcomes == dict.fromkeys(OF_PYTORCH, "passed"), done.report


@pytest.mark.slow
def test_an_uncaught_error_ends_all_ranks(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('compcoll')\n"
        "if dist.get_rank() == 1: raise RuntimeError('as intended')\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    done = mpirun(2, script, timeout=60, check=False)
    assert done.returncode != 0 and "RuntimeError: as intended" in done.report


@pytest.mark.slow
def test_mpi_without_threads(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    script = tmp_path / "single.py"
    script.write_text(
        "import mpi4py; mpi4py.rc.thread_level = 'single'\n"
        "import torch.distributed as dist\n"
        "from compcoll.errors import InvalidArgument\n"
        "try: dist.init_process_group('compcoll')\n"
        "except InvalidArgument as error: print(error)\n"
    )
    assert "MPI_THREAD_MULTIPLE" in mpirun(1, script, timeout=60).stdout


@pytest.mark.slow
def test_import_of_torch_stays_fast() -> None:
    """The entry point loads neither MPI nor compcoll's kernels, and works before compcoll is imported."""
    pytest.importorskip("torch", "2.12")
    code = (
        "import sys, torch\n"
        "import torch.distributed as dist\n"
        "assert 'compcoll' in dist.Backend.backend_list and 'compcoll.torch' in sys.modules\n"
        "heavy = {'mpi4py.MPI', 'compcoll.kernels._host', 'compcoll.communicator', 'ml_dtypes', 'zfpy'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    subprocess.run([sys.executable, "-c", "import compcoll.torch; compcoll.torch.Options()"], check=True, timeout=60)


@pytest.mark.slow
def test_benchmark_of_backends(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    path = tmp_path / "backends.json"
    mpirun(2, "osu_like_bench.backends", "-m", "4:64K", "-x", "1", "-i", "3", "--json", path, timeout=60)
    records = json.loads(path.read_text())["results"]
    assert {record["contender"] for record in records} == {"mpi4py", "inline", "async", "gloo"}
    assert all(record["ranks"] == 2 and 0 < record["min_us"] <= record["median_us"] for record in records)
