"""Low-rank gradient compression by ACP-SGD and Power-SGD, for DistributedDataParallel or any module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...codecs.base import Codec
from ...codecs.registry import as_codec
from ...deprecated import renamed_arguments, renamed_attribute
from ...errors import HookTaken, InvalidArgument
from ...plan import choose
from ..agreement import check_alike
from ..buffers import device_of
from ..groups.membership import check_group
from ..hooks import check_hook_free, check_hooks_run
from ..loss_scale import LossScale
from ..policy import check_whole, exact_parameters, has_sparse_gradient
from ..states import check_fed_back, layout_of, logical_name, residuals_of, state_of
from ..training_stats import TrainingStats
from .averaging import ACP, Averaging, Power
from .back_propagation import DDPGradients, GradientHooks, hooks_of
from .factors import Gradient, OnePassGradient, matrix_shape, worthwhile
from .fusion import CodedSums, Sums

BUFFER_MB = 25.0
"""Default uncompressed size of fusion buffers in MiB, equal to DistributedDataParallel's bucket size."""

_STATE = ("steps", "step", "factors", "buckets")
"""State keys that only low-rank methods have."""


class LowRank:
    """The base of `ACPSGD` and `PowerSGD`."""

    conserves: ClassVar[str] = "exact"
    _method: type[Averaging]

    account = renamed_attribute("account", "stats")

    @renamed_arguments(over="transport")
    def __init__(
        self,
        model: nn.Module,
        rank: int = 4,
        *,
        min_compression_rate: float = 2.0,
        exclude: Iterable[str] | Callable[[str, nn.Parameter], bool] = (),
        exact_steps: int = 0,
        buffer_mb: float | None = None,
        overlap: bool = True,
        feedback: bool = True,
        reuse: bool = True,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        codec: str | Codec | None = None,
        algorithm: str = choose.AUTO,
        timeout: float | None = None,
        transport: str = "auto",
        **codec_options: Any,
    ) -> None:
        wrapped = isinstance(model, DistributedDataParallel)
        _check(rank, min_compression_rate, exact_steps, buffer_mb, seed)
        if wrapped and (process_group is not None or buffer_mb is not None or not overlap):
            raise InvalidArgument(
                "process_group=, buffer_mb= and overlap= are not for DistributedDataParallel, which has bucket_cap_mb="
            )
        chosen = as_codec(codec, codec_options)
        choose.check("allreduce", algorithm)
        module = model.module if wrapped else model
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        _check_whole(model, type(self).__name__)
        _check_free(model, parameters)
        exact = exact_parameters(module, exclude, min_numel=0)
        ranks = {
            name: rank
            if not exact[name] and worthwhile(p.shape, rank, min_compression_rate, self._method.factors)
            else 0
            for name, p in parameters.items()
        }
        _check_shapes(module, parameters, ranks, rank, min_compression_rate)
        group = model.process_group if wrapped else check_group(process_group)
        device = device_of(parameters.values())
        self._settings = (
            f"rank {rank}, min_compression_rate {min_compression_rate:g}, exact_steps {exact_steps}, "
            f"feedback {feedback}, reuse {reuse}, seed {seed}, codec {chosen!r}, algorithm {algorithm}"
        )
        check_alike(
            group,
            device,
            [
                f"{type(self).__name__}: {self._settings}, buffer_mb {buffer_mb}, overlap {overlap}, over {transport}",
                f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {device.type}",
                *(f"{name}: {list(p.shape)} of {p.dtype}, rank {ranks[name]}" for name, p in parameters.items()),
            ],
        )
        self.exact = {name: not low for name, low in ranks.items()}
        self._shapes = {logical_name(name): p.shape for name, p in module.named_parameters()}
        self._carried: dict[str, Tensor] = {}
        self._rank, self._size = group.rank(), group.size()
        # Gradients become ready in roughly the reverse order of the forward pass.
        nbytes = sum(p.numel() * p.element_size() for p in parameters.values())
        one_pass = self._method is ACP and feedback and device.type == "cpu"
        gradients = [
            OnePassGradient(name, p.shape, p.dtype, ranks[name], nbytes)
            if one_pass and ranks[name]
            else Gradient(name, p.shape, p.dtype, p.device, ranks[name], feedback=feedback)
            for name, p in reversed(parameters.items())
        ]
        if chosen is None:
            sums = Sums(group, device, jobs=self._method is Power)
        else:
            lossy = feedback and self._method is ACP
            sums = CodedSums(group, device, chosen, algorithm, feedback=lossy, timeout=timeout, transport=transport)
        scale = LossScale(parameters.values())
        self._averaging = self._method(gradients, sums, scale, reuse, seed, exact_steps)
        self._hooks: DDPGradients | GradientHooks
        if wrapped:
            self._hooks = DDPGradients(self._averaging, model, repr(self))
        else:
            nbytes = (BUFFER_MB if buffer_mb is None else buffer_mb) * 2**20
            self._hooks = GradientHooks(self._averaging, model, group, nbytes, overlap=overlap)

    @property
    def stats(self) -> TrainingStats:
        """Bytes and calls so far, and this rank's seconds: projection (encode), waiting for means, and the work
        after them (decode). Assign a new TrainingStats to count from zero.
        """
        return self._averaging.stats

    @stats.setter
    def stats(self, stats: TrainingStats) -> None:
        self._averaging.stats = stats

    @property
    def error(self) -> BaseException | None:
        """The exception that the last backward pass raised while averaging; None if it succeeded."""
        return self._hooks.error

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in this context without averaging them, as DistributedDataParallel's `no_sync` does."""
        if isinstance(self._hooks, DDPGradients):
            raise InvalidArgument("use the no_sync() of DistributedDataParallel")
        before, self._hooks.enabled = self._hooks.enabled, False
        try:
            yield
        finally:
            self._hooks.enabled = before

    def state_dict(self) -> dict[str, Any]:
        """Copy the state to save with the model: this rank's residuals, the factors, and the step counts.

        Residuals have the shapes of their parameters, independent of the model's wrapper and memory format.
        """
        low = self._averaging.low
        layout = self._hooks.hook.layout if isinstance(self._hooks, DDPGradients) else []
        unit = self._averaging.scale.unit
        residuals = {logical_name(g.name): g.residual().cpu().reshape(g.shape) / unit for g in low if g.feedback}
        return state_of(self._rank, self._size, self._carried | residuals) | {
            "steps": self._averaging.steps,
            "step": self._averaging.step,
            "factors": {logical_name(g.name): (g.left.cpu().clone(), g.right.cpu().clone()) for g in low},
            "buckets": [list(map(logical_name, names)) for names in layout],
        }

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue an earlier run.

        Residuals of parameters that are not compressed now (frozen or excluded) are kept for later states. Parameters
        that the state lacks start with zero residuals and new factors.

        Parameters
        ----------
        states : dict, or sequence of dict
            This rank's `state_dict`, or those of all ranks of the earlier run. With all of them, the number of ranks
            may change: the mean of the residuals over the ranks is kept.

        Raises
        ------
        InvalidArgument
            If the states belong to another number of ranks, rank, or model. Nothing is changed in this case.
        """
        low = {logical_name(gradient.name): gradient for gradient in self._averaging.low}
        residuals = residuals_of(states, self._rank, self._size, self._shapes, _STATE)
        first = states if isinstance(states, Mapping) else states[0]
        for name, (left, right) in first["factors"].items():
            if name not in low and name in self._shapes:
                continue
            there = tuple(left.shape), tuple(right.shape)
            here = (tuple(low[name].left.shape), tuple(low[name].right.shape)) if name in low else None
            if there != here:
                raise InvalidArgument(
                    f"this state's factors of {name!r} have the shapes {there}, but here they are {here}"
                )
        check_fed_back(residuals, feedback=all(gradient.feedback for gradient in low.values()))
        names = {logical_name(name): name for name in self.exact}
        layout = layout_of(states, names)
        if self._size != first["size"]:
            residuals = {name: lost * (self._size / first["size"]) for name, lost in residuals.items()}
        self.reset()
        self._carried = {name: lost for name, lost in residuals.items() if name not in low}
        self._averaging.scale.restart(loaded=True)
        if layout is not None and isinstance(self._hooks, DDPGradients):
            self._hooks.hook.restore([[names[name] for name in bucket] for bucket in layout])
        self._averaging.steps, self._averaging.step = first["steps"], first["step"]
        for name, gradient in low.items():
            for factor, kept in zip((gradient.left, gradient.right), first["factors"].get(name, ()), strict=False):
                factor.copy_(kept)
            # A rank without a share of the earlier ranks' residuals starts with zeros.
            if name in residuals:
                gradient.set_residual(residuals[name].view(gradient.rows, gradient.columns))

    def reset(self) -> None:
        """Discard residuals, factors and statistics. Do not call this during a backward pass."""
        self._carried = {}
        self._averaging.reset()

    def free(self) -> None:
        """Remove the hooks, and release threads and communicators. Collective. DDP keeps its hook."""
        self._averaging.scale.free()
        self._hooks.remove()
        self._averaging.sums.free()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"


class ACPSGD(LowRank):
    """Average a model's gradients by low-rank factors, sending one of the two factors per step: ACP-SGD. Collective.

    A gradient, viewed as a matrix M (first dimension by all others), is approximated by the product of a left factor P
    and a right factor Q. In odd steps, each rank sends P = (M + E) Q, where Q is the orthonormalised mean of the last
    step. In even steps, P and Q change places. E is the residual: E ← M + E - P Qᵀ. Each step needs one small
    allreduce, which starts when its gradients are ready and overlaps with back-propagation. After ``backward()``, the
    gradients are products of the mean factors, with identical bits on all ranks.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel, or any other module. For DistributedDataParallel, this object becomes its communication
        hook, and its buckets are the fusion buffers. For another module, parameters and buffers become those of rank 0,
        and hooks take each gradient when it is ready. Frozen parameters are not touched.
    rank : int
        Columns of the factors. The paper uses 4 for convolutional nets and 32 for transformers.
    min_compression_rate : float
        A gradient is sent as factors only if its elements are more than this many times those that a step sends.
        `ACPSGD` sends one factor per step, on average half of both; `PowerSGD` sends both. One-dimensional gradients,
        and those with fewer rows or columns than ``rank``, are always sent exactly.
    exclude : iterable of str, or callable
        Further gradients to send exactly: kinds and patterns of names, or a function, as for `compress`.
    exact_steps : int
        Number of initial steps that are sent exactly.
    buffer_mb : float, optional
        Uncompressed size of a fusion buffer in MiB; default 25. Its factors are smaller by the model's compression
        rate. 0 sends each gradient on its own. Not for DistributedDataParallel, which has ``bucket_cap_mb``.
    overlap : bool
        Whether to send buffers during back-propagation, rather than at its end.
    feedback : bool
        Whether to add residuals to the next step's gradients. They need as much memory as the gradients; with `ACPSGD`
        on CPUs twice as much.
    reuse : bool
        Whether each step starts from the last step's factors, rather than from random ones.
    seed : int
        Seed of the random factors, 0 or more: of the first ones, or without ``reuse`` of all.
    process_group : torch.distributed.ProcessGroup, optional
        A group of any backend. By default the default group. Not for DistributedDataParallel, which has its own.
    codec : str or Codec, optional
        Codec that compresses the factors further, as in `compcoll.allreduce`. Feedback includes its residual.
    algorithm : str
        Algorithm of that allreduce.
    timeout : float, optional
        With a codec, as in `compress`. Without one, the process group's timeout applies.
    transport : {"auto", "mpi", "group"}
        With a codec, the transport of the factors, as in `compress`.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    exact : dict
        Whether a parameter's gradient is sent exactly, by name.
    conserves : str
        "exact": with feedback, the returned gradients plus the residuals' mean over the ranks equal the sum of the mean
        gradients, up to rounding. Backward passes with NaN or Inf are not counted.

    Raises
    ------
    InvalidArgument
        If an option is invalid, no parameter can be compressed at this rank, gradients are sparse, parameters are
        sharded, or a part of the model averages gradients itself.
    HookTaken
        If another communication hook or method already reduces this model's gradients.
    CollectiveMismatch
        If models, settings, torch versions or torch instruction sets differ between ranks. Different arithmetic would
        let the ranks' parameters drift apart.
    NotUnderMPI, ThreadsUnavailable, UnsupportedDevice
        With a codec, as for `compress`.

    Notes
    -----
    If some ranks have no gradient for a parameter, they contribute zeros. If no rank has one, the gradient is not
    changed; DistributedDataParallel needs ``find_unused_parameters=True`` for this. If a gradient is not finite on one
    rank, it is not finite on any rank: a GradScaler then skips the step on all ranks, and all residuals and factors
    keep their values.

    References
    ----------
    L. Zhang, L. Zhang, S. Shi, X. Chu, B. Li, "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning", ICDCS 2023, section IV.

    Examples
    --------
    >>> model = nn.Linear(64, 64)
    >>> compression = compcoll.torch.ACPSGD(model, rank=4)  # in place of DistributedDataParallel
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> compression.exact
    {'weight': False, 'bias': True}
    """

    _method = ACP


class PowerSGD(LowRank):
    """Average a model's gradients by low-rank factors: Power-SGD. Collective.

    First P = (M + E) Q is averaged and orthonormalised. Then Q = (M + E)ᵀ P is averaged, and its mean is the next
    step's start; E ← M + E - P Qᵀ. The second allreduce waits for the first. Parameters and attributes are those of
    `ACPSGD`, which does less than half of the work.

    References
    ----------
    T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithm 1.

    Examples
    --------
    >>> model = nn.Linear(64, 64)
    >>> compression = compcoll.torch.PowerSGD(model, rank=4)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> compression.exact
    {'weight': False, 'bias': True}
    """

    _method = Power


def _check(rank: int, rate: float, exact_steps: int, buffer_mb: float | None, seed: int) -> None:
    for name, value, lowest in (("rank", rank, 1), ("exact_steps", exact_steps, 0), ("seed", seed, 0)):
        check_whole(name, value, lowest)
    if not rate > 0:
        raise InvalidArgument(f"min_compression_rate={rate!r}: a number above 0 is needed")
    if buffer_mb is not None and not 0 <= buffer_mb < float("inf"):
        raise InvalidArgument(f"buffer_mb={buffer_mb!r}: a number of 0 or more is needed")


def _check_whole(model: nn.Module, method: str) -> None:
    for name, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel) or (name and isinstance(part, DistributedDataParallel)):
            raise InvalidArgument(
                f"{name or 'the model'!r} is a {type(part).__name__}, which averages gradients itself: {method} takes "
                "DistributedDataParallel, before torch.compile, or a module without it"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise InvalidArgument(
                f"{name!r} is sharded: compcoll.torch.compress() takes such parameters, {method} does not"
            )


def _check_free(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    check_hooks_run(model)
    check_hook_free(model)
    for name, parameter in parameters.items():
        if hooks_of(parameter):
            raise HookTaken(f"another ACPSGD or PowerSGD averages the gradient of {name!r}: free() it first")


def _check_shapes(
    module: nn.Module, parameters: Mapping[str, Tensor], ranks: Mapping[str, int], rank: int, rate: float
) -> None:
    for name, part in module.named_modules():
        if has_sparse_gradient(part):
            raise InvalidArgument(f"the gradient of {name!r} is sparse: make it with sparse=False")
    matrices = {name: matrix_shape(p.shape) for name, p in parameters.items() if p.dim() > 1}
    if not matrices:
        raise InvalidArgument("the model has no trainable parameter of two or more dimensions: no gradient is a matrix")
    if not any(ranks.values()):
        name = max(matrices, key=lambda name: min(matrices[name]))
        raise InvalidArgument(
            f"rank={rank} with min_compression_rate={rate:g} fits none of the model's parameters: the gradient of "
            f"{name!r} is {matrices[name][0]} × {matrices[name][1]}"
        )
