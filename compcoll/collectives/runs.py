"""Collectives under way on one communicator: from a call, whose arguments are checked, to its result."""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from .. import config
from ..codecs.base import Codec
from ..devices.cores import Contention, usable_cores
from ..devices.foreign import as_numpy, is_foreign, like
from ..devices.host import HostDevice, ndarray
from ..devices.memory import cuda_device, gpu_memory
from ..errors import CommunicatorBroken, CompcollError, InvalidArgument
from ..feedback import ErrorFeedback
from ..kernels._host import Body, Executor
from ..layout import World
from ..model.profile import profile_for
from ..progress import Ended, Engine, Request, Steps, Turn, keep_forever, under_way
from ..stats import Stats
from ..transports.base import Connection
from . import choose
from .calls import Calls
from .device import DeviceCollectives
from .failures import as_failure
from .handshake import Opening, agree, agreed, settle
from .host import Checked, Collectives
from .lanes import AT_ONCE, Lanes
from .missing import RollCall
from .planned_steps import Ranks
from .recipe import Asked, Buffers, Recipe, Run, driven, named_codec
from .replay import Recordings
from .signature import BUSY, ON_GPU, Signature, unmade

_OPENING_TAG = 0  # and the next


class Runs(Calls):
    """Runs collectives: known ones in C++, as `Executor` does, and all others as steps that an engine advances.

    Parameters
    ----------
    transport : Connection
        Between the ranks.
    codec, algorithm, progress, timeout, checksum, codec_options
        The settings of `compcoll.Communicator`.
    """

    def __init__(
        self,
        transport: Connection,
        codec: str | Codec | None,
        algorithm: str,
        progress: str,
        timeout: float | None,
        checksum: bool,
        codec_options: dict[str, Any],
    ) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.nodes = transport.nodes
        neighbours = list(self.nodes).count(self.nodes[self.rank])
        cores = usable_cores() / neighbours if transport.cores is None else transport.cores
        if progress not in ("wait", "nap", "thread"):
            raise InvalidArgument(f'progress={progress!r} is none of "wait", "nap" and "thread"')
        if not isinstance(checksum, bool):
            raise InvalidArgument(f"checksum={checksum!r}: True or False is needed")
        seconds, self._debug = config.timeout(timeout), config.debug()
        own_codec, tolerance = named_codec(codec, codec_options)
        device = HostDevice(config.threads(cores))
        profile = profile_for(transport, device.name)
        world = World.of(transport.nodes)
        self._opening = Opening(transport, _OPENING_TAG, transport.mail)
        self._roll_call = RollCall(transport)
        # Between nodes a look at the network costs more than the core that a waiting rank lends to others.
        crowded = cores < 1 or world.nodes > 1
        lent = world.nodes > 1 and transport.lends_core
        self._engine = engine = Engine(
            *(seconds, self._roll_call),
            threaded=progress == "thread",
            crowded=crowded,
            lent=lent,
            naps=progress == "nap",
            private=transport.blocks,
        )
        self._lanes = Lanes(transport, device.empty_bytes)
        self._recordings = Recordings(transport, self._lanes)
        self._collectives = Collectives(
            device,
            Ranks(
                self.rank,
                transport.native,
                own_codec,
                tolerance,
                algorithm,
                profile,
                world,
                self._opening.arrays,
                transport.shared if world.nodes == 1 else None,
                self._recordings,
                bounded=timeout is not None or config.timeout_is_set(),
                checksum=checksum and self.size > 1,
                blocks=transport.blocks,
            ),
        )
        self._known = device.known_calls(self.size)
        wanted = Contention() if world.nodes == 1 and self.size > 1 else None
        waits = (engine.alone, engine.beside)
        self._executor = Executor(
            *(self._known, self._opening.exchanges, under_way, *waits, wanted), decides=self.rank == 0
        )
        self._broken: BaseException | None = None
        self._turn: Turn | None = None
        self._gpu: DeviceCollectives | None = None
        self._threaded = progress == "thread"

    def call(self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked) -> Any:
        """Run a collective; ``param`` is the operation or the root."""
        executor = self._executor
        result = executor.repeat(self, collective, x, param, out, feedback, asked)
        if result is not None:
            return result
        if type(x) is not ndarray and is_foreign(x):
            seen, memory = self._seen(collective, x, out)
            result = self.call(collective, seen, param, memory, feedback, asked)
            return like(result, x) if out is None else out
        recipe, buffers = self._check(collective, x, param, out, feedback, asked)
        body = recipe.body if buffers.residual is None else recipe.with_feedback
        if body is None:
            try:
                body = self._recordings.body_for(recipe, buffers.residual is not None)
            except Exception as error:  # no memory for its wires
                self._refuse(collective, error)
        if body is None or buffers.order is not None or buffers.apart:
            return self._wait(self._begin(collective, recipe, buffers))
        if self._turn is not None:
            self._openings_before(recipe.timeout, buffers)
        x, out, result, residual = buffers[:4]
        return executor.run(self, collective, recipe, body, x, x.nbytes, out, result, residual)

    def start(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> Request:
        """Start a collective; ``param`` is the operation or the root."""
        if type(x) is not ndarray and is_foreign(x):
            seen, memory = self._seen(collective, x, out)
            request = self.start(collective, seen, param, memory, feedback, asked)
            request.finish = lambda result: like(result, x) if out is None else out
            return request
        recipe, buffers = self._check(collective, x, param, out, feedback, asked)
        return self._begin(collective, recipe, buffers)

    def _openings_before(self, timeout: float | None, *buffers: Buffers) -> None:
        """Wait until the openings of what was started before are over."""
        if self._turn is not None:
            try:
                self._engine.drive(Turn(self._turn).Test, timeout, lambda: "the openings before")
            except BaseException as error:
                self._failed(error, *buffers)
            self._turn, self._executor.ready = None, True

    # The executor calls the next four.

    def _settle_opening(self, recipe: Recipe, level: int) -> int:
        """End an opening that the executor could not, and tell the highest level of all ranks: it takes longer, some
        rank must not block, or the calls differ, which raises an error.
        """
        signature = recipe.plan.signature.here() if self._debug else recipe.plan.signature
        settling = settle(self._opening, signature, level, recipe.along, self._recordings.sent_ahead(recipe))
        self._engine.follow(settling, recipe.plan.signature, recipe.timeout)
        return self._opening.level

    def _beside_others(
        self, collective: str, recipe: Recipe, x: Any, out: Any, result: Any, residual: Any, number: int
    ) -> Any:
        """Run a collective that was opened, while some rank must not block in MPI: it may have others to advance."""
        recipe = recipe.unblocked or recipe
        started, lane = perf_counter(), self._lanes.in_turn[number % AT_ONCE]
        stats = Stats(collective, recipe.plan.codec_text, recipe.plan.algorithm, x.nbytes)
        run = Run(lane.group, lane.take, stats, Turn(None), lane, number)
        if lane.last is not None and not lane.last.done:
            self._engine.drive(Ended(lane.last).Test, recipe.timeout, lane.last.describe)
        used = lane.arena.fresh_nbytes
        steps = self._after_opening(recipe, Buffers(x, out, result, residual).flat(), run)
        self._engine.follow(steps, recipe.plan.signature, recipe.timeout)
        stats.fresh_nbytes += lane.arena.fresh_nbytes - used
        stats.total_seconds = perf_counter() - started
        self._executor.account = stats
        return result

    def _follow(self, body: Body, recipe: Recipe) -> None:
        """Wait for the end of a body."""
        self._engine.follow(body, recipe.plan.signature, recipe.timeout)

    def _failed(self, error: BaseException, *parts: Any) -> NoReturn:
        """Raise what a collective ended with, and break the communicator by it if it must be."""
        failure = self._ended(error, *parts)
        if failure is error or failure is None:
            raise error
        raise failure from error

    def _wait(self, request: Request) -> Any:
        """The result of a request that nobody else has."""
        try:
            return request.wait()
        except BaseException as error:
            if not request.done:
                self._break(error)
            raise

    def _check(
        self, collective: str, x: Any, param: Any, out: Any, feedback: ErrorFeedback | None, asked: Asked
    ) -> Checked:
        """Check the arguments, unless they are like those of a call before; a refusal is told to all ranks, which wait
        in the same collective.
        """
        if self._broken is not None:
            self._check_usable()
        try:
            known = self._known.find(collective, x, param, out, feedback, asked)
            if known is not None:
                recipe, result = known
                buffers = Buffers(x, result, result)
                if x.ndim != 1 or result.ndim != 1:
                    buffers = buffers.flat()
                return recipe, buffers if feedback is None else self._collectives.fed_back(recipe, buffers, feedback)
            collectives = self._collectives if type(x) is ndarray or not gpu_memory(x) else self._on_gpu(x)
            recipe, buffers = collectives.check(collective, x, param, out, feedback, asked)
            if buffers.order is None and buffers.x.dtype is x.dtype and recipe.plan.algorithm not in choose.SPARSE:
                self._known.keep(recipe, collective, x, param, out, feedback, asked)
            return recipe, buffers
        except Exception as error:
            self._refuse(collective, error)

    def _seen(self, collective: str, x: Any, out: Any) -> tuple[Any, Any]:
        """Another library's arrays in host memory, as NumPy's; a refusal is told to all ranks."""
        self._check_usable()
        try:
            return as_numpy(x, "x"), as_numpy(out, "out") if is_foreign(out) else out
        except Exception as error:
            self._refuse(collective, error)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise CommunicatorBroken(f"this communicator cannot be used any more: {self._broken!r}") from self._broken

    def _on_gpu(self, x: Any) -> DeviceCollectives:
        """The collectives on the GPU of the first array that was in one's memory."""
        if self._gpu is None:
            direct = self._transport.takes_device_memory()
            self._gpu = DeviceCollectives(
                cuda_device(x),
                self._collectives,
                self._transport,
                direct=direct,
                threaded=self._threaded,
                seconds=self._engine.timeout,
            )
        return self._gpu

    def _refuse(self, collective: str, error: Exception) -> NoReturn:
        signature = Signature(unmade(collective, error), f"by rank {self.rank}")
        self._executor.begun += 1
        turn = self._next_turn()

        def steps() -> Steps:
            yield turn
            yield from agree(self._opening, signature, BUSY)

        def release(failure: BaseException | None) -> BaseException | None:
            turn.used = True
            return self._ended(failure)

        request = Request(steps(), Stats(collective, None, "refused"), self._engine, release=release)
        self._engine.start(request)
        told: Exception | None = None
        try:
            self._wait(request)
        except CompcollError as heard:
            told = heard
        failure = as_failure(error, self.rank, collective)
        raise failure from told if failure is error else error

    def _begin(self, collective: str, recipe: Recipe, buffers: Buffers) -> Request:
        """Start a collective in its lane."""
        executor, recipe = self._executor, recipe.unblocked or recipe
        number = executor.begun
        executor.begun = number + 1
        lane, turn = self._lanes.in_turn[number % AT_ONCE], self._next_turn()
        stats = Stats(collective, recipe.plan.codec_text, recipe.plan.algorithm, buffers.x.nbytes)
        run = Run(lane.group, lane.take, stats, turn, lane, number)

        def release(error: BaseException | None) -> BaseException | None:
            executor.account = stats
            turn.used = True
            return error and self._ended(error, recipe, buffers)

        # In debugging the signature tells the caller's line, which is known here.
        signature = recipe.plan.signature.here() if self._debug else recipe.plan.signature
        steps = self._steps(recipe, buffers, run, lane.last, signature)
        lane.last = request = Request(steps, stats, self._engine, release=release, timeout=recipe.timeout)
        if self._gpu is not None and buffers.order is not None:
            request.finish = partial(self._gpu.handed_over, buffers.order)
        try:
            self._engine.start(request)
        except BaseException as error:  # an interrupt: the caller never gets what is under way
            self._break(error, recipe, buffers)
            raise
        return request

    def _steps(self, recipe: Recipe, buffers: Buffers, run: Run, before: Request | None, signature: Signature) -> Steps:
        """One of the collectives under way, from its opening to its result."""
        if run.turn.before is not None:
            yield run.turn
        if before is not None and not before.done:  # else all those behind would be opened now
            yield Ended(before)
        along, x, residual = recipe.along, buffers.x, buffers.residual
        if along is not None:
            if recipe.fetch is not None:
                x, residual = yield from recipe.fetch(buffers)
            along.load(x, residual, run.number)
        level = BUSY if buffers.order is None else ON_GPU
        if not agreed(self._opening, signature, level, along, (1, 0)):
            yield from settle(self._opening, signature, level, along)
            level = self._opening.level
        if level == ON_GPU and recipe.all_on_gpus is not None:
            result = yield from recipe.all_on_gpus(buffers, run)
            return buffers.result if result is None else result
        if recipe.plan.algorithm not in choose.IN_TURN:
            run.turn.used = True
        used = run.lane.arena.fresh_nbytes
        result = yield from self._after_opening(recipe, buffers, run)
        run.stats.fresh_nbytes += run.lane.arena.fresh_nbytes - used
        if buffers.apart:
            buffers.result.reshape(-1)[:] = buffers.out.view(buffers.result.dtype)
        return buffers.result if result is None else result

    def _after_opening(self, recipe: Recipe, buffers: Buffers, run: Run) -> Steps:
        """Return the steps that follow the opening."""
        recording = recipe.recordings.get((run.lane.number, buffers.residual is not None))
        if recording is not None:
            return driven(recording.program, buffers, run)
        run.lane.arena.rewind()
        return recipe.steps(buffers, run)

    def _ended(self, error: BaseException | None, *parts: Any) -> BaseException | None:
        """Break the communicator by an error with which a collective ended, and return what to raise; ranks that found
        out that they do not make the same call leave it usable.
        """
        return error if error is None or error is self._opening.apart else self._break(error, *parts)

    def _break(self, error: BaseException, *parts: Any) -> BaseException:
        """Make the communicator unusable: tell the other ranks, and end all that is under way. What MPI may still write
        to is never freed. Return what to raise: an error that names the dead rank or the call, where one can be made.
        """
        keep_forever((self._opening, self._lanes, *parts))
        broken, error = error, as_failure(error, self.rank, *parts)
        if self._broken is None:
            error = self._transport.failure(broken) or error
            self._broken = error
            self._executor.ready = False
            self._roll_call.tell(error)
            self._engine.fail(error)
        return error

    def _next_turn(self) -> Turn:
        turn = self._turn = Turn(self._turn)
        self._executor.ready = False
        return turn
