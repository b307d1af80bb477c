"""Checkpoints of a training run: a folder for each, complete or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from osu_like_bench import UsageError

_COMMON = "common.pt"
_UNFINISHED = ".unfinished"
_VERSION = 1
_KEPT = 2
"""So many checkpoints remain."""


def _write(state: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """Write a folder's names to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def save(
    folder: Path,
    step: int,
    common: Mapping[str, Any],
    own: Mapping[str, Any],
    standing: tuple[int, int],
    barrier: Callable[[], None],
) -> None:
    """Write a checkpoint: a folder that gets its final name after all ranks have written their part. Collective.

    Parameters
    ----------
    folder : Path
        The folder of all checkpoints, which the ranks share.
    step : int
        Steps done.
    common : mapping
        State that is the same on all ranks; rank 0 writes it.
    own : mapping
        State of this rank.
    standing : tuple of int
        This rank's number, and how many there are.
    barrier : callable
        Waits for all ranks.

    Raises
    ------
    UsageError
        On rank 0 and on ranks that do not see the folder that rank 0 made, if there are such ranks.
    """
    rank, ranks = standing
    unfinished = folder / f"step-{step:09d}{_UNFINISHED}"
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write({"version": _VERSION, "ranks": ranks, **common}, unfinished / _COMMON)
    barrier()
    unseen = []
    try:
        _write(own, unfinished / f"rank-{rank}.pt")
    except FileNotFoundError:
        unseen = [rank]
    barrier()
    if rank == 0:  # checks for all ranks, since only rank 0 prints errors
        unseen = [each for each in range(ranks) if not (unfinished / f"rank-{each}.pt").exists()]
    if unseen:
        raise UsageError(
            f"ranks {unseen} do not see {unfinished}, which rank 0 made: the folder of checkpoints must be on a file "
            "system that all nodes share"
        )
    if rank == 0:
        finished = unfinished.with_suffix("")
        shutil.rmtree(finished, ignore_errors=True)
        _settle(unfinished)
        unfinished.rename(finished)
        _settle(folder)
        for old in _all(folder)[:-_KEPT]:
            shutil.rmtree(old)
    barrier()


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Read the latest checkpoint: the common state, and each rank's own; None if there is no checkpoint.

    Raises
    ------
    UsageError
        If its files are cut, no checkpoint's, or of another version.
    """
    found = _all(folder)
    if not found:
        return None
    common = _read(found[-1] / _COMMON)
    if not {"version", "ranks"} <= set(common):
        raise UsageError(f"{found[-1] / _COMMON} is no checkpoint of such a training: version and ranks are missing")
    version, ranks = common.pop("version"), common.pop("ranks")
    if version != _VERSION:
        raise UsageError(f"{found[-1]} is a checkpoint of version {version!r}: this release reads {_VERSION}")
    return common, [_read(found[-1] / f"rank-{rank}.pt") for rank in range(ranks)]


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError, ValueError, KeyError) as error:
        raise UsageError(f"{path} cannot be read as a part of a checkpoint: {error}") from error
    if not isinstance(state, dict):
        raise UsageError(f"{path} is no part of a checkpoint: it holds a {type(state).__name__}")
    return state


def _all(folder: Path) -> list[Path]:
    """Return complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir() and path.suffix != _UNFINISHED)
