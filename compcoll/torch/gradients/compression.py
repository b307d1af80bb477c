"""Compressed gradients for one model: `compress`, warnings about unsuitable optimizers, and `DGC`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...codecs.options import real
from ...codecs.registry import as_codec, without_reference
from ...deprecated import renamed_arguments
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ...plan import choose
from ...sparse import DGCFeedback, Sparsifier, TopK
from .. import private
from ..groups.membership import accelerate_runs_one_process
from ..hooks import check_hooks_run
from ..policy import KINDS, SMALLEST, Codecs, as_codecs, each_codec, exact_parameters
from .bucket import Feedback
from .ddp import GradientCompression
from .fsdp import ShardCompression

# From the studies: docs/measurements/study-text.md and study-muon.md.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
_MUCH = 0.9
"""SGD momentum at or above which methods that delay gradients ended with a higher loss in the study."""

# Codecs whose training loss ended more than 2 % above that of uncompressed gradients.
_UNDER_ADAM = {
    "onebit": "it ended at 2.72 nats, and uncompressed gradients at 2.30",
    "topk": "1 % of the elements ended at 2.82 nats, and uncompressed gradients at 2.30",
    "variance": "it ended at 2.50 nats, and uncompressed gradients at 2.30",
    "minmax": "2 bits a value ended at 2.52 nats, and uncompressed gradients at 2.30",
    "zfp": "4 bits a value diverged",
}
_COARSE: dict[str, Callable[[Any], bool]] = {
    "minmax": lambda codec: codec.bits <= 2,
    "zfp": lambda codec: codec.rate is not None and codec.rate <= 4,
}
"""Whether a codec is as coarse as what failed, for codecs that failed only at low precision."""
_UNDER_MOMENTUM = {
    "onebit": "it ended at 3.17 nats, and uncompressed gradients at 2.45",
    "topk": "1 % of the elements ended at 2.70 nats, and uncompressed gradients at 2.45",
    "variance": "it ended at 2.56 nats, and uncompressed gradients at 2.45",
    "hybrid": "it ended at 2.93 nats, and uncompressed gradients at 2.45",
}
_UNDER_MUON = {
    "onebit": "it ended at 2.82 nats, and uncompressed gradients at 2.59",
    "topk": "1 % of the elements ended at 3.20 nats, and uncompressed gradients at 2.59",
    "variance": "it ended at 2.67 nats, and uncompressed gradients at 2.59",
    "minmax": "4 bits a value in blocks of 2048 ended at 2.65 nats, and uncompressed gradients at 2.59",
    "zfp": "4 bits a value diverged",
}
_COARSE_UNDER_MUON = _COARSE | {"minmax": lambda codec: codec.bits <= (4 if codec.block >= 2048 else 2)}
_warned: set[tuple[str, str]] = set()


@renamed_arguments(smallest="min_numel", over="transport", parameters="param_codec")
def compress(
    model: nn.Module,
    codec: str | Codec | Mapping[str, str | Codec | None] | None = "int8",
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
    """Average a model's gradients in compressed form, overlapped with back-propagation. Collective.

    The process group may have any backend, and still runs all other collectives. Gradients are sent over MPI if
    MPI started the ranks, else over a gloo group of the same ranks: torchrun needs no MPI. All ranks get identical
    bits. For a given algorithm, both transports give the same bits.

    Parameters
    ----------
    model : DistributedDataParallel, or a module that `fully_shard` was applied to
        The model, before its first backward pass. torch.compile may have wrapped it. For FSDP2 modules, the
        reduce-scatter of gradients is compressed. They may be on different meshes, as experts are.
    codec : str, Codec or mapping, optional
        As for `compcoll.allreduce`. None sends gradients uncompressed. The default loses an eighth of what ZFP at
        the same size loses of normally distributed gradients: see docs/codecs.md. A mapping gives codecs by pattern of
        parameter names, such as ``{"*.mlp.*": "mx:format=mxfp4", "*": "int8"}``: the first pattern that fits a
        parameter's name decides. A parameter that no pattern fits stays exact.
    feedback : bool or callable
        Whether to add each step's residual to the next step's gradients. The residuals need 4 bytes for each compressed
        element (float64: 8). A callable makes a feedback other than the codec's default, such as
        ``partial(compcoll.sparse.DGCFeedback, 0.9)``. It is called for each parameter, or bucket (see ``selection``).
    exclude : iterable of str, or callable
        Gradients that stay exact: kinds (default: ``"embeddings"``, ``"norms"``, ``"biases"``) and patterns of
        parameter names, such as ``"head.*"``. A function of name and parameter replaces both.
    min_numel : int
        Parameters with fewer elements stay exact.
    algorithm : str
        As for `compcoll.allreduce`. ``"auto"`` compresses only buckets for which this saves time. All codecs of a
        mapping use the same algorithm.
    selection : str
        Unit in which a sparse codec selects elements under DistributedDataParallel, by threshold or magnitude.
        ``"parameter"``, as in the papers, sends one message per parameter; parameters with fewer than 1024 elements
        join a larger one. ``"bucket"`` sends fewer messages, but layers with small gradients may wait long until their
        elements are selected. With FSDP2, the unit is each rank's row of a module's gradients.
    param_codec : str or Codec, optional
        Codec for FSDP2's parameter all-gather. Each rank keeps its own shard uncompressed, so errors do not
        accumulate. By default parameters are sent exactly.
    timeout : float, optional
        Seconds without progress after which a collective fails on all ranks. Default: COMPCOLL_TIMEOUT, or else the
        process group's timeout.
    transport : {"auto", "mpi", "group"}
        Transport of the gradients. ``"auto"`` is MPI if MPI started the ranks, and else the group.
    optimizer : torch.optim.Optimizer, optional
        The optimizer that uses these gradients. `compress` warns once if measurements showed that the codec does not
        suit it.
    **codec_options
        Configuration of a codec given by name, such as ``rate=8``.

    Returns
    -------
    GradientCompression or ShardCompression
        Statistics, and the state to save with a checkpoint.

    Raises
    ------
    InvalidArgument
        If the model is not wrapped, PyTorch passes no gradients to its hooks, an option is invalid, or a pattern
        decides for no parameter. A trial on a few zeros checks each codec.
    HookTaken
        If another communication hook or method already reduces this model's gradients.
    NotUnderMPI, MPIMissing
        If ``transport="mpi"``, and MPI did not start these ranks, or is not installed.
    ThreadsUnavailable
        If MPI started the ranks without support for several threads.
    UnsupportedDevice
        If the model is neither on the CPU nor on a CUDA device that CuPy can use, or has sparse gradients on a GPU.
    CollectiveMismatch
        If models or settings differ between ranks.

    Notes
    -----
    Gradients on a GPU are compressed there, and their residuals stay there: see docs/gpu.md.

    Rank 0 logs what will be compressed (logger ``compcoll``, level INFO). If nothing will be, it logs a warning that
    says why: on one node, for example, memory is faster than any codec.

    Sparse gradients, such as those of ``nn.Embedding(sparse=True)``, stay exact: all ranks gather all rows.

    Means are summed in float32, or in float64 for float64 gradients. Values are divided before they are summed, so the
    mean does not overflow if the gradients do not. Only ``codec="cast"`` to float16 can lose tiny values; feedback
    keeps them for later steps.

    Examples
    --------
    >>> model = DistributedDataParallel(nn.Linear(64, 10))
    >>> compression = compcoll.torch.compress(model)

    Codecs by parameter:

    >>> model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    >>> compression = compcoll.torch.compress(model, {"0.*": "mx:format=mxfp4", "*": "int8"})

    Variance-based codecs need second moments of single samples:

    >>> model = DistributedDataParallel(nn.Linear(64, 10))
    >>> compression = compcoll.torch.compress(model, codec="variance", alpha=1.5)
    >>> inputs, targets = torch.ones(8, 64), torch.zeros(8, dtype=torch.long)
    >>> loss = compression.backward(nn.functional.cross_entropy, inputs, targets)  # in place of loss.backward()

    See Also
    --------
    compcoll.torch.DGC : Deep Gradient Compression, which also changes the optimizer.
    """
    model = getattr(model, private.COMPILED, model)  # unwrap torch.compile
    check_hooks_run(model)
    if isinstance(model, DistributedDataParallel):
        module = model.module
        if param_codec is not None:
            raise InvalidArgument("param_codec= is for FSDP2 only: DistributedDataParallel gathers no parameters")
    elif isinstance(model, FSDPModule):
        module = model
    else:
        raise _unwrapped(model, "wrap it in DistributedDataParallel or apply fully_shard")
    chosen = as_codecs(codec, codec_options)
    advise(chosen, optimizer)
    for collective in ("allreduce",) if module is not model else ("reduce_scatter", "allgather"):
        choose.check(collective, algorithm)
    exact = exact_parameters(module, exclude, min_numel)
    if module is model:
        shards_codec = as_codec(param_codec, {}, "param_codec")
        if shards_codec is not None:
            without_reference(shards_codec, "param_codec=")
        unfit = [one for one in each_codec(chosen) if isinstance(one, Sparsifier) and one.state is not ErrorFeedback]
        if unfit or not isinstance(feedback, bool):
            given = ", ".join(map(repr, unfit)) or repr(chosen)
            raise InvalidArgument(f"{given} with feedback={feedback!r}: fully_shard supports only ErrorFeedback")
        return ShardCompression(
            model,
            chosen,
            shards_codec,
            algorithm,
            exact,
            feedback=feedback,
            timeout=timeout,
            transport=transport,
        )
    return GradientCompression(
        *(model, chosen, algorithm, exact), feedback=feedback, selection=selection, timeout=timeout, transport=transport
    )


def _unwrapped(model: nn.Module, advice: str) -> InvalidArgument:
    """Return the error for a model that is not wrapped, which Accelerate does if it runs several processes."""
    return InvalidArgument(f"model is a {type(model).__name__}: {accelerate_runs_one_process() or advice}")


def advise(codec: Codecs, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn, once per pair, if measurements showed that a gradient codec does not suit an optimizer.

    Raises
    ------
    InvalidArgument
        If ``optimizer`` is not a torch.optim.Optimizer.
    """
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer={optimizer!r}: the torch.optim.Optimizer of the model's parameters is needed")
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
    kind, page, coarse = type(optimizer).__name__, "study-text", _COARSE
    if isinstance(optimizer, _ADAMS):
        measured = _UNDER_ADAM
        instead = "compcoll.torch.OneBitAdam, which compresses the momentum, or DiLoCo"
    elif isinstance(optimizer, torch.optim.Muon):
        measured, page, coarse = _UNDER_MUON, "study-muon", _COARSE_UNDER_MUON
        instead = "codec='int8', or codec='mx' with format='mxfp4' and rotate=True"
    elif isinstance(optimizer, torch.optim.SGD) and max(each["momentum"] for each in optimizer.param_groups) >= _MUCH:
        measured, kind = _UNDER_MOMENTUM, f"{kind} with a momentum of {_MUCH:g} or more"
        instead = "a smaller momentum" + ", or compcoll.torch.DGC" * _suits_dgc(optimizer)
    else:
        return
    for each in each_codec(codec):
        fails = each.name in measured and coarse.get(each.name, lambda codec: True)(each)
        if not fails or (each.name, kind) in _warned:
            continue
        _warned.add((each.name, kind))
        warnings.warn(
            f"codec={each.name!r} on gradients does not suit {kind}: in the study of a small GPT, "
            f"{measured[each.name]}. Use {instead} (docs/measurements/{page}.md)",
            stacklevel=4,  # the caller of `compress`, which is decorated
        )


