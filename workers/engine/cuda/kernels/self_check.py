"""Compares `StepKernels` with their plain torch version on the device that they are going to serve on.

With the model's own shape and data type, and invented weights: ties, padding, positions at the ends of a split and
where the prefix-cache entry ends and the KV suffix begins, one row and the largest batch. An error of the device is
raised, as it is no result of a comparison. Knows tensors and kernels. Does not know which kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from workers.engine.arithmetic_code import MIN_WIDTH
from workers.engine.cuda.step_kernels import (
    AT,
    MAX_STEPS,
    POINT,
    ROWS_AT_ONCE,
    Attention,
    Product,
    StepKernels,
    TorchKernels,
)
from workers.engine.model.config import ModelConfig
from workers.engine.model.linear import DeviceHead, DeviceLinear
from workers.engine.model.transformer import Norm, activate, rotations

# Bounds of the difference, relative to a number if that exceeds 1. About four units in the last place of 16-bit types.
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
LOGPROB_BOUND = 1e-4
CODE_BOUND = 1e-6  # a place within an interval of a thousandth has a thousand times the interval's rounding error
NUM_IDS = 300  # of the token embedding, so that a check needs little memory
PADDING = 47  # columns behind the vocabulary
# First row and the row behind the last of batches in which a row must have the same bits: around multiples of 8 and 16.
BATCHES = ((0, 1), (1, 4), (0, 8), (8, 9), (3, 12), (7, 23), (40, 48))
MAX_ROWS_ALONE = 48
# Temperature, top-k and top-p as `sampling.limits`; 0: greedy.
DRAWS = (
    *((0.0, float("inf"), 2.0), (2.0, 50.0, 0.8), (0.7, 64.0, 2.0), (2.0, 7.0, 2.0), (2.0, 64.0, 0.3)),
    (5e-324, 64.0, 5e-324),
)


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """How one of the `StepKernels` compares with plain torch.

    Attributes:
        name: name of the method.
        difference: the largest, relative to numbers above 1.
        bound: largest difference allowed.
        faults: what else differs; empty if nothing does.
    """

    name: str
    difference: float
    bound: float
    faults: tuple[str, ...] = ()

    @property
    def is_correct(self) -> bool:
        return self.difference <= self.bound and not self.faults  # not a number is not within a bound

    @property
    def fault(self) -> str:
        """What is wrong, in words, where it is not correct."""
        return ", ".join(self.faults) or f"differs from plain torch by {self.difference:.2g}"


@dataclass(frozen=True, slots=True)
class CheckSetting:
    """What kernels are checked for.

    Attributes:
        max_sequences: rows of the largest batch.
    """

    config: ModelConfig
    dtype: torch.dtype
    max_sequences: int
    device: torch.device

    def random(self, *shape: int, dtype: torch.dtype | None = None, seed: int = 0) -> Tensor:
        """Normally distributed numbers, the same on all devices."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=generator).to(self.device, dtype or self.dtype)

    def table(self) -> Tensor:
        """A table of `max_sequences` rows with distinct positions, suffixes and draws; every seventh is padding."""
        columns = []
        lengths = _lengths(self.config.n_positions)
        suffix_size = max(length for _, length in lengths) + 1
        dummy = self.config.n_positions + self.max_sequences * suffix_size
        for row in range(self.max_sequences):
            position, suffix_length = lengths[row % len(lengths)]
            start = position - suffix_length
            suffix = self.config.n_positions + row * suffix_size
            # A high one, which depends on every limit; every other is replaced after most tokens.
            code = 0.97 - 0.001 * row, 1.0 if row % 2 else 1.5 * MIN_WIDTH
            next_points = [0.9 - 0.05 * step for step in range(MAX_STEPS)]
            if row % 7 == 6:
                columns.append([0, 0, 0, dummy, 0, 0, 0, 1, 2, *code, 0, *next_points])
                continue
            draw = *DRAWS[row % len(DRAWS)], *code, row % 3
            columns.append([row * 31 % NUM_IDS, start, 0, suffix - start, 1, position, *draw, *next_points])
        return torch.tensor(columns, dtype=torch.float64, device=self.device).T.contiguous()

    def num_slots(self) -> int:
        """Return the slots of the table's sequences: one entry, their suffixes, and the dummy slot."""
        suffix_size = max(length for _, length in _lengths(self.config.n_positions)) + 1
        return self.config.n_positions + self.max_sequences * suffix_size + 1


def check_kernels(kernels: StepKernels, setting: CheckSetting) -> tuple[KernelCheck, ...]:
    """
    Raises:
        RuntimeError: if the device reports an error.
    """
    return tuple(check(kernels, setting) for check in CHECKS.values())


@torch.inference_mode()
def check_begin(kernels: StepKernels, setting: CheckSetting) -> KernelCheck:
    config, table = setting.config, setting.table()
    positions = None if config.rotary else setting.random(config.n_positions, config.n_embd, seed=1)
    weights = setting.random(NUM_IDS, config.n_embd), positions
    x, expected = kernels.begin(table, *weights), TorchKernels(1).begin(table, *weights)
    alone = [kernels.begin(column, *weights) for column in _each(table)]
    return _result("begin", x, expected, _dependences(x, alone), setting)


