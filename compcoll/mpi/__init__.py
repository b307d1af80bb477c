"""mpi4py's conventions: communicators for programs written for mpi4py, whose large messages are compressed."""

from .intracomm import Cartcomm, Distgraphcomm, Graphcomm, Intracomm

__all__ = ["Cartcomm", "Distgraphcomm", "Graphcomm", "Intracomm"]
