"""The base class of compcoll's process groups, which splits groups in Python."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import private
from ..options import Options
from . import NAME


class SplittingGroup(dist.ProcessGroup):
    """Base class of the process groups of the backend "compcoll".

    Parameters
    ----------
    store : torch.distributed.Store
        Store through which the ranks find each other.
    rank, size : int
        Rank of this process, and number of ranks.
    options : Options
        What to compress.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        super().__init__(rank, size)
        self.store = store
        self.options = options
        self._parts: list[SplittingGroup] = []

    @abstractmethod
    def _of_some(
        self, ranks: Sequence[int], store: dist.Store, timeout: timedelta | None, options: Options
    ) -> SplittingGroup:
        """Make a group of some ranks of this group, including this rank."""

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SplittingGroup | None:
        """Make a group of some ranks. Those ranks must call it; all other ranks may, and get None."""
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"{group_name or ranks}/", self.store)
        group = self._of_some(ranks, store, timeout, opts if isinstance(opts, Options) else self.options)
        private.set_names(group, group_name, group_desc)
        self._parts.append(group)  # C++ keeps only the base class's part of the group alive
        return group

    splitGroup = split_group  # noqa: N815

    def get_group_store(self) -> dist.Store:
        return self.store

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815
