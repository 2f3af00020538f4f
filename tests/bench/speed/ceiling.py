"""The ceiling: achieved memory bandwidth, and a request's linear layers alone. Runs in a process of its own.

Knows torch's matrix kernels and the shapes of a model. Does not know attention, sampling and caches, nor whether a
kernel is fit for serving (row-exactness, quality): no server that multiplies with torch's kernels can be faster.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.speed.contenders import LinearPass
from workers.checkpoints.resolve import Checkpoint
from workers.engine.loader import read_config
from workers.engine.model.config import SHAPES, ModelConfig

Kernel = Callable[[Tensor], Tensor]  # [rows, in] float32 → [rows, out]
# A kernel that is slower than the fastest by this factor in its first round is not timed again.
MAX_SLOWDOWN = 2.0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """One of the model's five kinds of linear layer, [num_in] → [num_out]."""

    name: str
    num_in: int
    num_out: int
    num_layers: int


def config_of(subject: Checkpoint) -> ModelConfig:
    """The shape of the model under test."""
    if subject.source == "synthetic":
        return SHAPES[subject.name.removeprefix("synthetic:")]
    return read_config(Path(subject.directory))


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """The linear layers: four in each block (a gate and what it multiplies are one), and the language-model head."""
    width, depth = config.n_embd, config.n_layer
    return [
        LayerKind("qkv", width, config.qkv_width, depth),
        LayerKind("out", config.query_width, width, depth),
        LayerKind("up", width, config.up_width, depth),
        LayerKind("down", config.n_inner, width, depth),
        LayerKind("head", width, config.vocab_size, 1),
    ]


