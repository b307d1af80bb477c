"""Measured profiles in files: one for each MPI library, set of hosts and device."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .. import config
from ..errors import InvalidArgument, ProfileError
from ..layout import World
from ..transports.base import Connection, LibraryConnection
from .cost import DEFAULTS, Link, Profile, Speed, Timing, defaults_of

# The version of the file format.
VERSION = 1

_FORMAT = "compcoll profile"
_REMEDY = "make it again with `mpirun … python -m compcoll tune`, or delete it"


@dataclass(frozen=True)
class Place:
    """The MPI library, hosts and device that a profile is valid for.

    Parameters
    ----------
    mpi : str
        MPI library and version; empty without MPI.
    hosts : tuple of str
        Names of the hosts, sorted.
    device : str
        The device that holds the buffers, and its kernels.
    """

    mpi: str
    hosts: tuple[str, ...]
    device: str

    def covers(self, other: Place) -> bool:
        """Return whether this place's profile is valid for another one, which may have fewer hosts."""
        return (self.mpi, self.device) == (other.mpi, other.device) and set(other.hosts) <= set(self.hosts)

    def __str__(self) -> str:
        hosts = ", ".join(self.hosts[:4]) + (f" … ({len(self.hosts)} hosts)" if len(self.hosts) > 4 else "")
        return f"{self.mpi or 'no MPI'} on {hosts}, {self.device}"


@dataclass(frozen=True)
class Stored:
    """A profile with the place and date of its measurement."""

    profile: Profile
    place: Place
    made: str


def folder() -> Path:
    """Return the folder of profiles in this user's settings."""
    from platformdirs import user_config_path

    return user_config_path("compcoll", appauthor=False) / "profiles"


def path_of(place: Place) -> Path:
    """Return the path of a place's profile file."""
    text = "\n".join((place.mpi, place.device, *place.hosts))
    return folder() / f"{blake2b(text.encode(), digest_size=8).hexdigest()}.json"


def save(stored: Stored, path: Path | None = None) -> Path:
    """Write a profile atomically.

    Parameters
    ----------
    stored : Stored
        The profile.
    path : Path, optional
        The file; by default the one where `find` looks.

    Raises
    ------
    ProfileError
        If the file cannot be written.
    """
    path = path_of(stored.place) if path is None else path
    text = json.dumps({"format": _FORMAT, "version": VERSION, **asdict(stored)}, indent=1)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise ProfileError(f"profile {path} cannot be written: {error.strerror or error}") from error
    return path


