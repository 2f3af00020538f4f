"""Interleaved rounds and percentiles."""

from __future__ import annotations

import pytest

from deploy.load.rounds import Contender, Results, interleave, percentile
from shared.errors import StartError


def fail() -> dict[str, list[float]]:
    raise StartError("status 504\nand a traceback")


def test_percentiles_interpolate_between_neighbours() -> None:
    samples = [40.0, 10.0, 30.0, 20.0]
    assert [percentile(samples, share) for share in (0, 0.5, 0.9, 1)] == [10, 25, pytest.approx(37), 40]
    assert percentile([7.0], 0.99) == 7


def test_contenders_take_turns_and_the_warm_up_round_is_dropped() -> None:
    turns: list[str] = []

    def contender(name: str) -> Contender:
        return Contender(name, name, lambda: {name: [len(turns)]})

    results = interleave([contender(name) for name in "abc"], 3, turns.append)
    assert "".join(turns) == "abc" + "abc" + "bca" + "cab"
    assert results == Results({"a": [4, 9, 11], "b": [5, 7, 12], "c": [6, 8, 10]})
    assert interleave([], 3) == Results()


def test_a_contender_that_fails_once_has_no_samples_and_the_others_continue() -> None:
    turns: list[str] = []

    def fail_in_the_second_round() -> dict[str, list[float]]:
        return fail() if turns.count("bad") > 1 else {"bad": [1.0]}

    contenders = [Contender("bad", "bad", fail_in_the_second_round), Contender("good", "good", lambda: {"good": [2.0]})]
    results = interleave(contenders, 2, turns.append)
    assert results == Results({"good": [2.0, 2.0]}, {"bad": "status 504"})


def test_a_measurement_outside_the_rounds_that_fails_leaves_its_reason() -> None:
    results = Results()
    results.add("fine", lambda: {"fine": (3.0,)})
    results.add("embedded", fail)
    assert results == Results({"fine": [3.0]}, {"embedded": "status 504"})
