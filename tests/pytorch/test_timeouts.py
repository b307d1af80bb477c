"""Time-outs of what averages gradients, and of the backend's own waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from mpi.environments import Completed

from compcoll.errors import PeerTimeout
from compcoll.pending import wait_for

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, compcoll.torch
from datetime import timedelta
from mpi4py import MPI
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ZFP = dict(codec="zfp", rate=8, algorithm="ring")
dist.init_process_group("gloo", init_method="mpi://")

def ddp(model, group, **more):
    model = DistributedDataParallel(model, process_group=group)
    return model, compcoll.torch.compress(model, **ZFP, **more)

def dgc(model, group, **more):
    model = DistributedDataParallel(model, process_group=group)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, compcoll.torch.DGC(model, sgd, 0.1, **more)

def fsdp2(model, group, **more):
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model, compcoll.torch.compress(model, **ZFP, **more)

def acp_sgd(model, group, **more):
    return model, compcoll.torch.ACPSGD(model, rank=1, process_group=group, **ZFP, **more)

def meet():
    coming = MPI.COMM_WORLD.Ibarrier()
    while not coming.Test():
        time.sleep(0.01)

kept = []
for make in map(globals().get, sys.argv[1:]):
    for seconds, more in ((2, {}), (1800, {"timeout": 2})):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 10))
        meet()
        model, compression = make(model, group, **more)
        kept.append((group, model, compression))
        def step(): model(torch.ones(5, 100)).sum().backward()
        step(); step()  # DDP makes its buckets anew in the second, over gloo
        meet()
        if dist.get_rank() == 0:
            started = time.monotonic()
            try: step()
            except Exception as error:
                after = time.monotonic() - started
                print("gave up:", make.__name__, seconds, after, "PeerTimeout" in repr(error), flush=True)
        meet()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(240)
def test_gradients_are_not_waited_for_longer(
    mpirun: Callable[..., Completed], tmp_path: Path, figure: Callable[[str], None]
) -> None:
    """One rank does not come to a step: the others wait for the process group's time-out, or for one of their own."""
    script, methods = tmp_path / "stops.py", ("ddp", "acp_sgd", "dgc", "fsdp2")
    script.write_text(SCRIPT)
    done = mpirun(2, script, *methods, timeout=200, check=False)
    told = [line.split()[2:] for line in done.ranks[0].stdout.splitlines() if line.startswith("gave up:")]
    assert [(name, seconds) for name, seconds, _, _ in told] == [
        (name, seconds) for name in methods for seconds in ("2", "1800")
    ], done.report
    for name, seconds, after, by_time_out in told:
        assert by_time_out == "True" and 1.9 < float(after) < 60, told
        figure(f"{name}, {'timeout=2' if seconds == '1800' else 'a group of 2 s'}: {float(after):.2f} s")


STOPS = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
from datetime import timedelta

dist.init_process_group("compcoll", timeout=timedelta(seconds=2))
rank, tensor = dist.get_rank(), torch.ones(1 << 22)
dist.broadcast(tensor, 0)
if sys.argv[1] == "stops":  # inside of MPI, as likely as not, or between two calls
    if rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    while True:
        dist.broadcast(tensor, 0)
if rank == 1:
    time.sleep(5)
else:
    try:
        dist.broadcast(tensor, 0)
    except Exception as error:
        print("gave up:", type(error).__name__, error.missing, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.with_torch
@pytest.mark.only_on("openmpi")
@pytest.mark.timeout(120)
def test_a_rank_that_does_not_come_is_named_and_one_that_stops_in_mpi_ends_the_job(
    mpirun: Callable[..., Completed], tmp_path: Path
) -> None:
    """No rank can leave a blocking call of MPI's: then the job ends with a message, in time."""
    script = tmp_path / "stops.py"
    script.write_text(STOPS)
    done = mpirun(2, script, "late", timeout=60, check=False)
    assert "gave up: PeerTimeout (1,)" in done.ranks[0].stdout, done.report
    started = time.monotonic()
    done = mpirun(2, script, "stops", timeout=60, check=False)
    assert done.returncode != 0 and time.monotonic() - started < 40, done.report
    assert "did not end within 2 s" in done.report or "PeerTimeout" in done.report


def test_the_clock_is_looked_at_in_every_wait() -> None:
    """However long a look takes: on busy cores a core that was lent comes back late."""
    started, looks = time.monotonic(), list[float]()

    def look() -> bool:
        looks.append(time.monotonic())
        time.sleep(0.02)
        return False

    with pytest.raises(PeerTimeout, match="nothing came within"):
        wait_for(SimpleNamespace(Test=look), 0.2, "nothing came")
    assert time.monotonic() - started >= 0.2
    assert sum(each > looks[0] + 0.2 for each in looks) <= 5, looks  # up to 5 between two looks at the clock
