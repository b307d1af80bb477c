"""Runs PyTorch's own distributed_test suite, from the installed wheel, on all ranks of one MPI job.

    launch/mpirun -n 4 python tests/pytorch/backend/pytorch_suite.py                          # every test, on compcoll
    launch/mpirun -n 4 python tests/pytorch/backend/pytorch_suite.py --backend gloo           # what gloo does with them
    launch/mpirun -n 4 python tests/pytorch/backend/pytorch_suite.py --wrapping               # what wraps gloo
    launch/mpirun -n 4 python tests/pytorch/backend/pytorch_suite.py test_broadcast test_gather

The suite decides by the backend's name which tests run. All are taken as they are for gloo, but those of all_to_all as
they are for mpi, the only one to have it on the CPU. A line for each test comes from rank 0; the exit status is not 0
if any failed that is not in `UNSUITABLE`. The suite's file barrier is replaced by MPI's; nothing else is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from mpi4py import MPI

NAME = "torch.testing._internal.distributed.distributed_test"
SKIPPED, PASSED, FAILED = "skipped", "passed", "failed"
ONLY_NCCL = "meant for NCCL, and fails on gloo, too, where there is no GPU"
UNSUITABLE = {
    "test_batch_isend_irecv_mixed_backend_err": ONLY_NCCL,
    "test_batch_isend_irecv_op_err": ONLY_NCCL,
    "test_SyncBatchNorm_process_group": "needs torchvision",
}
"""Tests that cannot pass here on any backend, and why."""

BY_NAME = {"test_get_backend", "test_barrier_timeout_global"}
"""Tests that ask for the backend's name: they get the true one."""

WORLD = MPI.COMM_WORLD.Dup()


def barrier(comm: MPI.Intracomm, seconds: float = 60.0) -> None:
    arrived = comm.Ibarrier()
    started = time.monotonic()
    while not arrived.Test():
        if time.monotonic() > started + seconds:
            raise RuntimeError("barrier timeout")
        time.sleep(0.001)


def load(backend: str) -> ModuleType:
    """The suite with tests chosen as for that backend."""
    os.environ["BACKEND"] = backend
    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def suite_class(module: ModuleType) -> type[Any]:
    from torch.testing._internal.common_utils import TestCase

    class Suite(module.DistributedTest._DistTestBase, TestCase):  # type: ignore[name-defined,misc]
        source = module
        comm = WORLD
        rank = WORLD.rank
        world_size = WORLD.size
        file_name = os.path.join(os.environ["TEMP_DIR"], "store")
        init_method = f"file://{file_name}"

        def _barrier(self, *args: Any, **kwargs: Any) -> None:
            barrier(self.comm, 20.0)

    return Suite


def as_gloo() -> Any:
    """torch.distributed.monitored_barrier, which asks for the name "gloo" before it calls the group's own."""
    return mock.patch("torch.distributed.distributed_c10d.get_backend", return_value="gloo")


def outcome_of(suite: type[Any], name: str, backend: str) -> tuple[str, str]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    codes = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=60))
        barrier(WORLD)
        test = suite(name)
        test.setUp()
        try:
            with as_gloo() if "monitored_barrier" in name else contextlib.nullcontext():
                getattr(test, name)()
        finally:
            test.tearDown()
    except unittest.SkipTest as skip:
        return SKIPPED, str(skip)
    except SystemExit as end:
        return (SKIPPED, codes[end.code]) if end.code in codes else (FAILED, traceback.format_exc())
    except Exception:
        return FAILED, traceback.format_exc()
    return PASSED, ""


def run(suite: type[Any], name: str, backend: str, seconds: float) -> tuple[str, str]:
    """All ranks' outcome of a test."""
    import torch.distributed as dist

    faulthandler.dump_traceback_later(seconds, exit=True)
    sys.modules[NAME] = suite.source  # where pickle looks for the tests' classes
    named = suite.source.BACKEND
    if name in BY_NAME:
        suite.source.BACKEND = backend
    suite.comm = WORLD.Dup()
    outcome = outcome_of(suite, name, backend)
    suite.source.BACKEND = named
    barrier(WORLD)
    if dist.is_initialized():
        dist.destroy_process_group()
    outcomes = WORLD.allgather(outcome)
    faulthandler.cancel_dump_traceback_later()
    if any(status == FAILED for status, _ in outcomes):
        reason = UNSUITABLE.get(name)
        if reason is not None:
            return SKIPPED, reason
        return FAILED, "\n".join(f"[rank {r}] {text}" for r, (s, text) in enumerate(outcomes) if s == FAILED)
    if any(status == PASSED for status, _ in outcomes):
        return PASSED, ""
    return SKIPPED, outcomes[0][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="names of tests; default: all")
    parser.add_argument("--backend", default="compcoll", help="what they run on")
    parser.add_argument("--wrapping", action="store_true", help="as if MPI did not know the ranks: compcoll over gloo")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a test may take")
    parser.add_argument("--results", type=Path, help="write outcomes there, as JSON")
    arguments = parser.parse_args()

    with contextlib.ExitStack() as stack:
        if arguments.wrapping:
            stack.enter_context(mock.patch("compcoll.torch.groups.membership.mpi_knows", return_value=False))
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if WORLD.rank == 0 else None
        folder = WORLD.bcast(folder)
        os.environ |= {"WORLD_SIZE": str(WORLD.size), "TEMP_DIR": folder, "INIT_METHOD": f"file://{folder}/init"}
        for name in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(folder, name), exist_ok=True)
        Path(folder, "lockfile").touch()
        barrier(WORLD)
        good = run_all(arguments)
        barrier(WORLD)
    sys.exit(0 if good else 1)


def run_all(arguments: argparse.Namespace) -> bool:
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add(arguments.backend)
    usual, all_to_all = suite_class(load("gloo")), suite_class(load("mpi"))
    every = sorted(name for name in dir(usual) if name.startswith("test_"))
    results: dict[str, list[str]] = {}
    import torch

    for name in arguments.tests or every:
        if "cuda" in name and not torch.cuda.is_available():
            results[name] = [SKIPPED, "needs GPUs"]
            continue
        started = time.monotonic()
        suite = all_to_all if "all_to_all" in name and "cuda" not in name else usual
        status, detail = run(suite, name, arguments.backend, arguments.timeout)
        results[name] = [status, detail]
        if WORLD.rank == 0:
            print(
                f"{status:8}{name}  {time.monotonic() - started:.2f} s  {detail if status != PASSED else ''}",
                flush=True,
            )
    counts = {status: sum(s == status for s, _ in results.values()) for status in (PASSED, SKIPPED, FAILED)}
    if WORLD.rank == 0:
        print(", ".join(f"{count} {status}" for status, count in counts.items()), flush=True)
        if arguments.results is not None:
            arguments.results.write_text(json.dumps(results, indent=1))
    return counts[FAILED] == 0


if __name__ == "__main__":
    main()
