"""The CPU's KV cache takes memory as it is used, and returns what is released."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from workers.engine.batch import EntryCopy, EntryRelease
from workers.engine.cpu.kv_cache import CacheShape, KVCache

SHAPE = CacheShape(num_layers=2, num_heads=2, head_size=64, n_ctx=1024, dtype=torch.float16)


def resident_bytes() -> int:
    found = re.search(r"^Pss_Anon: +(\d+) kB$", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_memory_is_taken_by_use_and_returned_by_a_release() -> None:
    before = resident_bytes()
    cache = KVCache(SHAPE, 100, 100)
    assert cache.num_bytes > 100 << 20
    assert resident_bytes() - before < 10 << 20
    cache.entries.keys[:, 3:53] = 1
    cache.entries.values[:, 3:53] = 1
    half = cache.entries.num_bytes // 2
    assert resident_bytes() - before > 0.9 * half
    for entry in range(3, 53):
        cache.copy(EntryRelease(entry))
    assert resident_bytes() - before < 0.2 * half


def test_a_released_entry_is_zero_and_its_neighbours_stay() -> None:
    cache = KVCache(SHAPE, 3, 1)
    cache.entries.keys[:] = 1
    cache.entries.values[:] = 1
    cache.copy(EntryRelease(1))
    for numbers in (cache.entries.keys, cache.entries.values):
        assert not numbers[:, 1].any()
        assert numbers[:, [0, 2]].all()
    cache.copy(EntryCopy(0, 1, 1024))
    assert cache.entries.keys.all()
    assert cache.entries.values.all()
