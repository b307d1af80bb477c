"""Functions that torch.compile does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function, reason: str = "") -> Function:
    """Exclude a function and its callees from torch.compile; torch._dynamo.disable would cost 10 µs a call.

    Parameters
    ----------
    function : callable
        A Python function.
    reason : str
        Explanation for users who ask for a full graph.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason or None  # type: ignore[attr-defined]
    return function


def constant(function: Function) -> Function:
    """Make torch.compile call a function when it traces, and treat the result as a constant.

    Unlike PyTorch's own decorator for this, it does not load torch._dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
