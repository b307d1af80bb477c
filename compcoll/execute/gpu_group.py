"""Transports and plans of calls in which all ranks' arrays are on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from struct import Struct

from ..algorithms.gather import gather
from ..codecs.sparse.sparsifier import Sparsifier
from ..dtypes import DTYPES
from ..gpu.ipc_transport import UNIQUE_ID_NBYTES, Links
from ..gpu.stream_transport import Bootstrap
from ..gpu.watchdog import NCCLBase
from ..pending import Pending, Steps, keep_forever, start_thread, wait_for
from ..plan import choose
from ..plan import gpu_profiles as gpu
from ..plan.call import Call, Setting
from ..plan.plan import Plan, make_plan
from ..transports.base import Group

_COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")
_MOST_SECONDS_TO_JOIN = 120.0

_CARD = Struct("<?24sI16s128s160s")  # whether the rank can join, library, its version, GPU, unique ID, why not
_OFFER = Struct(f"<?{UNIQUE_ID_NBYTES}s160s")  # whether the rank shares memory, its unique ID, why not
_OUTCOME = Struct("<?160s")


class _Within:
    """A `Pending` that completes when a condition holds, or with an ``error``: the condition's or a timeout."""

    def __init__(self, holds: Callable[[], bool], seconds: float, late: str) -> None:
        self._holds = holds
        self._deadline = time.monotonic() + seconds
        self._late = f"{late} within {seconds:g} s"
        self.error: Exception | None = None

    def Test(self) -> bool:
        try:
            holds = self._holds()
            if not holds and time.monotonic() > self._deadline:
                raise TimeoutError(self._late)
            return holds
        except Exception as error:  # also CUDA's and NCCL's errors
            self.error = error
            return True


def connect(group: Group, bootstrap: Bootstrap, seconds: float) -> Steps:
    """Connect the GPUs of all ranks, if each of them can. Return the GPU transport, or a text that says why there is
    none. Every rank gets the same outcome.

    Parameters
    ----------
    group : Group
        The ranks, on a host transport.
    bootstrap : Bootstrap
        This rank's bootstrap.
    seconds : float
        Time limit for joining.
    """
    try:
        version, gpu = bootstrap.identity()
        unique_id = bootstrap.unique_id() if group.rank == 0 else b""
        own = _CARD.pack(True, bootstrap.name.encode(), version, gpu, unique_id, b"")
    except Exception as error:  # also CUDA's and NCCL's errors
        own = _CARD.pack(False, b"", 0, b"", b"", _short(error))
    cards = [_CARD.unpack(card) for card in (yield from gather(group, own))]
    gpus = [card[3] for card in cards]
    for rank, (usable, name, version, gpu, _, why) in enumerate(cards):
        if not usable:
            return f"rank {rank}: {_text(why)}"
        if (name, version) != cards[0][1:3]:
            return f"rank {rank} has {_text(name)} {version}, rank 0 {_text(cards[0][1])} {cards[0][2]}"
        if gpus.index(gpu) != rank:
            return f"ranks {gpus.index(gpu)} and {rank} share a GPU, which {bootstrap.name} refuses"
    joined: Future[NCCLBase] = Future()

    def join() -> None:
        try:
            joined.set_result(bootstrap.join(group.size, cards[0][4], group.rank))
        except Exception as error:
            joined.set_exception(error)

    def has_joined() -> bool:
        wait([joined], 0.001)  # leaves the GIL to the joining thread between polls
        return joined.done() and joined.result() is not None

    try:
        start_thread("join", join)
    except RuntimeError as error:  # the system has no more threads
        joined.set_exception(error)
    joining = _Within(has_joined, seconds, "not all ranks joined")
    yield joining
    return (yield from _refusal(group, joining.error)) or joined.result()


def link(group: Group, shares: Callable[[], Links], seconds: float) -> Steps:
    """Share memory between the GPUs of all ranks, if each of them can. Return the links, or a text that says why there
    are none. Every rank gets the same outcome.

    Parameters
    ----------
    group : Group
        The ranks, all on one node, on a host transport.
    shares : callable
        Creates this rank's part.
    seconds : float
        Time limit for the GPUs to read each other's memory.
    """
    links: Links | None = None
    try:
        links = shares()
        own = _OFFER.pack(True, links.unique_id(), b"")
    except Exception as error:  # also CUDA's errors
        own = _OFFER.pack(False, b"", _short(error))
    offers = [_OFFER.unpack(offer) for offer in (yield from gather(group, own))]
    unique_ids = [unique_id for _, unique_id, _ in offers]
    refused = next((f"rank {rank}: {_text(why)}" for rank, (shared, _, why) in enumerate(offers) if not shared), "")
    if not refused and links is not None:
        wrong: Exception | None = None
        try:
            yield from _ended(links.accept(unique_ids, group.rank), seconds)
            links.check(unique_ids)
        except Exception as error:
            wrong = error
        refused = yield from _refusal(group, wrong)
    if refused:
        yield from unlink(group, links, seconds)
    return refused or links


def unlink(group: Group, links: Links | None, seconds: float) -> Steps:
    """Close other ranks' memory, on all ranks together. No rank frees memory that another rank still has open."""
    closed = True
    if links is not None:
        try:
            yield from _ended([links.idle()], seconds)
            links.close()
        except Exception:  # also CUDA's errors: the memory stays open
            closed = False
    if all(told == b"\1" for told in (yield from gather(group, bytes([closed])))) and links is not None:
        links.forget()


