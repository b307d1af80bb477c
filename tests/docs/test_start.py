"""The program of docs/start/torch.md runs under torchrun, and prints what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "start" / "torch.md"


def test_program_of_torch_prints_what_the_page_says(tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    section = PAGE.read_text().split("\n## ")[1]
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    (tmp_path / "train.py").write_text(blocks["python"])
    launcher, *words = blocks["sh"].split()
    assert launcher == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=tmp_path,
        env={**os.environ, "COMPCOLL_PROFILE": "defaults", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks[""]
