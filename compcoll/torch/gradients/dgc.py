"""Deep Gradient Compression: largest elements, with the optimizer's momentum where elements wait to be sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...codecs.options import real
from ...collectives import choose
from ...errors import InvalidArgument
from ...sparse import DGCFeedback, TopK
from ..policy import KINDS, SMALLEST, exact_parameters
from .ddp import GradientCompression


class DGC(GradientCompression):
    """Average a model's gradients by Deep Gradient Compression. Collective.

    The momentum of compressed parameters moves from the optimizer into the compression (momentum correction), and ends
    there where an element was sent (momentum factor masking): each gradient becomes ``u ← m · u + g; v ← v + u``, and
    the largest elements of v are sent. Parameters that stay exact keep the optimizer's momentum. Weight decay and the
    learning rate stay the optimizer's.

    Parameters
    ----------
    model : DistributedDataParallel
        Before its first backward pass.
    optimizer : torch.optim.SGD
        With momentum, before its first step. Its groups are split: compressed parameters get a momentum of 0. Learning
        rate schedulers are to be made afterwards.
    density : float
        The part of the elements to send. It can be set from step to step, alike on all ranks: see the example.
    clip : float, optional
        Largest Euclidean norm of a parameter's gradient. Each rank clips its own, before it is accumulated, to this
        divided by the square root of the number of ranks.
    select : str
        How the largest elements are found, as of `TopK`.
    exclude, smallest, algorithm, selection, timeout, over
        As of `compress`.

    Raises
    ------
    InvalidArgument
        If the model is not wrapped, the optimizer is no SGD with a plain momentum, or an option is not allowed.
    HookTaken, NotUnderMPI, ThreadsUnavailable, CollectiveMismatch
        As `compress` does.

    Notes
    -----
    The paper clips by the norm of all gradients, which is known only after back-propagation; its authors' code clips
    each parameter's, as this does.

    References
    ----------
    Y. Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
    2018, section 3; https://github.com/synxlin/deep-gradient-compression.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 64))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> compression = compcoll.torch.DGC(model, optimizer)
    >>> for epoch in range(5):
    ...     compression.density = compcoll.sparse.warmup_density(epoch)
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        density: float = 0.001,
        *,
        clip: float | None = None,
        select: str = "ldte",
        exclude: Iterable[str] | Callable[[str, nn.Parameter], bool] = KINDS,
        smallest: int = SMALLEST,
        algorithm: str = choose.AUTO,
        selection: str = "parameter",
        timeout: float | None = None,
        over: str = "auto",
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InvalidArgument(f"model is a {type(model).__name__}: wrap it in DistributedDataParallel first")
        codec = TopK(density, select)
        limit = None if clip is None else real("DGC: clip", clip)
        if limit is not None and not 0 < limit < math.inf:
            raise InvalidArgument(f"DGC: clip={clip!r} must be finite and above 0")
        choose.check("allreduce", algorithm)
        exact = exact_parameters(model.module, exclude, smallest)
        momentum = _momentum_of(optimizer)
        feedback = partial(DGCFeedback, momentum)
        super().__init__(
            *(model, codec, algorithm, exact), feedback=feedback, selection=selection, timeout=timeout, over=over
        )
        compressed = list(self._parameters.values())
        _take_momentum(optimizer, compressed)
        if limit is not None:
            local = limit / math.sqrt(self._communicator.size)
            for parameter in compressed:
                parameter.register_hook(partial(_clipped, local))

    @property
    def density(self) -> float:
        """The part of the elements that is sent."""
        codec = self.codec
        assert isinstance(codec, TopK)
        return codec.density

    @density.setter
    def density(self, density: float) -> None:
        codec = self.codec
        assert isinstance(codec, TopK)
        self.codec = replace(codec, density=density)


def _clipped(limit: float, gradient: Tensor) -> Tensor:
    """A gradient of at most that norm; as it is where it is not finite."""
    norm = float(gradient.norm(dtype=torch.promote_types(gradient.dtype, torch.float32)))
    return gradient * (limit / norm) if limit < norm < math.inf else gradient


def _momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """The momentum that all of an optimizer's parameters have."""
    told = "DGC corrects the momentum of torch.optim.SGD, without Nesterov's and without dampening"
    if not isinstance(optimizer, torch.optim.SGD):
        raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}: {told}; others go with codec='topk'")
    groups = optimizer.param_groups
    moments = sorted({group["momentum"] for group in groups})
    if len(moments) != 1 or any(group["nesterov"] or group["dampening"] for group in groups):
        raise InvalidArgument(f"optimizer has momentum={', '.join(map(str, moments))}: {told}, and one for all")
    if optimizer.state:
        raise InvalidArgument("optimizer has made steps already: its momentum would be lost")
    return float(moments[0])


def _take_momentum(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Split the optimizer's groups, so that some parameters have none."""
    taken = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        without = [parameter for parameter in group["params"] if id(parameter) in taken]
        if not without:
            continue
        kept = [parameter for parameter in group["params"] if id(parameter) not in taken]
        if not kept:
            group["momentum"] = 0.0
            continue
        group["params"] = kept
        optimizer.add_param_group({**group, "params": without, "momentum": 0.0})
