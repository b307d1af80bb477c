"""Compressed gradients for one model: `compress`, advice on methods under an optimizer, and `DGC`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...codecs.options import real
from ...codecs.registry import as_codec
from ...deprecated import renamed_arguments
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ...plan import choose
from ...sparse import DGCFeedback, Sparsifier, TopK
from ..policy import KINDS, SMALLEST, exact_parameters
from .bucket import Feedback
from .ddp import GradientCompression
from .fsdp import ShardCompression

# From the studies: docs/measurements/study-text.md.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_MUCH = 0.9
"""Momentum of SGD from which on methods whose gradients come late were seen to lose."""

# What ended more than 2 % above uncompressed gradients.
_UNDER_ADAM = {
    "onebit": "it ended at 2.72 nats, and uncompressed gradients at 2.29",
    "topk": "1 % of the elements ended at 2.82 nats, and uncompressed gradients at 2.29",
    "variance": "it ended at 2.50 nats, and uncompressed gradients at 2.29",
    "minmax": "2 bits a value ended at 2.52 nats, and uncompressed gradients at 2.29",
    "zfp": "4 bits a value diverged",
}
_AT_MOST: dict[str, tuple[str, float]] = {"minmax": ("bits", 2), "zfp": ("rate", 4)}
"""Of methods that fail with few bits alone: the option that tells them, and the most that was seen to fail."""
_UNDER_MOMENTUM = {
    "onebit": "it ended at 3.17 nats, and uncompressed gradients at 2.45",
    "topk": "1 % of the elements ended at 2.70 nats, and uncompressed gradients at 2.45",
    "variance": "it ended at 2.56 nats, and uncompressed gradients at 2.45",
    "hybrid": "it ended at 2.93 nats, and uncompressed gradients at 2.45",
}
_warned: set[tuple[str, str]] = set()


@renamed_arguments(smallest="min_numel", over="transport", parameters="param_codec")
def compress(
    model: nn.Module,
    codec: str | Codec | None = "zfp",
    *,
    feedback: Feedback = True,
    exclude: Iterable[str] | Callable[[str, nn.Parameter], bool] = KINDS,
    min_numel: int = SMALLEST,
    algorithm: str = choose.AUTO,
    selection: str = "parameter",
    param_codec: str | Codec | None = None,
    timeout: float | None = None,
    transport: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    **codec_options: Any,
) -> GradientCompression | ShardCompression:
    """Have a model's gradients averaged compressed, while back-propagation goes on. Collective.

    The process group may be any backend's (it still does all else). Gradients travel over MPI where it started the
    ranks, else over a gloo group of the same ranks: under torchrun no MPI is needed. All ranks end with the same bits,
    which for one algorithm are the same either way.

    Parameters
    ----------
    model : DistributedDataParallel, or a module that `fully_shard` was applied to
        Before its first backward pass; torch.compile may have wrapped it. Of FSDP2's modules, the reduce-scatter of
        gradients is compressed.
    codec : str or Codec, optional
        As for `compcoll.allreduce`; None sends gradients as they are.
    feedback : bool or callable
        Whether what compression loses is added to the next step's gradients. Kept by parameter: for each compressed
        one as much memory as its gradient. A callable makes another feedback than the codec's usual one, such as
        ``partial(compcoll.sparse.DGCFeedback, 0.9)``: one is made for each parameter, or bucket (see ``selection``).
    exclude : iterable of str, or callable
        Gradients that stay exact: kinds (``"embeddings"``, ``"norms"``, ``"biases"``: the default) and patterns of
        parameters' names, such as ``"head.*"``; or a function of name and parameter that decides alone.
    min_numel : int
        Parameters of fewer elements stay exact.
    algorithm : str
        As for `compcoll.allreduce`. ``"auto"`` does not compress buckets for which that would not pay.
    selection : str
        Of what DistributedDataParallel's gradients a sparse method selects elements, and takes thresholds and largest
        magnitudes: ``"parameter"``, as the papers do, one message for each, where parameters of fewer than 1024
        elements go with a larger one; or ``"bucket"``, with fewer messages, in which layers with small gradients may
        wait for long. Of FSDP2's modules, each rank's row of a module's gradients is one.
    param_codec : str or Codec, optional
        What FSDP2's parameters are sent with when they are gathered. Each rank keeps its own part as it is, so that
        losses do not add up; they are sent exactly by default.
    timeout : float, optional
        Seconds without progress of a collective after which all ranks give up; by default COMPCOLL_TIMEOUT, or else the
        process group's.
    transport : {"auto", "mpi", "group"}
        What gradients travel over: MPI where the ranks are MPI's and else the group, or one of both.
    optimizer : torch.optim.Optimizer, optional
        The one that takes these gradients: a method that was measured not to go with it is warned of, once.
    **codec_options
        Configuration of a codec given by name, such as ``rate=8``.

    Returns
    -------
    GradientCompression or ShardCompression
        Accounts, and the state to be saved with a checkpoint.

    Raises
    ------
    InvalidArgument
        If the model is not wrapped, or PyTorch gives its hooks no gradients, or an option is not allowed, also by the
        codec: it is tried on a few zeros.
    HookTaken
        If something else reduces this model's gradients already.
    NotUnderMPI, MPIMissing
        If ``transport="mpi"``, and MPI did not start these ranks, or there is none.
    ThreadsUnavailable
        If MPI started them, but not for several threads.
    UnsupportedDevice
        If the model is neither on the CPU nor on a CUDA device that CuPy can use, or has sparse gradients on one.
    CollectiveMismatch
        If models or settings differ between ranks.

    Notes
    -----
    Gradients on a GPU are compressed there, and what compression loses stays there: see docs/gpu.md.

    Sparse gradients, those of ``nn.Embedding(sparse=True)``, stay exact: all ranks gather all rows.

    A mean is summed in float32, or float64 for such gradients, of values that are divided first: a half can hold it
    wherever it holds the gradients. Only ``codec="cast"`` to float16 can lose tiny values, which feedback makes up for.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 10))
    >>> compression = compcoll.torch.compress(model, codec="zfp", rate=8)

    The methods by variance need second moments of single samples:

    >>> model = DistributedDataParallel(nn.Linear(64, 10))
    >>> compression = compcoll.torch.compress(model, codec="variance", alpha=1.5)
    >>> inputs, targets = torch.ones(8, 64), torch.zeros(8, dtype=torch.long)
    >>> loss = compression.backward(nn.functional.cross_entropy, inputs, targets)  # in place of loss.backward()

    See Also
    --------
    compcoll.torch.DGC : Deep Gradient Compression, which changes the optimizer, too.
    """
    model = getattr(model, "_orig_mod", model)  # which torch.compile has wrapped
    _check_hooks_run(model)
    if isinstance(model, DistributedDataParallel):
        module = model.module
        if param_codec is not None:
            raise InvalidArgument("param_codec= is for FSDP2, which gathers them: DistributedDataParallel does not")
    elif isinstance(model, FSDPModule):
        module = model
    else:
        raise InvalidArgument(
            f"model is a {type(model).__name__}: wrap it in DistributedDataParallel or apply fully_shard"
        )
    chosen = as_codec(codec, codec_options)
    advise(chosen, optimizer)
    for collective in ("allreduce",) if module is not model else ("reduce_scatter", "allgather"):
        choose.check(collective, algorithm)
    exact = exact_parameters(module, exclude, min_numel)
    if module is model:
        if not isinstance(feedback, bool) or (isinstance(chosen, Sparsifier) and chosen.state is not ErrorFeedback):
            raise InvalidArgument(f"{chosen!r} with feedback={feedback!r}: fully_shard takes an ErrorFeedback's only")
        return ShardCompression(
            model,
            chosen,
            as_codec(param_codec, {}, "param_codec"),
            algorithm,
            exact,
            feedback=feedback,
            timeout=timeout,
            transport=transport,
        )
    return GradientCompression(
        *(model, chosen, algorithm, exact), feedback=feedback, selection=selection, timeout=timeout, transport=transport
    )


def _check_hooks_run(model: nn.Module) -> None:
    """Refuse what PyTorch gives no gradients to compress, or not as it gives them without torch.compile."""
    reason = ""
    if getattr(model, "_use_python_reducer", False):
        reason = 'optimize_ddp="python_reducer" calls communication hooks without buckets; make the model with another'
    elif isinstance(model, ReplicateModule):
        reason = "replicate() has no reduce-scatter; wrap the model in DistributedDataParallel"
    elif isinstance(model, FSDPModule) and torch._dynamo.config.compiled_autograd:
        reason = "with torch._dynamo.config.compiled_autograd FSDP2 does not reduce gradients; turn it off"
    if reason:
        raise InvalidArgument(f"{type(model).__name__} cannot be compressed: {reason}")


def advise(codec: Codec | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn, once for each pair, of a codec of gradients that was measured not to go with an optimizer.

    Raises
    ------
    InvalidArgument
        If it is no optimizer.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer={optimizer!r}: the torch.optim.Optimizer of the model's parameters is needed")
    if codec is None:
        return
    kind = type(optimizer).__name__
    instead = "compcoll.torch.OneBitAdam, which compresses the momentum, or DiLoCo"
    if isinstance(optimizer, _ADAMS):
        option, most = _AT_MOST.get(codec.name, ("", math.inf))
        enough = (getattr(codec, option, None) or math.inf) > most
        measured = None if enough else _UNDER_ADAM.get(codec.name)
    elif max(group.get("momentum", 0.0) for group in optimizer.param_groups) >= _MUCH:
        measured = _UNDER_MOMENTUM.get(codec.name)
        kind, instead = f"{kind} with a momentum of {_MUCH:g} or more", "a smaller momentum, or compcoll.torch.DGC"
    else:
        measured = None
    if measured is None or (codec.name, kind) in _warned:
        return
    _warned.add((codec.name, kind))
    warnings.warn(
        f"codec={codec.name!r} on gradients does not go with {kind}: in the study of a small GPT {measured}. Take "
        f"{instead} (docs/measurements/study-text.md)",
        stacklevel=3,
    )


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

    @renamed_arguments(smallest="min_numel", over="transport")
    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        density: float = 0.001,
        *,
        clip: float | None = None,
        select: str = "ldte",
        exclude: Iterable[str] | Callable[[str, nn.Parameter], bool] = KINDS,
        min_numel: int = SMALLEST,
        algorithm: str = choose.AUTO,
        selection: str = "parameter",
        timeout: float | None = None,
        transport: str = "auto",
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise InvalidArgument(f"model is a {type(model).__name__}: wrap it in DistributedDataParallel first")
        codec = TopK(density, select)
        limit = None if clip is None else real("DGC: clip", clip)
        if limit is not None and not 0 < limit < math.inf:
            raise InvalidArgument(f"DGC: clip={clip!r} must be finite and above 0")
        choose.check("allreduce", algorithm)
        exact = exact_parameters(model.module, exclude, min_numel)
        momentum = _momentum_of(optimizer)
        feedback = partial(DGCFeedback, momentum)
        super().__init__(
            *(model, codec, algorithm, exact),
            feedback=feedback,
            selection=selection,
            timeout=timeout,
            transport=transport,
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
