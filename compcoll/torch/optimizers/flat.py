"""Several parameters as one vector in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidArgument, UnsupportedDType
from ..buffers import COMPRESSIBLE


class Flat:
    """The layout of parameters that lie one behind the other.

    Parameters
    ----------
    parameters : mapping
        By name, in their order.

    Attributes
    ----------
    names : tuple of str
        Of the parameters.
    shapes, sizes : dict
        Their shapes and numbers of elements, by name.
    dtype : torch.dtype
        In which vectors are computed on: float64 if a parameter is, else float32.

    Raises
    ------
    InvalidArgument
        If there are none.
    UnsupportedDType
        If one is of another type than float16, bfloat16, float32 and float64.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        if not parameters:
            raise InvalidArgument("there are no parameters to be trained")
        for name, parameter in parameters.items():
            if parameter.dtype not in COMPRESSIBLE:
                known = ", ".join(map(str, COMPRESSIBLE))
                raise UnsupportedDType(f"parameter {name!r} is of {parameter.dtype}: it must be of {known}")
        self.names = tuple(parameters)
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        self.dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)

    def zeros(self) -> Tensor:
        """Make a vector of zeros."""
        return torch.zeros(sum(self.sizes.values()), dtype=self.dtype)

    def views(self, vector: Tensor) -> list[Tensor]:
        """View a vector's memory in the parameters' shapes."""
        parts = vector.split(list(self.sizes.values()))
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]

    def pack(self, tensors: Iterable[Tensor | None], vector: Tensor) -> Tensor:
        """Copy tensors of the parameters' shapes into a vector; zeros for None."""
        for view, tensor in zip(self.views(vector), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return vector

    def by_name(self, vector: Tensor) -> dict[str, Any]:
        """Split a vector into arrays of the parameters' shapes that share its memory, by name."""
        return {name: view.numpy() for name, view in zip(self.names, self.views(vector), strict=True)}

    def load(self, arrays: Mapping[str, Tensor], vector: Tensor) -> None:
        """Copy what a state holds of the parameters into a vector; zeros where it holds nothing."""
        for name, view in zip(self.names, self.views(vector), strict=True):
            if name in arrays:
                view.copy_(arrays[name].reshape(view.shape))
            else:
                view.zero_()
