"""A stand-in for CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import fake_cupy
from fakes.cuda_shim import Shim


@pytest.fixture(scope="module")
def cupy(shim: Shim) -> Iterator[Any]:
    with fake_cupy.installed(shim) as module:
        yield module
