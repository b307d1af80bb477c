"""A plan explained: what the cost model says of each option, and the reason of the choice."""

from __future__ import annotations

from ..codecs.base import Codec
from ..model.accuracy import encodings
from ..model.kinds import short
from . import choose
from .call import Call, Setting
from .choose import Option

_NO_LIMIT = '; a codec that is named is taken whatever it is, codec="auto" keeps within tolerance='


def text(call: Call, setting: Setting, algorithm: str, codec: Codec | None, unblocked: str | None) -> str:
    """The options of a call, one a line, and why one of them was chosen.

    Parameters
    ----------
    call, setting : Call, Setting
        What was asked for, and where.
    algorithm, codec : str, Codec or None
        What was chosen.
    unblocked : str or None
        The algorithm that runs instead where some rank must not block in MPI.
    """
    world = setting.world
    nodes = f"{world.nodes} nodes of {world.per_node}" if world.nodes > 1 else "one node"
    reduced = f" by {call.op}" if call.op not in ("", "sum") else ""
    head = [
        f"{call.collective} of {call.nbytes} bytes of {call.dtype}{reduced} on {world.size} ranks, {nodes}",
        f"profile: {(setting.between_gpus or setting.profile).source}",
    ]
    if algorithm == choose.COPY:
        return "\n".join([*head, "", f"choice: {algorithm}: there is one rank"])
    found = choose.options(call, setting)
    chosen = next((o for o in found if (o.algorithm, o.codec) == (algorithm, codec)), None)
    shown = found if call.tolerance is None else _worth_showing(found, chosen)
    fastest = min(option.seconds for option in shown)
    tail = [f"choice: {_reason(found, chosen, call, setting, algorithm, codec)}"]
    if unblocked is not None:
        tail.append(f"where some rank must not block in MPI, given a time-out or other collectives: {unblocked}")
    return "\n".join(
        [
            *head,
            "",
            f"{'algorithm':<20}{'codec':<22}{'time':>12}{'× best':>9}{'encodings':>11}{'error':>10}",
            *(_row(option, call, setting, fastest, option is chosen) for option in shown),
            "",
            *tail,
            "error: estimate of ‖result - exact‖ / ‖exact‖ for Gaussian values" + _NO_LIMIT * (call.codec is not None),
        ]
    )


def duration(seconds: float) -> str:
    """Seconds with a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.2f} µs"


def _worth_showing(found: list[Option], chosen: Option | None) -> list[Option]:
    """Keep, for each algorithm, the options without a codec and with the fastest codec that may be chosen."""
    shown: dict[tuple[str, bool], Option] = {}
    for option in sorted(found, key=lambda option: option.seconds):
        if option.codec is None or not option.refused:
            shown.setdefault((option.algorithm, option.codec is None), option)
    return [option for option in found if option in shown.values() or option is chosen]


def _row(option: Option, call: Call, setting: Setting, fastest: float, chosen: bool) -> str:
    count = 0 if option.codec is None else encodings(call.collective, option.algorithm, setting.world)
    error = "?" if option.error is None else f"{option.error:.1e}" if option.error else "0"
    mark = f"  ({option.refused})" if option.refused else ""
    if chosen:
        mark = "  <- auto" if call.algorithm == choose.AUTO else "  <- asked for"
    return (
        f"{option.algorithm:<20}{short(option.codec):<22}{duration(option.seconds):>12}"
        f"{option.seconds / fastest:>9.2f}{count:>11}{error:>10}{mark}"
    )


def _reason(
    found: list[Option], chosen: Option | None, call: Call, setting: Setting, algorithm: str, codec: Codec | None
) -> str:
    name = algorithm if codec is None else f"{algorithm} with {short(codec)}"
    native, own = found[0], setting.own
    if call.algorithm != choose.AUTO:
        return f"{name}: that algorithm was asked for"
    if not call.movable:
        values = " ".join(part for part in (call.op, "of" * bool(call.op), call.dtype) if part)
        small = "it is small enough to travel with the handshake, and " * (algorithm == choose.DISSEMINATION)
        return f"{name}: {small}no other algorithm of our own takes {values}"
    if chosen is None or native.refused:
        return f"{name}: the fastest that may be chosen" + f", without {own}: {native.refused}" * bool(native.refused)
    if chosen is not native:
        return f"{name}: {native.seconds / chosen.seconds:.2f} × faster than {own}"
    others = [option for option in found[1:] if not option.refused]
    if not others and call.tolerance is not None:
        return f"{name}: no codec keeps the error within {call.tolerance:g}"
    if not others:
        known = setting.profile.measured(setting.world)
        unknown = "" if known or setting.gpus else "; tune on these ranks lets auto consider our own uncompressed"
        return f"{name}: nothing is to be compressed{unknown}"
    fastest = min(others, key=lambda option: option.seconds)
    with_codec = "" if fastest.codec is None else f" with {short(fastest.codec)}"
    ratio = fastest.seconds / native.seconds
    than = f"would take {ratio:.2f} × as long" if ratio > 1 else f"would gain less than {1 - choose.CLEARLY:.0%}"
    return f"{name}: {fastest.algorithm}{with_codec} {than}"