@torch.inference_mode()
def check_multiply(kernels: StepKernels, setting: CheckSetting) -> KernelCheck:
    """All products of a layer, and a head of few tokens: alone, and in batches around multiples of 8 and 16 rows."""
    width = setting.config.n_embd
    products = products_of(setting)
    ours, theirs, faults = [], [], []
    # Far from 0, so that a norm's mean matters.
    x = 2 + 3 * setting.random(setting.max_sequences, width, seed=4)
    few = x[:MAX_ROWS_ALONE]
    batches = BATCHES if kernels.has_equal_products(setting.dtype) else ()
    for product in products:
        if product.is_added and not batches:  # the next product would add it
            continue
        assert isinstance(product.linear, DeviceLinear | DeviceHead)
        num_in = product.linear.weight.shape[1]
        y = setting.random(len(few), num_in, seed=num_in)

        def rows(first: int, stop: int, product: Product = product, y: Tensor = y) -> Tensor:
            return kernels.multiply(product, few[first:stop].clone(), y[first:stop])

        out = rows(0, len(few))
        ours.append(out.flatten())
        theirs.append(_multiply_exactly(product, few, y).flatten())
        for first, stop in batches:
            if stop <= len(few) and not rows(first, stop).equal(out[first:stop]):
                faults.append(f"rows {first} to {stop - 1} of {len(out[0])} columns have other bits than in a batch")
    # The largest batch, whose residual additions show in the logits only.
    added, last, y = products[1], products[-1], setting.random(len(x), setting.config.query_width, seed=5)
    sums = x.clone()
    kernels.multiply(added, sums, y)
    ours.append(kernels.multiply(last, sums, None).flatten())
    theirs.append(_multiply_exactly(last, _multiply_exactly(added, x, y).to(x.dtype), y).flatten())
    return _result("multiply", torch.cat(ours), torch.cat(theirs), faults, setting)


def products_of(setting: CheckSetting) -> tuple[Product, ...]:
    """The products of a layer, and a head of few tokens."""
    config, random = setting.config, setting.random
    width = config.n_embd
    bias = None if config.is_rms_norm else 0.3 * random(width, seed=1)
    norm = Norm(1 + 0.3 * random(width), bias, config.norm_epsilon)

    def linear(num_out: int, num_in: int, has_bias: bool) -> DeviceLinear:
        weight = random(num_out, num_in, seed=num_out) * num_in**-0.5
        return DeviceLinear(weight, random(num_out, seed=3) if has_bias else None)

    return (
        Product(linear(config.qkv_width, width, config.has_qkv_bias), norm),
        Product(linear(width, config.query_width, config.has_out_bias), is_added=True),
        Product(linear(config.up_width, width, config.has_mlp_bias), norm, partial(activate, config)),
        Product(linear(width, config.n_inner, config.has_mlp_bias), is_added=True),
        Product(DeviceHead.pad(random(NUM_IDS, width, seed=7) * width**-0.5), norm),
    )


def attention_of(setting: CheckSetting) -> Attention:
    """What precedes attention in the model."""
    config, angles = setting.config, rotations(setting.config)
    attention = Attention(rotations=None if angles is None else angles.to(setting.device))
    if not config.has_head_norms:
        return attention
    query, key = (1 + 0.3 * setting.random(config.head_size, seed=seed) for seed in (8, 9))
    scaled = Norm(query * config.head_size**-0.5, None, config.norm_epsilon)
    return replace(attention, query_norm=scaled, key_norm=Norm(key, None, config.norm_epsilon))


def _multiply_exactly(product: Product, x: Tensor, y: Tensor) -> Tensor:
    """`multiply`, each part in float32 with a result that is rounded."""
    source = y if product.norm is None else product.norm(x)
    linear = product.linear
    assert isinstance(linear, DeviceLinear | DeviceHead)
    out = source.float() @ linear.weight.float().T
    if isinstance(linear, DeviceHead):
        return out[:, : linear.vocab_size]
    if linear.bias is not None:
        out += linear.bias.float()
    if product.activate is not None:
        out = product.activate(out)
    out = out.to(x.dtype)
    return (x + out if product.is_added else out).float()


