"""OpenTelemetry traces of requests, in both pools: from a request through its branches to a worker's phases.

Off by default; then no OpenTelemetry module is imported and every call here does nothing. Only this module imports
OpenTelemetry. Its own environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, …) say where spans
go and which are kept. Spans hold numbers, names and error codes, never a text: a prompt must not reach a collector.

A span's parent is given as a `traceparent` (W3C Trace Context), which crosses threads and processes as a string.
"""

from __future__ import annotations

import atexit
import importlib.util
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from shared.errors import StartError
from shared.extras import install_command
from shared.version import tercet_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

Attribute = str | int | float | bool
Kind = Literal["server", "client", "internal"]
# At its exit a process has this long to export the spans that it still holds. A collector that is down must not delay
# the stop.
EXIT_S = 2.0


class Span:
    """A span that is not recorded. As a context manager it ends with its block, with the error that leaves it."""

    traceparent = ""

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes; their names get the prefix `tercet.` unless they have one."""

    def rename(self, name: str) -> None:
        """Give it another name than at its start."""

    def end(self, error: str | None = None, at_s: float | None = None) -> None:
        """End it.

        Args:
            error: a code, if what it spans has failed.
            at_s: seconds since the epoch; None: now.
        """

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        pass


NO_SPAN = Span()


class Tracing:
    """Starts spans. This class records none."""

    def start_trace(self, name: str, traceparent: str | None) -> Span:
        """The span of a client's request: a child of the client's own span if it sent one, else a trace's first.

        Args:
            traceparent: as the client sent it; one that is not valid is ignored.
        """
        return NO_SPAN

    def start(
        self, name: str, parent: str, kind: Kind = "internal", *, at_s: float | None = None, **attributes: Attribute
    ) -> Span:
        """A child of `parent`; without one (what is not traced has the parent ""), no span.

        Args:
            parent: a traceparent.
            kind: "client" and "server" are the two ends of a call.
            at_s: when it started, in seconds since the epoch; None: now.
        """
        return NO_SPAN


NO_TRACING = Tracing()


def require_opentelemetry() -> None:
    """
    Raises:
        StartError: OpenTelemetry is not installed.
    """
    try:
        is_installed = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise StartError(f"TERCET_TRACES=1 needs OpenTelemetry, which is not installed: {install_command('otel')}")


def start_tracing(service: str) -> Tracing:
    """Traces of this process, exported by a thread of its own. To be called once, after the process was forked.

    Args:
        service: `service.name` of its spans, unless `OTEL_SERVICE_NAME` is set.

    Raises:
        StartError: OpenTelemetry is not installed.
    """
    require_opentelemetry()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.version": tercet_version()}).merge(
        OTELResourceDetector().detect()
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))

    def export_rest() -> None:
        # The provider itself would wait for up to 30 s.
        thread = threading.Thread(target=provider.shutdown, name="trace-export", daemon=True)
        thread.start()
        thread.join(EXIT_S)

    atexit.register(export_rest)
    return _RecordedTracing(provider)


class _RecordedTracing(Tracing):
    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("tercet")
        self._extract = TraceContextTextMapPropagator().extract
        self._no_context = Context()
        self._kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

    def start_trace(self, name: str, traceparent: str | None) -> Span:
        return self._start(name, traceparent or "", "server", None)

    def start(
        self, name: str, parent: str, kind: Kind = "internal", *, at_s: float | None = None, **attributes: Attribute
    ) -> Span:
        if not parent:
            return NO_SPAN
        span = self._start(name, parent, kind, at_s)
        span.set(attributes)
        return span

    def _start(self, name: str, parent: str, kind: Kind, at_s: float | None) -> _RecordedSpan:
        context = self._extract({"traceparent": parent}, self._no_context)
        return _RecordedSpan(self._tracer.start_span(name, context, self._kinds[kind], start_time=_to_ns(at_s)))


class _RecordedSpan(Span):
    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        named = {name if "." in name else f"tercet.{name}": value for name, value in attributes.items()}
        self._span.set_attributes(named)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def end(self, error: str | None = None, at_s: float | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_to_ns(at_s))

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # The text of an error may repeat what a client sent: only its code or its type is exported.
        self.end(None if error is None else str(getattr(error, "code", type(error).__name__)))


def _to_ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)
