"""gloo groups of compcoll's own, and what their errors say about the network."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from ...errors import CollectiveFailed, CompcollError, PeerFailed
from ...tools.network import gloo_listens
from ..failure_detector import Board


def make_gloo(board: Board, store: dist.Store, limit: timedelta) -> dist.ProcessGroupGloo:
    """Make a gloo group of a board's ranks. Collective.

    Raises
    ------
    PeerTimeout, PeerFailed, CollectiveFailed
        As `Board.waits` does. The message names the network interface of this rank.
    """
    try:
        with board.waits("the making of connections"):
            made = dist.ProcessGroupGloo(store, board.rank, board.size, limit)
    except CompcollError as error:
        failure: CompcollError = error
        if isinstance(error, PeerFailed) and not error.failed:  # no rank has died: all wait for connections
            said = str(error.__cause__).partition("\n")[0]
            failure = CollectiveFailed(f"rank {board.rank} of {board.size} cannot connect to the others: {said}")
        failure.args = (f"{failure}. {gloo_listens()}",)
        raise failure from error.__cause__
    board.backends.add(made)
    return made