def load(path: Path) -> Stored:
    """Read a profile.

    Raises
    ------
    ProfileError
        If the file cannot be read, is no profile, or has another version.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe could block for ever
            raise OSError("it is no regular file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"profile {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"profile {path} is damaged ({error}): {_REMEDY}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ProfileError(f"{path} is not a profile of compcoll's: {_REMEDY}")
    if data.get("version") != VERSION:
        raise ProfileError(
            f"profile {path} has version {data.get('version')!r}, this compcoll reads {VERSION}: {_REMEDY}"
        )
    try:
        place = Place(str(data["place"]["mpi"]), tuple(map(str, data["place"]["hosts"])), str(data["place"]["device"]))
        return Stored(_profile(data["profile"], str(path)), place, str(data["made"]))
    except InvalidArgument as error:
        raise ProfileError(f"profile {path} has an invalid value: {error}: {_REMEDY}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ProfileError(f"profile {path} has a missing or malformed entry ({said}): {_REMEDY}") from error


def _profile(data: Mapping[str, Any], source: str) -> Profile:
    def timing(part: Mapping[str, Any]) -> Timing:
        points = tuple((int(nbytes), float(seconds)) for nbytes, seconds in part["points"])
        return Timing(part["algorithm"], part["codec"], float(part["bits"]), World(**part["world"]), points)

    def numbers(part: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in part.items()}

    return Profile(
        inside=Link(**numbers(data["inside"])),
        between=Link(**numbers(data["between"])),
        speeds=tuple(
            Speed(part["codec"], **numbers({name: value for name, value in part.items() if name != "codec"}))
            for part in data["speeds"]
        ),
        message=float(data["message"]),
        call=float(data["call"]),
        per_node=int(data["per_node"]),
        timings=tuple(timing(part) for part in data["timings"]),
        source=source,
    )


def find(place: Place) -> Stored | None:
    """Return the profile of a place, or of the smallest place that covers it; None if there is none.

    Raises
    ------
    ProfileError
        If the place's own profile cannot be used.
    """
    own = path_of(place)
    if own.exists():
        stored = load(own)
        if not stored.place.covers(place):
            raise ProfileError(f"profile {own} was measured for {stored.place}, not for {place}: {_REMEDY}")
        return stored
    larger = [stored for stored in _readable() if stored.place.covers(place)]
    return min(larger, key=lambda stored: len(stored.place.hosts), default=None)


def latest(host: str, device: str) -> Stored | None:
    """Return the newest profile that includes this host, for any MPI library."""
    places = [stored for stored in _readable() if host in stored.place.hosts and stored.place.device == device]
    return max(places, key=lambda stored: stored.made, default=None)


def _readable() -> list[Stored]:
    """Return all stored profiles that can be read."""
    found = []
    for path in sorted(folder().glob("*.json")):
        try:
            found.append(load(path))
        except ProfileError:
            continue
    return found


def place_of(transport: LibraryConnection, device: str) -> Place:
    """Return the place of a transport's ranks. Collective."""
    library, hosts = transport.whereabouts()
    return Place(library, hosts, device)


def profile_for(transport: Connection, device: str) -> Profile:
    """Return the profile of the machines that the ranks run on. Rank 0 reads and broadcasts it. Collective.

    COMPCOLL_PROFILE names a file, or is ``defaults``. If a profile cannot be used, rank 0 warns once and uses the
    defaults of the MPI library.

    Parameters
    ----------
    transport : Connection
        The transport between the ranks.
    device : str
        The device that holds the buffers, and its kernels.
    """
    if transport.size == 1 or not isinstance(transport, LibraryConnection):
        return DEFAULTS
    place, world = place_of(transport, device), World.of(transport.nodes)
    return _broadcast(transport, lambda: _known(place, world))


# Quick profiles that this process has measured because none was stored.
_measured: dict[tuple[Place, World], Profile] = {}


def remember(transport: LibraryConnection, device: str, measure: Callable[[], Profile]) -> None:
    """Measure a profile for a transport's ranks and keep it in this process, if none is stored or named. Collective.

    Parameters
    ----------
    transport, device
        As in `profile_for`; the transport must be a `LibraryConnection`.
    measure : callable
        Measures and returns the profile. Either all ranks call it, or none.
    """
    place, world = place_of(transport, device), World.of(transport.nodes)
    wanted = transport.broadcast(lambda: not config.profile() and _known(place, world) is defaults_of(place.mpi))
    if wanted:
        measured = measure()
        _measured[place, world] = _broadcast(transport, lambda: measured)


def _broadcast(transport: LibraryConnection, find: Callable[[], Profile]) -> Profile:
    """Call ``find`` on rank 0 and return its profile on every rank. Collective."""
    parts = transport.broadcast(lambda: asdict(find()))
    return _profile(parts, parts["source"])


def _known(place: Place, world: World) -> Profile:
    """Return the stored profile of a place, else the one measured in this process, else the defaults."""
    named, stored = config.profile(), None
    if named != config.NO_PROFILE:
        try:
            stored = load(Path(named)) if named else find(place)
        except (ProfileError, OSError, RuntimeError) as error:
            warnings.warn(f"{error} (compcoll uses its default profile)", RuntimeWarning, stacklevel=2)
    if stored is not None:
        return stored.profile
    defaults = defaults_of(place.mpi)
    return defaults if named else _measured.get((place, world), defaults)
