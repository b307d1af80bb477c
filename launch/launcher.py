"""`launch/mpirun`, which knows the MPIs and their environments, as a module: its name has no suffix."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

_loader = SourceFileLoader("launch_mpirun", str(Path(__file__).resolve().with_name("mpirun")))
launcher = ModuleType(_loader.name)
launcher.__file__ = _loader.path
_loader.exec_module(launcher)
