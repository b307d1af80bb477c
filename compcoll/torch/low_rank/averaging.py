"""A step of gradients' averaging by low-rank factors: put into buffers, sent in one order, and written back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from time import perf_counter
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arrays import arrays_on
from ..loss_scale import LossScale
from ..training_stats import TrainingStats
from .factors import Gradient, orthonormalize
from .fusion import Buffer, Kind, Sums, Wait


class Product(NamedTuple):
    """A gradient's mean: its factors; and those of what this rank gave to it."""

    gradient: Gradient
    left: Tensor
    right: Tensor
    sent: tuple[Tensor, Tensor]


class Averaging(ABC):
    """The arithmetic of a method, on buffers that are filled and sent in the same order on every rank.

    What is kept for the next step changes at a step's very end, when all means are known, and only if all are finite:
    a step that loss scaling will skip leaves no trace, on any rank.

    Parameters
    ----------
    gradients : sequence of Gradient
        Of the model.
    sums : Sums
        Computes means.
    scale : LossScale
        The loss's.
    reuse : bool
        Whether factors are kept for the next step, rather than drawn anew.
    seed : int
        Of the factors that are drawn: the same on all ranks.
    exact : int
        So many steps are sent exactly at first.

    Attributes
    ----------
    stats : TrainingStats
        What was sent, and seconds: encoding is projection, decoding all that is done when means have come.
    steps, step : int
        Steps so far; and those with factors, less those that were not finite.
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
        """Tell what the coming step sends first of gradients that have factors."""

    @abstractmethod
    def _project(self, gradient: Gradient, values: Tensor | None, buffer: Buffer) -> None:
        """Write this rank's factor into a buffer."""

    @abstractmethod
    def _start(self, buffer: Buffer) -> Wait:
        """Start to compute the means of a full buffer."""

    @abstractmethod
    def _products(self, buffers: Sequence[Buffer]) -> tuple[list[Product], list[Buffer]]:
        """The means, when those of some buffers have come, and further buffers that this took."""

    @abstractmethod
    def _keep(self, products: Sequence[Product]) -> None:
        """Keep factors for the next step."""

    def reset(self) -> None:
        """Forget what was lost and counted, and start with new factors."""
        self.stats, self.steps, self.step = TrainingStats(), 0, 0
        self.scale.restart(loaded=False)
        self._draw(0)
        for gradient in self.low:
            if gradient.feedback:
                gradient.set_residual(torch.zeros(()))

    def begin(self) -> Kind:
        """Begin a step, and return what it sends of gradients that have factors."""
        self.steps += 1
        if (ratio := self.scale.begin()) != 1.0:
            for gradient in self.low:
                if gradient.feedback:
                    gradient.multiply(ratio)
        self._buffers, self._waits = [], []
        self.sums.begin(self.step, self.factors * (len(self.gradients) + 1))
        return Kind.EXACT if self.steps <= self._exact else self.kind()

    def take(self, buffer: Buffer) -> None:
        """Take a buffer in; the order of these calls is that in which they are sent."""
        buffer.restart()
        self._buffers.append(buffer)

    def put(self, buffer: Buffer, gradient: Gradient, values: Tensor | None) -> None:
        """Put a gradient into its buffer; None if this rank has none: it takes part with what it lost before. Again, if
        the gradient changed before it was sent.
        """
        started = perf_counter()
        buffer.due.discard(gradient.name)
        if buffer.has_factor(gradient):
            self._project(gradient, values, buffer)
        else:
            buffer.put(gradient, values, self.ranks)
        self.stats.encode_seconds += perf_counter() - started

    def send(self, used: Collection[str]) -> None:
        """Start to send the buffers that are full, up to the first that is not; the last one may tell which parameters
        were used.
        """
        for buffer in self._buffers[len(self._waits) :]:
            if buffer.due:
                return
            if buffer.flags:
                buffer.put_flags([gradient.name in used for gradient in self.gradients])
            buffer.sent = True
            self._waits.append(self._start(buffer))

    def wait(self) -> set[str] | None:
        """Wait for the means of all buffers that were sent. Return which parameters any rank used, if flags tell."""
        started = perf_counter()
        for wait in self._waits:
            wait()
        self.stats.wait_seconds += perf_counter() - started
        last = self._buffers[-1]
        if not last.flags:
            return None
        return {gradient.name for gradient, used in zip(self.gradients, last.get_flags(), strict=True) if used}

    def finish(self, targets: Mapping[str, Tensor]) -> None:
        """End a step, after `wait`: gradients, by name, become means. Those that nobody has are left out.

        Parameters
        ----------
        targets : mapping
            What was put in; zeros where this rank had none.
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
        # A generator takes 32 bits of its seed.
        (mixed,) = np.random.SeedSequence((self._seed, step)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed))
        for gradient in self.low:
            gradient.draw(generator)
        lefts = orthonormalize([gradient.left for gradient in self.low])
        rights = orthonormalize([gradient.right.t() for gradient in self.low])
        for gradient, left, right in zip(self.low, lefts, rights, strict=True):
            gradient.left.copy_(left)
            gradient.right.copy_(right.t())

    def _count(self, seconds: float) -> None:
        stats = self.stats
        stats.decode_seconds += seconds
        nbytes = sum(gradient.nbytes for gradient in self.gradients)
        stats.raw_nbytes += nbytes
        stats.raw_sent_nbytes += round(2 * (self.ranks - 1) / self.ranks * nbytes)
        stats.total_seconds = stats.encode_seconds + stats.decode_seconds + stats.wait_seconds


class ACP(Averaging):
    """One factor a step, left and right by turns; the other is the orthonormalised mean of the last step."""

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
        lefts = [product for product in products if product.left is not product.gradient.left]
        rights = [product for product in products if product.left is product.gradient.left]
        for product, left in zip(lefts, orthonormalize([product.left for product in lefts]), strict=True):
            product.gradient.left.copy_(left)
        for product, right in zip(rights, orthonormalize([product.right.t() for product in rights]), strict=True):
            product.gradient.right.copy_(right.t())


class Power(Averaging):
    """The left factors' mean, orthonormalised, then the right ones' for it.

    A buffer's two sums are one job of the sums' queue, which goes through buffers in their order, the same on all
    ranks: so right factors leave as soon as the mean of the left ones has come, while back-propagation goes on.
    """

    factors = 2

    def reset(self) -> None:
        super().reset()
        self._values: dict[str, Tensor | None] = {}
        self._lefts: dict[str, Tensor] = {}
        self._place = arrays_on(self.low[0].left.device)

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
            # Ranks run this in their callers' threads or in the queue's: bits depend on how many threads these have.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            started = perf_counter()
            self._fill(right, buffer)
            seconds = perf_counter() - started
            right.start(self.sums, stats, self.ranks)()

        tensors = [buffer.own, buffer.wire] if right is None else [buffer.own, buffer.wire, right.own, right.wire]
        given = [self._values[g.name] for g in buffer.gradients if buffer.has_factor(g)]
        work = self._place.submit(
            self.sums.jobs, sum_both, *tensors, *(values for values in given if values is not None)
        )

        def wait() -> None:
            work.wait()
            stats.encode_seconds += seconds

        return wait

    def _right_of(self, buffer: Buffer) -> Buffer | None:
        """The buffer of the right factors that belong to one of left ones, if it has any."""
        low = [gradient for gradient in buffer.gradients if buffer.has_factor(gradient)]
        if low and buffer.right is None:
            buffer.right = Buffer(low, Kind.RIGHT, buffer.wire.device)
        return buffer.right

    def _fill(self, right: Buffer, buffer: Buffer) -> None:
        """Project to the orthonormalised means of left factors."""
        lefts = {gradient.name: buffer.mean_factor(gradient) for gradient in right.gradients}
        sound = list(lefts)
        if not bool(buffer.wire[: buffer.factors].isfinite().all()):
            # NaN and Inf stay with their parameter: they go on to its right factor, and so to its product.
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
