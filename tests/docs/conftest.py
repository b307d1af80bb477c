"""The site, built once for all tests of it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="session")
def built_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site's folder. Sphinx's complaints are beside it, in site.log.

    The first worker of pytest-xdist builds it, and the others wait.
    """
    for needed in ("sphinx", "myst_parser", "numpydoc", "sphinx_design", "sphinx_copybutton", "furo", "torch"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: make docs installs it")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    log = shared / "site.log"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            words = ["-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", DOCS, shared / "site"]
            words += ["-d", shared / "site-trees"]
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=580)
            log.write_text(done.stderr or f"sphinx: exit status {done.returncode}" * bool(done.returncode))
    return shared / "site"
