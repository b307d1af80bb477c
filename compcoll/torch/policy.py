"""Choice of the gradients to compress, parameter by parameter."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..codecs.base import Codec
from ..codecs.registry import as_codec
from ..communicator import Communicator
from ..errors import AccuracyWarning, InvalidArgument
from ..feedback import ErrorFeedback
from ..plan import choose
from ..plan.plan import Plan
from ..sparse import Sparsifier
from .buffers import COMPRESSIBLE, Array, array_of
from .states import logical_name

_log = logging.getLogger("compcoll")

KINDS = ("embeddings", "norms", "biases")
"""Kinds of parameters that stay exact by default. Errors harm them, and they are small or most of their rows zero."""

SMALLEST = 1024
"""Number of elements from which a parameter is worth compressing."""

Codecs: TypeAlias = Codec | dict[str, Codec | None] | None
"""One codec for all parameters, or codecs by pattern of parameter names. None sends gradients uncompressed."""


def check_whole(name: str, value: object, lowest: int) -> None:
    """Check that an option is an integer of at least ``lowest``.

    Raises
    ------
    InvalidArgument
        If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise InvalidArgument(f"{name}={value!r}: an integer of {lowest} or more is needed")


def as_codecs(codec: str | Codec | Mapping[str, str | Codec | None] | None, options: Mapping[str, Any]) -> Codecs:
    """Return the codec, or the mapping of codecs, given by a call's argument and options.

    Raises
    ------
    InvalidArgument, UnknownCodec
        As `as_codec`; also if a mapping is given with options, or a pattern is not a string.
    """
    if not isinstance(codec, Mapping):
        return as_codec(codec, dict(options))
    if options:
        raise InvalidArgument(
            f"options {', '.join(sorted(options))} go with one codec: in a mapping, write them after the codec's name, "
            'such as "minmax:bits=4,block=64"'
        )
    for pattern in codec:
        if not isinstance(pattern, str):
            raise InvalidArgument(f'codec: {pattern!r} is no pattern of parameter names, such as "*.weight"')
    return {pattern: as_codec(each, {}, f"codec[{pattern!r}]") for pattern, each in codec.items()}


def by_pattern(codec: Codecs) -> dict[str, Codec | None]:
    """Return codecs by pattern; one codec has the pattern ``"*"``."""
    return codec if isinstance(codec, dict) else {"*": codec}


def replaced(before: Codecs, codec: str | Codec | Mapping[str, str | Codec | None]) -> Codecs:
    """Return codecs that replace others during a run.

    Raises
    ------
    InvalidArgument
        If their patterns or types differ.
    """
    after = as_codecs(codec, {})
    old, new = ([(pattern, type(each)) for pattern, each in by_pattern(c).items()] for c in (before, after))
    if old != new:
        raise InvalidArgument(
            f"codec={codec!r}: only codecs of the same types, by the same patterns in the same order, can replace "
            f"{before!r}"
        )
    return after


def shown(codec: Codecs) -> Codec | Mapping[str, Codec | None] | None:
    """Return codecs for callers, who cannot change a mapping in place: to replace it, they assign another."""
    return MappingProxyType(codec) if isinstance(codec, dict) else codec


def each_codec(codec: Codecs) -> list[Codec]:
    """Return the codecs that are not None, equal ones once."""
    found: list[Codec] = []
    for each in by_pattern(codec).values():
        if each is not None and each not in found:
            found.append(each)
    return found


def fits(name: str, pattern: str) -> bool:
    """Return whether a pattern fits a parameter's name, with or without the wrappers that `logical_name` removes."""
    return fnmatchcase(name, pattern) or fnmatchcase(logical_name(name), pattern)


