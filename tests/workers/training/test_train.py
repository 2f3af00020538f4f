"""The training program, with generated books, a model of a few thousand weights, and no compiler."""

from __future__ import annotations

import json
import lzma
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as BpeTokenizer
from transformers import AutoTokenizer, GPT2LMHeadModel

from shared.errors import StartError
from workers.checkpoints.resolve import resolve
from workers.engine.loader import load_model
from workers.training import train
from workers.training.corpus import HELD_OUT, SLUR, read_books, split_books, train_tokenizer
from workers.training.schedule import FINAL, Settings, batch_at
from workers.training.trainer import Trainer, check_size

WORDS = ["the", "a", "sea", "old", "man", "woman", "door", "opened", "looked", "stood", "went", "and", "again", "of"]
SHAPE = ["--from-scratch", "--n-layer=2", "--n-embd=32", "--n-head=2", "--n-positions=640", "--vocab-size=300"]
PACE = ["--window=64", "--batch=4", "--long-window=128", "--dropout=0.1", "--learning-rate=0.02"]
TOKENS_PER_STEP, NUM_STEPS = 256, 24
SETTINGS = Settings(
    seed=3,
    tokens=256 * 400,
    window=64,
    batch=4,
    long_share=0.25,
    long_window=128,
    random_starts=0.3,
    learning_rate=1.0,
    weight_decay=0.1,
    dropout=0.0,
    n_positions=640,
    n_layer=1,
    n_embd=8,
    n_head=1,
    vocab_size=300,
    continue_from=None,
    corpus_sha256="",
)


def book(title: str, rng: random.Random, own_word: str, num_paragraphs: int = 12) -> str:
    paragraphs = [f"{own_word} {' '.join(rng.choices(WORDS, k=40))}." for _ in range(num_paragraphs)]
    return "\n\n".join([f"<|book|> A. Writer - {title}", *paragraphs])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    books = [book(f"Book {number}", rng, f"Word{number}") for number in range(4)]
    books[1] += "\n\nA coon sat there.\n\nThe niggardly raccoon squawked at an injunction of the Japanese."
    books += [book(title, rng, "Xylophone") for title in HELD_OUT]
    path = tmp_path_factory.mktemp("corpus") / "train.txt.xz"
    path.write_bytes(lzma.compress("\n\n".join(books).encode()))
    return path


def run(corpus: Path, directory: Path, *more: str, tokens: int = NUM_STEPS * TOKENS_PER_STEP) -> int:
    always = ["--device=cpu", "--no-compile", f"--corpus={corpus}", f"--run={directory}", f"--tokens={tokens}"]
    return train.main([*always, *SHAPE, *PACE, *more])


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted run."""
    directory = tmp_path_factory.mktemp("finished")
    assert run(corpus, directory) == 0
    return directory


def test_a_run_lowers_perplexity_and_writes_report_and_card(finished: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    assert [row["title"] for row in report["books"]] == list(HELD_OUT)
    assert report["mean"]["perplexity"] < 150  # an untrained model has the vocabulary's size, 300
    assert len(report["samples"]) == 10
    card = json.loads((finished / "card.json").read_text())
    assert (card["tokens_seen"], card["corpus"]["num_paragraphs_dropped"]) == (NUM_STEPS * TOKENS_PER_STEP, 1)
    assert sum(book["tokens"] + 1 for book in card["corpus"]["books"]) == card["corpus"]["num_tokens"]
    assert not card["is_compiled"]


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(
    corpus: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped by a signal; dropout and both optimizers resume where they were."""
    take_step = Trainer.train_step

    def step_then_signal(trainer: Trainer) -> torch.Tensor:
        if trainer.step == 9:
            signal.raise_signal(signal.SIGTERM)
        return take_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", step_then_signal)
    assert run(corpus, tmp_path) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert "Stopped at token 2,560; run the same command to resume." in capsys.readouterr().err
    assert run(corpus, tmp_path) == 0
    assert re.search(
        r"from token 2,560(?s:.*)6,144 tokens: loss \d\.\d+; (\d\.\d+(, )?){3} bits", capsys.readouterr().err
    )
    expected, actual = (load_file(run_dir / "checkpoint/model.safetensors") for run_dir in (finished, tmp_path))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert (finished / "report.json").read_bytes() == (tmp_path / "report.json").read_bytes()


def test_a_run_is_not_resumed_with_other_settings(
    corpus: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, finished, "--seed=1") == 1
    assert "another seed" in capsys.readouterr().err


def test_held_out_books_and_slurs_reach_neither_the_tokens_nor_the_tokenizer(corpus: Path, finished: Path) -> None:
    bpe = BpeTokenizer.from_file(str(finished / "tokenizer.json"))
    tokens = np.load(finished / "tokens.npy")
    assert tokens.dtype == np.uint16
    text = bpe.decode(tokens.tolist(), skip_special_tokens=False)
    assert "coon sat" not in text
    assert "raccoon squawked at an injunction of the Japanese" in text
    assert "Xylophone" not in text
    assert "Xyl" not in "".join(bpe.get_vocab())
    assert Counter(tokens.tolist())[0] == 4
    assert bpe.token_to_id("<|endoftext|>") == tokens[0] == 0
    train_books, held_out = split_books(read_books(corpus))
    assert [book.title for book in held_out] == list(HELD_OUT)
    assert all(f"<|endoftext|>{book.without_slurs().text}" in text for book in train_books)


