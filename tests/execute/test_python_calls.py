"""A call goes through few files of Python: a reader who follows it has to open all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.loopback import World
from fakes.python_calls import functions_entered

ASKED = {"codec": "zfp", "rate": 8, "algorithm": "ring"}


@pytest.mark.parametrize("blocking", [True, False])
def test_files_that_a_call_goes_through(blocking: bool) -> None:
    """Beside calls that are under way; the function of `compcoll.api` adds another file."""
    ahead, own = World(2, ranks_per_node=1, seed=None).comms
    x = np.linspace(-1, 1, 1024, dtype=np.float32)

    def call() -> Any:
        return own.allreduce(x, **ASKED) if blocking else own.iallreduce(x, **ASKED).wait()

    def files(action: Any) -> set[str]:
        other = ahead.iallreduce(x, **ASKED)
        found = {code.co_filename for code in functions_entered(action)}
        other.wait()
        return {name for name in found if not name.endswith("transports/loopback.py") and name != "<string>"}

    first = files(call)
    for _ in range(4):  # in every lane
        files(call)
    again = files(call)
    assert len(again) <= 8, again
    assert len(first) <= 29, first