class Ceiling:
    """Times kernels and layers; returns plain values only."""

    def __init__(self, subject: Checkpoint, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        self._config = config_of(subject)
        self._kinds = {kind.name: kind for kind in layer_kinds(self._config)}
        self._chosen: dict[tuple[str, int], tuple[str, list[Kernel]]] = {}  # by kind of layer and number of rows
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def shape(self) -> dict[str, int]:
        """The model's shape. `is_small` is 1 for GPT-2 small's, which the targets are for; `num_weights` counts the
        weights of the linear layers."""
        return {
            "is_small": int(self._config == SHAPES["small"]),
            "num_weights": sum(kind.num_in * kind.num_out * kind.num_layers for kind in self._kinds.values()),
        }

    def bandwidth(self, num_bytes: int) -> dict[str, float]:
        """Achieved memory bandwidth, 10⁹ bytes per second.

        Read: the sum of `num_bytes` of float32. Copy: one half to the other half, bytes read plus bytes written.
        """
        data = torch.ones(num_bytes // 4)
        left, right = data.chunk(2)
        return {
            "read_gb_s": round(num_bytes / 1e6 / self._median_ms(data.sum), 1),
            "copy_gb_s": round(num_bytes / 1e6 / self._median_ms(lambda: left.copy_(right)), 1),
        }

    def choose(self, row_counts: list[int], num_rounds: int) -> dict[str, dict[str, dict[str, float]]]:
        """Time every kernel for every kind of layer at these row counts; `run` then uses the fastest of each.

        Returns:
            row count → kind of layer → kernel → milliseconds of all the model's layers of that kind. A kernel that does
            not run on this machine is left out.
        """
        table: dict[str, dict[str, dict[str, float]]] = {str(rows): {} for rows in row_counts}
        for kind in self._kinds.values():
            kernels = self._kernels(kind)
            for rows in row_counts:
                times = self._time_kernels(kind, kernels, rows, num_rounds)
                fastest = min(times, key=times.__getitem__)
                self._chosen[kind.name, rows] = fastest, kernels[fastest]
                table[str(rows)][kind.name] = {name: round(ms, 3) for name, ms in times.items()}
        return table

    def run(self, passes: list[LinearPass], num_repeats: int) -> list[float]:
        """Milliseconds of this sequence of passes, each layer with its fastest kernel; one value per repeat."""
        times = []
        for _ in range(num_repeats):
            start = time.perf_counter()
            for linear_pass in passes:
                for _ in range(linear_pass.count):
                    self._run_pass(linear_pass)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _run_pass(self, linear_pass: LinearPass) -> None:
        num_rows, num_head_rows = linear_pass.num_rows, linear_pass.num_head_rows
        block = [
            (self._chosen[name, num_rows][1], self._input(num_rows, kind.num_in))
            for name, kind in self._kinds.items()
            if name != "head"
        ]
        for layer in range(self._config.n_layer):
            for kernels, x in block:
                kernels[layer](x)
        self._chosen["head", num_head_rows][1][0](self._input(num_head_rows, self._config.n_embd))

    def _input(self, rows: int, num_in: int) -> Tensor:
        if (rows, num_in) not in self._inputs:
            self._inputs[rows, num_in] = torch.randn(rows, num_in)
        return self._inputs[rows, num_in]

    def _kernels(self, kind: LayerKind) -> dict[str, list[Kernel]]:
        """Each kernel that runs on this machine, for all layers of a kind; every layer has weights of its own."""
        weights = [torch.randn(kind.num_out, kind.num_in) * 0.02 for _ in range(kind.num_layers)]
        bias = torch.zeros(kind.num_out)
        found = {}
        for name, make in KERNELS.items():
            try:
                kernels = [make(weight, bias) for weight in weights]
                kernels[0](self._input(1, kind.num_in))
            except (RuntimeError, NotImplementedError, AttributeError):  # not on this CPU, or not in this torch
                continue
            found[name] = kernels
        return found

    def _time_kernels(
        self, kind: LayerKind, kernels: dict[str, list[Kernel]], rows: int, num_rounds: int
    ) -> dict[str, float]:
        """Kernel → median milliseconds of all layers of a kind, over interleaved rounds after a first one."""
        x = self._input(rows, kind.num_in)
        times: dict[str, list[float]] = {name: [] for name in kernels}
        names = list(kernels)
        for number in range(num_rounds + 1):
            for name in names:
                layers = kernels[name]
                layers[0](x)
                start = time.perf_counter()
                for kernel in layers:
                    kernel(x)
                times[name].append(1e3 * (time.perf_counter() - start))
            if number == 0:
                best = min(min(found) for found in times.values())
                names = [name for name in names if times[name][0] < MAX_SLOWDOWN * best]
        # The first round includes initialization, and is the only round of kernels that are too slow.
        return {name: statistics.median(found[1:] or found) for name, found in times.items()}

    def _median_ms(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[1:])


def _fp32_mkl(weight: Tensor, bias: Tensor) -> Kernel:
    return lambda x: F.linear(x, weight, bias)


def _fp32_onednn(weight: Tensor, bias: Tensor) -> Kernel:
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, 16)
    return lambda x: ops._linear_pointwise(x, packed, bias, "none", [], "")


def _bf16_plain(weight: Tensor, bias: Tensor) -> Kernel:
    weight, bias = weight.bfloat16(), bias.bfloat16()
    return lambda x: F.linear(x.bfloat16(), weight, bias)


def _bf16_onednn(weight: Tensor, bias: Tensor) -> Kernel:
    ops = torch.ops.mkldnn
    packed, bias = ops._reorder_linear_weight(weight.bfloat16(), 16), bias.bfloat16()
    return lambda x: ops._linear_pointwise(x.bfloat16(), packed, bias, "none", [], "")


def _int8_dynamic(engine: str) -> Callable[[Tensor, Tensor], Kernel]:
    """Dynamic quantization: one activation scale per tensor; fp32 in and out."""

    def make(weight: Tensor, bias: Tensor) -> Kernel:
        if engine not in torch.backends.quantized.supported_engines:
            raise NotImplementedError(engine)
        torch.backends.quantized.engine = engine
        scales, _ = _int8(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated, but prepacking takes no other
            zeros = torch.zeros(len(weight), dtype=torch.long)
            packed = torch.ops.quantized.linear_prepack(
                torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias
            )
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed)

    return make


def _int8_onednn_rows(weight: Tensor, bias: Tensor) -> Kernel:
    """One activation scale per row: rows are divided by their absolute maximum before, and multiplied after."""
    scales, integers = _int8(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    packed = torch.ops.onednn.qlinear_prepack(integers, None)

    def kernel(x: Tensor) -> Tensor:
        absmax = x.abs().amax(1, keepdim=True).clamp_(min=1e-8)
        rounded = (x * (127 / absmax)).round_().to(torch.int8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1 / 127, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(absmax).add_(bias)

    return kernel


def _int8_int_mm(weight: Tensor, bias: Tensor) -> Kernel:
    scales, integers = _int8(weight)
    transposed = integers.t().contiguous()

    def kernel(x: Tensor) -> Tensor:
        absmax = x.abs().amax(1, keepdim=True).clamp_(min=1e-8)
        rounded = (x * (127 / absmax)).round_().to(torch.int8)
        return torch._int_mm(rounded, transposed).float().mul_(absmax / 127).mul_(scales).add_(bias)

    return kernel


def _int8_weight_only(weight: Tensor, bias: Tensor) -> Kernel:
    scales, integers = _int8(weight)
    scales, bias = scales.bfloat16(), bias.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), integers, scales).add_(bias)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric quantization, one scale per output channel: scales [out], integers [out, in]."""
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    return scales, (weight / scales[:, None]).round().to(torch.int8)


# The kernels for x · Wᵀ + b that torch offers without a compiler.
KERNELS: dict[str, Callable[[Tensor, Tensor], Kernel]] = {
    "fp32 mkl": _fp32_mkl,
    "fp32 onednn": _fp32_onednn,
    "bf16 plain": _bf16_plain,
    "bf16 onednn": _bf16_onednn,
    "int8 fbgemm dynamic": _int8_dynamic("fbgemm"),
    "int8 onednn dynamic": _int8_dynamic("onednn"),
    "int8 onednn per row": _int8_onednn_rows,
    "int8 _int_mm per row": _int8_int_mm,
    "int8 _weight_int8pack_mm": _int8_weight_only,
}
