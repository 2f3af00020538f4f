"""OpenTelemetry traces of requests, in both pools: from a request through its branches to a worker's phases.

Off by default; then no OpenTelemetry module is imported, and there is no `Tracing`. Only this module imports
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
    return Tracing(provider)


class Tracing:
    """Starts spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("tercet")
        self._extract = TraceContextTextMapPropagator().extract
        self._no_context = Context()
        self._kinds = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}

    def start(
        self, name: str, parent: str, kind: Kind = "internal", *, at_s: float | None = None, **attributes: Attribute
    ) -> Span:
        """
        Args:
            parent: a traceparent; a trace's first span has "", or one that is not valid.
            kind: "client" and "server" are the two ends of a call.
            at_s: when it started, in seconds since the epoch; None: now.
        """
        context = self._extract({"traceparent": parent}, self._no_context)
        span = Span(self._tracer.start_span(name, context, self._kinds[kind], start_time=_to_ns(at_s)))
        span.set(attributes)
        return span


class Span:
    """A span that is recorded. As a context manager it ends with its block, with the error that leaves it."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes; their names get the prefix `tercet.` unless they have one."""
        named = {name if "." in name else f"tercet.{name}": value for name, value in attributes.items()}
        self._span.set_attributes(named)

    def rename(self, name: str) -> None:
        """Give it another name than at its start."""
        self._span.update_name(name)

    def end(self, error: str | None = None, at_s: float | None = None) -> None:
        """End it.

        Args:
            error: a code, if what it spans has failed.
            at_s: seconds since the epoch; None: now.
        """
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_to_ns(at_s))

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        # The text of an error may repeat what a client sent: only its code or its type is exported.
        self.end(None if error is None else str(getattr(error, "code", type(error).__name__)))


def _to_ns(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * 1e9)
