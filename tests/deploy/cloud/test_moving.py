"""docs/moving: commands and code of the pages, run as they are written with the embedded checkpoint for other models.

The commands that need an account or a cluster are not run; each page says so.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from deploy.cloud.aws.wake.handler import make_service
from tests.clients.blocks import offline_environ
from tests.clients.sagemaker_front import sagemaker_front
from tests.deploy.cloud.aws.cloud import Cloud
from tests.deploy.cloud.aws.conftest import running
from tests.deploy.cloud.aws.function import Function, deployed_function
from tests.documentation.blocks import blocks
from tests.e2e.container import running_container
from tests.e2e.harness import ROOT, START_S, TERCET, free_port, until
from tests.e2e.remote_pool import free_ports
from tests.gateway.pool.helpers import respond, serving_requests
from tests.programs import run_program, running_script, write_program
from workers.checkpoints.resolve import EMBEDDED

__all__ = ["running"]

PAGES = sorted((ROOT / "docs/moving").glob("*.md"))
# Longer is no longer one page.
MAX_WORDS = 400
LINKED_FROM = {
    "WRITE_WITH_TRANSFORMER": ("README",),
    "LAMBDA_EC2": ("README", "AWS"),
    "PLUTO": ("README", "AWS"),
    "TENSORRT": ("README", "AWS"),
    "GKE": ("README", "KUBERNETES"),
}
# In place of the models that the pages name, without a check of int8.
QUICK = {"TERCET_COMPUTE": "cpu", "TERCET_DTYPE": "fp32", "TERCET_DRAIN_S": "0.1", "TERCET_JOBS": "none"}


def texts(page: str, language: str, heading: str = "") -> list[str]:
    """The blocks of a page, or of one of its sections."""
    found = blocks(ROOT / f"docs/moving/{page}.md")
    return [block.text for block in found if block.language == language and heading in {"", block.section}]


def environ_of(base: Path) -> dict[str, str]:
    """An environment in which the shell finds `tercet`, with no setting but `QUICK`."""
    program = base / "bin/tercet"
    write_program(program, f'exec {shlex.join(TERCET)} "$@"')
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    return {**kept, **QUICK, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_short_is_linked_and_names_its_tests(path: Path) -> None:
    text = path.read_text()
    assert len(text.split()) <= MAX_WORDS
    [named] = [line for line in text.splitlines() if line.startswith("Tests: ")]
    for test in re.findall(r"`(tests/[^`]+)`", named):
        assert (ROOT / test).exists(), test
    for linking in LINKED_FROM[path.stem]:
        assert f"](moving/{path.name})" in (ROOT / f"docs/{linking}.md").read_text()


def test_both_models_are_planned_on_each_of_four_gpus(tmp_path: Path) -> None:
    script, _ = texts("WRITE_WITH_TRANSFORMER", "sh", "Steps")
    script = script.replace("small*2,medium", f"small={EMBEDDED}*2,medium={EMBEDDED}")
    done = run_program(
        ["bash", "-euc", script.replace("tercet plan", "tercet plan --json")],
        cwd=tmp_path,
        env={**environ_of(tmp_path), "TERCET_RUN_DIR": str(tmp_path / "run")},
    )
    assert done.returncode == 0, done.stderr
    slots = json.loads(done.stdout)["slots"]
    assert [slot["model"] for slot in slots] == ["small", "small", "medium"] * 4
    assert [slot["device"] for slot in slots] == [f"cuda:{index}" for index in range(4) for _ in range(3)]


def test_each_model_is_on_the_gpus_that_its_workers_have(short_tmp_path: Path) -> None:
    """The commands for small on three GPUs and medium on a fourth; they compute on the CPU."""
    [script] = texts("WRITE_WITH_TRANSFORMER", "sh", "A model on some GPUs only")
    port, pool_port = free_port(), free_ports(11)
    for number in (8110, 8102, 8100):
        script = script.replace(str(number), str(pool_port + number - 8100))
    for name in ("small", "medium"):
        script = script.replace(f"TERCET_MODELS={name}", f"TERCET_MODELS={name}={EMBEDDED}")
    environ = {**environ_of(short_tmp_path), "TERCET_BIND": f"127.0.0.1:{port}"}
    log_path = short_tmp_path / "log"
    with (
        running_script(script, short_tmp_path, environ, log_path) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):

        def warm_models() -> list[str]:
            assert process.poll() is None, log_path.read_text()[-3000:]
            try:
                rows = client.get("/slots").json()["slots"]
            except httpx.TransportError:
                return []
            return sorted(row["model"] for row in rows) if all(row["state"] == "warm" for row in rows) else []

        assert until(warm_models, START_S, "all workers warm") == ["medium", "small", "small", "small"]
        for name in ("small", "medium"):
            body = {"context": "The old man", "model_size": name, "samples": 3}
            answer = client.post("/autocomplete", json=body, timeout=60).json()
            assert {sentence["model"] for sentence in answer["sentences"]} == {name}
    lines = [json.loads(line) for line in log_path.read_text().splitlines() if '"worker_started"' in line]
    assert sorted((line["model"], line["device"]) for line in lines) == [
        ("medium", "cuda:3"),
        ("small", "cuda:0"),
        ("small", "cuda:1"),
        ("small", "cuda:2"),
    ]


# The published page in front of the function.


@contextmanager
def http_api(function: Function) -> Iterator[str]:
    """An HTTP API without an authorizer, as the template makes it, in front of the function."""

    def answer(connection: socket.socket, request: bytes) -> None:
        head, _, body = request.decode().partition("\r\n\r\n")
        line, *fields = head.split("\r\n")
        method, path, _ = line.split()
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        is_new = method == "POST"
        got = function.post(body, user="", **headers) if is_new else function.get(path.removeprefix("/jobs/"), user="")
        respond(connection, got.status, json.dumps(got.body).encode(), got.headers)

    with serving_requests(answer) as server:
        yield f"http://{server.address}"


FORM = {
    "prompt": "The old man",
    "num_samples": "2",
    "length": "40",
    "temperature": "0.7",
    "top_p": "0.9",
    "top_k": "0",
}


@pytest.mark.parametrize("is_done", [True, False])
def test_the_published_page_gets_its_texts_with_the_function_of_the_page(
    running: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    [script] = texts("LAMBDA_EC2", "js")
    with deployed_function(running, tmp_path, AUTHORIZATION="NONE", MAX_WAIT_S="0") as function:
        make_service.cache_clear()
        queue = function.open_queue()

        def run_job() -> None:
            leased = until(queue.lease, 60, "a job")
            assert json.loads(leased.request)["n_samples"] == 2
            if is_done:
                queue.finish(leased, "succeeded", result=b'{"sentences": [{"value": " went"}, {"value": " sat"}]}')
            else:
                queue.finish(leased, "failed", error=b'{"detail": "No model."}')

        with http_api(function) as url:
            gateway = threading.Thread(target=run_job)
            gateway.start()
            program = (
                f"const API_ENDPOINT = {json.dumps(url)};\n{script}\n"
                f"complete({json.dumps(FORM)}).then((texts) => console.log(JSON.stringify(texts)), "
                "(error) => console.log(String(error)));"
            )
            done = run_program(["node", "-e", program], check=True, timeout=90)
            gateway.join()
        queue.close()
    assert done.stdout == ('[" went"," sat"]\n' if is_done else "Error: No model.\n"), done.stderr


def test_the_measurement_of_an_endpoint_prints_latency_and_rate(tmp_path: Path) -> None:
    [script] = texts("TENSORRT", "python")
    assert "range(100)" in script
    script = script.replace("range(100)", "range(8)").replace(
        'client("sagemaker-runtime")', 'client("sagemaker-runtime", endpoint_url=URL, region_name="eu-central-1")'
    )
    with running_container(tmp_path / "t") as container, sagemaker_front(container.url) as url:
        done = run_program(
            [sys.executable, "-c", f"URL = {url!r}\n{script}"],
            env=offline_environ(tmp_path, Path(sys.executable).parent),
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"average \d+ ms, \d+\.\d requests per second\n", done.stdout)
