"""A training run's state and its step: model, optimizers, number of steps; saving and restoring them.

At the end the model becomes a checkpoint that Tercet serves. Knows nothing of the command line or of the files of a
run.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shared.errors import StartError
from workers.training.corpus import TOKENIZER_FILES, Corpus
from workers.training.report import Unreduced, held_out
from workers.training.schedule import Settings, batch_at

MAX_GRADIENT = 1.0
EVAL_WINDOWS = 8  # per held-out book in the evaluations during training: 12,288 tokens in all
MAX_BYTES = 40_000_000  # of all files of a checkpoint, so that they fit in the source repository and the package
TOKENIZER_BYTES = 600_000


def check_size(model: Any) -> None:
    """Check that the exported checkpoint has at most `MAX_BYTES`.

    Raises:
        StartError: it would be larger.
    """
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters()) + TOKENIZER_BYTES
    if num_bytes > MAX_BYTES:
        raise StartError(
            f"This model's checkpoint would have {num_bytes / 1e6:.1f} MB, and at most {MAX_BYTES / 1e6:.0f} MB are "
            "shipped: take fewer layers, a smaller width or a smaller vocabulary."
        )


class Trainer:
    """A model, its optimizers, and the number of training steps done.

    Raises:
        StartError: the model is too large to ship.
    """

    def __init__(self, model: Any, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        check_size(model)
        self.model = model.to(device).train()
        self.settings = settings
        self.step = 0
        self.elapsed_s = 0.0  # of the run, over all calls
        self._tokens = corpus.tokens
        self._device = device
        self._loss_of = Unreduced(self.model)
        matrices = [weight for weight in model.transformer.h.parameters() if weight.ndim == 2]
        in_blocks = {id(weight) for weight in matrices}
        rest = [weight for weight in model.parameters() if id(weight) not in in_blocks]
        # One learning rate for both: match_rms_adamw scales Muon's updates to the size of AdamW's.
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    @property
    def num_tokens(self) -> int:
        """Number of tokens trained on, over all calls."""
        return self.step * self.settings.tokens_per_step

    def compile(self) -> None:
        """Compile one graph for each of the two window lengths; a graph for dynamic lengths is slower."""
        self._loss_of.compile(dynamic=False)

    def train_step(self) -> Tensor:
        """Run one training step; returns its mean loss in nats, on the device.

        Batch and dropout depend on the seed and the step's number only.
        """
        torch.manual_seed(self.settings.seed * 1_000_003 + self.step)
        batch = batch_at(self.settings, self._tokens, self.step)
        numbers = [torch.from_numpy(ids).to(self._device) for ids in (batch.ids, batch.targets, batch.positions)]
        with torch.autocast(self._device.type, torch.bfloat16):
            loss: Tensor = self._loss_of(*numbers).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate_at(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def evaluate(self, corpus: Corpus) -> dict[str, float]:
        """Bits per byte on the first windows of each held-out book, by title."""
        self.model.eval()
        with torch.autocast(self._device.type, torch.bfloat16):
            bits_per_byte = {
                book.title: held_out(self.model, corpus.tokenizer, book, self._device, EVAL_WINDOWS)["bits_per_byte"]
                for book in corpus.held_out
            }
        self.model.train()
        return bits_per_byte

    def save(self, path: Path) -> None:
        """Replace the saved state atomically: an interruption leaves the old state or the new one."""
        partial = path.with_name(f"{path.name}.partial")
        torch.save(
            {
                "settings": dataclasses.asdict(self.settings),
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
            partial,
        )
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            StartError: the saved run has other settings.
        """
        state = torch.load(path, map_location=self._device, weights_only=True)
        now = dataclasses.asdict(self.settings)
        if changed := [name for name in now if state["settings"].get(name) != now[name]]:
            raise StartError(
                f"{path.parent} holds a run with another {', '.join(changed)}: "
                "give the values that it was started with, or another --run."
            )
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def export(self, tokenizer: Path, directory: Path) -> None:
        """Write the checkpoint (weights in bf16, configuration, the tokenizer's files) to `directory`, replacing what
        is there only once the new one is complete."""
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        copy.deepcopy(self.model).to("cpu", torch.bfloat16).save_pretrained(partial)
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, partial / name)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