@torch.inference_mode()
def check_attend(kernels: StepKernels, setting: CheckSetting) -> KernelCheck:
    config = setting.config
    table = setting.table()
    attend = partial(kernels.attend, attention_of(setting))
    slots = setting.random(setting.num_slots(), 2, config.num_kv_heads, config.head_size)
    qkv = setting.random(setting.max_sequences, config.qkv_width, seed=1)
    qkv[:, : config.query_width] *= config.head_size**-0.5
    # Padding rows store in the same slot: the same key and value, so that the result is defined.
    qkv[6::7] = qkv[6 % len(qkv)].clone()
    expected_slots = slots.clone()
    twin = partial(TorchKernels(config.n_positions).attend, attention_of(setting))
    parts = range(0, len(qkv), ROWS_AT_ONCE)
    expected = [twin(qkv[at : at + ROWS_AT_ONCE], expected_slots, table[:, at : at + ROWS_AT_ONCE]) for at in parts]
    out = attend(qkv, slots, table)
    # Keys that are rotated or normed are rounded.
    bound = BOUNDS[setting.dtype] if config.rotary else 0.0
    faults = [] if _difference(slots, expected_slots) <= bound else ["other keys and values are stored"]
    if not attend(qkv, slots, table).equal(out):
        faults.append("a second launch has other results")
    alone = [attend(qkv[row : row + 1], slots, column) for row, column in enumerate(_each(table))]
    return _result("attend", out, torch.cat(expected), [*faults, *_dependences(out, alone)], setting)


@torch.inference_mode()
def check_draw(kernels: StepKernels, setting: CheckSetting) -> KernelCheck:
    table, logits = setting.table(), _logits(setting)
    advanced = table.clone()
    out = _drawn(kernels, logits, advanced)
    tables = [part.clone() for part in torch.split(table, ROWS_AT_ONCE, 1)]
    parts = zip(torch.split(logits, ROWS_AT_ONCE), tables, strict=True)
    expected = torch.cat([_drawn(TorchKernels(1), *part) for part in parts], 1)
    expected_table = torch.cat(tables, 1)
    faults = [] if out[0].equal(expected[0]) else ["other tokens are drawn"]
    codes, expected_codes = advanced[POINT:AT], expected_table[POINT:AT].clone()
    if _difference(codes, expected_codes) > CODE_BOUND or not codes.equal(out[2:]):
        faults.append("other codes follow")
    expected_table[POINT:AT] = codes
    if not advanced.equal(expected_table):
        faults.append("the table is advanced differently")
    alone = [_drawn(kernels, logits[row : row + 1], column)[:, 0] for row, column in enumerate(_each(table))]
    faults += _dependences(out.T, [one[None] for one in alone])
    difference = _difference(out[1], expected[1])
    return KernelCheck("draw", difference, LOGPROB_BOUND, tuple(faults))


def _drawn(kernels: StepKernels, logits: Tensor, table: Tensor) -> Tensor:
    """[4, rows], what a draw stores; not a number where it stores nothing."""
    out = torch.full((MAX_STEPS, 4, len(logits)), float("nan"), dtype=torch.float64, device=logits.device)
    at = table[AT].long()
    kernels.draw(logits, table, out)
    return out[at, :, torch.arange(len(logits), device=logits.device)].T


# Name of the method → its check.
CHECKS: dict[str, Callable[[StepKernels, CheckSetting], KernelCheck]] = {
    "begin": check_begin,
    "multiply": check_multiply,
    "attend": check_attend,
    "draw": check_draw,
}


def _lengths(n_ctx: int) -> list[tuple[int, int]]:
    """Positions, and how many tokens before them are in the suffix: around multiples of 64, where splits end."""
    lengths = [(n_ctx - 1, 40), (65, 1), (64, 64), (0, 0), (200, 70), (63, 0), (70, 70), (1, 1), (128, 63)]
    return [(position, min(suffix, position)) for position, suffix in lengths if position < n_ctx]


def _logits(setting: CheckSetting) -> Tensor:
    """Rows [max_sequences, vocab] with ties, with -inf, with a single finite logit; behind a row, high padding."""
    vocab = setting.config.vocab_size
    padded = 3 * setting.random(setting.max_sequences, vocab + PADDING, dtype=torch.float32)
    padded[:, vocab:] = 1e4
    logits = padded[:, :vocab]
    logits[::2] = logits[::2].round()  # many ties
    logits[2::8] = logits[2::8].clamp(max=0)  # the likeliest are 0.0 and -0.0, which are equal
    logits[1::4, vocab // 3 :] = float("-inf")
    logits[3::8, 1:] = float("-inf")
    return logits


def _each(table: Tensor) -> list[Tensor]:
    """Copies of the first columns of `table`, each [rows, 1], to compute alone; none if the batch is a single row."""
    size = table.shape[1]
    return [table[:, at : at + 1].clone() for at in range(min(size, ROWS_AT_ONCE) if size > 1 else 0)]


def _dependences(rows: Tensor, alone: list[Tensor]) -> list[str]:
    """A fault if a row has other bits alone than among others."""
    is_same = all(row[None].equal(one) for row, one in zip(rows, alone, strict=False))
    return [] if is_same else ["a row has other bits alone than in a batch"]


def _difference(ours: Tensor, expected: Tensor) -> float:
    ours, expected = ours.double(), expected.double()
    relative = (ours - expected).abs() / expected.abs().clamp(min=1)
    return float(torch.where(ours == expected, 0.0, relative).max())  # infinities may be equal


def _result(name: str, ours: Tensor, expected: Tensor, faults: list[str], setting: CheckSetting) -> KernelCheck:
    return KernelCheck(name, _difference(ours, expected), BOUNDS[setting.dtype], tuple(faults))
