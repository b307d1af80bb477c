"""mpi4py's own tests pass on compcoll's communicators, too."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi.environments import MPI, Completed
from mpi.job import launcher

SUITE = Path(__file__).with_name("mpi4py_suite.py")
FOLDER = launcher.REPOSITORY / "build" / f"mpi4py-{importlib.metadata.version('mpi4py')}" / "test"

REPLACED = ([], ["--codec", "zfp", "--rate", "32", "--min-bytes", "0", "--moved"])
PICKLED = "mpi4py pickles MPI.Intracomm(MPI.COMM_WORLD) by the name of an object that is not MPI.COMM_WORLD any more"
BY_HANDLE = "MPI.Comm.fromint makes mpi4py's own class from a handle"
TOPOLOGIES = ("Cartcomm", "Graphcomm", "Distgraphcomm", "DistgraphcommAdjacent")
EXCEPTIONS = {
    f"test_comm_topo.TestTopo{of}.test{kind}": BY_HANDLE
    for of in ("Self", "SelfDup", "World", "WorldDup")
    for kind in TOPOLOGIES
} | {
    "test_comm.TestCommSelf.testPickle": PICKLED,
    "test_comm.TestCommWorld.testPickle": PICKLED,
    "test_objmodel.TestObjModel.testCAPI": "mpi4py's C interface makes its own class from any handle",
}
"""Tests that no subclass in the place of MPI.COMM_WORLD can pass, and why."""


@pytest.mark.slow
@pytest.mark.first_mpi
@pytest.mark.timeout(1000)
@pytest.mark.skipif(not FOLDER.is_dir(), reason="no source distribution of mpi4py: make test-all fetches it")
def test_tests_of_mpi4py(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    def outcomes(*options: str | Path) -> dict[str, tuple[str, str]]:
        results = tmp_path / "results.json"
        mpirun(3, SUITE, FOLDER, "--results", results, *options, timeout=300)
        return json.loads(results.read_text())

    for options in REPLACED:
        replaced = outcomes(*options)
        assert sum(status == "passed" for status, _ in replaced.values()) > 1500
        bad = [name for name, (status, _) in replaced.items() if status in ("failed", "error")]
        wrong = [name for name in bad if name not in EXCEPTIONS]
        plain = outcomes("--plain", "--only", *wrong) if wrong else {}
        assert {name: replaced[name] for name in wrong if plain[name][0] == "passed"} == {}