def _refusal(group: Group, error: Exception | None) -> Steps:
    """Exchange all ranks' errors, and return the first one as a text; an empty text if there is none."""
    own = _OUTCOME.pack(error is None, b"" if error is None else _short(error))
    outcomes = [_OUTCOME.unpack(told) for told in (yield from gather(group, own))]
    return next((f"rank {rank}: {_text(why)}" for rank, (right, why) in enumerate(outcomes) if not right), "")


def _ended(reads: list[Pending], seconds: float) -> Steps:
    """Wait until the GPU has read other ranks' memory; raise its error, or `TimeoutError`."""

    def has_ended() -> bool:
        while reads and reads[0].Test():
            del reads[0]
        return not reads

    reading = _Within(has_ended, seconds, "the GPU has not read others' memory")
    yield reading
    if reading.error is not None:
        raise reading.error


def _short(error: Exception) -> bytes:
    return str(error).encode()[:160]


def _text(why: bytes) -> str:
    return why.rstrip(b"\0").decode(errors="ignore")


class GpuGroup:
    """The ranks of a communicator whose arrays are all on GPUs.

    Parameters
    ----------
    setting : Setting
        Setting of calls whose arrays may be on the host or on GPUs.
    bootstrap : Bootstrap
        Connects this rank's GPU with the others.
    shares : callable or None
        Creates this rank's part of the memory that GPUs of one machine share; None if no rank shares memory.
    seconds : float
        The communicator's timeout. Joining and leaving may each take at most half of it.

    Attributes
    ----------
    gpu_transport : NCCLBase or None
        Carries messages from GPU to GPU; None before the first call, or if there is none.
    links : Links or None
        Let GPUs read each other's memory if there is no GPU transport.
    known : bool
        Whether the ranks have already chosen one of these.
    why : str
        Why there is no GPU transport, and why there are no links, if so.
    """

    def __init__(
        self, setting: Setting, bootstrap: Bootstrap, shares: Callable[[], Links] | None, seconds: float
    ) -> None:
        self._bootstrap = bootstrap
        self._shares = shares
        self._group: Group | None = None
        self._seconds = min(seconds / 2, _MOST_SECONDS_TO_JOIN)
        self._by_the_host = setting._replace(profile=gpu.by_the_host(setting.profile), gpus=True)
        self._streamed = setting._replace(profile=gpu.by_nccl(setting.profile), library="NCCL", shared=False, gpus=True)
        self._plans: dict[Call, Plan] = {}
        self.gpu_transport: NCCLBase | None = None
        self.links: Links | None = None
        self.known = False
        self.why = ""

    @staticmethod
    def has_gpu_plan(mixed: Plan) -> bool:
        """Return whether a call may have another plan than ``mixed`` if all ranks' arrays are on GPUs."""
        call = mixed.call
        if (
            call.dtype not in DTYPES
            or call.collective not in _COLLECTIVES
            or call.tolerance is not None
            or call.checksum
            or not call.movable
        ):
            return False
        if mixed.algorithm in (choose.COPY, choose.DISSEMINATION) or mixed.setting.world.size == 1:
            return False
        if call.algorithm in choose.ON_THE_HOST or isinstance(call.codec, Sparsifier):
            return False
        if call.codec is None:
            return call.collective == "allreduce" or call.algorithm == choose.DIRECT
        return call.codec.fixed_size and not call.codec.additive

    def connect(self, group: Group) -> Steps:
        """Choose, together with all other ranks, how messages go from GPU to GPU."""
        found = yield from connect(group, self._bootstrap, self._seconds)
        if isinstance(found, str):
            self.why, self._group = found, group
            if self._shares is not None:
                linked = yield from link(group, self._shares, self._seconds)
                if isinstance(linked, str):
                    self.why += f"; {linked}"
                else:
                    self.links = linked
                    between = gpu.by_ipc(self._by_the_host.profile)
                    self._by_the_host = self._by_the_host._replace(between_gpus=between)
        else:
            self.gpu_transport = found
            self._streamed = self._streamed._replace(streamed=choose.streamed(group.transport.nodes))
        self.known = True

    def plan(self, call: Call) -> Plan:
        """Return the plan of a call. Before the first call, assume that there is no GPU transport."""
        if not self.known:
            return make_plan(call, self._by_the_host)
        if call not in self._plans:
            streamed = self.gpu_transport is not None and call.algorithm in (choose.AUTO, *self._streamed.streamed)
            only = streamed and call.collective != "allreduce"
            asked = call._replace(algorithm=choose.DIRECT) if only else call
            self._plans[call] = make_plan(asked, self._streamed if streamed else self._by_the_host)
        return self._plans[call]

    def free(self) -> None:
        """Free the GPU transport and the links, together with all other ranks."""
        if self.gpu_transport is not None:
            self.gpu_transport.free(self._seconds)
        if self.links is not None and self._group is not None:
            leaving = unlink(self._group, self.links, self._seconds)
            try:
                for pending in leaving:
                    if pending is not None:
                        wait_for(pending, self._seconds, "not all ranks closed each other's memory")
            except Exception:  # also MPI's errors: memory that some rank has not closed is never freed
                keep_forever((leaving, self.links))
