"""litellm, langchain and llm beyond the examples of docs/CLIENTS.md: streams, batches, exceptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.blocks import TERCET, offline_environ, run, run_blocks, sections
from tests.e2e.harness import Tercet

pytestmark = pytest.mark.clients

PROMPT = "The old man looked at the sea and"

LITELLM = """
options = {"model": "text-completion-openai/embedded", "api_base": URL, "api_key": "none", "prompt": PROMPT,
           "max_tokens": 8, "seed": 3}
plain = litellm.text_completion(**options)
streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**options, stream=True))
batch = litellm.text_completion(**{**options, "prompt": [PROMPT, "She"]})
names = []
for fields in ({"temperature": 9}, {"model": "text-completion-openai/no-such-model"}):
    try:
        litellm.text_completion(**{**options, **fields})
    except Exception as error:
        names.append(type(error).__name__)
print(json.dumps([plain.choices[0].text, streamed, [choice.text for choice in batch.choices], names]))
"""

LANGCHAIN = """
from langchain_openai import OpenAI

model = OpenAI(base_url=URL, api_key="none", model="embedded", max_tokens=8, seed=3, max_retries=0)
prompts = [f"{PROMPT} {word}" for word in "one two three four five six seven eight nine ten eleven twelve".split()]
alone = [model.invoke(prompt) for prompt in prompts]
together = [generations[0].text for generations in model.generate(prompts).generations]
three = OpenAI(base_url=URL, api_key="none", model="embedded", max_tokens=8, n=3, best_of=3).generate(prompts[:2])
print(json.dumps([alone, together, "".join(model.stream(prompts[0])), [len(group) for group in three.generations]]))
"""


def printed_by(script: str, tercet: Tercet, client_programs: Path, home: Path) -> Any:
    setup = f"import json\nURL, PROMPT = {tercet.url + '/v1'!r}, {PROMPT!r}\n"
    printed = run(["python", "-c", setup + script], home, offline_environ(home, client_programs))
    return json.loads(printed.splitlines()[-1])


def test_litellm(tercet: Tercet, client_programs: Path, tmp_path: Path) -> None:
    plain, streamed, batch, names = printed_by("import litellm\n" + LITELLM, tercet, client_programs, tmp_path)
    assert plain
    assert streamed == plain
    assert batch[0] == plain
    assert batch[1]
    assert names == ["BadRequestError", "NotFoundError"]


def test_langchain(tercet: Tercet, client_programs: Path, tmp_path: Path) -> None:
    """Twelve prompts of one request are answered in their order, each as alone."""
    alone, together, streamed, sizes = printed_by(LANGCHAIN, tercet, client_programs, tmp_path)
    assert together == alone
    assert streamed == alone[0]
    assert sizes == [3, 3]


def test_llm_logs_the_usage_of_a_stream(tercet: Tercet, client_programs: Path, tmp_path: Path) -> None:
    environ = offline_environ(tmp_path, client_programs)
    text = run_blocks(sections()["llm"], tmp_path, environ, {TERCET: tercet.url}).strip()
    [logged] = json.loads(run(["llm", "logs", "--json"], tmp_path, environ))
    assert logged["response"].strip() == text
    usage = logged["response_json"]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 20)
