"""What transformers loads from a directory is what is served: tiny checkpoints that it writes, ids and text in fp32."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as BpeTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from shared.errors import InvalidRequest
from shared.protocol import Done, GenerateRequest, Sampling, Token, TokenizeResponse
from shared.weights import weights_digest
from shared.wire import check_done
from tests.workers.checkpoints.gguf_files import random_model, write_gguf
from tests.workers.checkpoints.small_checkpoints import change_json
from tests.workers.engine.helpers import PROSE, needs_bf16, running_engine
from workers.checkpoints.files import CheckpointError
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.engine.loader import LoadedModel, load_model
from workers.engine.model.config import own_name

WEIGHTS = "model.safetensors"
NUM_TOKENS = 300


def trained() -> BpeTokenizer:
    """A byte-level BPE tokenizer of NUM_TOKENS tokens, three of them special."""
    bpe = BpeTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|start|>", "<|sep|>"]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    bpe.train_from_iterator([PROSE], trainer)
    return bpe


def save(
    directory: Path,
    shape: str = "llama",
    *,
    bpe: BpeTokenizer | None = None,
    rows: int = NUM_TOKENS,
    words: Sequence[AddedToken] = (),
    **config: Any,
) -> Any:
    """Write a random model of `rows` rows and a tokenizer by transformers; return the model."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe or trained(), bos_token="<|start|>", eos_token="<|end|>", **config
    )
    tokenizer.add_tokens(list(words))
    tokenizer.save_pretrained(directory)
    model = random_model(shape)
    model.resize_token_embeddings(rows)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
            weight.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def with_template(single: str) -> BpeTokenizer:
    bpe = trained()
    special = [(name, bpe.token_to_id(name)) for name in ("<|end|>", "<|start|>", "<|sep|>")]
    bpe.post_processor = processors.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)
    return bpe


def answers(loaded: LoadedModel, request: GenerateRequest) -> list[Token | Done]:
    """The lines of a request, as a worker sends them."""
    assert loaded.healing is not None
    codec = Codec(loaded.healing, loaded.config.n_positions)
    with running_engine(loaded) as engine:
        engine_request = codec.request(request, time.monotonic())
        results, lines = engine.submit(engine_request), []
        stream = codec.token_stream(request, engine_request)
        while not hasattr(output := results.next(), "finish_reason"):
            lines.append(stream.feed(output))  # type: ignore[arg-type]
        last = codec.last_line(request, engine_request, output)  # type: ignore[arg-type]
    assert isinstance(last, Done), last
    return [*(line for line in lines if line is not None), last]


def answer(loaded: LoadedModel, prompt: str = "", **settings: Any) -> Done:
    sampling = Sampling(**{"max_new_tokens": 12, "temperature": 0.0, **settings.pop("sampling", {})})
    request = GenerateRequest(prompt=None if "prompt_ids" in settings else prompt, sampling=sampling, **settings)
    last = answers(loaded, request)[-1]
    assert isinstance(last, Done)
    return last


def tokenized(directory: Path, text: str) -> TokenizeResponse:
    loaded = load_model(directory, dtype="fp32")
    assert loaded.healing is not None
    return Codec(loaded.healing, 128).tokenize(text)


def greedy(directory: Path, ids: Sequence[int], banned: Sequence[int] = ()) -> list[int]:
    """What transformers generates from ids."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompt = torch.tensor([[*ids]])
    mask, suppressed = torch.ones_like(prompt), [*banned] or None
    out = model.generate(
        prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, suppress_tokens=suppressed
    )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def check_greedy(directory: Path, text: str, banned: Sequence[int] = ()) -> Done:
    """Ids and text of a prompt are transformers'."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(text)["input_ids"]
    found = answer(load_model(directory, dtype="fp32"), text, echo=True, logprobs=1)
    expected = greedy(directory, ids, banned=banned)
    assert (found.prompt_ids, found.token_ids) == (ids, expected)
    # An incomplete character at the end is dropped.
    assert found.text.rstrip("\ufffd") == tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")
    assert (found.num_prompt_tokens, found.prompt_text) == (len(ids), text)
    assert found.prompt_ends is not None
    assert found.prompt_ends[-1] == len(text)
    assert tokenized(directory, text).ids == ids
    return found


