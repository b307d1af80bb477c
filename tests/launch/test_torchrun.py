"""torchrun on each host of a lab of launch/netlab, started as docs/launching/torchrun.md says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .test_netlab import NETLAB, needs_namespaces, netlab, new_name

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, needs_namespaces]

LAUNCH = NETLAB.parent
PROGRAM = Path(__file__).with_name("nodes.py")
HOSTS = 4
SECONDS = 150
LOOPBACK_NAME = r'printf "127.0.1.1 $(hostname)\n" >$TMPDIR/hosts && mount --bind $TMPDIR/hosts /etc/hosts'
"""Makes the host's name resolve to 127.0.1.1, as Debian's installer does."""
PET = "PET_NNODES=$WORLD_SIZE PET_NODE_RANK=$RANK PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=$MASTER_ADDR"
"""Variables of Kubernetes' operators."""


@pytest.fixture(scope="module")
def lab() -> Iterator[str]:
    """The name of a lab whose links are slow enough for compression to pay on a busy machine, too."""
    name = new_name()
    up = netlab("up", "--hosts", HOSTS, "--rate", "200mbit", "--name", name)
    assert up.returncode == 0, up.stderr
    yield name
    down = netlab("down", "--name", name)
    assert down.returncode == 0, down.stderr


@pytest.fixture
def environ() -> dict[str, str]:
    """The environment without the tests' own profile, so that ranks measure the lab's links."""
    return {name: value for name, value in os.environ.items() if name != "COMPCOLL_PROFILE"}


def on_hosts(lab: str, script: str, environ: dict[str, str], *options: object) -> subprocess.CompletedProcess[str]:
    """Run a shell script on the hosts of a lab."""
    words = ("--name", lab, "--mpi", "none", "--prefix", sys.prefix, "--timeout", SECONDS - 10, *options)
    return netlab("run", *words, "--", "sh", "-c", script, env=environ)


def check_training(folder: Path, done: subprocess.CompletedProcess[str], hosts: int) -> None:
    """Check what the ranks of `nodes.py` wrote."""
    assert done.returncode == 0, done.stdout + done.stderr
    seen: list[dict[str, Any]] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(hosts)]
    assert len({each["parameters"] for each in seen}) == 1
    for each in seen:
        assert each["nodes"] == list(range(hosts))
        assert sum(number for how, number in each["calls"].items() if "Int8" in how) >= 40
        assert each["ratio"] > 3.5
        before, after = each["losses"]
        assert (before, after) == (each["exact_losses"][0], pytest.approx(each["exact_losses"][1], rel=0.01))
        assert after < 0.5 * before


def test_slurm_script(lab: str, environ: dict[str, str], tmp_path: Path) -> None:
    """launch/torchrun.sbatch, with stand-ins for Slurm's commands that use the lab's hosts as nodes."""
    stub = tmp_path / "srun"
    run = f"{sys.executable} {NETLAB} run --name {lab} --mpi none --prefix {sys.prefix} --timeout {SECONDS - 10} --"
    stub.write_text(f'#!/bin/sh\nexec {run} sh -c \'SLURM_NODEID=$RANK exec "$@"\' sh "$@"\n')
    stub.chmod(0o755)
    names = tmp_path / "scontrol"
    names.write_text('#!/bin/sh\n[ "$*" = "show hostnames h[0-3]" ] && printf "h0\\nh1\\nh2\\nh3\\n"\n')
    names.chmod(0o755)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "h[0-3]"}
    environ |= slurm | {"SLURM_NNODES": str(HOSTS), "PATH": f"{tmp_path}{os.pathsep}{environ['PATH']}"}
    done = subprocess.run(
        ["bash", LAUNCH / "torchrun.sbatch", PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environ,
    )
    check_training(tmp_path, done, HOSTS)


def test_rendezvous_where_host_names_are_loopback(lab: str, environ: dict[str, str], tmp_path: Path) -> None:
    """The same on two hosts with torchrun's c10d rendezvous, where host names are of no use."""
    torchrun = "torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29502"
    more = "--rdzv-id job --local-addr 10.77.0.$((RANK + 1)) --rdzv-conf is_host=$((RANK == 0))"
    done = on_hosts(lab, f"{LOOPBACK_NAME} && {torchrun} {more} {PROGRAM} {tmp_path}", environ, "-n", 2)
    check_training(tmp_path, done, 2)


def test_wrong_interface(lab: str, environ: dict[str, str]) -> None:
    """Errors and `doctor --network` name the interface if host names resolve to a loopback address."""
    program = "import torch.distributed as d; d.init_process_group('compcoll')"
    doctor = "python -m compcoll doctor --network"
    torchrun = f'{PET} PET_MASTER_PORT=29501 torchrun --no-python python -c "{program}"'
    script = f"{LOOPBACK_NAME}; unset GLOO_SOCKET_IFNAME; {doctor}; {torchrun}"
    done = on_hosts(lab, script, environ, "-n", 2)
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    for host in ("h0", "h1"):
        why = f"takes lo (127.0.1.1, loopback), since the host name {host} resolves to 127.0.1.1"
        assert done.stdout.count(f"gloo         {why}\n") == 1
    assert done.stdout.count("→ export GLOO_SOCKET_IFNAME=eth0, before the ranks start on this node\n") == 2
    failed = [line for line in done.stderr.splitlines() if "CollectiveFailed: " in line]
    assert failed, done.stderr
    for line in failed:
        assert "cannot connect to the others: " in line
        assert "127.0.1.1; other nodes cannot reach lo" in line
        assert f"export GLOO_SOCKET_IFNAME=eth0 (see `{doctor}` on each node)" in line
