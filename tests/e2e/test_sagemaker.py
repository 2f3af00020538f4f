"""`tercet serve --sagemaker` as a container runs it, invoked as documented through a stand-in for SageMaker's front."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.blocks import SAGEMAKER, offline_environ, run_blocks, sections
from tests.clients.sagemaker_front import sagemaker_front
from tests.e2e.container import Container, running_container
from tests.e2e.harness import until

PROMPT = "The old man looked at the sea and"


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A warm container."""
    with running_container(tmp_path_factory.mktemp("t")) as instance:
        yield instance


@pytest.fixture(scope="module")
def front_url(container: Container) -> Iterator[str]:
    """AWS's side of an endpoint cannot be had here."""
    with sagemaker_front(container.url) as url:
        yield url


def test_the_documented_block_runs(front_url: str, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, Path(sys.executable).parent)
    printed = run_blocks(sections()["boto3"], tmp_path, environ, {SAGEMAKER: front_url})
    text = f"'{PROMPT}.+'"
    assert re.fullmatch(rf"\[{text}, {text}, {text}\]\n", printed.replace('"', "'")), printed


def test_the_ready_message_names_no_page_and_there_is_none(container: Container) -> None:
    assert container.client.get("/").status_code == 404
    until(lambda: "Every slot is warm" in container.log(), 10, "the announcement")
    assert "Write at" not in container.log()


def test_the_container_ends_in_time_after_sigterm(container: Container) -> None:
    """Runs last. SageMaker kills 30 s after SIGTERM."""
    with httpx.stream(
        "POST",
        f"{container.url}/invocations",
        json={"inputs": PROMPT, "parameters": {"max_new_tokens": 60}, "stream": True},
        timeout=60,
    ) as answer:
        assert answer.headers["cache-control"] == "no-store, no-transform"
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        container.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    assert events[-1]["generated_text"]
    assert container.process.wait(timeout=25) == 0
    assert time.monotonic() - began < 25
