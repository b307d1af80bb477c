"""Ranks that do not come, and groups that are made anew: nothing hangs, and nothing old is in the way."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import compcoll.torch
from compcoll.errors import CommunicatorBroken, PeerFailed, PeerTimeout

SECONDS = 3.0


def check_a_rank_that_does_not_come_ends_as_the_groups_time_out_says() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for hosts in ("shared", "apart"):
        dist.barrier()
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))
        tensor = torch.ones(5000)
        call = {"group": group, "codec": "zfp", "rate": 8, "algorithm": "direct"}
        if hosts == "apart":
            compcoll.torch.groups.transport.host_name = lambda: f"host {rank}"
        compcoll.torch.all_reduce(tensor, **call)
        assert tensor[0] == size
        if rank == 1:
            continue
        before = set(threading.enumerate())
        work = compcoll.torch.all_reduce(tensor, async_op=True, **call)
        started = time.monotonic()
        with pytest.raises((PeerTimeout, PeerFailed)):
            work.wait()
        assert time.monotonic() - started < 60
        with pytest.raises(CommunicatorBroken):
            compcoll.torch.all_reduce(tensor, **call)
        assert all(not thread.is_alive() or thread.daemon for thread in set(threading.enumerate()) - before)


def check_groups_that_are_made_anew() -> None:
    for turn in range(2):
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = os.environ["OTHER_PORTS"].split(",")[turn]
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        tensor = torch.ones(3000)
        compcoll.torch.all_reduce(tensor, codec="zfp", rate=8, algorithm="ring")
        assert tensor[0] == dist.get_world_size()
    dist.destroy_process_group()
    os.environ["COMPCOLL_CODEC"] = "zfp:rate=8"
    os.environ["MASTER_PORT"] = os.environ["OTHER_PORTS"].split(",")[2]
    dist.init_process_group("compcoll", timeout=timedelta(seconds=60))
    tensor = torch.full((1 << 18,), 1.0)
    dist.all_reduce(tensor)
    assert tensor[-1] == dist.get_world_size()
    assert "zfp" in repr(dist.group.WORLD.options).lower()
