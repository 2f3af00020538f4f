"""The kernels of the ARM instruction sets, emulated by qemu-user, leave the bytes in memory that this CPU's leave.

Each program of kernels that this process runs is run again in an emulated process, on a copy of the memory that the
engine's and the tests' functions on the stack can reach; in the copied records, addresses are those of the copies.
"""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
import shutil
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.cpu_features import INSTRUCTION_SETS
from shared.protocol import GenerateRequest, Sampling
from tests.workers.engine.cpu import test_kernels
from tests.workers.engine.helpers import CHECKPOINT, TINY, add, make_core, peaked_weights, run_to_end
from workers.checkpoints.int8_check import PAGE
from workers.codec import Codec
from workers.engine.cpu import runner as cpu_runner
from workers.engine.cpu.kernel_source.build import build
from workers.engine.cpu.layouts import LAYER_NORM, RMS_NORM
from workers.engine.cpu.team import Interrupt, Program, ThreadTeam
from workers.engine.cpu_kernels import load_kernels
from workers.engine.loader import LoadedModel, load_model
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.sequence import Sequence
from workers.text.token_healing import AllowedTokens

PROSE = PAGE.read_text(encoding="utf-8")
CPUS = {"neon_dotprod": "neoverse-n1", "scalar": "cortex-a53"}  # qemu's; the latter has no dot products
KERNELS = ("activate", "add_and_norm", "advance", "attend", "multiply", "sample", "scale", "store_kv")  # as replay.c
MEMORY_AT, MEMORY_BYTES = 1 << 36, 1 << 28
PATIENCE_S = 60.0
FOLLOWED = (list, tuple, dict, AllowedTokens)  # and the engine's own classes
_start = ThreadTeam.start
NUM_ANSWERS = {"neon_dotprod": 12, "scalar": 6}  # emulation takes fifty times as long
NUM_SAMPLES, MAX_CHUNK, MAX_PROMPT_TOKENS, MAX_NEW_TOKENS = 3, 64, 100, 8
SAMPLINGS: tuple[dict[str, Any], ...] = (
    *({}, {"temperature": 0}, {"stop": (".", " and")}, {"single_line": True}, {"repetition_penalty": 1.4}),
    *({"temperature": 1.6, "top_k": 0, "top_p": 1}, {"top_k": 0, "top_p": 0.7}, {"top_k": 200}),
)
# Their weights have the same layout as those of the ARM sets.
RECORDED = load_kernels("avx2" if "avx2" in test_kernels.SETS else "scalar")


class Emulator:
    """A process under qemu-user. `most_times` is how often a program has run all its entries, at most."""

    def __init__(self, instruction_set: str, directory: Path) -> None:
        self.instruction_set, self.most_times = instruction_set, 0
        found = next(one for one in INSTRUCTION_SETS if (one.machine, one.name) == ("aarch64", instruction_set))
        options = ("-Wl,-e,_start", f"-DMEMORY_AT={MEMORY_AT}", f"-DMEMORY_BYTES={MEMORY_BYTES}")
        program = build(found, directory, "linux", [str(Path(__file__).with_name("replay.c")), *options])
        program.chmod(0o700)
        file = os.memfd_create("replay")
        os.ftruncate(file, MEMORY_BYTES)
        self._image = np.frombuffer(mmap.mmap(file, MEMORY_BYTES), np.uint8)
        self._expected = np.zeros_like(self._image)
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(PATIENCE_S)
        command = ("qemu-aarch64", "-cpu", CPUS[instruction_set], program)
        self.process = subprocess.Popen(command, stdin=file, stdout=theirs.fileno())
        theirs.close()
        os.close(file)
        addresses = np.frombuffer(self._receive(8 * len(KERNELS)), np.int64).tolist()
        self._moved = {getattr(RECORDED, name): at for name, at in zip(KERNELS, addresses, strict=True)}

    def start(self, program_at: int, num_threads: int, holds_gil: bool) -> None:
        """Run a program here, as `ThreadTeam.start` does, and emulated; fails if a byte differs afterwards."""
        assert num_threads == 1
        caller = sys._getframe(1)
        program: Program = caller.f_locals["self"]
        memory = _Memory(caller, self._moved)
        memory.copy(self._image)
        self.socket.sendall(memory.moved(program_at).tobytes())
        _start(program._team, program_at, num_threads, holds_gil)
        memory.copy(self._expected)
        self._receive(8)
        for first, size in memory.places:
            assert np.array_equal(self._image[first : first + size], self._expected[first : first + size])
        self.most_times = max(self.most_times, int(program._head["num_times"]))

    def _receive(self, num_bytes: int) -> bytes:
        received = self.socket.recv(num_bytes, socket.MSG_WAITALL)
        assert len(received) == num_bytes, f"the emulated process ended with status {self.process.wait(PATIENCE_S)}"
        return received


