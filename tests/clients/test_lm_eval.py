"""lm-evaluation-harness's `local-completions`: scores and log-probabilities are those of transformers in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import held_out
from tests.clients.blocks import offline_environ, run
from tests.e2e.harness import Tercet

pytestmark = pytest.mark.clients

TOLERANCE = 1e-3
LENGTHS = (1, 2, 3, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256, 257, 500, 511, 512, 513, 999, 1000)

# Scores the prompts with the harness's model; prints its sums and the answers that it computed them from.
SCORE = """
import json, sys
from lm_eval.models.openai_completions import LocalCompletionsAPI

prompts, url, batch_size = json.load(sys.stdin)
model = LocalCompletionsAPI(model="embedded", base_url=url, max_length=1024, batch_size=batch_size)
answers, call = [], model.model_call

def recorded(messages, **options):
    answer = call(messages, **options)
    answers.extend(zip(messages, sorted(answer["choices"], key=lambda choice: choice["index"]), strict=True))
    return answer

model.model_call = recorded
sums = model._loglikelihood_tokens([(None, ids[:1], ids[1:]) for ids in prompts])
json.dump([sums, [(ids, choice["logprobs"]) for ids, choice in answers]], sys.stdout)
"""


def score(
    prompts: list[list[int]], tercet: Tercet, batch_size: int, client_programs: Path, home: Path
) -> tuple[list[tuple[float, bool]], list[tuple[list[int], dict[str, Any]]]]:
    """The harness's (log-likelihood, is greedy) of each prompt, and the log-probabilities that it read."""
    given = home / "given.json"
    given.write_text(json.dumps([prompts, f"{tercet.url}/v1/completions", batch_size]))
    (home / "score.py").write_text(SCORE)
    command = ["bash", "-c", "python score.py <given.json"]
    sums, answers = json.loads(run(command, home, offline_environ(home, client_programs)))
    return sums, answers


def prompts() -> list[list[int]]:
    ids = held_out.encode(held_out.TEXT)
    return [ids[10 : 10 + length] for length in LENGTHS]


@pytest.mark.parametrize("is_cached", [False, True])
def test_log_probabilities_of_prompts_are_those_of_transformers(
    is_cached: bool, tercet: Tercet, client_programs: Path, tmp_path: Path
) -> None:
    """The second case follows the first: every prompt, or most of it, is in the prefix cache."""
    if is_cached:
        for ids in prompts()[-4:]:
            tercet.client.post("/v1/completions", json={"model": "embedded", "prompt": ids, "max_tokens": 1})
    sums, answers = score(prompts(), tercet, 4, client_programs, tmp_path)
    assert len(answers) == len(LENGTHS)
    for ids, logprobs in answers:
        expected = held_out.reference(ids)
        assert logprobs["token_logprobs"][0] is None
        got = logprobs["token_logprobs"][1:]
        assert got == pytest.approx([*expected.prompt_logprobs, expected.next_logprob], abs=TOLERANCE)
    for ids, (total, _) in zip(prompts(), sums, strict=True):
        assert total == pytest.approx(sum(held_out.reference(ids).prompt_logprobs), abs=TOLERANCE * len(ids))


@pytest.mark.parametrize("options", ["", "num_concurrent=4"])
def test_tasks_of_held_out_text_have_transformers_scores(
    options: str, tercet: Tercet, client_programs: Path, tmp_path: Path
) -> None:
    held_out.write_tasks(tmp_path)
    arguments = f"model=embedded,base_url={tercet.url}/v1/completions,max_length=1024"
    run(
        [
            "lm_eval", "run", "--model", "local-completions", "--include_path", ".", "--output_path", "scores",
            "--tasks", "book_perplexity,book_cloze,book_greedy", "--batch_size", "4",
            "--model_args", ",".join(filter(None, [arguments, options])),
        ],
        tmp_path, offline_environ(tmp_path, client_programs),
    )  # fmt: skip
    [path] = tmp_path.glob("scores/**/results_*.json")
    scores = json.loads(path.read_text())["results"]
    perplexity = held_out.word_perplexity(held_out.paragraphs())
    assert scores["book_perplexity"]["word_perplexity,none"] == pytest.approx(perplexity, rel=TOLERANCE)
    assert scores["book_cloze"]["acc,none"] == pytest.approx(held_out.accuracy())
    assert held_out.accuracy() > 1 / held_out.NUM_CHOICES  # better than chance
    assert scores["book_greedy"]["exact_match,none"] == 1
