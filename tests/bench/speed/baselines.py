"""The baselines: transformers' `generate`, used as its documentation shows. Runs in a process of its own.

Tokenization and detokenization, which a user of `generate` needs as well, are not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from deploy.tuning.load.workload import Workload
from tests.bench.speed.ceiling import config_of
from workers.checkpoints.resolve import Checkpoint

# A random model may sample the end-of-text token; such a run did less work and is repeated.
MAX_TRIES = 8


class Baselines:
    """`run` times one whole request of the workload."""

    def __init__(self, subject: Checkpoint, workload: Workload, device: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(0)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._subject = subject
        self._workload = workload
        self._device = device
        self._models: dict[torch.dtype, Any] = {}

    def run(self, name: str, prompt_ids: tuple[int, ...]) -> float:
        """Milliseconds for all samples of one prompt.

        Args:
            name: a key of `tests.bench.speed.contenders.BASELINES`.

        Raises:
            RuntimeError: a text ended before its last token in every try.
        """
        baselines: dict[str, Callable[[], int]] = {
            "a": lambda: self._sequential(prompt_ids, torch.float32),
            "a-bf16": lambda: self._sequential(prompt_ids, torch.bfloat16),
            "b-fp32": lambda: self._batched(prompt_ids, torch.float32),
            "b-bf16": lambda: self._batched(prompt_ids, torch.bfloat16),
            "static": lambda: self._batched(prompt_ids, torch.bfloat16, cache_implementation="static"),
        }
        self._model(torch.float32 if name in {"a", "b-fp32"} else torch.bfloat16)
        for _ in range(MAX_TRIES):
            start = time.perf_counter()
            num_tokens = baselines[name]()
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            if num_tokens == self._workload.num_samples * self._workload.num_new_tokens:
                return elapsed_ms
        raise RuntimeError(f"a text of {name} ended early in each of {MAX_TRIES} tries")

    def _sequential(self, prompt_ids: tuple[int, ...], dtype: torch.dtype) -> int:
        return sum(self._generate(prompt_ids, dtype, 1) for _ in range(self._workload.num_samples))

    def _batched(self, prompt_ids: tuple[int, ...], dtype: torch.dtype, **more: Any) -> int:
        return self._generate(prompt_ids, dtype, self._workload.num_samples, **more)

    def _generate(self, prompt_ids: tuple[int, ...], dtype: torch.dtype, num_samples: int, **more: Any) -> int:
        """The number of generated tokens, padding after shorter texts included."""
        ids = torch.tensor([prompt_ids], device=self._device)
        output = self._model(dtype).generate(
            ids, attention_mask=torch.ones_like(ids), num_return_sequences=num_samples, **self._sampling(), **more
        )
        # `tolist` synchronizes with the device.
        return sum(len(row) for row in output[:, len(prompt_ids) :].tolist())

    def _sampling(self) -> dict[str, Any]:
        workload = self._workload
        return {
            "do_sample": True,
            "max_new_tokens": workload.num_new_tokens,
            "temperature": workload.temperature,
            "top_k": workload.top_k,
            "top_p": workload.top_p,
            "pad_token_id": 0,
        }

    def _model(self, dtype: torch.dtype) -> Any:
        if dtype not in self._models:
            if self._subject.source == "synthetic":
                ours = config_of(self._subject)
                model = GPT2LMHeadModel(
                    GPT2Config(n_embd=ours.n_embd, n_layer=ours.n_layer, n_head=ours.n_head, n_inner=ours.n_inner)
                )
            else:
                model = AutoModelForCausalLM.from_pretrained(Path(self._subject.directory), local_files_only=True)
            self._models[dtype] = model.to(dtype).to(self._device).eval()
        return self._models[dtype]
