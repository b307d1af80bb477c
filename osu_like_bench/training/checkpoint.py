"""Checkpoints of a training run: a folder for each, complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UsageError

_COMMON = "common.pt"
_UNFINISHED = ".unfinished"


def _write(state: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def save(folder: Path, step: int, common: Mapping[str, Any], own: Mapping[str, Any], *, keep: int = 2) -> None:
    """Write a checkpoint, collectively: a folder that gets its name when all ranks have written their part.

    Parameters
    ----------
    folder : Path
        Where checkpoints are kept; the ranks share it.
    step : int
        Steps done.
    common : mapping
        What is the same on all ranks: rank 0's is written.
    own : mapping
        What each rank has for itself.
    keep : int
        How many checkpoints remain.
    """
    rank = dist.get_rank()
    unfinished = folder / f"step-{step:09d}{_UNFINISHED}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(common, unfinished / _COMMON)
    dist.barrier()
    _write(own, unfinished / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        finished = unfinished.with_suffix("")
        shutil.rmtree(finished, ignore_errors=True)
        unfinished.rename(finished)
        for old in _all(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The latest checkpoint: what is common, and what each rank of then had; None if there is no checkpoint."""
    found = _all(folder)
    if not found:
        return None
    count = len(list(found[-1].glob("rank-*.pt")))
    try:
        common = torch.load(found[-1] / _COMMON, weights_only=True)
        return common, [torch.load(found[-1] / f"rank-{rank}.pt", weights_only=True) for rank in range(count)]
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{found[-1]} cannot be read as a checkpoint: {error}") from error


def _all(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.suffix != _UNFINISHED)