def codec_by_name(codec: Codecs, model: nn.Module, exact: Mapping[str, bool]) -> dict[str, Codec | None]:
    """Return the codec of each parameter's gradient, in the model's order; None for exact gradients.

    Parameters
    ----------
    codec : Codecs
        The first pattern that fits a parameter decides. A parameter that no pattern fits is exact.
    model : torch.nn.Module
        Model without DistributedDataParallel around it.
    exact : mapping
        Parameters that are exact with any codec, as returned by `exact_parameters`.

    Raises
    ------
    InvalidArgument
        If a pattern other than ``"*"`` decides for no parameter, which is likely a mistake.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, Codec | None] = dict.fromkeys(exact)
    decided: set[str] = set()
    for pattern, each in by_pattern(codec).items():
        fitting = {every[0] for every in names.values() if any(fits(name, pattern) for name in every)}
        if pattern != "*" and fitting <= decided:
            why = f"fits the name of no parameter, such as {', '.join(map(logical_name, list(exact)[:3]))}"
            if fitting:
                why = "fits only parameters that earlier patterns fit, too: put it before these patterns"
            raise InvalidArgument(f"codec: the pattern {pattern!r} {why}")
        found |= {name: None if exact[name] else each for name in fitting - decided}
        decided |= fitting
    return found


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


class Average(NamedTuple):
    """A collective that averages gradients.

    Attributes
    ----------
    communicator : Communicator
        Communicator of the ranks that average.
    names : collection of str
        Names of the parameters whose gradients are averaged.
    largest : int
        Bytes of the largest buffer of gradients that is averaged at once.
    shards : int
        Number of shards of this buffer, of which these ranks average one.
    scatter : bool
        Whether the average is a reduce-scatter, rather than an allreduce.
    """

    communicator: Communicator
    names: Collection[str]
    largest: int
    shards: int = 1
    scatter: bool = False


def log_choice(
    given: Sequence[Codec],
    codecs: Mapping[str, Codec | None],
    algorithm: str,
    parameters: Mapping[str, Tensor],
    averages: Sequence[Average],
) -> None:
    """Log which gradients each codec will compress, and how. If it will compress none, this is a warning.

    Nothing is sent, so one rank can call this alone.

    Parameters
    ----------
    given : sequence of Codec
        The codecs to log.
    codecs : mapping
        The codec of each parameter, by name.
    algorithm : str
        Algorithm of all averages.
    parameters : mapping
        The parameters, by name.
    averages : sequence of Average
        The averages of these parameters' gradients.
    """
    if not given:
        _log.info("compress: no codec was given, so gradients are sent uncompressed")
    for each in given:
        compressed = {name: parameters[name] for name, own in codecs.items() if own == each}
        numel, total = (sum(p.numel() for p in some.values()) for some in (compressed, parameters))
        what = f"compress: {len(compressed)} of {len(parameters)} parameters ({numel} of {total} elements) for {each!r}"
        plans = [plan for average in averages for plan in _plans(average, compressed, each, algorithm)]
        # A collective of one rank sends nothing, so it is only named if there is no other.
        how = "; ".join(plan.summary for plan in [p for p in plans if p.algorithm != choose.COPY] or plans)
        if not plans:
            _log.warning("%s: nothing will be compressed, see exclude= and min_numel= of compress()", what)
        elif all(plan.codec is None for plan in plans):
            _log.warning("%s: nothing will be compressed: %s", what, how)
        else:
            _log.info("%s: %s", what, how)


def _plans(average: Average, compressed: Mapping[str, Tensor], codec: Codec, algorithm: str) -> list[Plan]:
    """Return the plans of a codec's largest averages, one for each element type."""
    own = [parameter for name, parameter in compressed.items() if name in average.names]
    sizes = Counter[torch.dtype]()
    for parameter in own:
        sizes[parameter.dtype] += parameter.numel()
    collective, explain = "reduce_scatter" if average.scatter else "allreduce", average.communicator.explain
    plans = []
    for dtype, n in sizes.items():
        length = max(min(n, average.largest // dtype.itemsize) // average.shards, 1)
        like = array_of(own[0].detach().new_empty(length, dtype=dtype))
        plans.append(explain(like, collective=collective, op="mean", codec=codec, algorithm=algorithm))
    return plans


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
        if not any(fits(name, pattern) for name in names):
            raise InvalidArgument(
                f"exclude: {pattern!r} is neither a kind ({', '.join(KINDS)}) nor a pattern that fits the name of a "
                f"parameter, such as {', '.join(map(logical_name, names[:3]))}"
            )
    return lambda name, owner, parameter: (
        kind_of(name, owner) in given or any(fits(name, pattern) for pattern in patterns)
    )
