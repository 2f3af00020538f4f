"""Decode steps of one model on one GPU, in a process of its own: compares kernels with plain torch and times them.

A kernel that faults ends this process and not its caller. Knows the CUDA backend. Does not know which kernels are best.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shared.telemetry import configure_structlog
from workers.engine.cuda.forward import PLAIN_KERNELS, DecodeKernels, decode
from workers.engine.cuda.graphs import Batch, GraphRecorder, Program, StepResult
from workers.engine.cuda.kernel_choice import check_kernels, dtype_name, gpu_of, make_kernels, require_packages
from workers.engine.cuda.kernel_store import Kernels, kernel_key, refusal
from workers.engine.cuda.kv_cache import KVCache
from workers.engine.cuda.step_kernels import MAX_STEPS
from workers.engine.loader import load_model, random_model

CONTEXT_TOKENS = 150  # of each row: the length of a paragraph
CROWD = 48  # rows among which a row is compared with itself alone
# Of the largest logit, per dtype: what a different order of summation may change in a model of 24 layers.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}


class StepTimer:
    """A model on a device, with graphs of its decode step for several kernels and batch sizes."""

    @torch.inference_mode()
    def __init__(self, directory: str, synthetic: str, dtype: str, max_rows: int, device: str = "cuda") -> None:
        """
        Args:
            directory: of the checkpoint.
            synthetic: "small" or "medium" for random weights of that shape; empty for the checkpoint.
            dtype: auto, bf16, fp16 or fp32.
        """
        require_packages()
        if synthetic:
            loaded = random_model("medium" if synthetic == "medium" else "small", device=device, dtype=dtype)
        else:
            loaded = load_model(Path(directory), device=device, dtype=dtype)
        self._config, self._model = loaded.config, loaded.model
        self._device = torch.device(device)
        self._dtype = self._model.token_embedding.dtype
        self._context = min(CONTEXT_TOKENS, self._config.n_positions - 1)
        self._max_rows = max_rows
        self._cache = KVCache(self._config, max_rows, self._dtype, self._device)
        self._fill_cache()
        self._recorder = GraphRecorder()
        self._kernels: dict[Kernels, DecodeKernels] = {"torch": PLAIN_KERNELS}
        self._programs: dict[tuple[Kernels, int], Program[StepResult]] = {}

    def describe(self) -> tuple[str, str, str]:
        """The key of the stored choice, the GPU's name, and the dtype."""
        gpu, dtype = gpu_of(self._device), dtype_name(self._dtype)
        return kernel_key(gpu, self._config, dtype), gpu.name, dtype

    @torch.inference_mode()
    def check(self, kernels: Kernels) -> str | None:
        """Why these kernels cannot be used; None if they can: each kernel, and a whole step, agree with plain torch."""
        if (reason := refusal(torch.cuda.get_device_capability(self._device))) is not None:
            return reason
        if (reason := check_kernels(kernels, self._config, self._dtype, self._max_rows, self._device)) is not None:
            return reason
        self._kernels[kernels] = make_kernels(kernels, self._model, self._max_rows, self._device)
        expected, ours = self._step("torch", 3), self._step(kernels, 3)
        difference = float((ours - expected).abs().max() / expected.abs().max())
        if not difference <= TOLERANCE[self._dtype]:  # NaN is refused, too
            return f"logits of a step differ from plain torch by {difference:.2g} of the largest"
        return None

    @torch.inference_mode()
    def has_same_bits(self, kernels: Kernels) -> bool:
        """Whether a row's logits are equal, bit by bit, alone and among CROWD rows."""
        crowd = min(CROWD, self._max_rows)
        return torch.equal(self._step(kernels, 1)[0], self._step(kernels, crowd)[0])

    @torch.inference_mode()
    def capture(self, kernels: Kernels, rows: int) -> None:
        """Captures the graph of a step."""
        batch = Batch(self._model, self._cache, rows, self._kernels[kernels])
        length = min(length for length in batch.programs if length > self._context)
        program = batch.programs[length]
        batch.table.copy_(self._table(rows))
        program.capture(self._recorder)
        self._programs[kernels, rows] = program

    @torch.inference_mode()
    def replay(self, kernels: Kernels, rows: int, num_replays: int) -> float:
        """The mean duration of a captured step in µs, by CUDA's events around `num_replays` replays in a row."""
        program = self._programs[kernels, rows]
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        program()
        begin.record()
        for _ in range(num_replays):
            program()
        end.record()
        end.synchronize()
        return float(1e3 * begin.elapsed_time(end) / num_replays)

    def _step(self, kernels: Kernels, rows: int) -> Tensor:
        """The logits [rows, vocab] of a step."""
        table, own = self._table(rows), self._kernels[kernels]
        made = own.make(self._config.n_positions)
        logits, _ = decode(self._model, self._cache.layers, table, made, own.fused_layers)
        return logits.clone()

    def _table(self, rows: int) -> Tensor:
        """[TABLE_ROWS, rows]: different tokens and cached prompts, one new token each; a replay repeats the step."""
        layout = self._cache.layout
        start = self._context
        columns = [
            (
                *(row % self._config.vocab_size, start, layout.first_of_entry(row % layout.num_entries)),
                *(layout.first_of_suffix(row) - start, 0, start),  # the position does not move
                *(1.0, 50, 0.95, 0.5, 1.0, 0),
                *[0.5] * MAX_STEPS,
            )
            for row in range(rows)
        ]
        return torch.tensor(columns, dtype=torch.float64).T.contiguous().to(self._device)

    def _fill_cache(self) -> None:
        """Random keys and values: zeros would hide a wrong sum."""
        generator = torch.Generator().manual_seed(0)
        shape = self._cache.layers.shape[2:]
        some = torch.randn(1024, *shape, generator=generator).to(self._dtype).to(self._device)
        for layer in self._cache.layers:
            for first in range(0, len(layer), len(some)):
                part = layer[first : first + len(some)]
                part.copy_(some[: len(part)])


def step_timer(directory: str, synthetic: str, dtype: str, max_rows: int) -> StepTimer:
    """A `StepTimer` in a process of its own, which logs as workers do."""
    configure_structlog("tune", "info")
    return StepTimer(directory, synthetic, dtype, max_rows)
