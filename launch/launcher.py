"""`launch/mpirun`, which knows the MPIs and their environments, as a module: its name has no suffix."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType


def _loaded() -> ModuleType:
    path = Path(__file__).resolve().with_name("mpirun")
    loader = importlib.machinery.SourceFileLoader("launch_mpirun", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


launcher = _loaded()
