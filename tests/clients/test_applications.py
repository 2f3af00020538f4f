"""Applications that are not installed here, configured as docs/CLIENTS.md says: tests do what their sources do."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.clients.blocks import offline_environ, run, saved_file
from tests.e2e.harness import Tercet

PROMPT = "The old man looked at the sea and"


# `inline_completions` of Notebook Intelligence's litellm_compatible_llm_provider.py, with the properties of the file.
NOTEBOOK_INTELLIGENCE = """
import json, sys, litellm
model = json.load(open("config.json"))["inline_completion_model"]
assert model["provider"] == "litellm-compatible" and model["model"] == "litellm-compatible-inline-completion-model"
value = {each["id"]: each["value"] for each in model["properties"]}
answer = litellm.completion(model=value["model_id"], prompt=sys.argv[1], suffix=sys.argv[2], stream=False,
                            api_base=value["base_url"], api_key=value["api_key"])
print(json.dumps(answer.choices[0].message.content))
"""


@pytest.mark.clients
@pytest.mark.parametrize("suffix", ["", "\n\nShe opened the door."])
def test_notebook_intelligence_completes_a_cell(
    suffix: str, tercet: Tercet, client_programs: Path, tmp_path: Path
) -> None:
    saved_file("JupyterLab", tmp_path, tercet.url)
    environ = offline_environ(tmp_path, client_programs)
    printed = run(["python", "-c", NOTEBOOK_INTELLIGENCE, PROMPT, suffix], tmp_path, environ)
    assert json.loads(printed.splitlines()[-1]).strip()


def open_webui_answer(file: Path, body: dict[str, Any], **parameters: Any) -> str:
    """The text of a function's answer, as Open WebUI's functions.py loads the file and calls it."""
    pytest.importorskip("pydantic", reason="pydantic, which Open WebUI requires, is not installed")
    spec = importlib.util.spec_from_file_location("function_tercet", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = module.Pipe()
    function.valves = function.Valves()
    text: str = asyncio.run(function.pipe(body=body, **parameters))
    return text


def test_open_webui_s_function_answers_with_three_suggestions(tercet: Tercet, tmp_path: Path) -> None:
    body = {"stream": True, "model": "tercet", "messages": [{"role": "user", "content": PROMPT}]}
    text = open_webui_answer(saved_file("Open WebUI", tmp_path, tercet.url), body, __task__=None, __task_body__=None)
    assert text.startswith(PROMPT)
    assert text.count(PROMPT) == 3


def test_open_webui_s_message_box_is_completed(tercet: Tercet, tmp_path: Path) -> None:
    """The task of routers/tasks.py, and the reading of its answer by the page's `generateAutoCompletion`."""
    task = {"model": "tercet", "prompt": PROMPT, "type": "search query", "stream": False}
    instructions = [{"role": "user", "content": f"Continue the text between these marks. <text>{PROMPT}</text>"}]
    body = {"model": "tercet", "messages": instructions, "stream": False}
    function = saved_file("Open WebUI", tmp_path, tercet.url)
    content = open_webui_answer(function, body, __task__="autocomplete_generation", __task_body__=task)
    found = re.search(r"\{.*\}", content, re.DOTALL)
    assert found
    suggestion = json.loads(found[0])["text"]
    assert suggestion.strip()
    assert "\n" not in suggestion
    assert open_webui_answer(function, body, __task__="title_generation", __task_body__=task) == ""