@pytest.mark.parametrize(
    ("shape", "template"),
    [
        ("gpt2", "<|start|> $A"),
        ("llama", "$A <|end|>"),
        ("qwen2", "<|start|> <|sep|> $A"),
        ("qwen3", "<|start|> $A <|end|>"),
        ("llama", "$A"),
    ],
)
def test_what_the_post_processor_adds_is_added(shape: str, template: str, tmp_path: Path) -> None:
    save(tmp_path, shape, bpe=with_template(template))
    check_greedy(tmp_path, "The old man looked")
    check_greedy(tmp_path, "<|start|>The old man looked")


@pytest.mark.parametrize("flags", [(True, False), (True, True), (False, False)])
def test_the_flags_of_tokenizer_config_replace_the_template(flags: tuple[bool, bool], tmp_path: Path) -> None:
    bos, eos = flags
    save(tmp_path, bpe=with_template("<|sep|> $A"), add_bos_token=bos, add_eos_token=eos)
    change_json(tmp_path / "tokenizer_config.json", add_bos_token=bos, add_eos_token=eos)
    check_greedy(tmp_path, "The old man looked")


def test_an_added_token_is_in_windows_healing_and_the_empty_prompt(tmp_path: Path) -> None:
    save(tmp_path, bpe=with_template("<|start|> $A"))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="fp32")
    assert loaded.tokenizer is not None
    start = loaded.tokenizer.encode("<|start|>")
    empty = answer(loaded, "", echo=True)
    assert (empty.prompt_ids, empty.token_ids) == (start, greedy(tmp_path, start))
    window = answer(loaded, PROSE, max_prompt_tokens=24, echo=True)
    ids = window.prompt_ids or []
    assert (ids[:1], len(ids) <= 24) == (start, True)
    assert ids[1:] == theirs(PROSE)["input_ids"][-len(ids) + 1 :]
    assert window.token_ids == greedy(tmp_path, ids)
    assert answer(loaded, prompt_ids=ids[1:], echo=True).prompt_ids == ids[1:]
    healed = answer(loaded, "The old man lo", heal=True, echo=True)
    assert (healed.prompt_ids, healed.prompt_text) == (theirs("The old man")["input_ids"], "The old man")
    assert [answer(loaded, "The old", max_prompt_tokens=number).num_prompt_tokens for number in (1, 2)] == [1, 2]


@pytest.mark.parametrize("bos", [1, 2])
def test_an_empty_prompt_begins_with_the_start_token(bos: int, tmp_path: Path) -> None:
    save(tmp_path)
    change_json(tmp_path / "config.json", bos_token_id=bos)
    assert answer(load_model(tmp_path, dtype="fp32")).token_ids == greedy(tmp_path, [bos])
    assert tokenized(tmp_path, "").bos_token == {1: "<|start|>", 2: "<|sep|>"}[bos]


