"""What this machine could do at best: memory bandwidth, and a request's linear layers alone.

Runs in a child process. Knows matrix kernels and GPT-2's shapes. Refuses to know attention, sampling, caches and
whether a kernel is fit to serve with (row-exactness, quality): a ceiling is what nobody can be faster than with
the kernels that torch brings.
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

from deploy.bench.harness.workload import Pass, Subject
from workers.engine.model.gpt2 import SHAPES, GPT2Config
from workers.engine.model.loader import read_config

Kernel = Callable[[Tensor], Tensor]  # [rows, in] float32 → [rows, out]
# Kernels this much slower than the fastest after one look are not looked at again.
HOPELESS = 2.0


@dataclass(frozen=True, slots=True)
class Role:
    """One of the model's five kinds of linear layer."""

    name: str
    num_in: int
    num_out: int
    num_layers: int


def config_of(subject: Subject) -> GPT2Config:
    if subject.source == "synthetic":
        return SHAPES[subject.name.removeprefix("synthetic:")]
    return read_config(Path(subject.directory))


def roles_of(config: GPT2Config) -> list[Role]:
    width, inner, depth = config.n_embd, config.n_inner, config.n_layer
    return [
        Role("qkv", width, 3 * width, depth),
        Role("out", width, width, depth),
        Role("up", width, inner, depth),
        Role("down", inner, width, depth),
        Role("head", width, config.vocab_size, 1),
    ]


