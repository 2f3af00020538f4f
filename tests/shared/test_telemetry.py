"""Logged tracebacks: types and lines of code, no values."""

from __future__ import annotations

import json

import pytest

from shared.errors import StartError
from shared.telemetry import format_traceback
from tests.workers.helpers import run_python

SECRET = "the old man looked at the sea"


def traceback_of(error: Exception) -> str:
    with pytest.raises(type(error)) as caught:
        raise error
    return format_traceback((caught.type, caught.value, caught.tb))


@pytest.mark.parametrize("error", [KeyError(SECRET), ValueError(SECRET), TypeError(SECRET), AssertionError(SECRET)])
def test_a_traceback_has_the_lines_but_not_the_text(error: Exception) -> None:
    text = traceback_of(error)
    assert text.startswith(f"builtins.{type(error).__name__}\n")
    assert f'File "{__file__}", line ' in text
    assert "raise error" in text
    assert SECRET not in text


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("CUDA error: out of memory"),
        ModuleNotFoundError("No module named 'triton'"),
        StartError("There is no slot plan."),
    ],
)
def test_what_the_machine_lacks_is_said(error: Exception) -> None:
    assert traceback_of(error).startswith(f"{type(error).__module__}.{type(error).__name__}: {error}\n")


def test_causes_follow_without_their_text() -> None:
    def fail() -> None:
        try:
            SECRET.encode("ascii").index(SECRET.encode() + b"\xff")
        except ValueError as error:
            raise LookupError(SECRET) from error

    with pytest.raises(LookupError) as caught:
        fail()
    text = format_traceback((caught.type, caught.value, caught.tb))
    assert text.index("builtins.LookupError") < text.index("builtins.ValueError")
    assert SECRET not in text


def test_tercets_events_and_those_of_libraries_are_rendered_so() -> None:
    """Runs in a process of its own, whose logging it may configure."""
    program = f"""
import logging, structlog
from shared.errors import StartError
from shared.telemetry import configure_logging
configure_logging("gateway", "debug")
try:
    {{}}[{SECRET!r}]
except KeyError as error:
    structlog.get_logger().error("unhandled_exception", exc_info=error)
    logging.getLogger("gunicorn.error").exception("Error handling request")
    logging.getLogger("other").exception("it failed")
"""
    done = run_python(program)
    assert done.returncode == 0
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["unhandled_exception", "Error handling request", "it failed"]
    for line in lines:
        assert line["exception"].startswith("builtins.KeyError\n")
    assert SECRET not in done.stderr
