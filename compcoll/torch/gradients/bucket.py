"""Buckets of gradients: their layout in one buffer, their compressed averaging, and the model's residuals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...codecs.base import Codec
from ...communicator import Communicator
from ...errors import InvalidArgument
from ...feedback import ErrorFeedback
from ...plan import choose
from ...sparse import Sparsifier, VarianceFeedback
from ..buffers import Array, HostArray, array_of, copy_of, put, residual_of
from ..job_queue import JobQueue
from ..loss_scale import LossScale
from ..policy import SMALLEST, each_codec
from ..states import count_calls_with
from ..streams import JobStreams
from ..training_stats import TrainingStats

RESIDUAL = "residual"
_POWERS = {"variance": 2}
"""Feedback arrays that scale with a power of the loss scale other than 1, and that power."""

Kept = dict[str, dict[str, Array]]
"""Feedback arrays by kind (``"residual"`` …) and parameter name."""


def adopt(known: dict[str, Array], whole: Array, parts: Iterable[tuple[str, int, int]]) -> None:
    """Move parameters' arrays into parts of another array.

    Parameters
    ----------
    known : dict
        Arrays by parameter name. Replaced by views of ``whole``.
    whole : array
        The target, split along its last axis.
    parts : iterable of tuple
        Name, begin and end of each part.
    """
    for name, begin, end in parts:
        part = whole[..., begin:end]
        if name in known:
            put(known[name], part)
        known[name] = part


class Residuals:
    """The residuals and other feedback arrays of a model's gradients, multiplied by the loss scale.

    A GradScaler skips a step in which a gradient overflows. All ranks have the same means, so either all ranks or none
    skip the step. Before the next backward pass, the changes of a skipped step are undone.

    Parameters
    ----------
    jobs : JobQueue
        Runs the jobs that change the arrays.
    streams : JobStreams
        Streams of these jobs.
    parameters : iterable of Tensor
        Parameters whose gradients are scaled.
    kinds : sequence of str
        Names of the feedback arrays.

    Attributes
    ----------
    arrays : Kept
        Arrays of the compressed parameters.
    carried : dict of dict
        Unscaled residuals of parameters that are frozen or exact now, by kind and name. Later states include them.
    scale : LossScale
        The loss scale.
    """

    def __init__(self, jobs: JobQueue, streams: JobStreams, parameters: Iterable[Tensor], kinds: Sequence[str]) -> None:
        self._jobs, self._streams = jobs, streams
        self.scale = LossScale(parameters)
        self.arrays: Kept = {kind: {} for kind in kinds}
        self.carried: dict[str, dict[str, Tensor]] = {}
        self._finite: list[Tensor] = []
        self._copies: dict[tuple[str, str], Array] = {}
        self._remembered: set[tuple[str, str]] = set()

    def unit(self, kind: str) -> float:
        """Return the factor by which the loss scale enlarges the arrays of a kind."""
        return self.scale.unit ** _POWERS.get(kind, 1)

    def begin(self) -> None:
        """Begin a backward pass: undo the last step if it was skipped, and rescale all arrays to the current scale."""
        self.settle()
        if (ratio := self.scale.begin()) == 1.0:
            return

        def multiply() -> None:
            for kind, arrays in self.arrays.items():
                for array in arrays.values():
                    array *= ratio ** _POWERS.get(kind, 1)

        self._run(multiply)

    def remember(self, names: Iterable[str], kinds: Iterable[str]) -> None:
        """Save copies of some parameters' arrays before a step's first backward pass changes them."""
        for kind in kinds:
            for name in self.arrays[kind].keys() & names:
                key, array = (kind, name), self.arrays[kind][name]
                if key in self._remembered:
                    continue
                if key in self._copies:
                    put(array, self._copies[key])
                else:
                    self._copies[key] = copy_of(array)
                self._remembered.add(key)

    def watch(self, finite: Tensor) -> None:
        """Record a one-element tensor, equal on all ranks: whether all means of a bucket are finite."""
        self._finite.append(finite)

    def settle(self) -> None:
        """Undo the last step's changes of the arrays if any of its means was not finite."""
        if not self._finite:
            return

        def restore() -> None:
            if not all(map(bool, self._finite)):
                for kind, name in self._remembered:
                    put(self._copies[kind, name], self.arrays[kind][name])

        self._run(restore)
        if self.scale.ended:
            self._finite.clear()
            self._remembered.clear()

    def restart(self, carried: Mapping[str, Mapping[str, Tensor]], *, loaded: bool) -> None:
        """Discard all arrays and replace `carried`. If a state is loaded, the caller then stores its arrays."""
        self.scale.restart(loaded=loaded)
        self.arrays.update({kind: {} for kind in self.arrays})
        self.carried = {kind: dict(tensors) for kind, tensors in carried.items()}
        for remembered in (self._finite, self._copies, self._remembered):
            remembered.clear()

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job on all arrays, after all jobs that were submitted before."""
        arrays = (array for arrays in self.arrays.values() for array in arrays.values() if isinstance(array, Tensor))
        self._jobs.run(job, self._streams.order(*arrays, *self._finite))


Feedback: TypeAlias = bool | Callable[[], ErrorFeedback]
"""True for the codec's default feedback, False for none, or a callable that makes another feedback."""

