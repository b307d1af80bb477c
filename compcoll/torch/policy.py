"""Choice of the gradients to compress, parameter by parameter."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..codecs.base import Codec
from ..communicator import Communicator
from ..errors import AccuracyWarning, InvalidArgument
from ..feedback import ErrorFeedback
from ..plan import choose
from ..sparse import Sparsifier
from .buffers import COMPRESSIBLE, Array, array_of

_log = logging.getLogger("compcoll")

KINDS = ("embeddings", "norms", "biases")
"""Kinds of parameters that stay exact by default. Errors harm them, and they are small or most of their rows zero."""

SMALLEST = 1024
"""Number of elements from which a parameter is worth compressing."""


def check_whole(name: str, value: object, lowest: int) -> None:
    """Check that an option is an integer of at least ``lowest``.

    Raises
    ------
    InvalidArgument
        If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidArgument(f"{name}={value!r}: an integer of {lowest} or more is needed")


def compressing(codec: Codec | None) -> str:
    """Return an allreduce algorithm that always compresses, even where this saves no time."""
    return "sparse_ring" if isinstance(codec, Sparsifier) else "direct"


def try_codec(
    communicator: Communicator,
    zeros: Iterable[Array],
    codec: Codec | None,
    algorithm: str,
    feedback: Callable[[], ErrorFeedback] | None,
    *,
    scatter: bool = False,
) -> None:
    """Average a few zeros, so that a codec that later calls would reject is rejected now. Collective.

    Parameters
    ----------
    communicator : Communicator
        Communicator of the ranks that will average.
    zeros : iterable of array
        One array for each element type.
    codec, algorithm
        As in the later calls. ``"auto"`` would not compress so few elements, so it is replaced by an algorithm that
        does.
    feedback : callable or None
        Makes the feedback of an average.
    scatter : bool
        Whether the averages are reduce-scatters, rather than allreduces.
    """
    collective = communicator.reduce_scatter if scatter else communicator.allreduce
    if algorithm == choose.AUTO:
        algorithm = "direct" if scatter else compressing(codec)
    for each in zeros if codec is not None else ():
        made = None if feedback is None else feedback()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccuracyWarning)  # later calls may have another algorithm, and warn then
            collective(each, op="mean", feedback=made, codec=codec, algorithm=algorithm)


def log_choice(
    communicator: Communicator,
    codec: Codec | None,
    algorithm: str,
    parameters: Mapping[str, Tensor],
    exact: Mapping[str, bool],
    largest: int,
    *,
    scatter: bool = False,
) -> None:
    """Log on rank 0 which gradients will be compressed, and how. If none will be, this is a warning.

    Parameters
    ----------
    communicator, codec, algorithm, scatter
        As of `try_codec`.
    parameters : mapping
        The parameters, by name.
    exact : mapping
        Whether a parameter stays exact, by name.
    largest : int
        Bytes of the largest buffer of gradients that is averaged at once.
    """
    if communicator.rank != 0:
        return
    if codec is None:
        _log.info("compress: no codec was given, so gradients are sent uncompressed")
        return
    compressed = [parameters[name] for name, kept in exact.items() if not kept]
    sizes = Counter[torch.dtype]()
    for parameter in compressed:
        sizes[parameter.dtype] += parameter.numel()
    elements = f"{sizes.total()} of {sum(p.numel() for p in parameters.values())} elements"
    what = f"compress: {len(compressed)} of {len(parameters)} parameters ({elements}) for {codec!r}"
    plans = [
        communicator.explain(
            array_of(compressed[0].detach().new_empty(max(min(n, largest // dtype.itemsize), 1), dtype=dtype)),
            collective="reduce_scatter" if scatter else "allreduce",
            op="mean",
            codec=codec,
            algorithm=algorithm,
        )
        for dtype, n in sizes.items()
    ]
    how = "; ".join(plan.summary for plan in plans)
    if not plans:
        _log.warning("%s: nothing will be compressed, see exclude= and min_numel= of compress()", what)
    elif all(plan.codec is None for plan in plans):
        _log.warning("%s: nothing will be compressed: %s", what, how)
    else:
        _log.info("%s: %s", what, how)


def kind_of(name: str, owner: nn.Module) -> str | None:
    """Return a parameter's kind, one of `KINDS`, or None.

    Parameters
    ----------
    name : str
        Name of the parameter in the model.
    owner : torch.nn.Module
        Module that the parameter belongs to.
    """
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return "embeddings"
    if any("norm" in cls.__name__.lower() for cls in type(owner).__mro__):
        return "norms"
    return "biases" if name.endswith("bias") else None


def has_sparse_gradient(owner: nn.Module) -> bool:
    """Return whether the gradient of a module's parameter is a sparse tensor."""
    return isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse


def exact_parameters(
    model: nn.Module, exclude: Iterable[str] | Callable[[str, nn.Parameter], bool], min_numel: int
) -> Mapping[str, bool]:
    """Return for each parameter of a model, in order, whether its gradient stays exact.

    Parameters
    ----------
    model : torch.nn.Module
        Model without DistributedDataParallel around it.
    exclude : iterable of str, or callable
        Kinds of `KINDS`, and patterns of names such as ``"head.*"``; or a function of name and parameter.
    min_numel : int
        Parameters with fewer elements are exact, as are those with sparse gradients or other element types.

    Returns
    -------
    dict
        By name. A parameter that several modules share has its first name, and is exact if any of them makes it exact.

    Raises
    ------
    InvalidArgument
        If a pattern fits no parameter, which is likely a mistake.
    """
    excluded = _predicate(exclude, model)
    first_names: dict[int, str] = {}
    exact: dict[str, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        first = first_names.setdefault(id(parameter), name)
        unfit = parameter.dtype not in COMPRESSIBLE or parameter.numel() < min_numel or has_sparse_gradient(owner)
        exact[first] = exact.get(first, False) or unfit or excluded(name, owner, parameter)
    return exact


def described(parameters: Iterable[tuple[str, Tensor]], exact: Mapping[str, bool]) -> list[str]:
    """Describe each parameter in one line, for ranks to compare."""
    return [f"{n}: {list(p.shape)} of {p.dtype}, {'exact' if exact[n] else 'compressed'}" for n, p in parameters]


def _predicate(
    exclude: Iterable[str] | Callable[[str, nn.Parameter], bool], model: nn.Module
) -> Callable[[str, nn.Module, nn.Parameter], bool]:
    if callable(exclude):
        return lambda name, owner, parameter: bool(exclude(name, parameter))
    if isinstance(exclude, str):
        raise InvalidArgument(f"exclude={exclude!r}: a sequence of kinds and patterns is needed, such as [{exclude!r}]")
    given = list(exclude)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    patterns = [pattern for pattern in given if pattern not in KINDS]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InvalidArgument(
                f"exclude: {pattern!r} is neither a kind ({', '.join(KINDS)}) nor a pattern that fits the name of a "
                f"parameter, such as {', '.join(names[:3])}"
            )
    return lambda name, owner, parameter: (
        kind_of(name, owner) in given or any(fnmatchcase(name, pattern) for pattern in patterns)
    )
