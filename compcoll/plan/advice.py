"""Advice for calls whose result loses too much: another algorithm, another codec, or error feedback."""

from __future__ import annotations

from collections.abc import Iterable

from ..algorithms.record import REDUCTIONS
from ..errors import CompcollError, InvalidArgument
from . import choose
from .accuracy import candidates
from .call import Call, Setting
from .plan import LARGE_ERROR, Plan, make_plan


def warning(plan: Plan) -> str:
    """Return the text of the `AccuracyWarning` for a plan that `Plan.loses_much`."""
    error, codec, call = plan.error, plan.codec, plan.call
    assert error is not None and codec is not None
    found = _instead(plan, max(error / 2, LARGE_ERROR), LARGE_ERROR)
    if call.collective in REDUCTIONS and codec.feedback_converges(call.dtype):
        found.append("feedback=compcoll.ErrorFeedback()")
    use = " or ".join(found or ["codec=None"])
    return (
        f"{_what(plan)}: the result has an estimated relative error of {error:.2g}. Use {use}. If this error is "
        f"acceptable, pass max_error={1.1 * error:.2g}, or call "
        'warnings.simplefilter("ignore", compcoll.AccuracyWarning)'
    )


def check_error(plan: Plan) -> None:
    """Check that the estimated error of a plan is at most its call's ``max_error=``.

    Raises
    ------
    InvalidArgument
        If it is larger or unknown.
    """
    limit, error = plan.call.max_error, plan.error
    if limit is None or not plan.exceeds_max_error:
        return
    found = "unknown" if error is None else f"{error:.2g}"
    raise InvalidArgument(
        f"max_error={limit:g}: the estimated relative error of {_what(plan)} is {found}: use "
        f"{' or '.join(_instead(plan, limit, limit) or ['codec=None'])}"
    )


def _what(plan: Plan) -> str:
    call, ranks = plan.call, plan.setting.world.size
    return f"{call.collective} of {call.dtype} with {plan.codec!r} by {plan.algorithm} on {ranks} ranks"


def _instead(plan: Plan, by_algorithm: float, by_codec: float) -> list[str]:
    """Return the argument that makes the error small enough; nothing if there is none.

    Parameters
    ----------
    plan : Plan
        The plan whose error is too large or unknown.
    by_algorithm, by_codec : float
        The largest error with another algorithm and the same codec, and with another codec. The algorithm of the least
        error comes first, else the codec of the fewest bits.
    """
    call, setting = plan.call._replace(max_error=None, tolerance=None), plan.setting
    algorithms = [call._replace(codec=plan.codec, algorithm=name) for name in choose.NAMES[call.collective]]
    best = min(_compressing(algorithms, setting), default=None, key=lambda found: found[0])
    if best is not None and best[0] <= by_algorithm:
        return [f'algorithm="{best[1].algorithm}" (error {best[0]:.2g})']
    algorithm = choose.AUTO if plan.algorithm in choose.SPARSE else call.algorithm
    others = candidates(setting.device, call.dtype, setting.world.size)
    codecs = [call._replace(codec=codec, algorithm=algorithm) for codec in others]
    enough = [found for found in _compressing(codecs, setting) if found[0] <= by_codec]
    if not enough:
        return []
    error, other = min(enough, key=lambda found: (_bits(found[1]), found[0]))
    return [f"codec={other.codec!r} (error {error:.2g})"]


def _compressing(calls: Iterable[Call], setting: Setting) -> list[tuple[float, Plan]]:
    """Return the plans of those calls that use their codec, with the estimated errors."""
    found = []
    for call in calls:
        try:
            plan = make_plan(call, setting)
        except CompcollError:  # this algorithm does not take this codec
            continue
        if plan.codec == call.codec and plan.error is not None:
            found.append((plan.error, plan))
    return found


def _bits(plan: Plan) -> float:
    return 0.0 if plan.codec is None else plan.codec.wire_bits(plan.setting.device, plan.call.dtype)
