"""Low-rank gradients: ACP-SGD and Power-SGD, for DistributedDataParallel or any module."""

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
from ..arrays import device_of
from ..hooks import check_hook_free
from ..loss_scale import LossScale
from ..membership import check_alike
from ..policy import check_whole, exact_parameters, has_sparse_gradient
from ..states import check_fed_back, layout_of, logical_name, residuals_of, state_of
from ..training_stats import TrainingStats
from .averaging import ACP, Averaging, Power
from .back_propagation import DDPGradients, GradientHooks, hooks_of
from .factors import Gradient, OnePassGradient, matrix_shape, worthwhile
from .fusion import CodedSums, Sums

BUFFER_MB = 25.0
"""Uncompressed size of fusion buffers: that of DistributedDataParallel's buckets."""

_STATE = ("steps", "step", "factors", "buckets")
"""Keys of a state besides those that others have."""


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
                "process_group, buffer_mb, overlap: DistributedDataParallel has its own (bucket_cap_mb)"
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
        if not dist.is_initialized():
            raise InvalidArgument("there is no process group yet: torch.distributed.init_process_group() comes first")
        group = model.process_group if wrapped else process_group or dist.group.WORLD
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
        # Gradients become ready in about the reverse order of the forward pass.
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
        """The account of what was sent so far, with seconds of this rank: of projections (encode), of waits for means,
        and of all that comes after them (decode). Replace it by a new one to count from zero.
        """
        return self._averaging.stats

    @stats.setter
    def stats(self, stats: TrainingStats) -> None:
        self._averaging.stats = stats

    @property
    def error(self) -> BaseException | None:
        """What ended the averaging of the last backward pass, which raised it; None if that went well."""
        return self._hooks.errors.error

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
        """Copy what is to be saved with the model: this rank's residuals, the factors, and how many steps were made.

        Residuals have the shapes of their parameters, whatever wrapper and memory format the model has.
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
        """Go on where an earlier run ended.

        What was lost of a parameter that is not compressed now, since it was frozen or excluded, is kept for states to
        come. One that the state does not hold starts with residuals of zero and new factors.

        Parameters
        ----------
        states : dict, or sequence of dict
            What this rank's `state_dict` gave; or all ranks' ones of then, whatever their number was: the mean over
            the ranks of what was lost is kept.

        Raises
        ------
        InvalidArgument
            If they belong to another number of ranks, rank, or model. Nothing is changed then.
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
            # A rank that got none of the earlier ranks' residuals begins with zeros.
            if name in residuals:
                gradient.set_residual(residuals[name].view(gradient.rows, gradient.columns))

    def reset(self) -> None:
        """Forget what was lost, factors, and what was counted. Not during a backward pass."""
        self._carried = {}
        self._averaging.reset()

    def free(self) -> None:
        """Take the hooks off, and give back threads and communicators. Collective; DDP keeps its hook."""
        self._averaging.scale.free()
        self._hooks.remove()
        self._averaging.sums.free()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._settings})"


class ACPSGD(LowRank):
    """Average a model's gradients by low-rank factors, one of the two factors a step: ACP-SGD. Collective.

    A gradient as a matrix M (its first dimension by all others) is approximated by a product of a left factor P and a
    right factor Q. In odd steps Q is the orthonormalised mean that the last step sent, and P = (M + E) Q is sent; in
    even ones P and Q change places; E is what earlier steps lost, E ← M + E - P Qᵀ. So there is one small allreduce a
    step, that nothing waits for: it starts when its gradients are ready, while back-propagation goes on. After
    ``backward()`` the gradients are the means' products, on all ranks the same bits.

    Parameters
    ----------
    model : torch.nn.Module
        DistributedDataParallel, of which this becomes the communication hook: buckets are then fusion buffers. Or any
        other module, whose parameters and buffers become rank 0's, and whose gradients are taken one by one as they
        become ready. Frozen parameters are left alone.
    rank : int
        Columns of the factors. The paper takes 4 for convolutional nets and 32 for transformers.
    min_compression_rate : float
        A gradient with not more than this many times the elements that a step sends of its factors is sent exactly, as
        are gradients of one dimension, and those with fewer rows or columns than ``rank``. `ACPSGD` sends one factor a
        step, half of both on average; `PowerSGD` both.
    exclude : iterable of str, or callable
        Further gradients that are sent exactly: kinds and patterns of names, or a function, as for `compress`.
    exact_steps : int
        So many steps are sent exactly at first.
    buffer_mb : float, optional
        Uncompressed size of fusion buffers, in MiB: 25. Their factors are as much smaller as the model's are. 0 for
        each gradient on its own. DistributedDataParallel has its ``bucket_cap_mb`` instead.
    overlap : bool
        Whether buffers are sent while back-propagation goes on, rather than at its end.
    feedback : bool
        Whether what is lost is added to the next step's gradients. Takes as much memory as they do; `ACPSGD` on CPUs
        twice as much.
    reuse : bool
        Whether factors start from the last step's, rather than from random ones.
    seed : int
        Of the first factors, 0 or more; without ``reuse`` of all.
    process_group : torch.distributed.ProcessGroup, optional
        Any backend's; the default one. DistributedDataParallel has its own.
    codec : str or Codec, optional
        Compresses the factors further, as `compcoll.allreduce` does. What it loses is fed back as well.
    algorithm : str
        Of that allreduce.
    timeout : float, optional
        With a codec, as of `compress`; without one the process group has its own.
    transport : {"auto", "mpi", "group"}
        With a codec, what factors travel over, as of `compress`.
    **codec_options
        Configuration of a codec given by name.

    Attributes
    ----------
    exact : dict
        Whether a parameter's gradient is sent exactly, by name.
    conserves : str
        "exact": with feedback, the gradients given so far and the mean over the ranks of the residuals add up to the
        sum of the mean gradients, but for rounding. Backward passes with NaN or Inf are not counted.

    Raises
    ------
    InvalidArgument
        If an option is not allowed, no parameter can be compressed at this rank, gradients are sparse, parameters are
        sharded, or a part of the model averages gradients itself.
    HookTaken
        If something else reduces this model's gradients already.
    CollectiveMismatch
        If models, settings, or versions and instruction sets of torch differ between ranks: with other arithmetic their
        parameters would drift apart.
    NotUnderMPI, ThreadsUnavailable, UnsupportedDevice
        With a codec, as for `compress`.

    Notes
    -----
    A rank that has no gradient of a parameter that others have takes part with zeros; where no rank has one, it stays
    as it is (with DistributedDataParallel: ``find_unused_parameters=True``). A gradient that is not finite on one rank
    is not finite on all ranks, so that a GradScaler skips the step everywhere, and residuals and factors of all
    parameters stay as they are.

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

    P = (M + E) Q, its mean orthonormalised; then Q = (M + E)ᵀ P, whose mean is the next step's start; E ← M + E - P Qᵀ.
    The second allreduce waits for the first. All else is as in `ACPSGD`, which does less than half of the work.

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
        raise InvalidArgument("the model has no trainable parameter of two or more dimensions: nothing has a rank")
    if not any(ranks.values()):
        name = max(matrices, key=lambda name: min(matrices[name]))
        raise InvalidArgument(
            f"rank={rank} with min_compression_rate={rate:g} fits none of the model's parameters: the gradient of "
            f"{name!r} is {matrices[name][0]} × {matrices[name][1]}"
        )
