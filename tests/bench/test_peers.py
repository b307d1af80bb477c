"""Contenders that entry points name: the one of the documentation, those that are shipped, and what cannot be one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi.environments import Completed

from compcoll.dtypes import DTYPES
from osu_like_bench import UsageError, bounds, peers
from osu_like_bench.contenders import names, parse

MPIRun = Callable[..., Completed]
DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmark.md"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget what other tests of this process found installed, and what these install."""
    forget()
    yield
    forget()


def forget() -> None:
    peers.load.cache_clear()
    peers.names.cache_clear()


def documented(folder: Path) -> Path:
    """Install the documentation's contender there, as pip would."""
    code, entry = (
        re.search(rf"```{kind}\n(.*?reduce_bcast.*?)```", DOCS.read_text(), re.S) for kind in ("python", "toml")
    )
    assert code and entry and len(code[1].splitlines()) <= 10
    info = folder / "my_package-1.dist-info"
    info.mkdir(parents=True)
    (folder / "my_package.py").write_text(code[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    group = re.search(r'entry-points\."(.*)"\]', entry[1])
    name = re.search(r'(\w+) = "(.*)"', entry[1])
    assert group and name
    (info / "entry_points.txt").write_text(f"[{group[1]}]\n{name[1]} = {name[2]}\nbroken = my_package:none\n")
    return folder


@pytest.mark.slow
@pytest.mark.with_torch
def test_others_run_beside_ours_and_are_checked(mpirun: MPIRun, tmp_path: Path) -> None:
    there = documented(tmp_path / "site")
    written = tmp_path / "bench.json"
    contenders = "native,reduce_bcast,gloo,gloo_fp16,native_nonblocking,auto_nonblocking,auto"
    words = f"allreduce -m 64,64K --codec zfp --rate 16 --compare {contenders} -i 3 --op mean"
    path = os.pathsep.join([str(there), *filter(None, [os.environ.get("PYTHONPATH")])])
    mpirun(2, "osu_like_bench", *words.split(), "--json", written, env={"PYTHONPATH": path}, timeout=100)
    found = {(each["contender"], each["size"]): each for each in json.loads(written.read_text())["results"]}
    assert {name for name, _ in found} == set(contenders.split(","))
    assert not any(each["wrong"] for each in found.values())
    assert found["reduce_bcast", 1 << 16]["error"] < 1e-6 and found["gloo", 1 << 16]["codec"] is None
    assert all(found[f"{name}_nonblocking", 1 << 16]["error"] < 1e-6 for name in ("native", "auto"))
    assert 1e-5 < found["gloo_fp16", 1 << 16]["error"] < 1e-3 and "float16" in found["gloo_fp16", 1 << 16]["codec"]


def test_what_is_installed_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(documented(tmp_path))
    assert {"gloo", "gloo_fp16", "reduce_bcast"} < set(names("allreduce"))
    assert not {"gloo", "reduce_bcast"} & set(names("allgather"))
    assert parse("native,reduce_bcast", "allreduce", None) == ["native", "reduce_bcast"]
    peer = peers.load("reduce_bcast")
    assert peer is not None and peers.codec_of(peer) is None
    with pytest.raises(UsageError, match="broken: my_package:none cannot be loaded"):
        peers.load("broken")
    peer.codec = "float16"  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="one of compcoll's, not 'float16'"):
        peers.codec_of(peer)
    x = np.zeros(2, DTYPES["bfloat16"].numpy)
    with pytest.raises(UsageError, match="float64, not bfloat16"):
        peers.gloo(None, x, x)  # type: ignore[arg-type]


def test_each_step_of_a_strangers_may_lose_something() -> None:
    assert bounds.encodings_of("allreduce", "reduce_bcast", 4, 1) == bounds.Encodings(6, 6)
    assert bounds.encodings_of("allreduce", "gloo_fp16", 1, 1) == bounds.Encodings(1, 1)
