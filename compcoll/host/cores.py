"""The cores that a process may use: where it may run, what control groups leave of their time, and who shares them."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Quota(NamedTuple):
    """A control group's share of the machine's time.

    Attributes
    ----------
    group : str
        Which group: the same string for all processes in it, whatever path each sees.
    cores : float
        So much time as this many cores have.
    """

    group: str
    cores: float


@dataclass(frozen=True)
class Cores:
    """The cores that a process may use.

    Attributes
    ----------
    kernel : str
        The running kernel: the same for all containers, and network or host name spaces, of a machine.
    allowed : frozenset of int
        The cores that the process may run on.
    quotas : tuple of Quota
        Of its control group, and of those around it.
    """

    kernel: str
    allowed: frozenset[int]
    quotas: tuple[Quota, ...]

    @classmethod
    def of(cls, kernel: str, allowed: Sequence[int], quotas: Sequence[tuple[str, float]]) -> Cores:
        """The cores that another process tells of, by `parts`."""
        return cls(kernel, frozenset(allowed), tuple(Quota(*each) for each in quotas))

    @property
    def parts(self) -> tuple[str, list[int], tuple[Quota, ...]]:
        """The numbers and texts from which `of` makes them."""
        return self.kernel, sorted(self.allowed), self.quotas

    @property
    def count(self) -> float:
        """The number of cores that the process can keep busy at once, at least a part of one."""
        return min([float(len(self.allowed)), *(quota.cores for quota in self.quotas)])

    def share(self, processes: Sequence[Cores]) -> float:
        """The part of the cores that is left when some processes, this one among them, take as much each."""
        beside = [each for each in processes if each.kernel == self.kernel]
        alone = sum(1 / sum(core in each.allowed for each in beside) for core in self.allowed)
        groups = [{quota.group for quota in each.quotas} for each in beside]
        limited = [quota.cores / sum(quota.group in each for each in groups) for quota in self.quotas]
        return round(min([alone, *limited]), 6)  # seven sevenths of a core are one


def affinity() -> list[int]:
    """The numbers of the cores that this process may run on; all where the system does not tell which (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def own_cores() -> Cores:
    """The cores that this process may use."""
    return Cores(_kernel(), frozenset(affinity()), tuple(quotas()))


def _kernel() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def quotas(root: Path = Path("/")) -> list[Quota]:
    """The quotas of this process's control group and of those around it (``cpu.max`` of version 2, ``cpu.cfs_quota_us``
    of version 1); those that set no limit are left out. None where the system has no control groups.

    References
    ----------
    The Linux kernel's Documentation/admin-guide/cgroup-v2.rst, and scheduler/sched-bwc.rst for version 1.
    """
    found: list[Quota] = []
    with contextlib.suppress(OSError, ValueError):
        paths = dict(_paths((root / "proc/self/cgroup").read_text()))
        for kind, mounted, top in _mounts((root / "proc/self/mountinfo").read_text()):
            if kind in paths:
                found += _around(kind, root / top.lstrip("/"), _below(paths[kind], mounted))
    return found


def _paths(text: str) -> Iterator[tuple[str, str]]:
    """The version that limits cores, and this process's group there."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "cpu" in controllers.split(","):
            yield "cgroup", path


def _mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """Find where the groups of each version are to be seen: version, the group that is at the top, and its folder."""
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            _, _, _, mounted, top, *_ = mount.split(" ")
            yield kind, mounted, top


def _below(path: str, mounted: str) -> str:
    """The path of a group from the one that is at the top; that one, if it is elsewhere."""
    if mounted == "/":
        return path
    return path[len(mounted) :] if path == mounted or path.startswith(mounted + "/") else ""


def _around(kind: str, top: Path, path: str) -> Iterator[Quota]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside what this process may see
        parts = []
    for depth in range(len(parts), -1, -1):
        folder = top.joinpath(*parts[:depth])
        with contextlib.suppress(OSError, ValueError):  # the root has no quota
            cores = _limit(kind, folder)
            if cores is not None:
                yield Quota(f"{folder.stat().st_dev}:{folder.stat().st_ino}", cores)


def _limit(kind: str, folder: Path) -> float | None:
    if kind == "cgroup2":
        quota, period = (folder / "cpu.max").read_text().split()
    else:
        quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
    return None if quota in ("max", "-1") else int(quota) / int(period)


def usable_cores() -> int:
    """Count the cores that this process may use at once, by its affinity and its control groups' quotas: at least 1."""
    return max(int(own_cores().count), 1)
