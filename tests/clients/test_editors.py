"""Editor plug-ins, configured as docs/CLIENTS.md says.

minuet runs unmodified in Emacs, where its checkouts are given, because no package index has all of them. Otherwise, for
Continue, which runs inside VS Code, and for Zed, tests send the requests that their sources build, and read the answers
as their sources do.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.clients.blocks import saved_file
from tests.clients.emacs import running_emacs
from tests.e2e.harness import Tercet, until

PROMPT = "The old man looked at the sea and"


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
    [model] = yaml.safe_load(saved_file("Continue", tmp_path, tercet.url).read_text())["models"]
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


def zed_text(answer: dict[str, Any]) -> str:
    """The text that Zed takes from an answer, which must have all fields of its `RawCompletionResponse`."""
    assert all(isinstance(answer[name], str) for name in ("id", "object", "model"))
    assert isinstance(answer["created"], int)
    assert all(isinstance(answer["usage"][f"{name}_tokens"], int) for name in ("prompt", "completion", "total"))
    [choice] = answer["choices"]
    assert isinstance(choice["finish_reason"], str | None)
    text: str = choice["text"]
    return text


@pytest.mark.parametrize("suffix", ["", "\n", ".\n\nShe opened the door."])
def test_zed_s_request_is_answered(suffix: str, tercet: Tercet, tmp_path: Path) -> None:
    """As crates/edit_prediction/src/fim.rs and open_ai_compatible.rs build it from the page's settings."""
    settings = json.loads(saved_file("Zed", tmp_path, tercet.url).read_text())["edit_predictions"]
    server = settings[settings["provider"]]
    assert server["prompt_format"] == "codestral"
    body = {
        "model": server["model"],
        "prompt": f"[SUFFIX]{suffix}[PREFIX]{PROMPT}",
        "max_tokens": server["max_output_tokens"],
        "stop": ["[PREFIX]", "[SUFFIX]"],
    }
    answer = httpx.post(server["api_url"], json=body)
    assert answer.status_code == 200, answer.text
    assert zed_text(answer.json()).strip()


@pytest.mark.clients
@pytest.mark.skipif(
    "MINUET_EL" not in os.environ or not shutil.which("emacs"),
    reason="MINUET_EL does not name the directories of minuet.el, plz.el and dash.el, or there is no emacs",
)
def test_minuet_for_emacs_shows_and_accepts_a_suggestion(tercet: Tercet, tmp_path: Path) -> None:
    """Emacs in a terminal; keys are typed, the overlay is read, and M-n and M-a choose and accept."""
    settings = saved_file("Emacs", tmp_path, tercet.url)
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "xterm"}
    directories = [part for each in os.environ["MINUET_EL"].split(":") for part in ("-L", each)]
    with running_emacs(tmp_path / "notes.txt", environ, ["-Q", *directories, "-l", str(settings)]) as emacs:

        def suggestions() -> list[str] | None:
            found = emacs.ask("minuet--current-suggestions") or []
            return found if len(found) == 3 else None

        emacs.send(f"{PROMPT} ")
        found = until(suggestions, 10, "3 suggestions")
        shown = emacs.ask("(substring-no-properties (overlay-get minuet--current-overlay 'after-string))")
        assert shown == f"{found[0]} (1/3)"
        emacs.send("\x1bn")
        until(lambda: emacs.ask("minuet--current-suggestion-index") == 1, 5, "the second suggestion")
        emacs.send("\x1ba")
        until(lambda: emacs.ask("(buffer-string)") == f"{PROMPT} {found[1]}", 5, "the accepted text")