_SEPARATE_NBYTES = 1 << 16
"""Exact gradients of at least this many bytes split a compressed span; smaller ones stay in it as zeros."""


class Part(NamedTuple):
    """A parameter's gradient in its bucket: elements ``begin`` to ``end`` (exclusive)."""

    name: str
    begin: int
    end: int


class Span(NamedTuple):
    """Gradients that one collective compresses, from the first parameter's begin to the last one's end."""

    begin: int
    end: int
    parts: Sequence[Part]
    feedback: ErrorFeedback | None


class Bucket:
    """The layout and averaging of one gradient bucket: a DDP bucket, or all gradients.

    Parameters
    ----------
    names : tuple of str
        The bucket's parameters, in order.
    sizes : sequence of int
        Elements of each parameter.
    gradients : torch.Tensor
        One-dimensional; the parameters' gradients, contiguous. `average` later takes tensors of the same layout.
    communicator : Communicator
        Allocates the residuals.
    codecs : mapping
        The codec of each parameter, by name; None if it is exact. Parameters with different codecs are copied to a
        buffer in which those of one codec lie side by side, and there form one span. The codecs may change later, but
        not which of them are equal.
    by_parameter : bool
        Whether each parameter with a sparse codec is a span of its own. Otherwise a span is all parameters of a codec
        between large exact ones. A parameter with fewer than `SMALLEST` elements joins the next one: a layer's bias
        joins its weight.
    feedback : Feedback
        The feedback of a span, as for `maker_of`.
    kept : Kept
        Earlier residuals. They are moved into the bucket's memory, and `kept` gets views of it.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        sizes: Sequence[int],
        gradients: Tensor,
        communicator: Communicator,
        codecs: Mapping[str, Codec | None],
        by_parameter: bool,
        feedback: Feedback,
        kept: Kept,
    ) -> None:
        self.names = names
        self._codecs, self._kept = codecs, kept
        self.spans: list[Span] = []
        holes: list[tuple[int, int]] = []
        self._lost_in_holes: list[Array] = []
        size_of = dict(zip(names, sizes, strict=True))
        groups = _groups(names, codecs)
        parts = side_by_side(chain.from_iterable(groups), size_of)
        self._grouped: Tensor | None = None
        self._moves: list[tuple[slice, slice]] = []
        if len(groups) > 1:
            given = side_by_side(names, size_of)
            self._moves = [(slice(*given[name][1:]), slice(*parts[name][1:])) for name in names]
            gradients = self._grouped = torch.empty_like(gradients)
        values, dtype = array_of(gradients), gradients.dtype
        for group in groups:
            compressed: list[Part] = []
            for name in group:
                part, size, codec = parts[name], size_of[name], codecs[name]
                if codec is None:
                    holes.append((part.begin, part.end))
                    complete = size * dtype.itemsize >= _SEPARATE_NBYTES
                else:
                    compressed.append(part)
                    complete = by_parameter and isinstance(codec, Sparsifier) and size >= SMALLEST
                if complete:
                    self._add_span(compressed, values, communicator, feedback)
                    compressed = []
            self._add_span(compressed, values, communicator, feedback)
        # 16-bit floats are summed in float32, whose rounding errors are below their precision.
        wide = dtype if dtype.itemsize > 2 else torch.float32
        lengths = [end - begin for begin, end in holes]
        self._whole = sum(lengths) == sum(sizes) and wide == dtype
        self._memory = gradients.new_empty(0 if self._whole else sum(lengths), dtype=wide)
        self._exact = array_of(self._memory)
        self._lifted = [] if self._whole else list(zip(holes, map(array_of, self._memory.split(lengths)), strict=True))

    def average(
        self,
        gradients: Tensor,
        communicator: Communicator,
        algorithm: str,
        stats: TrainingStats,
        unused: Collection[str] = (),
    ) -> None:
        """Average all ranks' gradients in place. Collective.

        Parameters
        ----------
        gradients : torch.Tensor
            This rank's gradients, contiguous. Overwritten.
        communicator : Communicator
            The ranks.
        algorithm : str
            Algorithm for the compressed gradients.
        stats : TrainingStats
            Counts the bytes sent.
        unused : collection of str
            Parameters that no rank used. Their mean becomes zero, and their residuals do not change.
        """
        given = array_of(gradients)
        values = given if self._grouped is None else array_of(self._grouped)
        for there, here in self._moves:
            values[here] = given[there]
        of_unused = (kept[name] for kept in self._kept.values() for name in unused if name in kept)
        set_aside = [(part, copy_of(part)) for part in of_unused]
        for part, _ in set_aside:
            part[...] = 0
        exact = self.lift(values)
        # A single span has nothing to overlap with, and a blocking call runs entirely in C++.
        reduce = communicator.allreduce if len(self.spans) == 1 else communicator.iallreduce
        requests = []
        for span in self.spans:
            part = values[span.begin : span.end]
            count_calls_with(span.feedback, communicator)
            codec = self._codecs[span.parts[0].name]
            requests.append(reduce(part, op="mean", out=part, feedback=span.feedback, codec=codec, algorithm=algorithm))
        if len(self.spans) == 1:
            stats.add_last(communicator)
        else:
            for request in requests:
                request.wait()
                stats.add(request.stats, communicator.size)
        # Block codecs also leave residuals where exact gradients were replaced by zeros. States do not contain these.
        for lost in self._lost_in_holes:
            lost[...] = 0
        for part, before in set_aside:
            put(before, part)
        if exact is not None:
            # Ranks are in step here, and MPI's blocking allreduce is much faster than its nonblocking one.
            communicator.allreduce(exact, op="mean", out=exact, codec=None)
            stats.add_last(communicator)
        self.put_back(values)
        for span in self.spans:
            for name, begin, end in span.parts:
                if name in unused:  # its values may contain compression noise from neighbours
                    values[begin:end] = 0
        for there, here in self._moves:
            given[there] = values[here]

    def _add_span(
        self,
        parts: list[Part],
        values: Array,
        communicator: Communicator,
        feedback: Feedback,
    ) -> None:
        if not parts:
            return
        make = maker_of(self._codecs[parts[0].name], feedback)
        made = None if make is None else make()
        span = Span(parts[0].begin, parts[-1].end, parts, made)
        self.spans.append(span)
        if made is None:
            return
        communicator._prepare_feedback(made, values[span.begin : span.end])
        for kind in made.arrays:
            whole = residual_of(getattr(made, kind))
            inside = [(name, begin - span.begin, end - span.begin) for name, begin, end in parts]
            adopt(self._kept.setdefault(kind, {}), whole, inside)
            for before, behind in pairwise(parts):
                if before.end < behind.begin:
                    self._lost_in_holes.append(whole[before.end - span.begin : behind.begin - span.begin])

    def observe(self, moments: Mapping[str, HostArray]) -> None:
        """Pass second moments, by parameter name, to the feedback of spans that need them."""
        for span in self.spans:
            if not isinstance(span.feedback, VarianceFeedback):
                continue
            variance = span.feedback.variance
            observed = np.zeros(variance.size, variance.dtype)
            for name, begin, end in span.parts:
                observed[begin - span.begin : end - span.begin] = moments[name]
            span.feedback.observe(observed)

    def lift(self, values: Array) -> Array | None:
        """Move the exact gradients into their own array and leave zeros in their places; None if there are none.

        If all gradients are exact, return ``values`` itself, unchanged.
        """
        if self._whole:
            return values
        for (begin, end), part in self._lifted:
            part[...] = values[begin:end]
            values[begin:end] = 0
        return self._exact if self._lifted else None

    def put_back(self, values: Array) -> None:
        """Copy the exact gradients' means back to their places."""
        with np.errstate(over="ignore"):
            for (begin, end), part in self._lifted:
                values[begin:end] = part


