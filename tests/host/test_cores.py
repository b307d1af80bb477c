"""How many cores a process may use: affinity, control groups' quotas, and ranks that share a kernel."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import compcoll
from compcoll import config, encoding
from compcoll.host.cores import Cores, Quota, own_cores, quotas, usable_cores
from compcoll.host.device import HostDevice

V2 = "30 23 0:26 {mounted} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 31 0:30 {mounted} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
OTHER = (
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
)


def system(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A file system with these files, and others empty of what is asked."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text(OTHER + mounts)
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


def cores(root: Path) -> list[float]:
    return [quota.cores for quota in quotas(root)]


def test_version_2(tmp_path: Path) -> None:
    files = {
        "jobs/cpu.max": "300000 100000\n",
        "jobs/mine/cpu.max": "max 100000\n",
        "jobs/mine/inner/cpu.max": "150000 100000\n",
        "other/cpu.max": "10000 100000\n",
    }
    assert cores(system(tmp_path, "0::/jobs/mine/inner\n", V2.format(mounted="/"), files)) == [1.5, 3.0]


def test_version_2_in_a_container(tmp_path: Path) -> None:
    """Its group is all that there is to be seen."""
    files = {"cpu.max": "200000 100000\n", "inner/cpu.max": "100000 50000\n"}
    assert cores(system(tmp_path / "a", "0::/\n", V2.format(mounted="/"), files)) == [2.0]
    assert cores(system(tmp_path / "b", "0::/pod/7/inner\n", V2.format(mounted="/pod/7"), files)) == [2.0, 2.0]
    assert cores(system(tmp_path / "c", "0::/../elsewhere\n", V2.format(mounted="/"), files)) == [2.0]
    assert cores(system(tmp_path / "d", "0::/elsewhere\n", V2.format(mounted="/pod/7"), files)) == [2.0]


def test_version_1_beside_version_2(tmp_path: Path) -> None:
    files = {
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "cpu/docker/abc/cpu.cfs_quota_us": "50000\n",
        "cpu/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    groups = "9:name=systemd:/\n3:cpuset:/elsewhere\n2:cpu,cpuacct:/docker/abc\n0::/\n"
    assert cores(system(tmp_path, groups, V1.format(mounted="/") + V2.format(mounted="/"), files)) == [0.5]


@pytest.mark.parametrize("text", ["", "many 100000", "100000", "100000 0 0"])
def test_what_is_not_understood_sets_no_limit(tmp_path: Path, text: str) -> None:
    assert cores(system(tmp_path, "0::/a\n", V2.format(mounted="/"), {"a/cpu.max": text, "cpu.max": "2 1"})) == [2.0]


def test_no_control_groups(tmp_path: Path) -> None:
    assert quotas(tmp_path) == []
    assert cores(system(tmp_path, "nonsense\n", "nonsense\n", {})) == []


def test_shares() -> None:
    def on(kernel: str, *allowed: int, **groups: float) -> Cores:
        return Cores(kernel, frozenset(allowed), tuple(Quota(name, limit) for name, limit in groups.items()))

    free = on("a", *range(8))
    assert free.share([free]) == 8
    assert free.share([free] * 4 + [on("b", *range(8))] * 9) == 2
    assert free.share([free] * 7 + [on("a", 8)]) == round(8 / 7, 6)
    seven = on("a", *range(7))
    assert seven.share([seven] * 7) == 1
    assert seven.share([seven] * 8) < 1
    # Ranks that are bound to cores of their own share nothing; one beside them, bound to none, shares with each.
    bound = [on("a", 2 * rank, 2 * rank + 1) for rank in range(4)]
    assert [each.share(bound) for each in bound] == [2, 2, 2, 2]
    assert free.share([free, *bound]) == 4
    # Of a quota only those in the group take, in whatever groups these are themselves.
    pod, inner = on("a", *range(8), pod=3.0), on("a", *range(8), inner=0.5, pod=3.0)
    assert pod.share([pod]) == 3
    assert pod.share([pod, inner, free]) == 1.5
    assert inner.share([pod, inner, free]) == 0.5
    assert inner.count == 0.5


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.THREADS, raising=False)
    assert [config.threads(share) for share in (0.25, 1, 1.99, 2, 16)] == [1, 1, 1, 2, 16]
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_a_codec_without_mpi_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(config.THREADS, raising=False)
    monkeypatch.setattr("compcoll.host.cores.own_cores", lambda: Cores("kernel", frozenset(range(3)), ()))
    made = []
    monkeypatch.setattr(encoding, "HostDevice", lambda threads: made.append(threads) or HostDevice(threads))
    compcoll.encode(np.ones(8, np.float32), codec="cast")
    assert made == [3]


@contextlib.contextmanager
def group(quota: int, period: int) -> Iterator[Path]:
    """A control group of this kind for a process of one's own, where the system lets us make one."""
    for top, name in (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us"), ("/sys/fs/cgroup", "cpu.max")):
        folder = Path(top, f"compcoll-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / name).exists():
                continue
            (folder / name).write_text(str(quota) if name != "cpu.max" else f"{quota} {period}")
            yield folder
            return
        finally:
            folder.rmdir()
    pytest.skip("control groups that limit cores cannot be made here")


def test_a_real_quota() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two cores are needed")
    code = """
import os, sys
from compcoll.host.cores import usable_cores
before = usable_cores()
with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
print(before >= 2, usable_cores())
"""
    with group(100_000, 100_000) as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "1"], done.stderr


def test_this_process() -> None:
    cores = own_cores()
    assert cores.allowed == os.sched_getaffinity(0)
    assert cores.kernel
    assert cores.share([cores]) == round(cores.count, 6)