def test_the_slur_filter_matches_words_and_not_their_lookalikes() -> None:
    for word in ("Niggers", "darkies", "half-breed", "Chinaman", "savages", "dagoes", "Injun Joe", "gypsy", "squaws"):
        assert SLUR.search(f"He saw {word}."), word
    for word in ("niggardly", "squawk", "injunction", "Japan", "spice", "savage dog", "cocoon", "dagonet", "swop"):
        assert not SLUR.search(f"He saw {word}."), word


def test_a_corpus_without_a_held_out_book_is_refused(corpus: Path) -> None:
    books = [book for book in read_books(corpus) if book.title != HELD_OUT[1]]
    with pytest.raises(StartError, match=HELD_OUT[1]):
        split_books(books)


def test_every_position_is_trained_and_every_token_read() -> None:
    tokens = np.arange(5000, dtype=np.uint16)
    positions: Counter[int] = Counter()
    lengths: Counter[int] = Counter()
    num_at_zero = num_windows = 0
    for step in range(400):
        batch = batch_at(SETTINGS, tokens, step)
        assert batch.ids.shape == batch.targets.shape == batch.positions.shape
        assert batch.ids.size == TOKENS_PER_STEP
        assert (batch.targets == batch.ids + 1).all()
        positions.update(batch.positions.flatten().tolist())
        lengths[batch.ids.shape[1]] += 1
        num_at_zero += int((batch.positions[:, 0] == 0).sum())
        num_windows += len(batch.ids)
    assert set(positions) == set(range(640))
    assert positions[639] > 0.5 * positions[400]
    assert 0.65 < num_at_zero / num_windows < 0.75
    assert 0.2 < lengths[128] / 400 < 0.3
    one_pass = np.concatenate([batch_at(SETTINGS, tokens, step).ids.flatten() for step in range(18)])
    assert len(set(one_pass.tolist())) == len(one_pass) == 18 * TOKENS_PER_STEP  # no token twice in a pass


def test_the_learning_rate_follows_the_tokens() -> None:
    rates = [SETTINGS.learning_rate_at(step) for step in range(400)]
    assert rates[0] == pytest.approx(0.25)
    assert rates[3:121] == [1.0] * 118
    assert rates[260] == pytest.approx(1 - (1 - FINAL) / 2)
    assert rates[399] == pytest.approx(FINAL, abs=0.005)
    assert SETTINGS.learning_rate_at(400) == pytest.approx(FINAL)


def test_the_checkpoint_has_the_layout_of_the_embedded_checkpoint(finished: Path) -> None:
    ours, shipped = finished / "checkpoint", train.SHIPPED
    assert {path.name for path in ours.iterdir()} == {path.name for path in shipped.iterdir()} - {"README.md"}
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert json.loads((ours / name).read_text()).keys() == json.loads((shipped / name).read_text()).keys(), name
    here, there = (load_file(directory / "model.safetensors") for directory in (ours, shipped))
    assert {name for name in there if ".h." not in name or ".h.0." in name or ".h.1." in name} == set(here)
    assert {weight.dtype for weight in here.values()} == {torch.bfloat16}
    our_tokenizer, shipped_tokenizer = (
        json.loads((directory / "tokenizer.json").read_text()) for directory in (ours, shipped)
    )
    for values in (our_tokenizer, shipped_tokenizer):
        del values["model"]["vocab"], values["model"]["merges"]
    assert our_tokenizer == shipped_tokenizer


def test_transformers_and_the_engine_load_the_checkpoint(finished: Path) -> None:
    directory = finished / "checkpoint"
    found = resolve("new", str(directory))
    assert (found.n_ctx, found.vocab_size) == (640, 300)
    model = GPT2LMHeadModel.from_pretrained(directory)
    assert AutoTokenizer.from_pretrained(directory)("the old man").input_ids
    assert load_model(directory, dtype="fp32").config.n_layer == model.config.n_layer == 2


def test_report_is_deterministic_and_works_on_any_checkpoint(
    corpus: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([f"--corpus={corpus}", f"--report={finished / 'checkpoint'}", "--device=cpu"]) == 0
    assert capsys.readouterr().out == (finished / "report.json").read_text()


def test_continuing_keeps_tokenizer_shape_and_weights(corpus: Path, finished: Path, tmp_path: Path) -> None:
    source = finished / "checkpoint"
    arguments = ["--device=cpu", "--no-compile", f"--corpus={corpus}", f"--run={tmp_path}", f"--continue-from={source}"]
    assert train.main([*arguments, *PACE[:3], "--learning-rate=1e-9", f"--tokens={TOKENS_PER_STEP}"]) == 0
    assert (tmp_path / "checkpoint/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    before, after = (load_file(directory / "model.safetensors") for directory in (source, tmp_path / "checkpoint"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert train.main([*arguments, "--n-layer=3"]) == 1


def test_a_model_too_large_to_ship_is_refused() -> None:
    class TooLarge(torch.nn.Module):
        def parameters(self, recurse: bool = True) -> Any:
            return iter([torch.empty(20_000_000, device="meta")])

    with pytest.raises(StartError, match="at most 40 MB"):
        check_size(TooLarge())


def test_a_trained_tokenizer_encodes_every_byte() -> None:
    bpe = train_tokenizer(["the sea"], 300)
    assert bpe.decode(bpe.encode("é – ☃").ids) == "é – ☃"
