"""Explanation of a plan: the cost model's figures for each option, and the reason of the choice."""

from __future__ import annotations

from ..codecs.base import Codec
from ..layout import amount
from . import choose
from .accuracy import encodings
from .call import Call, Setting
from .choose import Option
from .cost import DEFAULTS, Link
from .wire_formats import short

_NO_LIMIT = '; a codec that is named is taken whatever it is, codec="auto" keeps within tolerance='


def text(call: Call, setting: Setting, algorithm: str, codec: Codec | None, unblocked: str | None = None) -> str:
    """Return the options of a call, one on each line, and the reason of the choice.

    Parameters
    ----------
    call, setting : Call, Setting
        The call and its environment.
    algorithm, codec : str, Codec or None
        The choice.
    unblocked : str or None
        The algorithm that runs instead if some rank must not block in MPI.
    """
    head = _head(call, setting)
    if algorithm == choose.COPY:
        return "\n".join([*head, "", f"choice: {algorithm}: there is one rank"])
    found = choose.options(call, setting)
    chosen = next((o for o in found if (o.algorithm, o.codec) == (algorithm, codec)), None)
    shown = found if call.tolerance is None else _worth_showing(found, chosen)
    tail = [f"choice: {_reason(found, chosen, call, setting, algorithm, codec)}"]
    if unblocked is not None:
        tail.append(f"where some rank must not block in MPI, given a time-out or other collectives: {unblocked}")
    return "\n".join(
        [
            *head,
            "",
            f"{'algorithm':<20}{'codec':<26}{'time':>12}{'gain':>9}{'encodings':>11}{'error':>10}",
            *(_row(option, call, setting, found[0].seconds, option is chosen) for option in shown),
            "",
            *tail,
            f"gain: over {setting.own}, uncompressed",
            "error: estimate of ‖result - exact‖ / ‖exact‖ for Gaussian values" + _NO_LIMIT * (call.codec is not None),
        ]
    )


def summary(call: Call, setting: Setting, algorithm: str, codec: Codec | None, error: float | None) -> str:
    """Return one line on a call: what was asked for, what runs and why, what it loses, and what it saves.

    Parameters
    ----------
    call, setting, algorithm, codec
        As of `text`.
    error : float or None
        Estimated relative error of the result; None if it is unknown.
    """
    values = f"rows of {call.rows}" if call.rows is not None else amount(call.nbytes)
    asked = "no codec" if call.codec is None else call.codec.label
    if call.tolerance is not None:
        asked = f"codec for tolerance {call.tolerance:g}"
    if call.algorithm != choose.AUTO:
        asked += f" by {call.algorithm}"
    head = f"{call.collective} of {values} {call.dtype} on {setting.world.size} ranks: {asked} asked for; "
    if algorithm == choose.COPY:
        return f"{head}{algorithm}: there is one rank"
    found = choose.options(call, setting)
    chosen = next((o for o in found if (o.algorithm, o.codec) == (algorithm, codec)), None)
    said = [head + _reason(found, chosen, call, setting, algorithm, codec)]
    if codec is None:
        said.append("uncompressed")
    else:
        said.append("error unknown" if error is None else f"error {error:.1e}")
        if codec.fixed_size:
            said.append(f"{choose.format_on_wire(algorithm, codec, call, setting).ratio:.1f} × fewer bytes")
    if chosen is not None and chosen is not found[0] and setting.library and call.algorithm != choose.AUTO:
        said.append(f"{found[0].seconds / chosen.seconds:.1f} × as fast as {setting.own} by the model")
    return ", ".join(said)


def duration(seconds: float) -> str:
    """Format seconds with a fitting unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3f} {unit}"
    return f"{seconds * 1e6:.2f} µs"


def link_text(link: Link) -> str:
    """Describe a link: its speed, and the latency of a message."""
    speed = f"{8e-9 / link.per_byte:.4g} Gb/s" if link.per_byte else "infinitely fast"
    return f"{speed}, {duration(link.latency)} a message"


def _head(call: Call, setting: Setting) -> list[str]:
    world, profile = setting.world, setting.between_gpus or setting.profile
    nodes = f"{world.nodes} nodes of {world.per_node}" if world.nodes > 1 else "one node"
    reduced = f" by {call.op}" if call.op not in ("", "sum") else ""
    allowed = f"; error up to {call.tolerance:g}" if call.tolerance is not None else ""
    values = f"{call.collective} of {call.nbytes} bytes of {call.dtype}{reduced}"
    lines = [f"{values} on {world.size} ranks, {nodes}{allowed}"]
    if world.nodes > 1:
        lines.append(f"between nodes: {link_text(profile.between)}")
    measured = profile.timings or profile.speeds != DEFAULTS.speeds
    remark = "" if measured else " (nothing was measured here: `python -m compcoll tune` does)"
    return [*lines, f"profile: {profile.source}{remark}"]


def _worth_showing(found: list[Option], chosen: Option | None) -> list[Option]:
    """Return the uncompressed options, the chosen one, and the fastest allowed one of each codec name and algorithm."""
    fastest: dict[tuple[str, bool], Option] = {}
    for option in sorted(found, key=lambda option: option.seconds):
        if option.codec is not None and not option.refused:
            fastest.setdefault((option.algorithm, True), option)
            fastest.setdefault((option.codec.name, False), option)
    return [o for o in found if o.codec is None or o is chosen or o in fastest.values()]


def _row(option: Option, call: Call, setting: Setting, native_seconds: float, chosen: bool) -> str:
    count = 0 if option.codec is None else encodings(call.collective, option.algorithm, setting.world)
    error = "?" if option.error is None else f"{option.error:.1e}" if option.error else "0"
    mark = f"  ({option.refused})" if option.refused else ""
    if chosen:
        mark = "  <- auto" if call.algorithm == choose.AUTO else "  <- asked for"
    return (
        f"{option.algorithm:<20}{short(option.codec):<26}{duration(option.seconds):>12}"
        f"{native_seconds / option.seconds:>8.2f}×{count:>11}{error:>10}{mark}"
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
        without, more = f", without {own}: {native.refused}" * bool(native.refused), _with_more_error(found, chosen)
        return f"{name}: the {'fastest' if not more else 'best'} that may be chosen{without}{more}"
    if chosen is not native:
        return f"{name}: {native.seconds / chosen.seconds:.2f} × faster than {own}{_with_more_error(found, chosen)}"
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


def _with_more_error(found: list[Option], chosen: Option | None) -> str:
    """Return a remark about the fastest option, if its error was too large; else an empty text."""
    fastest = min((option for option in found if not option.refused), key=lambda option: option.seconds, default=chosen)
    if chosen is None or fastest is None or not (fastest.error and chosen.error):
        return ""
    if fastest.error <= choose.MORE_ERROR * chosen.error:
        return ""
    ratio = fastest.seconds / chosen.seconds
    return (
        f"; {fastest.algorithm} would take {ratio:.2f} × as long, with {fastest.error / chosen.error:.1f} × the error"
    )