class Ceiling:
    """Made in a child process; everything it returns is plain values."""

    def __init__(self, subject: Subject, device: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(False)
        torch.manual_seed(0)
        self._device = device
        self._config = config_of(subject)
        self._roles = {role.name: role for role in roles_of(self._config)}
        self._chosen: dict[tuple[str, int], tuple[str, list[Kernel]]] = {}  # by role and rows
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def shape(self) -> dict[str, int]:
        """`is_small` is 1 for the shape that the targets are for; `num_weights` counts the linear layers'."""
        return {
            "is_small": int(self._config == SHAPES["small"]),
            "num_weights": sum(role.num_in * role.num_out * role.num_layers for role in self._roles.values()),
            "n_layer": self._config.n_layer,
            "n_embd": self._config.n_embd,
        }

    def bandwidth(self, num_bytes: int) -> dict[str, float]:
        """GB/s (10⁹) of memory: reading `num_bytes` (their sum), and copying half of them to the other half."""
        data = torch.ones(num_bytes // 4, device=self._device)
        left, right = data.chunk(2)
        return {
            "read_gb_s": round(num_bytes / 1e6 / self._median_ms(data.sum), 1),
            "copy_gb_s": round(num_bytes / 1e6 / self._median_ms(lambda: left.copy_(right)), 1),
        }

    def choose(self, row_counts: list[int], num_looks: int) -> dict[str, dict[str, dict[str, float]]]:
        """Try every kernel for every layer at these row counts; `run` then uses the fastest for each.

        Returns:
            row count → layer → kernel → milliseconds of all the model's layers of that kind. A kernel that this
            machine does not have is left out.
        """
        table: dict[str, dict[str, dict[str, float]]] = {str(rows): {} for rows in row_counts}
        for role in self._roles.values():
            kernels = self._kernels(role)
            for rows in row_counts:
                times = self._race(role, kernels, rows, num_looks)
                fastest = min(times, key=times.__getitem__)
                self._chosen[role.name, rows] = fastest, kernels[fastest]
                table[str(rows)][role.name] = {name: round(ms, 3) for name, ms in times.items()}
        return table

    def chosen(self) -> dict[str, dict[str, str]]:
        """Row count → layer → the kernel that won."""
        found: dict[str, dict[str, str]] = {}
        for (role, rows), (name, _) in self._chosen.items():
            found.setdefault(str(rows), {})[role] = name
        return found

    def run(self, passes: list[Pass], num_times: int) -> list[float]:
        """Milliseconds of this sequence of layers, each layer with its fastest kernel, `num_times` times over."""
        times = []
        for _ in range(num_times):
            start = time.perf_counter()
            for one in passes:
                for _ in range(one.times):
                    self._pass(one)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def _pass(self, one: Pass) -> None:
        blocks = [
            (kernels, self._input(one.rows, role.num_in))
            for name, role in self._roles.items()
            if name != "head"
            for kernels in [self._chosen[name, one.rows][1]]
        ]
        for layer in range(self._config.n_layer):
            for kernels, x in blocks:
                kernels[layer](x)
        self._chosen["head", one.head_rows][1][0](self._input(one.head_rows, self._config.n_embd))

    def _input(self, rows: int, num_in: int) -> Tensor:
        if (rows, num_in) not in self._inputs:
            self._inputs[rows, num_in] = torch.randn(rows, num_in)
        return self._inputs[rows, num_in]

    def _kernels(self, role: Role) -> dict[str, list[Kernel]]:
        """Each kernel that works here, for all layers of a role; every layer has weights of its own."""
        weights = [torch.randn(role.num_out, role.num_in) * 0.02 for _ in range(role.num_layers)]
        bias = torch.zeros(role.num_out)
        found = {}
        for name, make in KERNELS.items():
            try:
                kernels = [make(weight, bias) for weight in weights]
                kernels[0](self._input(1, role.num_in))
            except (RuntimeError, NotImplementedError, AttributeError):  # not on this CPU, or not in this torch
                continue
            found[name] = kernels
        return found

    def _race(self, role: Role, kernels: dict[str, list[Kernel]], rows: int, num_looks: int) -> dict[str, float]:
        """Kernel → median milliseconds of all the role's layers; the kernels take turns."""
        x = self._input(rows, role.num_in)
        times: dict[str, list[float]] = {name: [] for name in kernels}
        hopeful = list(kernels)
        for look in range(num_looks + 1):
            for name in hopeful:
                layers = kernels[name]
                layers[0](x)
                start = time.perf_counter()
                for kernel in layers:
                    kernel(x)
                times[name].append(1e3 * (time.perf_counter() - start))
            if look == 0:
                best = min(min(found) for found in times.values())
                hopeful = [name for name in hopeful if times[name][0] < HOPELESS * best]
        # The first look pays for what is done on first use, and is all that the hopeless get.
        return {name: statistics.median(found[1:] or found) for name, found in times.items()}

    def _median_ms(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            start = time.perf_counter()
            work()
            if self._device != "cpu":
                torch.cuda.synchronize()
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
    """fp32 in and out, the activation's scale taken from the whole tensor."""

    def make(weight: Tensor, bias: Tensor) -> Kernel:
        if engine not in torch.backends.quantized.supported_engines:
            raise NotImplementedError(engine)
        torch.backends.quantized.engine = engine
        scales, _ = _int8(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # quantized tensors are deprecated; the packed weight is still made of one
            zeros = torch.zeros(len(weight), dtype=torch.long)
            packed = torch.ops.quantized.linear_prepack(
                torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), bias
            )
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed)

    return make


def _int8_onednn_rows(weight: Tensor, bias: Tensor) -> Kernel:
    """One activation scale a row: the rows are divided by their own greatest value first, and multiplied after."""
    scales, integers = _int8(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    packed = torch.ops.onednn.qlinear_prepack(integers, None)

    def kernel(x: Tensor) -> Tensor:
        greatest = x.abs().amax(1, keepdim=True).clamp_(min=1e-8)
        rounded = (x * (127 / greatest)).round_().to(torch.int8)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1 / 127, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(greatest).add_(bias)

    return kernel


def _int8_int_mm(weight: Tensor, bias: Tensor) -> Kernel:
    scales, integers = _int8(weight)
    transposed = integers.t().contiguous()

    def kernel(x: Tensor) -> Tensor:
        greatest = x.abs().amax(1, keepdim=True).clamp_(min=1e-8)
        rounded = (x * (127 / greatest)).round_().to(torch.int8)
        return torch._int_mm(rounded, transposed).float().mul_(greatest / 127).mul_(scales).add_(bias)

    return kernel


def _int8_weight_only(weight: Tensor, bias: Tensor) -> Kernel:
    scales, integers = _int8(weight)
    scales, bias = scales.bfloat16(), bias.bfloat16()
    return lambda x: torch._weight_int8pack_mm(x.bfloat16(), integers, scales).add_(bias)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric, one scale per output: scales [out], integers [out, in]."""
    scales = weight.abs().amax(1).clamp(min=1e-8) / 127
    return scales, (weight / scales[:, None]).round().to(torch.int8)


# The kernels of DESIGN.md's table, and the other ways to the same product that torch has without a compiler.
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
