"""A Python like this one, but without mpi4py, as of those who use compcoll under torchrun."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def make_python(folder: Path) -> Path:
    """Make a virtual environment of all packages installed here but mpi4py, and return its Python."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("mpi4py"):
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
