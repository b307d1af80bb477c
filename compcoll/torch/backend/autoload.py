"""Registration of "compcoll" with PyTorch; `import torch` calls it through the entry point torch.backends."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from ..loading import load
from . import NAME


def register() -> None:
    """Register the backend and the rendezvous with PyTorch. Repeated calls are harmless.

    MPI starts only with the first process group. This function never raises, since an exception would make every
    `import torch` in this environment fail.
    """
    try:
        _register()
    except Exception as error:
        warnings.warn(f"compcoll cannot be a backend of this PyTorch: {error!r}", stacklevel=2)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    from ..private import rendezvous_handlers

    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler("mpi", _by_mpi)
    handlers = rendezvous_handlers()
    by_environment = handlers["env"]

    def by_environment_or_mpi(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        from ...tools.machine import launcher

        started_by_mpi = "RANK" not in os.environ and "rank=" not in url and launcher().name != "none"
        return (_by_mpi if started_by_mpi else by_environment)(url, **options)

    handlers["env"] = by_environment_or_mpi


def _by_mpi(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    return load(".backend.rendezvous").rendezvous(
        **{name: value for name, value in options.items() if name == "timeout"}
    )


def _create(given: Any, options: Any) -> Any:
    by_mpi = load(".groups.membership").mpi_knows(given.group_size)
    return load(".backend.rendezvous" if by_mpi else ".backend.wrapping").create(given, options)
