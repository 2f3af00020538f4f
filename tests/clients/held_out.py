"""A text that the embedded checkpoint was not trained on, as tasks for lm-evaluation-harness, and their right scores.

The text is from Three Men in a Boat, one of the checkpoint's three held-out books. The scores come from transformers.
"""

from __future__ import annotations

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.e2e.harness import ROOT

CHECKPOINT = ROOT / "workers/checkpoints/embedded"
TEXT = (ROOT / "workers/checkpoints/page.txt").read_text()
NUM_CHOICES = 4


@cache
def model() -> GPT2LMHeadModel:
    torch.set_num_threads(1)  # more would spin while the server under test computes
    return GPT2LMHeadModel.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer()(text).input_ids
    return ids


class Reference(NamedTuple):
    """A forward pass over a prompt of N tokens."""

    prompt_logprobs: list[float]  # [N - 1]: of the second token and the following
    next_id: int  # the most likely next token
    next_logprob: float


def reference(ids: list[int]) -> Reference:
    with torch.inference_mode():
        logprobs = model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    chosen = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    best = logprobs[-1].max(0)
    return Reference(chosen.tolist(), int(best.indices), float(best.values))


def paragraphs() -> list[str]:
    return [paragraph for paragraph in TEXT.split("\n\n") if len(paragraph.split()) > 5]


def word_perplexity(texts: list[str]) -> float:
    """As lm-evaluation-harness defines it: each text follows `<|endoftext|>`, words are separated by white space."""
    end_of_text = encode("<|endoftext|>")
    total = sum(sum(reference(end_of_text + encode(text)).prompt_logprobs) for text in texts)
    return math.exp(-total / sum(len(re.split(r"\s+", text)) for text in texts))


class Cloze(NamedTuple):
    """Which word ends the sentence? The others end other sentences."""

    context: str
    choices: list[str]  # each begins with a space
    label: int


def clozes() -> list[Cloze]:
    sentences = re.findall(r"([A-Z][^.?!\n]{30,}) (\w+)[.?!]", TEXT)
    words = [f" {word}" for _, word in sentences]
    found = []
    for index, (context, _) in enumerate(sentences):
        others = [word for word in dict.fromkeys(words[index + 1 :] + words[:index]) if word != words[index]]
        choices = others[: NUM_CHOICES - 1]
        choices.insert(index % NUM_CHOICES, words[index])
        found.append(Cloze(context, choices, index % NUM_CHOICES))
    return found


@cache
def accuracy() -> float:
    """The share of clozes whose right word is the most likely."""

    def logprob(context: str, choice: str) -> float:
        ids = encode(context + choice)
        return sum(reference(ids).prompt_logprobs[len(encode(context)) - 1 :])

    hits = 0
    for cloze in clozes():
        logprobs = [logprob(cloze.context, choice) for choice in cloze.choices]
        hits += logprobs.index(max(logprobs)) == cloze.label
    return hits / len(clozes())


def greedy_text(prompt: str, num_tokens: int) -> str:
    ids = encode(prompt)
    for _ in range(num_tokens):
        ids = [*ids, reference(ids).next_id]
    text: str = tokenizer().decode(ids[len(encode(prompt)) :])
    return text


def write_tasks(directory: Path) -> None:
    """Task files for `lm_eval run --include_path`: book_perplexity, book_cloze and book_greedy."""
    texts = [{"text": text} for text in paragraphs()]
    _write(
        directory,
        "book_perplexity",
        texts,
        """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
    )
    _write(
        directory,
        "book_cloze",
        [cloze._asdict() for cloze in clozes()],
        """
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: label
metric_list: [{metric: acc}]
""",
    )
    greedy = [{"context": cloze.context, "text": greedy_text(cloze.context, 12)} for cloze in clozes()[:8]]
    _write(
        directory,
        "book_greedy",
        greedy,
        """
output_type: generate_until
target_delimiter: ""
doc_to_text: "{{context}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["<|endoftext|>"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
""",
    )


def _write(directory: Path, name: str, documents: list[dict[str, Any]], task: str) -> None:
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (directory / f"{name}.jsonl").write_text(lines)
    (directory / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}\n"
        f"test_split: test{task}"
    )