class _Memory:
    """The memory that a frame and its callers can reach. `places`: offset and size of each region in the copy."""

    def __init__(self, frame: FrameType, kernels: dict[int, int]) -> None:
        arrays = [found for found in _arrays(frame) if found.nbytes]
        self._records = [found for found in arrays if found.dtype.names]
        regions: list[tuple[int, int]] = []  # those that overlap become one
        bounds = [np.lib.array_utils.byte_bounds(found) for found in arrays]
        for start, stop in sorted([*bounds, *((at, at + 1) for at in kernels)]):
            overlapping = regions.pop() if regions and start < regions[-1][1] else (start, stop)
            regions.append((overlapping[0], max(stop, overlapping[1])))
        self._starts, self._stops = np.array(regions).T
        # Alignment to cache lines is kept; kernels may read whole vectors.
        room = (self._stops - self._starts // 64 * 64 + 127) // 64 * 64
        firsts = np.cumsum(room) - room + self._starts % 64
        assert room.sum() <= MEMORY_BYTES
        self._distances = MEMORY_AT + firsts - self._starts
        self._distances[np.searchsorted(self._starts, [*kernels])] = np.subtract([*kernels.values()], [*kernels])
        self.places = list(zip(firsts.tolist(), (self._stops - self._starts).tolist(), strict=True))

    def moved(self, addresses: Any) -> Any:
        """Addresses in the emulated process; what is no address of the memory stays."""
        number = np.searchsorted(self._starts, addresses, "right") - 1
        is_inside = (number >= 0) & (addresses < self._stops[number])
        return np.where(is_inside, addresses + self._distances[number], addresses)

    def copy(self, image: Any) -> None:
        """Write the memory, with the emulated process's addresses, to `image` [MEMORY_BYTES]."""
        for start, (first, size) in zip(self._starts.tolist(), self.places, strict=True):
            ctypes.memmove(image.ctypes.data + first, start, size)
        for record in self._records:
            first = int(self.moved(record.ctypes.data)) - MEMORY_AT
            copied: Any = np.ndarray(record.shape, record.dtype, image, first, record.strides)
            for name in filter(lambda name: name.endswith("_at"), copied.dtype.names):
                copied[name] = self.moved(copied[name])


def _arrays(frame: FrameType | None) -> Iterator[Any]:
    pending: list[Any] = []
    seen: dict[int, Any] = {}
    while frame is not None:
        if frame.f_globals["__name__"].startswith(("workers.engine.", "tests.workers.")):
            pending += frame.f_locals.values()
        frame = frame.f_back
    while pending:
        found = pending.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, Tensor) and found.layout == torch.strided:  # no kernel reads what torch has packed
            yield found.numpy()
        elif isinstance(found, array):
            yield np.frombuffer(found, np.int64)
        elif isinstance(found, np.ndarray):
            yield found
        elif isinstance(found, np.void):  # a record of an array
            pending.append(found.base)
        elif type(found).__module__.startswith("workers.engine") or isinstance(found, FOLLOWED):
            pending += gc.get_referents(found)


@pytest.fixture(scope="module", params=CPUS)
def neon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """Runs each kernel of a test on an emulated ARM CPU as well; the test fails if a byte differs."""
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("needs Debian's qemu-user")
    emulator = Emulator(request.param, tmp_path_factory.mktemp("replay"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadTeam, "start", emulator.start)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        patch.setattr(Sequence, "multi_step_budget_s", lambda *_: 3600.0)
        yield emulator
    emulator.socket.close()
    assert emulator.process.wait(PATIENCE_S) == 0


def answer(loaded: LoadedModel, prompts: list[list[EngineRequest]]) -> None:
    """Run the samples of each prompt together, one prompt after the other."""
    runner = cpu_runner.CpuRunner(loaded, NUM_SAMPLES, Interrupt())
    core = make_core(runner, NUM_SAMPLES, max_chunk=MAX_CHUNK, eos_ids=loaded.eos_ids)
    for samples in prompts:
        streams = [add(core, sample, loaded.healing) for sample in samples]
        run_to_end(core)
        assert all(stream.result().failure is None for stream in streams)


def samples_of(codec: Codec, number: int) -> list[EngineRequest]:
    """Contexts of all lengths, that end at a word's end or in a word; the first is empty."""
    text = PROSE[97 * number : 97 * number + (0, 40, 160, 700)[number % 4]]
    sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS, **SAMPLINGS[number % len(SAMPLINGS)])
    request = GenerateRequest(prompt=text, max_prompt_tokens=MAX_PROMPT_TOKENS, heal=True, sampling=sampling)
    sample = replace(codec.request(request, now=math.inf), group_size=NUM_SAMPLES)
    return [replace(sample, seed=1000 * number + index) for index in range(NUM_SAMPLES)]


def test_neon_changes_no_bit_of_seeded_answers(neon: Emulator) -> None:
    loaded = load_model(CHECKPOINT, dtype="int8", kernels=RECORDED)
    assert loaded.healing is not None
    codec = Codec(loaded.healing, loaded.config.n_positions)
    answer(loaded, [samples_of(codec, number) for number in range(NUM_ANSWERS[neon.instruction_set])])
    assert neon.most_times == MAX_NEW_TOKENS - 1  # a multi-step decode, of all kernels


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu", "tanh"])
def test_neon_changes_no_bit_of_other_models(activation: str, dtype: str, neon: Emulator) -> None:
    """Other activations, and widths that are no multiples of vectors; with fp32 also a KV cache of float32."""
    config = replace(TINY, n_embd=120, n_head=5, n_inner=500, activation_function=activation)
    loaded = test_kernels.load(config, dtype, RECORDED, peaked_weights(config))
    answer(loaded, [[EngineRequest((*range(7, 107),), SamplingParams(4), seed) for seed in range(NUM_SAMPLES)]])


def test_neon_agrees_on_what_kernels_are_tested_with(neon: Emulator) -> None:
    """Norms without mean, heads that share keys, and numbers at the borders of float16 and of 8 bits."""
    for outputs, inputs in ((100, 64), (5, 6), (200, 640)):
        test_kernels.test_packed_products_are_exact(outputs, inputs, False, RECORDED)
    test_kernels.test_activated_rows_are_rounded_to_8_bits_exactly("tanh", RECORDED)
    test_kernels.test_both_kinds_of_norm_follow_their_formula(RMS_NORM, False, RECORDED)
    test_kernels.test_both_kinds_of_norm_follow_their_formula(LAYER_NORM, True, RECORDED)
    test_kernels.test_query_heads_share_keys_and_values(6, 2, np.float16, RECORDED)
    test_kernels.test_float16_is_rounded_as_numpy_rounds_it(RECORDED)
