"""Averaging of gradients by low-rank factors: fill buffers, send them in a common order, write means back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..loss_scale import LossScale
from ..streams import JobStreams
from ..training_stats import TrainingStats
from .factors import Gradient, orthonormalize
from .fusion import Buffer, Kind, Sums, Wait


class Product(NamedTuple):
    """Factors of a gradient's mean (left, right), and of this rank's contribution to it (sent)."""

    gradient: Gradient
    left: Tensor
    right: Tensor
    sent: tuple[Tensor, Tensor]


class Averaging(ABC):
    """Base class of the low-rank methods; every rank fills and sends the buffers in the same order.

    Residuals and factors change only at the end of a step, when all means are known, and only if all are finite. So a
    step that loss scaling skips changes nothing on any rank.

    Parameters
    ----------
    gradients : sequence of Gradient
        The model's gradients.
    sums : Sums
        Computes means.
    scale : LossScale
        The loss scale.
    reuse : bool
        Whether the next step starts from this step's factors, rather than from random ones.
    seed : int
        Seed of the random factors, the same on all ranks.
    exact : int
        Number of initial steps that are sent exactly.

    Attributes
    ----------
    stats : TrainingStats
        Bytes sent, and seconds: encoding is projection, decoding is the work after the means have arrived.
    steps, step : int
        Number of all steps so far, and of those that sent factors with finite means.
    factors : int
        How many of a gradient's two factors a step sends.
    """

    factors: ClassVar[int]

    def __init__(
        self, gradients: Sequence[Gradient], sums: Sums, scale: LossScale, reuse: bool, seed: int, exact: int
    ) -> None:
        self.gradients, self.low = list(gradients), [gradient for gradient in gradients if gradient.rank]
        self.stats, self.sums, self.scale, self.ranks = TrainingStats(), sums, scale, sums.ranks
        self._reuse, self._seed, self._exact = reuse, seed, exact
        self._buffers: list[Buffer] = []
        self._waits: list[Wait] = []
        self.reset()

    @abstractmethod
    def kind(self) -> Kind:
        """Return the kind of factor that the coming step sends first."""

    @abstractmethod
    def _project(self, gradient: Gradient, values: Tensor | None, buffer: Buffer) -> None:
        """Write this rank's factor into a buffer."""

    @abstractmethod
    def _start(self, buffer: Buffer) -> Wait:
        """Start to compute the means of a full buffer."""

    @abstractmethod
    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        """Return the products of buffers whose means have arrived, and any further buffers used."""

    @abstractmethod
    def _keep(self, products: Sequence[Product]) -> None:
        """Keep factors for the next step."""

    def reset(self) -> None:
        """Discard residuals and statistics, and start with new factors."""
        self.stats, self.steps, self.step = TrainingStats(), 0, 0
        self.scale.restart(loaded=False)
        self._draw(0)
        for gradient in self.low:
            if gradient.feedback:
                gradient.set_residual(torch.zeros(()))

    def begin(self) -> Kind:
        """Begin a step, and return what it sends for gradients that have factors."""
        self.steps += 1
        if (ratio := self.scale.begin()) != 1.0:
            for gradient in self.low:
                if gradient.feedback:
                    gradient.multiply(ratio)
        self._buffers, self._waits = [], []
        self.sums.begin(self.step, self.factors * (len(self.gradients) + 1))
        return Kind.EXACT if self.steps <= self._exact else self.kind()

    def take(self, buffer: Buffer) -> None:
        """Add a buffer to the step. Buffers are sent in the order of these calls."""
        buffer.restart()
        self._buffers.append(buffer)

    def put(self, buffer: Buffer, gradient: Gradient, values: Tensor | None) -> None:
        """Put a gradient into its buffer. Call this again if the gradient changes before it is sent.

        If this rank has no gradient (None), it contributes its residual alone.
        """
        started = perf_counter()
        buffer.due.discard(gradient.name)
        if buffer.has_factor(gradient):
            self._project(gradient, values, buffer)
        else:
            buffer.put(gradient, values, self.ranks)
        self.stats.encode_seconds += perf_counter() - started

    def send(self, used: Collection[str]) -> None:
        """Send full buffers in order, up to the first that is not full. A step's last may carry flags of parameters."""
        for buffer in self._buffers[len(self._waits) :]:
            if buffer.due:
                return
            if buffer.flags:
                buffer.put_flags([gradient.name in used for gradient in self.gradients])
            buffer.sent = True
            self._waits.append(self._start(buffer))

    def wait(self) -> set[str] | None:
        """Wait for the means of all sent buffers; return the parameters that any rank used, or None without flags."""
        started = perf_counter()
        for wait in self._waits:
            wait()
        self.stats.wait_seconds += perf_counter() - started
        last = self._buffers[-1]
        if not last.flags:
            return None
        return {gradient.name for gradient, used in zip(self.gradients, last.get_flags(), strict=True) if used}

    def finish(self, targets: Mapping[str, Tensor]) -> None:
        """End a step after `wait`: overwrite the gradients with their means.

        Parameters
        ----------
        targets : mapping
            The gradients that were put in, by name; zeros where this rank had none. Gradients that no rank has are
            absent.
        """
        started = perf_counter()
        products, more = self._products(self._buffers)
        finite = all(bool(b.wire.isfinite().all()) for b in (*self._buffers, *more) if b.kind is not Kind.EXACT)
        products = [product for product in products if product.gradient.name in targets]
        finite = finite and all(p.gradient.can_hold(p.left, p.right, targets[p.gradient.name].dtype) for p in products)
        for gradient, left, right, sent in products:
            gradient.finish(targets[gradient.name], left, right, sent if finite else None)
        for buffer in self._buffers:
            for gradient in buffer.gradients:
                if gradient.name in targets and not buffer.has_factor(gradient):
                    buffer.get(gradient, targets[gradient.name])
        if finite and self._buffers[0].kind is not Kind.EXACT:
            self.step += 1
            self._keep(products)
            if not self._reuse:
                self._draw(self.step)
        self._count(perf_counter() - started)

    def _draw(self, step: int) -> None:
        # Mix seed and step into 32 bits, since a generator uses only 32 bits of its seed.
        (mixed,) = np.random.SeedSequence((self._seed, step)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed))
        for gradient in self.low:
            gradient.draw(generator)
        factors = [factor for gradient in self.low for factor in (gradient.left, gradient.right.t())]
        for factor, drawn in zip(factors, orthonormalize(factors), strict=True):
            factor.copy_(drawn)

    def _count(self, seconds: float) -> None:
        stats = self.stats
        stats.decode_seconds += seconds
        nbytes = sum(gradient.nbytes for gradient in self.gradients)
        stats.raw_nbytes += nbytes
        stats.raw_sent_nbytes += round(2 * (self.ranks - 1) / self.ranks * nbytes)
        stats.total_seconds = stats.encode_seconds + stats.decode_seconds + stats.wait_seconds


