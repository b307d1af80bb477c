"""Import of this package's modules on first use, with an error that names the releases of PyTorch they need."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from .. import __version__

OLDEST, TESTED = (2, 12), "2.14"
"""The oldest release of PyTorch that has all names in private.py, and the newest that the tests have run with."""


def load(module: str) -> ModuleType:
    """Import a module of this package by its relative name.

    Raises
    ------
    ImportError
        If this release of PyTorch is too old, or lacks a name that the module needs.
    """
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ImportError(
            f"compcoll.torch needs PyTorch {needed} or later, but PyTorch {torch.__version__} is installed: "
            f"pip install 'torch>={needed}'",
            name="torch",
        )
    try:
        return import_module(module, __package__)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"compcoll {__version__} does not work with PyTorch {torch.__version__} ({error}): upgrade compcoll, or "
            f"pip install 'torch=={TESTED}.*'",
            name="torch",
        ) from error
