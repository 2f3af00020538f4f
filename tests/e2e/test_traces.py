"""Traces of a real server, exported to a real OTLP receiver: one trace per request, with the right parents."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.e2e.harness import Tercet, running, until
from tests.gateway.pool.helpers import respond, serving_requests

PROMPT = "Marmalade zeppelins"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP receiver that keeps what it gets.

    Attributes:
        spans: the spans, with the service that sent each.
        requests: as received.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []
        self.requests: list[bytes] = []

    def receive(self, connection: socket.socket, request: bytes) -> None:
        self.requests.append(request)
        for part in ExportTraceServiceRequest.FromString(request.partition(b"\r\n\r\n")[2]).resource_spans:
            names = {item.key: item.value.string_value for item in part.resource.attributes}
            for scope in part.scope_spans:
                self.spans += [(names["service.name"], span) for span in scope.spans]
        respond(connection, 200, b"", {"Content-Type": "application/x-protobuf"})

    def trace(self, trace_id: str, num_spans: int) -> list[tuple[str, Span]]:
        """The spans of a trace, once there are as many."""

        def found() -> list[tuple[str, Span]] | None:
            spans = [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]
            return spans if len(spans) >= num_spans else None

        spans: list[tuple[str, Span]] = until(found, 10, f"{num_spans} spans of a trace; {len(self.spans)} in all")
        return spans


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    with serving_requests(collector.receive) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{server.address}")
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running(tmp_path_factory.mktemp("t"), models="embedded*2", traces="1", test_faults="901=oom") as tercet:
            yield tercet


def attributes(span: Span) -> dict[str, Any]:
    """A span's attributes."""
    kinds = {"string_value": str, "int_value": int, "bool_value": bool, "double_value": float}
    return {
        item.key: kinds[kind](getattr(item.value, kind))
        for item in span.attributes
        if (kind := item.value.WhichOneof("value")) is not None
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace_from_the_client_to_the_decode(
    traced: Tercet, collector: Collector, stream: bool
) -> None:
    trace_id = TRACE[:-1] + ("1" if stream else "0")
    body = {"context": PROMPT, "length": 8, "seed": 1, "stream": stream}
    response = traced.client.post("/autocomplete", json=body, headers={"traceparent": f"00-{trace_id}-{PARENT}-01"})
    assert response.status_code == 200
    # The request, its admission, and for each branch a call, the worker's side of it, and three phases there.
    spans = collector.trace(trace_id, 2 + 3 * 5)

    def children(parent: bytes, name: str) -> list[Span]:
        return [span for _, span in spans if (span.parent_span_id, span.name) == (parent, name)]

    [request] = children(bytes.fromhex(PARENT), "POST /autocomplete")
    assert request.kind == Span.SPAN_KIND_SERVER
    assert attributes(request)["http.route"] == "/autocomplete"
    assert attributes(request)["http.response.status_code"] == 200
    assert attributes(request)["tercet.request_id"] == response.headers["x-request-id"]
    assert len(children(request.span_id, "admission")) == 1
    branches = children(request.span_id, "branch")
    assert {attributes(span)["tercet.branch"] for span in branches} >= {0, 1, 2}
    for branch in branches:
        assert branch.kind == Span.SPAN_KIND_CLIENT
        [generate] = children(branch.span_id, "generate")
        assert generate.kind == Span.SPAN_KIND_SERVER
        assert attributes(generate)["tercet.slot"] == attributes(branch)["tercet.slot"]
        assert attributes(generate)["tercet.tokens"] >= 1
        phases = [children(generate.span_id, name)[0] for name in ("queue", "prefill", "decode")]
        times = [time for phase in phases for time in (phase.start_time_unix_nano, phase.end_time_unix_nano)]
        assert times == sorted(times)
        assert request.start_time_unix_nano <= branch.start_time_unix_nano <= times[0]
        assert times[-1] <= branch.end_time_unix_nano + 5_000_000  # the clocks of two processes, compared
    assert {service for service, _ in spans} == {"tercet-gateway", "tercet-worker"}
    assert not any(word.encode() in received for word in PROMPT.split() for received in collector.requests)


def test_an_invalid_parent_begins_a_trace_and_probes_begin_none(traced: Tercet, collector: Collector) -> None:
    before = len(collector.spans)
    traced.client.get("/health/ready")
    response = traced.client.post("/autocomplete", content=b"{", headers={"traceparent": f"00-{'0' * 32}-{PARENT}-01"})
    assert response.status_code == 400

    def new() -> list[Span]:
        return [span for _, span in collector.spans[before:] if span.name == "POST /autocomplete"]

    [request] = until(new, 10, "the refused request's span")
    assert (request.parent_span_id, request.status.code) == (b"", Status.STATUS_CODE_UNSET)
    assert not [span for _, span in collector.spans if "/health" in span.name or span.name == "GET"]


def test_a_retry_is_a_span_of_its_own_and_errors_are_codes(traced: Tercet, collector: Collector) -> None:
    trace_id = TRACE[:-1] + "4"
    body = {"context": PROMPT, "n_samples": 1, "seed": 901}
    response = traced.client.post("/autocomplete", json=body, headers={"traceparent": f"00-{trace_id}-{PARENT}-01"})
    assert response.status_code >= 500
    # The request, its admission, and two calls with the worker's side of each and three phases there.
    spans = [span for _, span in collector.trace(trace_id, 2 + 2 * 5)]
    calls = {attributes(span)["tercet.attempt"]: span for span in spans if span.name == "branch"}
    assert {attempt: span.status.message for attempt, span in calls.items()} == dict.fromkeys((1, 2), "out_of_memory")
    assert attributes(calls[1])["tercet.slot"] != attributes(calls[2])["tercet.slot"]
    [request] = [span for span in spans if span.name == "POST /autocomplete"]
    assert (request.status.code, request.status.message) == (Status.STATUS_CODE_ERROR, str(response.status_code))


def test_a_request_that_the_client_does_not_sample_is_not_exported(traced: Tercet, collector: Collector) -> None:
    for number, sampled in ((2, "00"), (3, "01")):
        headers = {"traceparent": f"00-{TRACE[:-1]}{number}-{PARENT}-{sampled}"}
        traced.client.post("/autocomplete", json={"context": "He saw", "length": 2}, headers=headers)
    collector.trace(f"{TRACE[:-1]}3", 2 + 3 * 5)
    assert f"{TRACE[:-1]}2" not in {span.trace_id.hex() for _, span in collector.spans}
