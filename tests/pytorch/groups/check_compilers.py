"""Collectives in functions that go to the other backends of torch.compile: that of Dynamo alone, and Inductor."""

from __future__ import annotations

from check_compiled import bits_are_those_of_eager, calls_keep_their_number_and_order, gradients_go_back_the_same_way


def check_dynamo_alone() -> None:
    compiled_functions_do_the_same("eager")


def check_inductor() -> None:
    compiled_functions_do_the_same("inductor")


def compiled_functions_do_the_same(backend: str) -> None:
    bits_are_those_of_eager(backend)
    calls_keep_their_number_and_order(backend)
    gradients_go_back_the_same_way(backend)
