"""Copies that another core reads next, into a cache or past it; by a program, as which way depends on the machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_copies_both_ways(tmp_path: Path) -> None:
    """Nothing beside them is written, and who sees the number sees what was copied before."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("a C++ compiler is needed")
    source, kernels = Path(__file__).parent / "fuzz" / "copies.cpp", REPOSITORY / "compcoll" / "kernels"
    program = tmp_path / "copies"
    build = [compiler, "-std=c++20", "-O2", "-pthread", "-I", kernels, source, "-o", program]
    subprocess.run(build, check=True, timeout=120)
    done = subprocess.run([program, "2000"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "copied\n"), done
