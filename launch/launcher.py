"""Load the script `launch/mpirun` as a module, since its name has no suffix. It finds MPIs and their environments."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

_loader = SourceFileLoader("launch_mpirun", str(Path(__file__).resolve().with_name("mpirun")))
launcher = ModuleType(_loader.name)
launcher.__file__ = _loader.path
_loader.exec_module(launcher)
