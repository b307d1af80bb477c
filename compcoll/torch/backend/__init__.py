"""The process group "compcoll"."""

NAME = "compcoll"
