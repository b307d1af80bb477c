"""A call goes through few functions of Python: who reads its way has to go through all of them."""

from __future__ import annotations

import numpy as np
from fakes.loopback import World
from fakes.python_calls import functions_entered

from compcoll.devices.host import HostCoder

ASKED = {"codec": "zfp", "rate": 8, "algorithm": "ring"}


def test_the_way_of_a_first_call_to_its_kernel() -> None:
    ahead, own = World(2, seed=None).comms
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    other = ahead.iallreduce(x, **ASKED)
    ways = functions_entered(lambda: own.iallreduce(x, **ASKED).wait(), until=HostCoder.encode.__code__)
    assert ways[-1] == "HostCoder.encode" and len(ways) <= 112, "\n".join(ways)
    other.wait()


def test_the_way_of_a_blocking_call_to_its_kernel() -> None:
    """The functions of `compcoll.api` add two more."""
    ahead, own = World(2, seed=None).comms
    x = np.linspace(-1, 1, 1024, dtype=np.float32)
    other = ahead.iallreduce(x, **ASKED)
    ways = functions_entered(lambda: own.allreduce(x, **ASKED), until=HostCoder.encode.__code__)
    assert ways[-1] == "HostCoder.encode" and len(ways) <= 112, "\n".join(ways)
    other.wait()
