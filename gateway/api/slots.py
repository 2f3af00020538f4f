"""`GET /slots`: every slot with what its worker does, as JSON and, for a browser, as a page that shows the same live.

The page polls the JSON. It holds no figures itself, so it needs no API key; it has a field for the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import falcon
import msgspec
from msgspec import Struct, structs

from gateway.api.health import TAG
from gateway.api.operation import JSON, Answer, Operation, Operations
from gateway.api.page import CONTENT_TYPES, Asset, send_asset
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from shared.protocol import State

PAGE = "slots.html"
# Whose times to answer are shown: those of completions.
ROUTES = frozenset({"/autocomplete", "/v1/completions", "/generate", "/generate_stream", "/invocations"})
_encode = msgspec.json.Encoder().encode


class SlotDetails(State, kw_only=True, frozen=True):
    """All that is known of a slot. `revision` identifies its weights; `peak_in_flight` is the largest number of
    branches that this gateway had there at a time in about the last second. `address` is that of a worker on another
    machine, "" on this machine."""

    slot: int
    peak_in_flight: int
    address: str = ""


class AnswerTimes(Struct, kw_only=True):
    """Times to answer requests for completions since the gateway's start: `counts[i]` answers took at most
    `bounds_s[i]` seconds, and the last of `counts` is the number of all answers."""

    bounds_s: list[float]
    counts: list[int]


class Slots(Struct, kw_only=True):
    """`waiting`: branches that wait for room in a slot."""

    slots: list[SlotDetails]
    waiting: int
    answers: AnswerTimes


def wants_page(fields: Mapping[str, str]) -> bool:
    """Whether a request is a browser's for a page, from its header fields. Programs that accept anything get JSON."""
    return "text/html" in fields.get("HTTP_ACCEPT", "")


class SlotsResource:
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG,
            summary="Every slot, with process ids, revisions and counters",
            description="With `Accept: text/html`, a page that shows the slots live. The page needs no API key, only"
            " what it reads.",
            answers={
                200: Answer(
                    "The slots: those of the plan, then those of other machines.",
                    {JSON: Slots, CONTENT_TYPES[".html"]: str},
                ),
            },
        )
    }

    def __init__(self, admission: Admission, metrics: Metrics, assets: dict[str, Asset]) -> None:
        self._admission = admission
        self._metrics = metrics
        self._page = assets[PAGE]

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.append_header("Vary", "Accept")
        if wants_page(req.env):
            send_asset(self._page, req, resp)
            return
        rows = [
            SlotDetails(
                slot=row.slot.index,
                peak_in_flight=row.peak_in_flight,
                address=str(row.slot.remote or ""),
                **{**structs.asdict(row.state), "model": row.slot.model, "device": row.device},
            )
            for row in self._admission.slots()
        ]
        bounds_s, counts = self._metrics.answer_times(ROUTES)
        answers = AnswerTimes(bounds_s=bounds_s, counts=counts)
        resp.data = _encode(Slots(slots=rows, waiting=self._admission.num_waiting, answers=answers))