def _groups(names: Sequence[str], codecs: Mapping[str, Codec | None]) -> list[list[str]]:
    """Return the exact parameters, then those of each codec; with at most one codec, all in one group."""
    distinct = each_codec({name: codecs[name] for name in names})
    if len(distinct) < 2:
        return [list(names)]
    return [[name for name in names if codecs[name] == codec] for codec in (None, *distinct)]


def side_by_side(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Part]:
    """Return the places of parameters that lie side by side in this order."""
    parts, begin = {}, 0
    for name in names:
        parts[name] = Part(name, begin, begin + sizes[name])
        begin += sizes[name]
    return parts


def maker_of(codec: Codec | None, feedback: Feedback) -> Callable[[], ErrorFeedback] | None:
    """Return the callable that makes a span's feedback; None without feedback.

    Raises
    ------
    InvalidArgument
        If the callable does not make an ErrorFeedback.
    """
    if codec is None or feedback is False:
        return None
    if feedback is True:
        return codec.state if isinstance(codec, Sparsifier) else ErrorFeedback
    if not callable(feedback) or not isinstance(feedback(), ErrorFeedback):
        raise InvalidArgument(f"feedback={feedback!r}: give True, False, or a callable that returns an ErrorFeedback")
    return feedback


def average_sparse(gradient: Tensor, communicator: Communicator, stats: TrainingStats) -> Tensor:
    """Average a sparse gradient in host memory, exactly. Collective.

    Every rank gathers all ranks' rows and adds them in rank order, so all ranks get identical bits.

    Parameters
    ----------
    gradient : torch.Tensor
        This rank's sparse gradient, with any number of rows.
    communicator : Communicator
        The ranks.
    stats : TrainingStats
        Counts the bytes sent.
    """
    own = gradient.coalesce()
    # 16-bit floats are summed in float32, whose rounding errors are below their precision.
    wide = torch.promote_types(own.dtype, torch.float32)
    indices = own.indices().t().clone(memory_format=torch.contiguous_format)
    gathered = []
    for part in (indices, own.values().to(wide) / communicator.size):
        gathered.append(torch.from_numpy(communicator.allgatherv(part.numpy(), codec=None, algorithm=choose.AUTO)))
        stats.add_last(communicator)
    total = torch.sparse_coo_tensor(gathered[0].t(), gathered[1], own.shape, check_invariants=False)
    return total.coalesce().to(own.dtype)
