"""The model of a decode step on paper: bytes that must be read, and kernels that must be launched. Pure.

Nothing here has been measured. The time of a step lies between two bounds: reads and launches overlap entirely (the
larger of the two), or not at all (their sum). Arithmetic is left out: at 96 rows of GPT-2 small it is 24 GFLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.model.gpt2 import SHAPES, GPT2Config

BYTES_PER_VALUE = 2  # bf16, or fp16 where the card has no bf16
LAUNCH_US = 2.4  # of a kernel inside a CUDA graph; an estimate
VOCABULARY_MULTIPLE = 64  # the head is padded to it, so that rows of logits are aligned


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU by its data sheet."""

    name: str
    gb_s: float  # memory bandwidth, 10⁹ bytes per second
    source: str


CARDS = (
    Card("T4", 320, "NVIDIA T4 data sheet: 320+ GB/s"),
    Card("A10", 600, "NVIDIA A10 data sheet: 600 GB/s"),
    Card("A100", 2039, "NVIDIA A100 data sheet, 80 GB SXM: 2,039 GB/s"),
    Card("H100", 3350, "NVIDIA H100 data sheet, SXM: 3.35 TB/s"),
)


@dataclass(frozen=True, slots=True)
class Kernels:
    """How many kernels a step launches."""

    name: str
    per_layer: int
    outside: int

    def of(self, config: GPT2Config) -> int:
        """Kernels of a step."""
        return self.per_layer * config.n_layer + self.outside


# Four products, two additions with a norm and attention per layer; outside the start of the step, the last norm, the
# head, and two kernels of the draw. Counted by tests/workers/engine/cuda/test_kernel_count.py. The fused head computes
# the last norm too.
SEVEN = Kernels("cuBLAS products, seven per layer", 7, 5)
FIVE = Kernels("fused layers, five per layer", 5, 4)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A step's cost on paper; times in µs."""

    weight_bytes: int
    kv_bytes: int
    num_kernels: int
    read_us: float
    launch_us: float

    @property
    def least_us(self) -> float:
        """Reads and launches overlap entirely."""
        return max(self.read_us, self.launch_us)

    @property
    def most_us(self) -> float:
        """Nothing overlaps."""
        return self.read_us + self.launch_us


def weight_bytes(config: GPT2Config) -> int:
    """Bytes of the weights that a step reads: the linear layers, and the head with its padded vocabulary."""
    width, inner = config.n_embd, config.n_inner
    per_layer = 4 * width * width + 2 * width * inner
    vocab = -(-config.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return BYTES_PER_VALUE * (config.n_layer * per_layer + vocab * width)


def kv_bytes(config: GPT2Config, num_rows: int, num_tokens: int) -> int:
    """Bytes of keys and values that a step of `num_rows` different prompts of `num_tokens` tokens reads."""
    return BYTES_PER_VALUE * 2 * config.n_layer * config.n_embd * num_rows * num_tokens


def step_estimate(
    config: GPT2Config,
    num_rows: int,
    num_tokens: int,
    gb_s: float,
    kernels: Kernels = SEVEN,
    launch_us: float = LAUNCH_US,
) -> StepEstimate:
    """The estimate of one decode step.

    Args:
        num_rows: sequences, each with a prompt of its own.
        num_tokens: context of each.
        gb_s: memory bandwidth, 10⁹ bytes per second.
        launch_us: of one kernel inside a CUDA graph.
    """
    weights, keys_values = weight_bytes(config), kv_bytes(config, num_rows, num_tokens)
    num_kernels = kernels.of(config)
    return StepEstimate(
        weights, keys_values, num_kernels, (weights + keys_values) / gb_s / 1e3, launch_us * num_kernels
    )


# Of the published table: model, rows, context.
POINTS = (
    ("small", 1, 84), ("small", 3, 84), ("small", 3, 1000), ("small", 12, 150), ("small", 48, 150), ("small", 96, 150),
    ("small", 96, 1000), ("medium", 3, 84), ("medium", 3, 1000), ("medium", 96, 150),
)  # fmt: skip


TITLES = (
    "| model | rows | context | keys and values, MB | floor: reads, µs (estimate) "
    "| step, 7 per layer, µs (estimate) | step, 5 per layer, µs (estimate) | measured, µs |"
)


def estimate_markdown(points: Sequence[tuple[str, int, int]] = POINTS) -> str:
    """The tables of docs/PERFORMANCE.md, with an empty column for measurements."""
    lines = [
        "| model | kernels per layer + outside | kernels | launches, µs (estimate) | weights, MB |",
        "|---|---|---|---|---|",
    ]
    for model in ("small", "medium"):
        for kernels in (SEVEN, FIVE):
            found = step_estimate(SHAPES[model], 1, 0, CARDS[-1].gb_s, kernels)
            lines.append(
                f"| {model} | {kernels.per_layer} + {kernels.outside} | {found.num_kernels} | {found.launch_us:.0f} | "
                f"{found.weight_bytes / 1e6:.0f} |"
            )
    for card in CARDS:
        lines += [
            "",
            f"**{card.name}** ({card.source})",
            "",
            TITLES,
            "|---|---|---|---|---|---|---|---|",
        ]
        for model, rows, tokens in points:
            seven, five = (step_estimate(SHAPES[model], rows, tokens, card.gb_s, kernels) for kernels in (SEVEN, FIVE))
            lines.append(
                f"| {model} | {rows} | {tokens:,} | {seven.kv_bytes / 1e6:.0f} | {seven.read_us:,.0f} "
                f"| {seven.least_us:,.0f}–{seven.most_us:,.0f} | {five.least_us:,.0f}–{five.most_us:,.0f} | |"
            )
    return "\n".join(lines) + "\n"
