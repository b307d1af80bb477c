"""The columns of an FSDP2 module's parameters in the buffer of its collectives, which has a row for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...codecs.base import Codec
from ...communicator import Communicator
from .. import private
from ..buffers import COMPRESSIBLE, Array
from ..policy import each_codec
from ..states import logical_name


class Column(NamedTuple):
    """A parameter's columns, ``begin`` to ``end`` (exclusive), in each rank's row of a module's buffer.

    Attributes
    ----------
    shape : torch.Size
        Shape of the whole parameter. If all ranks' columns together have more elements, the last ones are padding.
    dim : int
        Dimension along which the parameter is sharded.
    """

    name: str
    begin: int
    end: int
    shape: torch.Size
    dim: int
    parameter: Tensor

    def to_rows(self, values: Tensor, ranks: int) -> Tensor:
        """Arrange values of the parameter's shape as one row per rank, padded with zeros."""
        padded = values.new_zeros(ranks * (self.end - self.begin))
        padded[: values.numel()] = torch.cat(values.chunk(ranks, self.dim)).reshape(-1)
        return padded.view(ranks, -1)

    def own(self, values: Tensor, shards: Communicator) -> Tensor:
        """Copy values of the parameter's shape, with zeros outside this rank's row."""
        rows = self.to_rows(values, shards.size)
        own = torch.zeros_like(rows)
        own[shards.rank] = rows[shards.rank]
        return self.from_rows(own)

    def clear_padding(self, values: Array, numbers: range) -> None:
        """Set the padding in rows of these numbers to zero."""
        numel, width = self.shape.numel(), self.end - self.begin
        for number in range(max(numbers.start, numel // max(width, 1)), numbers.stop):
            values[number - numbers.start, max(numel - number * width, 0) :] = 0

    def from_rows(self, rows: Tensor) -> Tensor:
        """Restore the parameter's shape from rows made by `to_rows`."""
        flat = rows.reshape(-1)[: self.shape.numel()]
        if not self.dim:
            return flat.view(self.shape)
        lengths = list(self.shape)
        lengths[self.dim] //= len(rows)
        return torch.cat([row.view(lengths) for row in flat.view(len(rows), -1)], self.dim)


class Columns:
    """The columns of several parameters, side by side.

    Parameters
    ----------
    parameters : sequence
        FSDP parameters of a sharded module.
    names : mapping
        Names of the model's parameters, by id.
    codecs : mapping
        The codec of each parameter, by logical name; None if it is exact. It may change later.
    """

    def __init__(self, parameters: Sequence[Any], names: Mapping[int, str], codecs: Mapping[str, Codec | None]) -> None:
        self.all: list[Column] = []
        self._codecs = codecs
        offset = 0
        for parameter in parameters:
            end = offset + private.padded_size(parameter).numel()
            shard = private.shard_of(parameter)
            place = (private.unsharded_size(parameter), private.sharded_dim(parameter))
            self.all.append(Column(logical_name(names[id(shard)]), offset, end, *place, shard))
            offset = end
        self.width = offset

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum((column.end - column.begin) * column.parameter.element_size() for column in self.all)

    @property
    def compressed(self) -> list[Column]:
        """The columns that are not exact."""
        return [column for column in self.all if self._codecs[column.name] is not None]

    def of(self, codec: Codec | None) -> list[Column]:
        """Return the columns that a codec compresses; for None, the exact ones."""
        return [column for column in self.all if self._codecs[column.name] == codec]

    def codecs(self, width: int, tensor: Tensor) -> list[Codec]:
        """Return the codecs of the columns of ``tensor``; none if all are exact."""
        if width != self.width or tensor.dtype not in COMPRESSIBLE:
            return []
        return each_codec({column.name: self._codecs[column.name] for column in self.all})


def gather_columns(values: Array, columns: Sequence[Column]) -> Array:
    """Copy columns of one or more rows, side by side."""
    parts = [values[..., column.begin : column.end] for column in columns]
    return torch.cat(parts, -1) if isinstance(values, Tensor) else np.concatenate(parts, -1)


def scatter_columns(values: Array, columns: Sequence[Column], target: Array) -> None:
    """Copy values that lie side by side to their columns."""
    begin = 0
    for column in columns:
        end = begin + column.end - column.begin
        target[..., column.begin : column.end] = values[..., begin:end]
        begin = end


def clear_columns(values: Array, columns: Sequence[Column]) -> None:
    """Set columns to zero."""
    for column in columns:
        values[..., column.begin : column.end] = 0