class ACP(Averaging):
    """ACP-SGD: send one factor per step, left and right alternating.

    The other factor is the orthonormalised mean of the last step.
    """

    factors = 1

    def kind(self) -> Kind:
        return Kind.RIGHT if self.step % 2 else Kind.LEFT

    def _project(self, gradient: Gradient, values: Tensor | None, buffer: Buffer) -> None:
        if buffer.kind is Kind.LEFT:
            gradient.project_left(values, gradient.right, buffer.own_factor(gradient))
        else:
            gradient.project_right(values, gradient.left, buffer.own_factor(gradient))

    def _start(self, buffer: Buffer) -> Wait:
        return buffer.start(self.sums, self.stats, self.ranks)

    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        products = []
        for buffer in buffers:
            for gradient in filter(buffer.has_factor, buffer.gradients):
                own, mean, lost = (of(gradient) for of in (buffer.own_factor, buffer.mean_factor, buffer.lost_factor))
                if lost is not None:
                    own = own - self.ranks * lost
                if buffer.kind is Kind.LEFT:
                    products.append(Product(gradient, mean, gradient.right, (own, gradient.right)))
                else:
                    products.append(Product(gradient, gradient.left, mean, (gradient.left, own)))
        return products, []

    def _keep(self, products: Sequence[Product]) -> None:
        means = [
            (gradient.left, left) if left is not gradient.left else (gradient.right.t(), right.t())
            for gradient, left, right, _ in products
        ]
        for (factor, _), mean in zip(means, orthonormalize([mean for _, mean in means]), strict=True):
            factor.copy_(mean)


