"""The benchmark's commands on selection, uneven contributions and sparse allreduces."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi.environments import Completed

from compcoll.codecs.sparse.sparsifier import WIRES
from compcoll.sparse import TopK
from compcoll.tools.arguments import add_codec_options, chosen_codec
from osu_like_bench import UsageError, data, selection

MPIRun = Callable[..., Completed]


@pytest.mark.slow
def test_selection(tmp_path: Path) -> None:
    out = tmp_path / "selection.json"
    words = ["selection", "-m", "64K:128K", "--data", "laplace", "--density", "0.01", "-i", "3", "-x", "0"]
    command = [sys.executable, "-m", "osu_like_bench", *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())["results"]
    assert {"copy", "read", "exact", "ldte", "argpartition"} < {record["method"] for record in records}
    assert {record["size"] for record in records} == {65536, 131072}
    assert all(record["wrong"] == 0 and record["throughput"] > 0 for record in records)
    for line in done.stdout.splitlines()[3:]:
        assert line.split()[-1] == "0"


def test_values_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gradients.npy"
    np.save(path, np.arange(20.0).reshape(4, 5))
    assert data.make(data.kind_of(str(path)), 3, "float32", (0,)).tolist() == [0, 1, 2]
    np.save(tmp_path / "whole.npy", np.arange(20))
    for name, said in (("gradients.npy", "20 of float64, but 21"), ("whole.npy", "int64"), ("none.npy", "none.npy")):
        with pytest.raises(UsageError, match=said):
            data.make(data.kind_of(str(tmp_path / name)), 21 if name == "gradients.npy" else 1, "float32", (0,))
    with pytest.raises(UsageError, match="normal, laplace"):
        data.kind_of("gaussian")


def test_wrong_choices_are_counted() -> None:
    x = np.arange(100, dtype=np.float32)
    right = np.arange(90, 100, dtype=np.uint32)
    assert selection._wrong("exact", x, 10, right) == 0
    assert selection._wrong("exact", x, 10, right[1:]) == 1
    assert selection._wrong("exact", x, 10, np.arange(85, 100)) == 5
    assert selection._wrong("ldte", x, 10, np.arange(86, 100)) == 0
    assert selection._wrong("exact", x, 10, np.concatenate([right[1:], [3]])) == 87


@pytest.mark.parametrize(
    "spread", ["linear", *(pytest.param(each, marks=pytest.mark.slow) for each in ("equal", "one"))]
)
def test_allgatherv(mpirun: MPIRun, tmp_path: Path, spread: str) -> None:
    out = tmp_path / "allgatherv.json"
    words = ["-m", "4K:8K", "--spread", spread, "--compare", "native,ring,direct", "-i", "3", "-x", "1"]
    mpirun(3, "osu_like_bench", "allgatherv", *words, "--json", out)
    records = json.loads(out.read_text())["results"]
    assert [record["contender"] for record in records] == ["native", "ring", "direct"] * 2
    assert all(record["wrong"] == 0 for record in records)


def test_sparse_allreduce(mpirun: MPIRun, tmp_path: Path) -> None:
    out = tmp_path / "sparse.json"
    names = "native,sparse_ring,sparse_native,sparse_direct"
    words = ["-m", "64K", "--codec", "topk", "--density", "0.01", "--compare", names, "-i", "3", "-x", "1"]
    mpirun(3, "osu_like_bench", "allreduce", *words, "--json", out)
    records = json.loads(out.read_text())["results"]
    assert [record["algorithm"] for record in records] == names.split(",")
    assert all(record["wrong"] == record["different"] == 0 for record in records)
    assert records[1]["ratio"] > 30


@pytest.mark.parametrize("wire", ["auto", *WIRES])
def test_wire_formats_by_name(wire: str) -> None:
    parser = argparse.ArgumentParser()
    add_codec_options(parser.add_argument_group("codec"), "")
    words = f"--codec topk --density 0.1 --wire {wire}".split()
    assert chosen_codec(parser.parse_args(words)) == TopK(density=0.1, wire=wire)
