"""The engine as a source of suggestions: it answers as a real server does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from deploy.bench.quality.replay import PROSE
from deploy.bench.quality.sources import GatewaySource, engine_source
from deploy.load.options import Options
from tests.e2e.harness import running

# The threshold is above the usefulness of some predictions and below that of others.
SETTINGS = {"dtype": "fp32", "min_usefulness": "0.15", "predict_temperature": "1.3"}
# At the end of a word, in a word, after a space, after a typed start of a word, in a new line.
SUFFIXES = ["", " wa", " ", " the quick", ".\n\n"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running(tmp_path_factory.mktemp("server"), **SETTINGS) as tercet:
        yield tercet.port


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"strategy": "predict"}, {1, 2, 3}),
        # One each: the engine's source replaces no rejected sample. None is rejected with these seeds.
        ({"n_samples": 1, "temperature": 0.8}, {1}),
    ],
)
def test_suggestions_are_those_of_a_server(port: int, fields: dict[str, Any], numbers: set[int]) -> None:
    prose = PROSE.read_text(encoding="utf-8").split()
    contexts = ["", *(" ".join(prose[: 40 + number]) + suffix for number, suffix in enumerate(SUFFIXES))]
    gateway = GatewaySource(port, fields)
    served = [gateway.suggest(context, 1).suggestions for context in contexts]
    gateway.close()
    with engine_source(Options(models="embedded", settings=SETTINGS), fields) as engine:
        assert [engine.suggest(context, 1).suggestions for context in contexts] == served
    assert {len(suggestions) for suggestions in served} >= numbers
