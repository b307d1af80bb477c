"""Under torchrun, the program of docs/start/torch.md prints what the page says, and examples of other pages run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [*sorted((DOCS / "torch").glob("*.md")), DOCS / "training.md", DOCS / "low-rank.md"]
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")


def torchrun(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=folder,
        env={**os.environ, "COMPCOLL_PROFILE": "defaults", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_program_of_torch_prints_what_the_page_says(tmp_path: Path) -> None:
    section = (DOCS / "start" / "torch.md").read_text().split("\n## ")[1]
    blocks = dict(re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
    (tmp_path / "train.py").write_text(blocks["python"])
    launcher, *words = blocks["sh"].split()
    assert launcher == "torchrun"
    done = torchrun(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks[""]


@pytest.mark.slow
def test_examples_of_pages_run(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "--nproc-per-node", "4", Path(__file__).with_name("torch_pages.py"), *PAGES)
    assert done.returncode == 0, done.stderr
    counts = {page: int(count) for page, count in re.findall(r"^(\S+\.md): (\d+) examples$", done.stderr, re.MULTILINE)}
    assert counts.keys() == {page.name for page in PAGES}
    assert [page for page, count in counts.items() if not count] == ["backend.md"]  # its own tests run those
