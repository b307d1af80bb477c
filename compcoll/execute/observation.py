"""What users see of their calls: the logger ``compcoll``, `AccuracyWarning`, and ranges in profiles."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from .. import config
from ..errors import AccuracyWarning
from ..gpu.discovery import nvtx_range
from ..layout import amount
from ..plan import advice
from ..plan.plan import Plan
from ..plan.signature import caller
from ..stats import Stats
from .compiled_plan import CompiledPlan

_log = logging.getLogger("compcoll")
_PROFILER, _FLAG = "torch.autograd.profiler", "_is_profiler_enabled"
_nvtx = False

# Modules, since their attributes are read fastest. Each call reads the flag, so `watch` is looked up seldom.
_never, _always = ModuleType("never"), ModuleType("always")
setattr(_never, _FLAG, False)
setattr(_always, _FLAG, True)
watch: Any = _never
"""Its ``_is_profiler_enabled`` is true if calls are shown: logged at DEBUG, or as NVTX ranges; else it is
PyTorch's own, if PyTorch is loaded.
"""


def set_up() -> None:
    """Follow COMPCOLL_LOG and COMPCOLL_NVTX. Called for each new communicator."""
    global _nvtx
    _nvtx = config.nvtx()
    level = config.log_level()
    if level and _log.level == logging.NOTSET:  # else the program has set it
        _log.setLevel(level)
        if not _log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
            _log.addHandler(handler)
    refresh()


def refresh() -> None:
    """Look up the level of the logger, and whether PyTorch is loaded."""
    global watch
    module = sys.modules.get(_PROFILER)
    watch = module if hasattr(module, _FLAG) else _never
    if _nvtx or _log.isEnabledFor(logging.DEBUG):
        watch = _always


@contextmanager
def silent() -> Iterator[None]:
    """Log no calls in a block, in which the library measures by calls of its own."""
    before, _log.disabled = _log.disabled, True
    try:
        yield
    finally:
        _log.disabled = before


@contextmanager
def in_profiles(name: str) -> Iterator[None]:
    """Show a block as a range in PyTorch's profiler if it runs, and as an NVTX range if COMPCOLL_NVTX is set."""
    profiler = sys.modules.get(_PROFILER)
    with ExitStack() as ranges:
        if profiler is not None and getattr(profiler, _FLAG, False):
            ranges.enter_context(profiler.record_function(name))
        if _nvtx:
            ranges.enter_context(nvtx_range(name))
        yield


def name_of(plan: Plan, nbytes: int) -> str:
    """Return the name of a call's range, such as ``compcoll::allreduce int8 ring 16 MiB``."""
    codec = [] if plan.codec is None else [plan.codec.label]
    return " ".join([f"compcoll::{plan.call.collective}", *codec, plan.algorithm, amount(nbytes)])


def log_first_call(
    rank: int, compiled: CompiledPlan, running: Callable[[CompiledPlan], Plan], *, feedback: bool
) -> None:
    """Log what a plan does at its first call. Warn at the first one without feedback if its estimated error is large.

    Parameters
    ----------
    rank : int
        This rank. Only rank 0 logs and warns.
    compiled : CompiledPlan
        Remembers its first calls.
    running : callable
        Returns the plan that runs; see `compcoll.execute.host.Collectives.running`.
    feedback : bool
        Whether this call has feedback.
    """
    refresh()
    if rank != 0:
        return
    if not compiled.logged:
        compiled.logged = True
        log_plan(rank, running(compiled))
    if not (feedback or compiled.checked):
        compiled.checked = True
        if (plan := running(compiled)).loses_much:
            text, at = advice.warning(plan), caller()
            registry = at.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(text, AccuracyWarning, at.f_code.co_filename, at.f_lineno, registry=registry)


def log_plan(rank: int, plan: Plan) -> None:
    """Log what a plan does. Only rank 0 logs."""
    if rank == 0 and _log.isEnabledFor(logging.INFO):
        _log.info("%s", plan.summary)


def log_end(rank: int, stats: Stats) -> None:
    """Log the statistics of a call that has ended."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("rank %d: %s", rank, stats)
