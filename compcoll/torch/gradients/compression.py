"""Compressed gradients for one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...collectives import choose
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ...registry import as_codec
from ...sparse import Sparsifier
from ..policy import KINDS, SMALLEST, exact_parameters
from .advice import advise
from .bucket import Feedback
from .ddp import GradientCompression
from .fsdp import ShardCompression


def compress(
    model: nn.Module,
    codec: str | Codec | None = "zfp",
    *,
    feedback: Feedback = True,
    exclude: Iterable[str] | Callable[[str, nn.Parameter], bool] = KINDS,
    smallest: int = SMALLEST,
    algorithm: str = choose.AUTO,
    selection: str = "parameter",
    parameters: str | Codec | None = None,
    timeout: float | None = None,
    over: str = "auto",
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
    smallest : int
        Parameters of fewer elements stay exact.
    algorithm : str
        As for `compcoll.allreduce`. ``"auto"`` does not compress buckets for which that would not pay.
    selection : str
        Of what DistributedDataParallel's gradients a sparse method selects elements, and takes thresholds and largest
        magnitudes: ``"parameter"``, as the papers do, one message for each, where parameters of fewer than 1024
        elements go with a larger one; or ``"bucket"``, with fewer messages, in which layers with small gradients may
        wait for long. Of FSDP2's modules, each rank's row of a module's gradients is one.
    parameters : str or Codec, optional
        What FSDP2's parameters are sent with when they are gathered. Each rank keeps its own part as it is, so that
        losses do not add up; they are sent exactly by default.
    timeout : float, optional
        Seconds without progress of a collective after which all ranks give up; by default COMPCOLL_TIMEOUT, or else the
        process group's.
    over : {"auto", "mpi", "group"}
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
        If ``over="mpi"``, and MPI did not start these ranks, or there is none.
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
        if parameters is not None:
            raise InvalidArgument("parameters= is for FSDP2, which gathers them: DistributedDataParallel does not")
    elif isinstance(model, FSDPModule):
        module = model
    else:
        raise InvalidArgument(
            f"model is a {type(model).__name__}: wrap it in DistributedDataParallel, or apply fully_shard, first"
        )
    chosen = as_codec(codec, codec_options)
    advise(chosen, optimizer)
    for collective in ("allreduce",) if module is not model else ("reduce_scatter", "allgather"):
        choose.check(collective, algorithm)
    exact = exact_parameters(module, exclude, smallest)
    if module is model:
        if not isinstance(feedback, bool) or (isinstance(chosen, Sparsifier) and chosen.state is not ErrorFeedback):
            raise InvalidArgument(f"{chosen!r} with feedback={feedback!r}: fully_shard takes an ErrorFeedback's only")
        return ShardCompression(
            model,
            chosen,
            as_codec(parameters, {}, "parameters"),
            algorithm,
            exact,
            feedback=feedback,
            timeout=timeout,
            over=over,
        )
    return GradientCompression(
        *(model, chosen, algorithm, exact), feedback=feedback, selection=selection, timeout=timeout, over=over
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
