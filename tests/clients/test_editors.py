"""Editor plug-ins, configured as docs/CLIENTS.md says.

minuet-ai.nvim runs unmodified where its checkout and Neovim 0.10 or newer are given, because no package index has both.
Otherwise, and for Continue, which runs inside VS Code, tests send the requests that their sources build, and read the
answers as their sources do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.clients.blocks import TERCET, run_blocks, sections
from tests.e2e.harness import Tercet, until

PROMPT = "The old man looked at the sea and"


def settings_file(section: str, tercet: Tercet, home: Path) -> Path:
    """The section's settings, saved with the server's address."""
    run_blocks(sections()[section], home, {}, {TERCET: tercet.url})
    [block] = sections()[section]
    return home / block.file_name


def minuet_text(printed: str) -> str:
    """What minuet's `stream_decode` (lua/minuet/utils.lua) makes of curl's output."""
    text = ""
    for line in printed.split("\n"):
        try:
            part = json.loads(line.removeprefix("data:"))["choices"][0]["text"]
        except (ValueError, LookupError, TypeError):
            continue
        text += part if isinstance(part, str) else ""
    return text


def start_minuet_request(tercet: Tercet, body: dict[str, Any], home: Path) -> subprocess.Popen[str]:
    """The command of minuet's `make_curl_args`."""
    # A file per request, as minuet makes them: curl may not have read the last one's yet.
    with tempfile.NamedTemporaryFile("w", dir=home, suffix=".json", delete=False) as data:
        json.dump(body, data)
    headers = ["Content-Type: application/json", "Accept: application/json", "Authorization: Bearer xterm"]
    return subprocess.Popen(
        [
            "curl",
            "-L",
            *(part for header in headers for part in ("-H", header)),
            "--max-time",
            "3",
            "-d",
            f"@{data.name}",
            f"{tercet.url}/v1/completions",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_minuet_s_requests_are_answered_each_with_a_text_of_its_own(tercet: Tercet, tmp_path: Path) -> None:
    """Three identical requests at once, without seeds; the next key kills those that still run."""
    body = {"stream": True, "model": "embedded", "max_tokens": 20, "prompt": PROMPT, "stop": ["\n"], "clean": True}
    requests = [start_minuet_request(tercet, body, tmp_path) for _ in range(3)]
    answers = [minuet_text(request.communicate(timeout=10)[0]) for request in requests]
    assert all(answer.strip() for answer in answers)
    assert len(set(answers)) > 1

    long = [start_minuet_request(tercet, {**body, "max_tokens": 256, "stop": []}, tmp_path) for _ in range(3)]
    until(lambda: sum(slot["in_flight"] for slot in tercet.slots()) > 0, 5, "a running sequence")
    for request in long:
        request.terminate()
        request.communicate()
    until(lambda: sum(slot["in_flight"] for slot in tercet.slots()) == 0, 2, "the sequences' cancellation")


def continue_texts(lines: Iterable[str]) -> list[str]:
    """What Continue's `streamSse` (packages/fetch/src/stream.ts) and `_legacystreamComplete` make of a stream."""
    texts = []
    for line in lines:
        if line.startswith((": ping", "data:[DONE]", "data: [DONE]")):
            break
        if line.startswith("data:"):
            value = json.loads(line.removeprefix("data:"))
            assert not value.get("error")
            if value["choices"] and value["choices"][0]["text"]:
                texts.append(value["choices"][0]["text"])
    return texts


def test_continue_s_request_is_streamed(tercet: Tercet, tmp_path: Path) -> None:
    """As core/llm/llms/OpenAI.ts (`_legacystreamComplete`) builds it from the page's settings."""
    [model] = yaml.safe_load(settings_file("Continue", tercet, tmp_path).read_text())["models"]
    options = model["defaultCompletionOptions"]
    assert model["autocompleteOptions"]["template"] == "{{{prefix}}}"
    body = {
        "model": model["model"],
        "max_tokens": options["maxTokens"],
        "temperature": 0.01,
        "stream": True,
        "stop": ["/src/", "#- coding: utf-8", "```"],
        "prompt": PROMPT,
        **model.get("requestOptions", {}).get("extraBodyProperties", {}),
    }
    for key in (model["apiKey"], ""):
        headers = {"Content-Type": "application/json", "api-key": key}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        with httpx.stream("POST", f"{model['apiBase']}/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            assert "".join(continue_texts(response.iter_lines())).strip()
    eight = {**body, "stop": [*body["stop"], "<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "</code>"]}
    assert tercet.client.post("/v1/completions", json={**eight, "stream": False}).status_code == 200


@pytest.mark.clients
@pytest.mark.skipif(
    "MINUET" not in os.environ or not shutil.which("nvim"),
    reason="MINUET is not set to a checkout of minuet-ai.nvim, or there is no nvim",
)
def test_minuet_shows_and_accepts_a_suggestion(tercet: Tercet, tmp_path: Path) -> None:
    """Neovim without a screen; keys are typed, the virtual text is read, and Alt-a accepts it."""
    settings = settings_file("minuet-ai.nvim", tercet, tmp_path)
    socket = str(tmp_path / "nvim")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "xterm"}

    def ask(expression: str) -> str:
        return subprocess.run(
            ["nvim", "--server", socket, "--remote-expr", expression],
            capture_output=True,
            text=True,
            check=True,
            env=environ,
        ).stdout

    def send(keys: str) -> None:
        subprocess.run(["nvim", "--server", socket, "--remote-send", keys], check=True, env=environ)

    marks = (
        'vim.api.nvim_buf_get_extmarks(0, vim.api.nvim_create_namespace("minuet.virtualtext"), 0, -1, {details=true})'
    )
    editor = subprocess.Popen(
        [
            "nvim",
            "--headless",
            "--clean",
            "--cmd",
            f"set rtp+={os.environ['MINUET']}",
            "-c",
            f"luafile {settings}",
            "-c",
            f"edit {tmp_path}/notes.md",
            "--listen",
            socket,
        ],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: Path(socket).exists(), 10, "Neovim's socket")
        send(f"i{PROMPT[:-1]}")
        time.sleep(0.05)
        send(PROMPT[-1])
        shown = until(
            lambda: ask(f"luaeval('vim.inspect({marks})')").partition("virt_text = { { ")[2], 10, "a suggestion"
        )
        send("<A-a>")
        line = until(lambda: text if (text := ask("getline(1)")) != PROMPT else "", 5, "the accepted text")
    finally:
        editor.terminate()
        editor.wait()
    accepted = line.removeprefix(PROMPT)
    assert accepted.strip()
    assert shown.startswith(json.dumps(accepted).rstrip('"'))
