"""All that is measured on busy cores: programs, what they run beside, and what must be true of their times."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
SIZES = "4,64K,1M,4M,16M,64M"
QUICK_SIZES = "4,1M,16M"

CODECS = {
    "none": "",
    "zfp": "--codec zfp --rate 8",
    "minmax": "--codec minmax --bits 8",
    "cast": "--codec cast --codec-dtype float16",
    "fp8": "--codec fp8",
    "int8": "--codec int8",
    "qsgd": "--codec qsgd --bits 4",
    "terngrad": "--codec terngrad",
    "onebit": "--codec onebit",
    "intsum": "--codec intsum --bits 8",
    "sign": "--codec sign",
    "topk": "--codec topk --density 0.001",
}
"""Options of the codecs that are compared with one thread."""


@dataclass(frozen=True)
class Goal:
    """A goal of one contender: its mean time by another's is to be at most so much, from one size on.

    Attributes
    ----------
    contender, against : str
        Names in the case's records; ``against`` may be ``CASE:NAME``, of another case.
    most : float
        The ratio.
    least : int
        Bytes.
    """

    contender: str
    against: str
    most: float
    least: int = 0


@dataclass(frozen=True)
class Case:
    """One program; its JSON is kept under its name.

    Attributes
    ----------
    what : str
        Beside what, or where, it runs.
    program : str
        After ``python -m``; ``{json}`` is the file that it writes, ``{sizes}`` and ``{cap}`` differ when it is quick.
    goals : tuple of Goal
        What must be true.
    hosts, run : int, str
        Of the lab in which it runs, and more for `netlab run`; 0: on this machine.
    ranks : int
        How many.
    cores : str
        ``"quota"``: in a control group that leaves the time of one core; ``"one"``: bound to one core.
    quick : bool
        Whether it is measured when all is to be quick.
    launches : int
        In turns with those of other cases that are launched as often; times are means over all.
    """

    name: str
    what: str
    program: str
    goals: tuple[Goal, ...]
    hosts: int = 0
    run: str = ""
    ranks: int = 2
    cores: str = ""
    quick: bool = True
    launches: int = 1


def _bench(options: str, compare: str, sizes: str = "{sizes}") -> str:
    return (
        f"osu_like_bench allreduce -m {sizes} {options} --compare {compare} -x 10 -i 100000 --time-cap {{cap}} "
        "--json {json}"
    )


OWN = ("auto", "auto_uncompressed")
_USUAL = _bench(f"{CODECS['zfp']} {{load}}", "native,auto,auto_uncompressed")


def _beside(name: str, what: str, load: str, goals: tuple[Goal, ...], *, quick: bool = True, launches: int = 2) -> Case:
    # Of one launch the mean depends on which calls met the few that wait for a core, or for the GIL.
    return Case(name, what, _USUAL.replace("{load}", load), goals, quick=quick, launches=launches)


def _never(most: float) -> tuple[Goal, ...]:
    return tuple(Goal(name, "native", most) for name in OWN)


_BURNERS = _never(1.05) + tuple(Goal(name, "native", 0.5, MIB) for name in OWN)
_TRAINED = tuple(Goal(name, "gloo", 1.0) for name in ("backend", "compcoll+zfp:rate=8"))
_DDP = (
    "osu_like_bench ddp --parameters 4e6 --loaders 2 --compare gloo,backend,compcoll+zfp:rate=8 -x 2 -i 1000 "
    "--time-cap {long} --statistic mean --json {json}"
)
_QUOTA = _bench(CODECS["zfp"], "native,auto,auto_uncompressed", "1M,16M")

CASES: tuple[Case, ...] = (
    _beside("quiet", "nothing else", "", _never(1.05), launches=1),
    *(
        _beside(
            f"burners-{count}-nice-{nice}",
            f"{count} busy process{'es' * (count > 1)}, nice {nice}",
            f"--burners {count} --burner-nice {nice}",
            _BURNERS,
            quick=count == 2,
        )
        for nice in (0, 19)
        for count in (1, 2, 4)
    ),
    _beside("python-1", "1 computing Python thread in each rank", "--python-threads 1", _never(1.1)),
    _beside(
        "python-4",
        "4 computing Python threads in each rank",
        "--python-threads 4",
        _never(1.1),
        quick=False,
        launches=4,
    ),
    _beside("native-2", "2 busy threads without the GIL in each rank", "--native-threads 2", _never(1.1)),
    Case(
        "ranks-4",
        "4 ranks, nothing else",
        _USUAL.replace("{load}", ""),
        _never(1.05),
        ranks=4,
        quick=False,
    ),
    *(
        Case(
            f"namespaces-{name}",
            f"4 namespaces at 1 Gb/s, {name}, each rank believes that it has a machine",
            _bench(options, "auto_one_thread,auto", "1M,16M,64M" if name != "none" else "1M,16M"),
            (Goal("auto", "auto_one_thread", 1.05),),
            hosts=4,
            run="--own-cores",
            quick=name == "zfp",
            launches=2,
        )
        for name, options in CODECS.items()
    ),
    Case("one-core", "bound to one core", _QUOTA, (), cores="one", launches=4),
    Case(
        "quota",
        "control group with the time of one core, two visible",
        _QUOTA,
        tuple(Goal(name, f"one-core:{name}", 1.1) for name in OWN),
        cores="quota",
        launches=4,
    ),
    Case("ddp-memory", "DDP, 2 busy loaders beside each rank, shared memory", _DDP, _TRAINED),
    Case("ddp-1g", "DDP, 2 busy loaders beside each rank, 1 Gb/s", _DDP, _TRAINED, hosts=2, quick=False),
)

WAITING = "osu_like_bench.waiting -m 4,1M --late 1 -i 2 --json {json}"
WAITING_GOAL = 20.0
"""Milliseconds of CPU time that a rank may use while it waits a second for a late one, inside a node."""
