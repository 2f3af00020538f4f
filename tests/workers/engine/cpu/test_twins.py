"""Each compiled kernel gives what its NumPy twin gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.engine.cpu import twins
from tests.workers.engine.cpu.twins import Array
from workers.engine.cpu import kernels
from workers.engine.cpu.kernels import HAS_AMX, HAS_DOT_PRODUCTS, KernelCall, ThreadTeam
from workers.engine.cpu.layouts import (
    ACTIVATIONS,
    DRAW,
    LANES,
    LAYER,
    NORM,
    PLAIN,
    ROW,
    ROW_TILE,
    SAMPLER,
    SAMPLER_SCRATCH,
    STEP,
    TILE,
    TOTALS,
    UINT8,
    UNIT,
    VECTOR,
)
from workers.engine.cpu.linear import HugePages, PackedInt8Linear

_f32 = np.float32
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX for 8-bit integers")
WIDTHS = [1, 20, 64, 100, 129]
MODES = [PLAIN, UNIT, UINT8]


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> ThreadTeam:
    return ThreadTeam(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(_f32)


class Record:
    """A record whose fields are numbers or arrays, of which it keeps the address and the memory."""

    def __init__(self, layout: np.dtype[Any], **fields: Any) -> None:
        self.array = np.zeros(1, layout)
        self._arrays = [value for value in fields.values() if isinstance(value, np.ndarray)]
        for name, value in fields.items():
            assert not isinstance(value, np.ndarray) or value.flags.c_contiguous
            self.array[name] = value.ctypes.data if isinstance(value, np.ndarray) else value

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


def step_for(team: ThreadTeam, num_rows: int, width: int, mode: int, **fields: Any) -> Record:
    """A step with scratch memory, and with room for prepared rows in `prepared` and `scales`."""
    scratch = np.zeros((team.num_threads, LANES + 5000 + 20 * width), _f32)
    return Record(
        STEP, num_rows=num_rows, width=width, mode=mode, scratch_at=scratch, scratch_stride=scratch.shape[1], **fields
    )


def room_for(num_rows: int, width: int, mode: int) -> Array:
    return np.zeros((num_rows, width), np.uint8 if mode == UINT8 else _f32)


def assert_prepared(prepared: Array, scales: Array, rows: Array, mode: int, *, is_exact: bool) -> None:
    expected, expected_scales = twins.prepare(rows, mode)
    if is_exact:
        assert np.array_equal(prepared, expected)
        assert np.array_equal(scales, expected_scales)
        return
    tolerance = {"atol": 1} if mode == UINT8 else {"rtol": 1e-5, "atol": 2e-6}
    np.testing.assert_allclose(prepared.astype(_f32), expected.astype(_f32), **tolerance)
    np.testing.assert_allclose(scales, expected_scales, rtol=2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_norm(team: ThreadTeam, rng: np.random.Generator, width: int, mode: int) -> None:
    num_rows = 5
    stream, product = floats(rng, num_rows, width), floats(rng, num_rows, width)
    scales_in, scales, prepared = np.abs(floats(rng, num_rows)), np.zeros(3, _f32), room_for(3, width, mode)
    bias_in, weight, bias = floats(rng, width), floats(rng, width), floats(rng, width)
    sources = np.array([4, 0, 3])
    expected, normed = twins.add_and_norm(
        stream[sources], product[sources], scales_in[sources], bias_in, weight, bias, 1e-5
    )
    step = step_for(
        team,
        3,
        width,
        mode,
        epsilon=1e-5,
        stream_at=stream,
        prepared_at=prepared,
        scales_at=scales,
        scales_in_at=scales_in,
        sources_at=sources,
        rows_at=np.zeros(num_rows, ROW),
    )
    norm = Record(NORM, bias_in_at=bias_in, weight_at=weight, bias_at=bias)
    untouched = stream[[1, 2]].copy()
    team.run(KernelCall(kernels.add_and_norm, step.address, norm.address, product.ctypes.data), True)
    np.testing.assert_allclose(stream[sources], expected, rtol=1e-6, atol=1e-7)
    assert np.array_equal(stream[[1, 2]], untouched)
    assert_prepared(prepared, scales, normed, mode, is_exact=False)


def test_the_stream_begins_with_the_embeddings(team: ThreadTeam, rng: np.random.Generator) -> None:
    width, tokens, positions = 24, floats(rng, 9, 24), floats(rng, 7, 24)
    rows = np.array([(8, 0, 0, 0, 0, 0), (3, 6, 0, 0, 0, 0), (3, 1, 0, 0, 0, 0)], ROW)
    stream, prepared, scales = np.zeros((3, width), _f32), np.zeros((3, width), _f32), np.zeros(3, _f32)
    weight, bias = floats(rng, width), floats(rng, width)
    step = step_for(
        team,
        3,
        width,
        PLAIN,
        epsilon=1e-5,
        stream_at=stream,
        prepared_at=prepared,
        scales_at=scales,
        scales_in_at=scales,
        token_embedding_at=tokens,
        position_embedding_at=positions,
        rows_at=rows,
    )
    norm = Record(NORM, weight_at=weight, bias_at=bias)
    team.run(KernelCall(kernels.add_and_norm, step.address, norm.address), True)
    assert np.array_equal(stream, tokens[rows["token_id"]] + positions[rows["position"]])
    expected = np.stack([twins.norm(row, weight, bias, 1e-5) for row in stream])
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("activation", sorted(twins.ACTIVATIONS))
def test_activate(team: ThreadTeam, rng: np.random.Generator, activation: str, mode: int) -> None:
    num_rows, inner = 4, 77
    product, bias = 3 * floats(rng, num_rows, inner), floats(rng, inner)
    product[3], bias[:] = 0, 0  # a row of zeros has a scale, too
    scales, prepared = np.array([1, 0.5, 2, 0.25], _f32), room_for(num_rows, inner, mode)
    step = step_for(
        team, num_rows, 8, mode, inner=inner, activation=ACTIVATIONS[activation], prepared_at=prepared, scales_at=scales
    )
    expected = twins.ACTIVATIONS[activation](twins.fma(product, scales[:, None], bias)).astype(_f32)
    layer = Record(LAYER, up_bias_at=bias)
    team.run(KernelCall(kernels.activate, step.address, layer.address, product.ctypes.data), True)
    assert_prepared(prepared, scales, expected, mode, is_exact=activation == "relu")


def test_scale(team: ThreadTeam, rng: np.random.Generator) -> None:
    product, scales = floats(rng, 6, 33), floats(rng, 6)
    expected = product * scales[:, None]
    step = step_for(team, 6, 8, PLAIN, scales_at=scales)
    team.run(KernelCall(kernels.scale, step.address, 33, product.ctypes.data), True)
    assert np.array_equal(product, expected)


class Cache:
    """Keys and values of one layer in the kernels' layout, with what each position should hold."""

    def __init__(self, num_places: int, num_positions: int, heads: int, size: int, dtype: Any) -> None:
        value_width = -(-size // VECTOR) * VECTOR
        self.keys = np.zeros((num_places, heads, num_positions // VECTOR, size, VECTOR), dtype)
        self.values = np.zeros((num_places, heads, num_positions, value_width), dtype)
        self.size = size

    def read(self, place: int, head: int, length: int) -> tuple[Array, Array]:
        """Keys and values [length, size] float32."""
        keys = self.keys[place, head].transpose(0, 2, 1).reshape(-1, self.size)
        return keys[:length].astype(_f32), self.values[place, head, :length, : self.size].astype(_f32)

    def fill(self, rng: np.random.Generator) -> None:
        self.keys[:] = rng.standard_normal(self.keys.shape)
        self.values[..., : self.size] = rng.standard_normal((*self.values.shape[:3], self.size))

    @property
    def strides(self) -> tuple[int, int]:
        return self.keys.strides[0], self.values.strides[0]


def cache_fields(entries: Cache, suffixes: Cache, heads: int) -> dict[str, int]:
    (entry_keys, entry_values), (suffix_keys, suffix_values) = entries.strides, suffixes.strides
    return {
        "num_heads": heads,
        "head_size": entries.size,
        "item_bytes": entries.keys.itemsize,
        "entry_key_bytes": entry_keys,
        "entry_value_bytes": entry_values,
        "suffix_key_bytes": suffix_keys,
        "suffix_value_bytes": suffix_values,
    }


def layer_of(entries: Cache, suffixes: Cache, **fields: Any) -> Record:
    return Record(
        LAYER,
        entry_keys_at=entries.keys,
        entry_values_at=entries.values,
        suffix_keys_at=suffixes.keys,
        suffix_values_at=suffixes.values,
        **fields,
    )


HEADS = 3
SHAPES = [(size, dtype) for size in (8, 16, 20, 64, 80) for dtype in (np.float32, np.float16)]


@pytest.mark.parametrize(("size", "dtype"), SHAPES)
def test_store_kv(team: ThreadTeam, rng: np.random.Generator, size: int, dtype: Any) -> None:
    """Prompt rows go to their entry, others to their suffix; all other positions stay as they were."""
    rows = np.array([(0, 0, 1, position + 1, -1, 0) for position in (14, 15, 16, 17, 18, 19, 20, 21, 22)], ROW)
    rows = np.concatenate([rows, np.array([(0, 0, 0, 30, 2, 1), (0, 0, 0, 30, 0, 17)], ROW)])
    entries, suffixes = Cache(2, 48, HEADS, size, dtype), Cache(3, 32, HEADS, size, dtype)
    width, num_rows = HEADS * size, len(rows)
    qkv, bias = floats(rng, num_rows, 3, HEADS, size), floats(rng, 3, HEADS, size)
    qkv[0] *= 1e5  # more than float16 holds
    scales = _f32(2) ** rng.integers(-2, 2, num_rows).astype(_f32)
    query = np.zeros((num_rows, HEADS, size), _f32)
    expected = twins.fma(qkv, scales[:, None, None, None], bias)
    step = step_for(
        team,
        num_rows,
        width,
        PLAIN,
        rows_at=rows,
        scales_at=scales,
        query_at=query,
        **cache_fields(entries, suffixes, HEADS),
    )
    layer = layer_of(entries, suffixes, qkv_bias_at=bias)
    team.run(KernelCall(kernels.store_kv, step.address, layer.address, qkv.ctypes.data), True)
    assert np.array_equal(query, expected[:, 0])
    stored = twins.to_cache(expected, dtype).astype(_f32)
    for number, row in enumerate(rows):
        is_prompt = row["suffix"] < 0
        store = entries if is_prompt else suffixes
        place, length = (row["entry"], row["num_in_entry"]) if is_prompt else (row["suffix"], row["num_in_suffix"])
        for head in range(HEADS):
            keys, values = store.read(place, head, length)
            assert np.array_equal(keys[-1], stored[number, 1, head])
            assert np.array_equal(values[-1], stored[number, 2, head])
    assert sum(int((cache.keys != 0).sum()) for cache in (entries, suffixes)) == num_rows * width
    assert sum(int((cache.values != 0).sum()) for cache in (entries, suffixes)) == num_rows * width


TILES = {
    "prompt": [(5, 0), (6, 0), (7, 0), (8, 0)],
    "siblings": [(40, 1), (40, 16), (40, 17)],
    "one": [(1, 0)],
    "suffix only": [(0, 3)],
    "blocks": [(15, 15), (16, 32), (17, 33), (48, 48)],
}


@pytest.mark.parametrize("reads", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("size", "dtype"), SHAPES)
def test_attend(
    team: ThreadTeam, rng: np.random.Generator, size: int, dtype: Any, reads: list[tuple[int, int]]
) -> None:
    """Rows of a tile read different numbers of positions of their entry, each followed by its own suffix."""
    entries, suffixes = Cache(2, 48, HEADS, size, dtype), Cache(TILE, 48, HEADS, size, dtype)
    entries.fill(rng)
    suffixes.fill(rng)
    width, num_rows = HEADS * size, len(reads)
    rows = np.array([(0, 0, 1, in_entry, i, in_suffix) for i, (in_entry, in_suffix) in enumerate(reads)], ROW)
    tiles = np.array([(num_rows, [*range(num_rows), *[0] * (TILE - num_rows)])], ROW_TILE)
    query, mean = floats(rng, num_rows, HEADS, size), np.zeros((num_rows, width), _f32)
    prepared, scales = np.zeros((num_rows, width), np.uint8), np.zeros(num_rows, _f32)
    score_stride = 48 + 48 + 2 * VECTOR
    scratch = np.zeros((team.num_threads, TILE * (2 * size + VECTOR + TOTALS + score_stride)), _f32)
    step = Record(
        STEP,
        num_rows=num_rows,
        num_tiles=1,
        mode=UINT8,
        width=width,
        rows_at=rows,
        tiles_at=tiles,
        query_at=query,
        mean_at=mean,
        prepared_at=prepared,
        scales_at=scales,
        heads_done_at=np.zeros(1, np.int64),
        scratch_at=scratch,
        scratch_stride=scratch.shape[1],
        score_stride=score_stride,
        **cache_fields(entries, suffixes, HEADS),
    )
    layer = layer_of(entries, suffixes)
    team.run(KernelCall(kernels.attend, step.address, layer.address), True)
    for number, (in_entry, in_suffix) in enumerate(reads):
        for head in range(HEADS):
            pairs = zip(entries.read(1, head, in_entry), suffixes.read(number, head, in_suffix), strict=True)
            keys, values = (np.concatenate(pair) for pair in pairs)
            expected = twins.attend(query[number, head], keys, values)
            result = mean[number].reshape(HEADS, size)[head]
            np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-6)
    assert_prepared(prepared, scales, mean, UINT8, is_exact=True)


@pytest.mark.skipif(not HAS_DOT_PRODUCTS, reason="this CPU has no AVX-512 VNNI, so the kernel does not exist")
@pytest.mark.parametrize("can_use_amx", [False, pytest.param(True, marks=needs_amx)])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 4), (100, 64), (768, 3072), (8200, 256)])
def test_multiply(rng: np.random.Generator, outputs: int, inputs: int, can_use_amx: bool) -> None:
    """To the bit, for any number of rows; 100 outputs are two blocks that overlap."""
    weight = rng.integers(-127, 128, (outputs, inputs), np.int8)
    scales = np.abs(floats(rng, outputs))
    x = rng.integers(0, 256, (100, inputs), np.uint8)
    product = PackedInt8Linear.pack(
        torch.from_numpy(weight), torch.from_numpy(scales), HugePages(), can_use_amx=can_use_amx
    )
    starts = -128 * weight.astype(np.int64).sum(1)
    expected = twins.multiply(x, weight, starts, scales * _f32(1 / 127))
    for num_rows in (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 49, 64, 100):
        assert np.array_equal(product(torch.from_numpy(x[:num_rows])).numpy(), expected[:num_rows])