class Power(Averaging):
    """Power-SGD: average and orthonormalise the left factors, then compute and average the right ones.

    A buffer's two sums are one job of the sums' queue. The queue runs buffers in the same order on all ranks. So right
    factors are sent as soon as the left mean has arrived, while back-propagation continues.
    """

    factors = 2

    def reset(self) -> None:
        super().reset()
        self._values: dict[str, Tensor | None] = {}
        self._lefts: dict[str, Tensor] = {}
        self._streams = JobStreams()

    def kind(self) -> Kind:
        return Kind.LEFT

    def _project(self, gradient: Gradient, values: Tensor | None, buffer: Buffer) -> None:
        self._values[gradient.name] = values
        gradient.project_left(values, gradient.right, buffer.own_factor(gradient))

    def _start(self, buffer: Buffer) -> Wait:
        right = self._right_of(buffer)
        threads, stats = torch.get_num_threads(), self.stats
        seconds = 0.0

        def sum_both() -> None:
            nonlocal seconds
            buffer.start(self.sums, stats, self.ranks)()
            if right is None:
                return
            # The caller's thread or the queue's thread may run this job. The bits depend on torch's thread count.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            started = perf_counter()
            self._fill(right, buffer)
            seconds = perf_counter() - started
            right.start(self.sums, stats, self.ranks)()

        tensors = [buffer.own, buffer.wire] if right is None else [buffer.own, buffer.wire, right.own, right.wire]
        given = [self._values[g.name] for g in buffer.gradients if buffer.has_factor(g)]
        order = self._streams.order(*tensors, *(values for values in given if values is not None))
        work = self.sums.jobs.submit(sum_both, order)

        def wait() -> None:
            work.wait()
            stats.encode_seconds += seconds

        return wait

    def _right_of(self, buffer: Buffer) -> Buffer | None:
        """Return the buffer of the right factors that belong to a buffer of left ones; None if it has no factors."""
        low = [gradient for gradient in buffer.gradients if buffer.has_factor(gradient)]
        if low and buffer.right is None:
            buffer.right = Buffer(low, Kind.RIGHT, buffer.wire.device)
        return buffer.right

    def _fill(self, right: Buffer, buffer: Buffer) -> None:
        """Compute right factors from the orthonormalised means of the left ones."""
        lefts = {gradient.name: buffer.mean_factor(gradient) for gradient in right.gradients}
        sound = list(lefts)
        if not bool(buffer.wire[: buffer.factors].isfinite().all()):
            # NaN and Inf must reach their own parameter's product, and no other parameter.
            sound = [name for name, left in lefts.items() if bool(left.isfinite().all())]
        lefts.update(zip(sound, orthonormalize([lefts[name] for name in sound]), strict=True))
        self._lefts.update(lefts)
        for gradient in right.gradients:
            left = lefts[gradient.name]
            gradient.project_right(self._values[gradient.name], left, right.own_factor(gradient))

    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        rights = [right for right in map(self._right_of, buffers) if right is not None]
        products = []
        for buffer in rights:
            for gradient in buffer.gradients:
                left, right = self._lefts[gradient.name], buffer.mean_factor(gradient)
                products.append(Product(gradient, left, right, (left, right)))
        self._values.clear()
        return products, rights

    def _keep(self, products: Sequence[Product]) -> None:
        for product in products:
            product.gradient.right.copy_(product.right)