def _suits_dgc(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `DGC` accepts an optimizer."""
    try:
        _momentum_of(optimizer)
    except InvalidArgument:
        return False
    return True


class DGC(GradientCompression):
    """Average a model's gradients by Deep Gradient Compression. Collective.

    For compressed parameters, the momentum moves from the optimizer into the compression (momentum correction):
    ``u ← m · u + g; v ← v + u``. The largest elements of v are sent. The momentum of a sent element becomes zero
    (momentum factor masking). Exact parameters keep the optimizer's momentum. The optimizer still applies weight decay
    and the learning rate.

    Parameters
    ----------
    model : DistributedDataParallel
        The model, before its first backward pass.
    optimizer : torch.optim.SGD
        SGD with momentum, before its first step. Its groups are split: compressed parameters get a momentum of 0.
        Create learning rate schedulers afterwards.
    density : float
        Fraction of the elements to send. It can be changed between steps, to the same value on all ranks: see the
        example.
    clip : float, optional
        Largest Euclidean norm of a parameter's gradient. Before accumulation, each rank clips its own gradient to
        ``clip`` divided by the square root of the number of ranks.
    select : str
        How to find the largest elements, as in `TopK`.
    exclude, min_numel, algorithm, selection, timeout, transport
        As in `compress`.

    Raises
    ------
    InvalidArgument
        If the model is not wrapped, the optimizer is not SGD with plain momentum, or an option is invalid.
    HookTaken, NotUnderMPI, ThreadsUnavailable, CollectiveMismatch
        As in `compress`.

    Notes
    -----
    The paper clips by the norm of all gradients, which is known only after back-propagation. The authors' code clips
    each parameter's gradient, as this class does.

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
            raise _unwrapped(model, "wrap it in DistributedDataParallel first")
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
        """Fraction of the elements that is sent."""
        codec = self.codec
        assert isinstance(codec, TopK)
        return codec.density

    @density.setter
    def density(self, density: float) -> None:
        codec = self.codec
        assert isinstance(codec, TopK)
        self.codec = replace(codec, density=density)


def _clipped(limit: float, gradient: Tensor) -> Tensor:
    """Return the gradient scaled to at most norm ``limit``, or unchanged if its norm is not finite."""
    norm = float(gradient.norm(dtype=torch.promote_types(gradient.dtype, torch.float32)))
    return gradient * (limit / norm) if limit < norm < math.inf else gradient


def _momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the momentum shared by all parameter groups, or raise InvalidArgument."""
    supported = "DGC corrects the momentum of torch.optim.SGD, without Nesterov's and without dampening"
    if not isinstance(optimizer, torch.optim.SGD):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}: {supported}; for others, use compress() with its default codec"
        )
    groups = optimizer.param_groups
    moments = sorted({group["momentum"] for group in groups})
    if len(moments) != 1 or any(group["nesterov"] or group["dampening"] for group in groups):
        raise InvalidArgument(
            f"optimizer has momentum={', '.join(map(str, moments))}: {supported}, and the same in all groups"
        )
    if optimizer.state:
        raise InvalidArgument("optimizer has made steps already, and would lose its momentum: make DGC before them")
    return float(moments[0])


def _take_momentum(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Set the momentum of some parameters to 0, splitting the optimizer's groups where needed."""
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