@pytest.mark.parametrize(
    ("flag", "pre", "is_added"),
    [(True, "gpt-2", True), (None, "gpt-2", False), (False, "llama-bpe", False), (None, "llama-bpe", True)],
)
def test_a_gguf_adds_its_start_token(flag: bool | None, pre: str, is_added: bool, tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.add_bos_token": flag}
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"), pre=pre, metadata=metadata)
    directory = Path(resolve("x", str(path), cache=tmp_path / "cache").directory)
    ids = check_greedy(directory, "The old man").prompt_ids or []
    assert (ids[0] == 5) is is_added


@pytest.mark.parametrize("shape", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("to", ["fp32 cpu", pytest.param("bf16 cpu", marks=needs_bf16), "int8 cpu", "fp32 cpu:0"])
def test_rows_without_a_token_are_never_sampled(shape: str, to: str, tmp_path: Path) -> None:
    """A padded vocabulary, with a gap between the tokens, too: in no dtype, by no path and by no bias."""
    gap = range(NUM_TOKENS, NUM_TOKENS + 4)
    save(tmp_path, shape, rows=340)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zq"] = gap.stop
    tokenizer["model"]["merges"].append(["z", "q"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    padding = [*gap, *range(gap.stop + 1, 340)]
    check_greedy(tmp_path, "The old man looked", banned=padding)
    loaded = load_model(tmp_path, dtype=to.partition(" ")[0], device=to.partition(" ")[2])
    biased = {"logit_bias": tuple((id_, 100.0) for id_ in padding[:8])}
    for sampling in ({"temperature": 3.0}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}, biased):
        found = answer(loaded, "The", sampling={"max_new_tokens": 60, **sampling}, logprobs=5, seed=3)
        tops = {top.token_id for top in chain.from_iterable(found.tops or [])}
        assert not {*found.token_ids, *tops} & {*padding}, sampling


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_mask_changes_no_other_logit(dtype: str, tmp_path: Path) -> None:
    save(tmp_path, rows=340)
    masked = load_model(tmp_path, dtype=dtype)
    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    whole["added_tokens"] += [
        {**whole["added_tokens"][0], "id": id_, "content": f"<|{id_}|>"} for id_ in range(NUM_TOKENS, 340)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    plain = load_model(tmp_path, dtype=dtype)
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    ours, theirs = masked.model.logits(hidden), plain.model.logits(hidden)
    assert torch.equal(ours[:, :NUM_TOKENS], theirs[:, :NUM_TOKENS])
    assert (ours[:, NUM_TOKENS:] < -1e20).all()


@pytest.mark.parametrize("shape", ["gpt2", "qwen3"])
def test_tokens_beyond_the_models_rows_are_an_error_of_the_request(shape: str, tmp_path: Path) -> None:
    save(tmp_path, shape, words=[AddedToken("<|unused|>", special=True), AddedToken("zzunused")])
    assert resolve("x", str(tmp_path)).vocab_size == NUM_TOKENS
    check_greedy(tmp_path, "The old man looked")
    loaded = load_model(tmp_path, dtype="fp32")
    for text in ("The <|unused|>", "a zzunused", "zzunused"):
        for settings in ({}, {"heal": True}, {"max_prompt_tokens": 20}):
            with pytest.raises(InvalidRequest, match=r"token that the model lacks: .* ids end at 299"):
                answer(loaded, text, **settings)
    assert tokenized(tmp_path, "zzunused").texts == ["zzunused"]


@pytest.mark.parametrize("word", ["Straße", "Ġwort", "naïve", "日本", "ÿĀ"])
def test_an_added_word_is_literal_text(word: str, tmp_path: Path) -> None:
    model = save(tmp_path, "gpt2", rows=NUM_TOKENS + 1, words=[AddedToken(word)])
    head = model.lm_head.weight
    with torch.no_grad():
        head[NUM_TOKENS] = 4 * head[NUM_TOKENS]
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype="fp32")
    sampling = Sampling(max_new_tokens=2, temperature=0.0, logit_bias=((NUM_TOKENS, 100.0),))
    request = GenerateRequest(prompt=f"a {word}", sampling=sampling, logprobs=1, stream=True, echo=True)
    *tokens, done = answers(loaded, request)
    assert (done.text, "".join(token.text for token in tokens)) == (2 * word, 2 * word)
    assert isinstance(done, Done)
    assert done.token_ids == [NUM_TOKENS] * 2
    assert (done.token_texts, done.prompt_text) == ([word] * 2, f"a {word}")
    healed = answer(loaded, f"a {word}", heal=True)
    assert healed.num_typed_tokens >= 1


def test_a_byte_stays_a_byte_though_it_is_added_as_a_word(tmp_path: Path) -> None:
    """The library gives a word that the vocabulary has no new id: `İ` stands for a byte there."""
    save(tmp_path, words=[AddedToken("İ")])
    tokenizer = load_model(tmp_path, dtype="fp32").tokenizer
    assert tokenizer is not None
    assert sorted(data for id_ in range(NUM_TOKENS) if len(data := tokenizer.token_bytes(id_)) == 1) == [
        bytes([byte]) for byte in range(256)
    ]


@pytest.mark.parametrize(("pattern", "content"), [("END.*", ""), (".*", ""), ("x", 40 * "y")])
def test_a_tokenizer_may_drop_or_lengthen_text(pattern: str, content: str, tmp_path: Path) -> None:
    """The gateway takes what a worker makes of it for an answer, and the worker for a sound one."""
    bpe = trained()
    bpe.normalizer = normalizers.Replace(Regex(pattern), content)
    save(tmp_path, bpe=bpe)
    loaded = load_model(tmp_path, dtype="fp32")
    for text in ("x", "so x it END all x"):
        found = tokenized(tmp_path, text)
        assert len(found.ids) == len(found.ends)
        for settings in ({}, {"max_prompt_tokens": 20}, {"heal": True}):
            sampling = Sampling(max_new_tokens=4, temperature=0.0)
            request = GenerateRequest(prompt=text, sampling=sampling, logprobs=0, **settings)
            [done] = answers(loaded, request)
            assert isinstance(done, Done)
            check_done(done, request)


# As transformers, peft and wrappers of models name weights.
NAMED: dict[str, tuple[str, Callable[[str], str]]] = {
    "compiled": ("gpt2", lambda name: f"_orig_mod.{name}"),
    "parallel": ("qwen3", lambda name: f"module.{name}"),
    "parallel and compiled": ("llama", lambda name: f"module._orig_mod.{name}"),
    "compiled and parallel": ("gpt2", lambda name: f"_orig_mod.module.{name}"),
    "layers compiled": ("qwen3", lambda name: name.replace(".1.", ".1._orig_mod.")),
    "merged by peft": ("llama", lambda name: f"module.base_model.model.{name}"),
    "peft's of GPT-2": ("gpt2", lambda name: f"base_model.model.{name}"),
    "no prefix": ("llama", lambda name: name.removeprefix("model.")),
    "no prefix of GPT-2": ("gpt2", lambda name: name.removeprefix("transformer.")),
    "another of GPT-2": ("gpt2", lambda name: name.replace("transformer.", "model.")),
}


@pytest.mark.parametrize(("shape", "change"), NAMED.values(), ids=NAMED)
def test_what_stands_before_names_of_weights_is_left_out(shape: str, change: Callable[[str], str]) -> None:
    names = [*random_model(shape).state_dict()]
    own = [name.removeprefix("transformer." if shape == "gpt2" else "model.") for name in names]
    assert [own_name(change(name)) for name in names] == own


def test_weights_of_wrapped_models_are_served(tmp_path: Path) -> None:
    save(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "wrapped")
    weights = load_file(tmp_path / "wrapped" / WEIGHTS)
    save_file({f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}, tmp_path / "wrapped" / WEIGHTS)
    resolve("x", str(tmp_path / "wrapped"))
    found = answer(load_model(tmp_path / "wrapped", dtype="fp32"), "The old man")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert found.token_ids == greedy(tmp_path / "plain", tokenizer("The old man")["input_ids"])


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({**weights, **{f"module.{name}": 1 + tensor for name, tensor in weights.items()}}, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="has a weight twice"):
        resolve("x", str(tmp_path))


def halved(directory: Path) -> None:
    """Weights of other values, in shards with their index, as an earlier `save_pretrained` left them."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    model.save_pretrained(directory / "old", max_shard_size="100KB")
    assert len([*(directory / "old").glob("model-*")]) > 1


CANDIDATES: dict[str, Callable[[Path], object]] = {
    "index and shards": lambda d: [shutil.copy(path, d) for path in (d / "old").glob("model*")],
    "index without shards": lambda d: shutil.copy(d / f"old/{WEIGHTS}.index.json", d),
    "shards without index": lambda d: [shutil.copy(path, d) for path in (d / "old").glob("model-*")],
    "a variant": lambda d: save_file(load_file(next((d / "old").glob("model-*"))), d / "model.fp16.safetensors"),
    "a pickle": lambda d: torch.save({}, d / "pytorch_model.bin"),
    "an adapter": lambda d: save_file({"x": torch.zeros(1)}, d / "adapter_model.safetensors"),
    "another file": lambda d: save_file({"lm_head.weight": torch.zeros(1)}, d / "consolidated.safetensors"),
    "an index that is none": lambda d: (d / f"{WEIGHTS}.index.json").write_text("{"),
}


@pytest.mark.parametrize("case", CANDIDATES)
@pytest.mark.parametrize("is_whole", [True, False])
def test_beside_the_files_that_transformers_loads_nothing_counts(case: str, is_whole: bool, tmp_path: Path) -> None:
    save(tmp_path)
    halved(tmp_path)
    if not is_whole:
        (tmp_path / WEIGHTS).unlink()
        CANDIDATES["index and shards"](tmp_path)
    digest = weights_digest(tmp_path)
    if is_whole or not case.startswith(("index", "an index")):
        CANDIDATES[case](tmp_path)
    resolve("x", str(tmp_path))
    check_greedy(tmp_path, "The old man looked")
    assert weights_digest(tmp_path) == digest


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (("model.fp16.safetensors", "pytorch_model.bin"), "as a pickle"),
        (("a.safetensors", "b.safetensors"), "neither model.safetensors nor model.safetensors.index.json"),
        (("model-00001-of-00002.safetensors", "model-00003-of-00002.safetensors", "x.safetensors"), "neither"),
    ],
)
def test_where_transformers_would_load_others_none_is_chosen(
    names: Sequence[str], sentence: str, tmp_path: Path
) -> None:
    save(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / names[0])
    for name in names[1:]:
        shutil.copy(tmp_path / names[0], tmp_path / name)
    with pytest.raises(CheckpointError, match=sentence):
        resolve("x", str(tmp_path))
