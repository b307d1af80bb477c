"""Collectives in functions that Inductor compiled, which takes a C++ compiler."""

from __future__ import annotations

from check_compiled import bits_are_those_of_eager, calls_keep_their_number_and_order, gradients_go_back_the_same_way


def check_inductor_has_the_bits_of_eager() -> None:
    bits_are_those_of_eager("inductor")
    calls_keep_their_number_and_order("inductor")
    gradients_go_back_the_same_way("inductor")