def run_sampler(team: ThreadTeam, logits: Array, draws: Array) -> None:
    scratch = np.zeros((team.num_threads, SAMPLER_SCRATCH), _f32)
    sampler = Record(SAMPLER, num_draws=len(draws), vocab_size=logits.shape[1], draws_at=draws, scratch_at=scratch)
    team.run(KernelCall(kernels.sample, sampler.address, 0, logits.ctypes.data), True)


def code_of(draw: Any) -> tuple[float, float, float]:
    return draw["point"], draw["width"], draw["next_point"]


@pytest.mark.parametrize("point", [0.0, 1.0])
def test_a_code_at_the_ends_of_its_range_stays_within_the_candidates(team: ThreadTeam, point: float) -> None:
    """The last candidate's probability is 0 in float64: not even 1 draws it."""
    logits, draws = np.array([[1, 0, -2000]], _f32), np.zeros(1, DRAW)
    draws["token_id"], draws["temperature"], draws["top_k"], draws["top_p"] = -1, 1.0, 50, 2.0
    draws["point"], draws["width"], draws["next_point"] = point, 1.0, 0.5
    run_sampler(team, logits, draws)
    assert draws["token_id"] == [0, 1][int(point)]
    assert draws["point"] == point


@pytest.mark.parametrize(("end_id", "is_set"), [(-1, 0), (6, 1), (8, 0)])
def test_advance(team: ThreadTeam, end_id: int, is_set: int) -> None:
    rows = np.array([(1, 10, 0, 9, 0, 1), (2, 20, 0, 15, 1, 5)], ROW)
    draws = np.zeros((2, 2), DRAW)
    draws["token_id"] = [[6, 7], [8, 9]]
    draws["point"][0], draws["width"][0], draws["next_point"][1] = [0.1, 0.2], [0.5, 0.25], [0.3, 0.4]
    flag = np.zeros(1, np.int64)
    step = step_for(team, 2, 8, PLAIN, rows_at=rows, end_id=end_id)
    sampler = Record(SAMPLER, num_draws=2, draws_at=draws)
    team.run(KernelCall(kernels.advance, step.address, flag.ctypes.data, sampler.address), False)
    assert rows.tolist() == [(6, 11, 0, 9, 0, 2), (7, 21, 0, 15, 1, 6)]
    assert sampler.array["draws_at"][0] == draws[1].ctypes.data
    assert flag[0] == is_set
    assert [code_of(draw) for draw in draws[1]] == [(0.1, 0.5, 0.3), (0.2, 0.25, 0.4)]
