"""The code of docs/cupy.md, on two ranks of one process and a stand-in for CuPy."""

from __future__ import annotations

import re
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import fake_cupy
from fakes.cuda_shim import Shim
from fakes.loopback import World

import compcoll

PAGE = Path(__file__).parents[2] / "docs" / "cupy.md"
SIZE = 5000
"""Elements of the arrays in place of the page's millions: the kernels run on the CPU here."""


class OfThread(threading.local):
    """What each thread, as a rank, has of its own: entered streams, its communicator, its random numbers."""

    comm: Any

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.drawn: list[np.ndarray] = []

    def draw(self, size: int, dtype: Any) -> Any:
        values = np.random.default_rng([self.comm.rank, len(self.drawn)]).standard_normal(SIZE).astype(dtype)
        self.drawn.append(values)
        return fake_cupy.upload(values)

    def __len__(self) -> int:
        return len(self.entered)

    def __getitem__(self, index: int) -> Any:
        return self.entered[index]

    def append(self, stream: Any) -> None:
        self.entered.append(stream)

    def pop(self) -> Any:
        return self.entered.pop()


def test_code_of_the_page(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, run_kernels = threading.Lock(), Shim.run  # the kernels' stand-in has one set of blocks

    def one_at_a_time(shim: Shim, launches: Any) -> Any:
        with alone:
            return run_kernels(shim, launches)

    monkeypatch.setattr(Shim, "run", one_at_a_time)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(blocks) == 5
    here = OfThread()
    monkeypatch.setattr(fake_cupy.Stream, "entered", here)
    monkeypatch.setattr(cupy, "float32", np.float32, raising=False)
    monkeypatch.setattr(cupy, "random", types.SimpleNamespace(standard_normal=here.draw), raising=False)
    for name in ("allreduce", "iallreduce"):
        monkeypatch.setattr(compcoll, name, lambda *a, name=name, **k: getattr(here.comm, name)(*a, **k))
    monkeypatch.setattr(compcoll, "get_communicator", lambda: here.comm)
    world = World(2)

    def run(rank: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        here.comm, names = world.comms[rank], {}
        for block in blocks:
            exec(block, names)
        return names, here.drawn

    with ThreadPoolExecutor(2, initializer=threading.Barrier(2).wait) as pool:  # a thread for each rank
        (names, drawn), (others, others_drawn) = pool.map(run, range(2))
    for name in ("gradient", "total", "wire"):
        assert isinstance(names[name], cupy.ndarray), name
        np.testing.assert_array_equal(names[name].array, others[name].array)
    exact = drawn[-1].astype(np.float64) + others_drawn[-1]
    for found in (names["total"].array, names["gradient"].array, names["values"].array):
        assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)
    assert isinstance(names["feedback"].residual, cupy.ndarray)
    assert world.comms[0].stats is not None and world.comms[0].stats.device == "cuda fake"
