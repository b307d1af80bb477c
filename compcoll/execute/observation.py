"""What users see of their calls: the logger ``compcoll``, `AccuracyWarning`, and ranges in profiles."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from .. import config
from ..errors import AccuracyWarning
from ..gpu.discovery import nvtx_range
from ..plan import advice
from ..plan.explanation import duration, size
from ..plan.plan import Plan
from ..plan.signature import caller
from ..stats import Stats
from .compiled_plan import CompiledPlan

_log = logging.getLogger("compcoll")
_is_enabled, _loaded = _log.isEnabledFor, sys.modules.get  # looked up here, since each call uses them
_DEBUG, _PROFILER = logging.DEBUG, "torch.autograd.profiler"
_nvtx = False


def set_up() -> None:
    """Follow COMPCOLL_LOG and COMPCOLL_NVTX, as each new communicator does."""
    global _nvtx
    _nvtx = config.nvtx()
    level = config.log_level()
    if level and _log.level == logging.NOTSET:  # else the program has set it
        _log.setLevel(level)
        if not _log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
            _log.addHandler(handler)


def is_watched() -> bool:
    """Return whether to show each call: in the log at DEBUG, in PyTorch's profiler, or as an NVTX range."""
    profiler = _loaded(_PROFILER)
    return _is_enabled(_DEBUG) or _nvtx or (profiler is not None and profiler._is_profiler_enabled)


@contextmanager
def in_profiles(name: str) -> Iterator[None]:
    """Show a block as a range in PyTorch's profiler if it runs, and as an NVTX range if COMPCOLL_NVTX is set."""
    profiler = _loaded(_PROFILER)
    with ExitStack() as ranges:
        if profiler is not None and profiler._is_profiler_enabled:
            ranges.enter_context(profiler.record_function(name))
        if _nvtx:
            ranges.enter_context(nvtx_range(name))
        yield


def name_of(plan: Plan, nbytes: int) -> str:
    """Return the name of a call's range, such as ``compcoll::allreduce int8 ring 16.0 MiB``."""
    codec = [] if plan.codec is None else [plan.codec.label]
    return " ".join([f"compcoll::{plan.call.collective}", *codec, plan.algorithm, size(nbytes)])


def log_first_call(compiled: CompiledPlan, running: Callable[[CompiledPlan], Plan], *, feedback: bool) -> None:
    """Log what a plan does at its first call, and warn at the first one without feedback if its result loses much.

    Parameters
    ----------
    compiled : CompiledPlan
        Remembers its first calls.
    running : callable
        Returns the plan that runs; see `compcoll.execute.host.Collectives.running`.
    feedback : bool
        Whether this call has feedback.
    """
    if not compiled.logged:
        compiled.logged = True
        if _is_enabled(logging.INFO):
            _log.info("%s", running(compiled).summary)
    if not (feedback or compiled.checked):
        compiled.checked = True
        if (plan := running(compiled)).loses_much:
            text, at = advice.warning(plan), caller()
            registry = at.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(text, AccuracyWarning, at.f_code.co_filename, at.f_lineno, registry=registry)


def log_end(rank: int, stats: Stats) -> None:
    """Log the statistics of a call that has ended."""
    if _is_enabled(_DEBUG):
        codec = "" if stats.codec is None else f" with {stats.codec}"
        sent = "unknown" if stats.wire_nbytes < 0 else size(stats.wire_nbytes)
        _log.debug(
            *("rank %d: %s%s by %s: %s, sent %s, ratio %.1f, %s", rank, stats.collective, codec, stats.algorithm),
            *(size(stats.raw_nbytes), sent, stats.ratio, duration(stats.total_seconds)),
        )
