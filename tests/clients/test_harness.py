"""lm-evaluation-harness, unmodified, on texts that are as long as the model's context, and on parts of characters."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from tests.clients.blocks import offline_environ, run
from tests.e2e.harness import ROOT, Tercet

pytestmark = pytest.mark.clients
N_CTX = 1024
TEXT = "“Où es-tu ?” dit-il, et la vieille Größe répondit: «Привет!» "
# Its `max_length` is that of prompt and one generated token.
PROGRAM = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

url, length, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
arguments = f"model=embedded,base_url={url}/v1/completions,max_length={length},tokenizer_backend=remote"
model = get_model("local-completions").create_from_arg_string(arguments, {"batch_size": 2})
requests = [Instance("loglikelihood", {}, tuple(pair), number) for number, pair in enumerate(pairs)]
print("RESULT", json.dumps(model.loglikelihood(requests, disable_tqdm=True)))
"""


@pytest.mark.parametrize("surplus", [-1, 0, 1, 300])
def test_log_likelihoods_of_texts_that_fill_the_context(
    tercet: Tercet, client_programs: Path, tmp_path: Path, surplus: int
) -> None:
    """`surplus`: tokens more than prompt and generated token may have; the harness cuts them off at the left."""
    tokenizer = Tokenizer.from_file(str(ROOT / "workers/checkpoints/embedded/tokenizer.json"))
    continuation = " “Größe, dit-elle"
    num_tokens = N_CTX - 1 + surplus
    context = "a" + TEXT * 40
    while len(tokenizer.encode(context + continuation).ids) > num_tokens:
        context = context[:-1].rstrip()
    context += " a" * (num_tokens - len(tokenizer.encode(context + continuation).ids))
    ids = tokenizer.encode(context + continuation).ids
    assert len(ids) == num_tokens
    pairs = [[context, continuation], ["She saw", " the sea and then"]]
    command = ["python", "-c", PROGRAM, tercet.url, str(N_CTX), json.dumps(pairs)]
    printed = run(command, tmp_path, offline_environ(tmp_path, client_programs))
    [(score, is_greedy), _] = json.loads(printed.partition("RESULT ")[2])
    # The same tokens, scored at once.
    num_scored = len(ids) - len(tokenizer.encode(context).ids)
    body = {"prompt": ids[-(N_CTX - 1) :], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = httpx.post(f"{tercet.url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    rows = [answer[name][-num_scored:] for name in ("tokens", "token_logprobs", "top_logprobs")]
    assert score == pytest.approx(sum(rows[1]), abs=1e-2)
    assert is_greedy == all(top[name] == max(top.values()) for name, _, top in zip(*rows, strict=True))
