"""The cores that a process may use: its affinity, the quotas of its control groups, and other processes' shares."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Quota(NamedTuple):
    """The quota of CPU time of a control group.

    Attributes
    ----------
    group : str
        An identifier of the group: the same string for all its processes, even if they see different paths.
    cores : float
        The CPU time, in cores.
    """

    group: str
    cores: float


@dataclass(frozen=True)
class Cores:
    """The cores that a process may use.

    Attributes
    ----------
    kernel : str
        An identifier of the running kernel: the same in all containers and name spaces of a machine.
    allowed : frozenset of int
        The cores that the process may run on.
    quotas : tuple of Quota
        The quotas of its control group and of the groups around it.
    """

    kernel: str
    allowed: frozenset[int]
    quotas: tuple[Quota, ...]

    @classmethod
    def of(cls, kernel: str, allowed: Sequence[int], quotas: Sequence[tuple[str, float]]) -> Cores:
        """Create another process's cores from its `parts`."""
        return cls(kernel, frozenset(allowed), tuple(Quota(*each) for each in quotas))

    @property
    def parts(self) -> tuple[str, list[int], tuple[Quota, ...]]:
        """The attributes as numbers and strings, for `of`."""
        return self.kernel, sorted(self.allowed), self.quotas

    @property
    def count(self) -> float:
        """The number of cores that the process can keep busy at once; quotas make it a fraction."""
        return min([float(len(self.allowed)), *(quota.cores for quota in self.quotas)])

    def share(self, processes: Sequence[Cores]) -> float:
        """Return this process's share of the cores, in cores, if these processes, itself included, use equally many."""
        beside = [each for each in processes if each.kernel == self.kernel]
        alone = sum(1 / sum(core in each.allowed for each in beside) for core in self.allowed)
        groups = [{quota.group for quota in each.quotas} for each in beside]
        limited = [quota.cores / sum(quota.group in each for each in groups) for quota in self.quotas]
        return round(min([alone, *limited]), 6)  # so that seven sevenths of a core are exactly one


def affinity() -> list[int]:
    """Return the numbers of the cores that this process may run on; all cores if the system cannot tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def own_cores() -> Cores:
    """Return the cores that this process may use."""
    return Cores(_kernel(), frozenset(affinity()), tuple(quotas()))


def _kernel() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def quotas(root: Path = Path("/")) -> list[Quota]:
    """Return the quotas of this process's control group and of the groups around it, without those that set no limit.

    They are in ``cpu.max`` (version 2) and ``cpu.cfs_quota_us`` (version 1). Without control groups the list is empty.

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
    """Yield each version of control groups that limits cores, and this process's group in it."""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "cpu" in controllers.split(","):
            yield "cgroup", path


def _mounts(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield where the groups of each version are mounted: version, the group at the top, and its folder."""
    for line in text.splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            _, _, _, mounted, top, *_ = mount.split(" ")
            yield kind, mounted, top


def _below(path: str, mounted: str) -> str:
    """Return the path of a group relative to the group at the top; empty if it is not below it."""
    if mounted == "/":
        return path
    return path[len(mounted) :] if path == mounted or path.startswith(mounted + "/") else ""


def _around(kind: str, top: Path, path: str) -> Iterator[Quota]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of the groups that this process can see
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
    """Return the number of cores that this process may use at once, by affinity and control groups: at least 1."""
    return max(int(own_cores().count), 1)
