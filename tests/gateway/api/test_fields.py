"""The sampling fields of each dialect become the parameters of workers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import structs

from gateway.api.fields import OpenAIFields, OwnFields, SamplingFields, TgiFields, sampling_of
from shared.protocol import Sampling

VOCAB_SIZE = 500
DIALECTS = (OwnFields, OpenAIFields, TgiFields)


def parameters(kind: type[SamplingFields], fields: dict[str, Any]) -> dict[str, Any]:
    return structs.asdict(sampling_of(msgspec.convert(fields, kind), 5, VOCAB_SIZE))


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (OwnFields, {}, {"temperature": 1, "top_k": 50, "top_p": 0.95, "max_new_tokens": 5}),
        (OwnFields, {"top_p": 0}, {"temperature": 1, "top_p": 0}),  # the published deployment's rule: off
        (OpenAIFields, {}, {"temperature": 1, "top_k": 0, "top_p": 1}),
        (OpenAIFields, {"top_p": 0, "temperature": 2, "top_k": 5}, {"temperature": 0, "top_k": 5, "top_p": 1}),
        *((OpenAIFields, {"stop": stop}, {"stop": ()}) for stop in ("", [], [""], ["", ""])),
        *((OpenAIFields, {"stop": stop}, {"stop": ("x",)}) for stop in ("x", ["x"], ["", "x"])),
        (TgiFields, {}, {"temperature": 0, "top_k": 0, "top_p": 1, "typical_p": 1}),
        (TgiFields, {"do_sample": True}, {"temperature": 1}),
        (TgiFields, {"do_sample": True, "top_p": 0}, {"temperature": 0, "top_p": 1}),
        (TgiFields, {"temperature": 1.0}, {"temperature": 1}),
        (TgiFields, {"temperature": 0}, {"temperature": 0}),
        (TgiFields, {"top_k": 7}, {"temperature": 1, "top_k": 7}),
        (TgiFields, {"top_k": 7, "top_p": 0}, {"temperature": 0, "top_k": 7, "top_p": 1}),
        (TgiFields, {"top_p": 0.5}, {"temperature": 1, "top_p": 0.5}),
        (TgiFields, {"typical_p": 0.5}, {"temperature": 1, "typical_p": 0.5}),
        (TgiFields, {"typical_p": 1}, {"temperature": 0}),
    ],
)
def test_values_have_the_meaning_that_they_have_in_their_dialect(
    kind: type[SamplingFields], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert parameters(kind, fields).items() >= expected.items()


@pytest.mark.parametrize("value", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 10**30])
@pytest.mark.parametrize("kind", DIALECTS)
def test_top_k_is_off_below_1_and_beyond_the_vocabulary(kind: type[SamplingFields], value: int) -> None:
    assert parameters(kind, {"top_k": value})["top_k"] == 0


def test_each_parameter_of_workers_is_a_field_of_a_dialect_and_the_reverse() -> None:
    fields = {name for kind in DIALECTS for name in kind.__struct_fields__}
    assert fields - {"seed", "do_sample", "stop_sequences"} == set(Sampling.__struct_fields__) - {
        "max_new_tokens",
        "first_rank",
    }
