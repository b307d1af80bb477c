"""Codecs by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from .. import codecs
from ..errors import InvalidArgument, UnknownCodec
from .base import UPDATING, Codec
from .sparse.methods import ALL as SPARSIFIERS

_OWN: dict[str, type[Codec]] = {cls.name: cls for cls in [*codecs.ALL, *SPARSIFIERS]}
_GROUP = "compcoll.codecs"
_TRUTH = {"true": True, "false": False}


@lru_cache(maxsize=1)
def codec_classes() -> dict[str, type[Codec]]:
    """Return all codec classes by name."""
    others: dict[str, type[Codec]] = {point.name: point.load() for point in entry_points(group=_GROUP)}
    return others | _OWN


def is_own(cls: type[Codec]) -> bool:
    """Return whether a codec is compcoll's own."""
    return _OWN.get(cls.name) is cls


def list_codecs() -> list[str]:
    """Return the names of all codecs: compcoll's own, and those of installed packages' entry points "compcoll.codecs".

    Examples
    --------
    >>> "zfp" in compcoll.list_codecs()
    True
    """
    return sorted(codec_classes())


def get_codec(name: str, **options: Any) -> Codec:
    """Create a codec by name.

    Parameters
    ----------
    name : str
        A name from `list_codecs`. Options may follow it: ``"NAME:option=value,option=value"``.
    **options
        The codec's configuration, such as ``rate=8``.

    Raises
    ------
    UnknownCodec
        If there is no codec of that name.
    InvalidArgument
        If the codec has no such option or does not allow its value, or if an option is given twice.

    Examples
    --------
    >>> compcoll.get_codec("zfp", rate=8)
    ZFP(rate=8.0)
    >>> compcoll.get_codec("minmax:bits=4,block=64")
    MinMax(bits=4, block=64)
    """
    text, name = name, name_in(name)
    cls = _OWN.get(name) or codec_classes().get(name)
    if cls is None:
        raise UnknownCodec(f"unknown codec {name!r}{meant(name, list_codecs())}: there are {', '.join(list_codecs())}")
    options = with_written(text, options, cls)
    try:
        return cls(**options)
    except TypeError as error:
        allowed = sorted(field.name for field in fields(cls)) if is_dataclass(cls) else list(options)
        for option in options:
            if option not in allowed:
                known = ", ".join(allowed)
                hint = meant(option, allowed) or _owners(option)
                raise InvalidArgument(f"codec {name!r} has no option {option!r}{hint}: it takes {known}") from None
        raise InvalidArgument(f"codec {name!r} cannot take {options}: {error}") from error


def name_in(text: str) -> str:
    """Return the name in ``"NAME:option=value,option=value"``."""
    return text.partition(":")[0]


def with_written(text: str, options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Return the options given separately, and those in ``"NAME:option=value,…"``.

    Parameters
    ----------
    text : str
        A codec's name, with or without options.
    options : mapping
        The options given separately.
    cls : type
        The dataclass whose fields have the types of the options. Without fields, options stay text.

    Raises
    ------
    InvalidArgument
        If the text has another form, a value has another type than its option, or an option is given twice.
    """
    name, colon, written = text.partition(":")
    own = {field.name: field for field in fields(cls)} if is_dataclass(cls) else {}
    found = dict(options)
    for part in written.split(",") if colon else ():
        option, _, value = (word.strip() for word in part.partition("="))
        if not (option and value):
            raise InvalidArgument(
                f"codec={text!r}: {part!r} is not option=value: write NAME:option=value,option=value, such as "
                "minmax:bits=4,block=64"
            )
        if option in found:
            also = f" and {option}={options[option]!r}" if option in options else ""
            raise InvalidArgument(f"codec={text!r}{also}: {option} is given twice: give it once")
        found[option] = _converted(name, option, value, own.get(option))
    return found


def kind_of(field: Field[Any]) -> type:
    """Return the type of an option's values other than None."""
    words = re.findall(r"\w+", str(field.type))
    return next((kind for kind in (bool, int, float) if kind.__name__ in words), str)


def _converted(codec: str, option: str, text: str, field: Field[Any] | None) -> Any:
    if field is None:
        return text
    if text == "None" and field.default is None:
        return None
    kind = kind_of(field)
    try:
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        limits = field.metadata.get("limits", f"of type {kind.__name__}")
        raise InvalidArgument(f"{codec}: {option}={text!r} must be {limits}") from None


def as_codec(codec: str | Codec | None, options: dict[str, Any], argument: str = "codec") -> Codec | None:
    """Return the codec given by a call's argument and options; None for uncompressed. See `get_codec` for its text."""
    if isinstance(codec, str):
        return get_codec(codec, **options)
    if options and codec is None:
        raise InvalidArgument(_without_codec(sorted(options), argument))
    if options:
        raise InvalidArgument(f"options {', '.join(sorted(options))} go with a codec's name, not with {codec!r}")
    if isinstance(codec, type):
        raise InvalidArgument(f"{argument}={codec.__name__} is a class: give {codec.__name__}(…), or its name")
    if codec is not None and not isinstance(codec, Codec):
        raise InvalidArgument(
            f"{argument}={codec!r} is neither a codec nor the name of one ({', '.join(list_codecs())})"
        )
    return codec


def needed_codec(codec: str | Codec, options: dict[str, Any]) -> Codec:
    """Return the codec given by an argument and options, which must not be None."""
    found = as_codec(codec, options)
    if found is None:
        raise InvalidArgument("codec=None: a codec is needed here")
    return found


def without_reference(codec: Codec, what: str) -> Codec:
    """Return a codec that encodes values alone, as ``what`` needs it.

    Raises
    ------
    InvalidArgument
        If the codec needs values that the receivers have.
    """
    if codec.needs_reference:
        raise InvalidArgument(
            f"{what} cannot use {codec!r}, which sends how values differ from those that the receivers have: use "
            f"another codec; only {' and '.join(UPDATING)} take this one"
        )
    return codec


def meant(name: str, known: Iterable[str]) -> str:
    """Return a suggestion of a similar name; empty if there is none."""
    close = get_close_matches(str(name).lower(), known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _options_of_all() -> dict[str, set[str]]:
    """Return the names of the options of each codec."""
    found: dict[str, set[str]] = {}
    for name, cls in codec_classes().items():
        if is_dataclass(cls):
            found[name] = {field.name for field in fields(cls)}
    return found


def _owners(option: str) -> str:
    """Return which codecs have an option, for an error message; empty if none has it."""
    names = sorted(name for name, options in _options_of_all().items() if option in options)
    return f" (an option of {', '.join(names)})" if names else ""


def _without_codec(options: Sequence[str], argument: str) -> str:
    """Return the error message for options without a codec: the codec is missing, or an option is misspelt."""
    known = set[str]().union(*_options_of_all().values())
    for option in options:
        if option not in known:
            return f"{option!r} is neither an argument nor an option of any codec{meant(option, (argument, *known))}"
    return f'options {", ".join(options)} go with a codec: name it, such as {argument}="zfp"'
