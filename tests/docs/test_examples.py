"""Every public name has an example in its docstring, and what that prints is true."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "modules", ["compcoll compcoll.codecs compcoll.sparse", pytest.param("compcoll.torch", marks=pytest.mark.slow)]
)
def test_examples_are_there_and_true(modules: str, tmp_path: Path) -> None:
    if "torch" in modules and find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    ended = subprocess.run(
        [sys.executable, Path(__file__).with_name("examples.py"), *modules.split()],
        env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},  # `tune` stores a profile
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 failed; without an example: []" in ended.stdout
