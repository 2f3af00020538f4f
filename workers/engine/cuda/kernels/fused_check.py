"""Compares the products of fused layers with plain torch on the device that they are going to serve on.

With the model's own shapes and data type, and invented numbers: a row's result must be right, and must have the same
bits alone, among three and among 48. An error of the device is raised. Does not know which kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.engine.cuda.kernels.fused_layer import (
    Product,
    Target,
    Weights,
    device_capability,
    layer_products,
    multiply,
    multiply_reference,
)
from workers.engine.cuda.kernels.launch import Launcher
from workers.engine.cuda.kernels.self_check import BOUNDS, KernelCheck
from workers.engine.model.gpt2 import GPT2Config, Norm

NUM_ROWS = 48
# First row and the row behind the last: a row alone at both ends of a tile, and three in one tile and in two.
BATCHES = ((0, 1), (15, 16), (16, 17), (47, 48), (4, 7), (14, 17))


@torch.inference_mode()
def check_fused_layers(config: GPT2Config, dtype: torch.dtype, device: torch.device) -> tuple[KernelCheck, ...]:
    """How the products of a model that is supported compare with plain torch.

    Raises:
        RuntimeError: if the device reports an error.
    """
    target = Target.of(device_capability(device))
    return check_products(layer_products(config, dtype), Launcher(device), target, device)


def check_products(
    products: Mapping[str, Product], launcher: Launcher, target: Target, device: torch.device
) -> tuple[KernelCheck, ...]:
    """How products, by their names, compare with plain torch; raises as `check_fused_layers`."""
    return tuple(_check(name, product, launcher, target, device) for name, product in products.items())


def operands(product: Product, num_rows: int, device: torch.device) -> tuple[Tensor, Weights, Tensor | None]:
    """x, weights and, if the product has one, the residual: random numbers; before a norm around 2 with scale 3."""
    generator = torch.Generator().manual_seed(product.num_in)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(shape, generator=generator).mul_(scale).add_(mean).to(device, product.dtype)

    depth, width = product.num_in, product.num_out
    x = normal(num_rows, depth, scale=3, mean=2) if product.has_norm else normal(num_rows, depth)
    norm = Norm(normal(depth, scale=0.3, mean=1), normal(depth, scale=0.3), 1e-5) if product.has_norm else None
    weight = normal(width, depth, scale=depth**-0.5)
    bias = normal(width) if product.has_bias else None
    return x, Weights(weight, bias, norm), normal(num_rows, width) if product.has_residual else None


def _check(name: str, product: Product, launcher: Launcher, target: Target, device: torch.device) -> KernelCheck:
    x, weights, residual = operands(product, NUM_ROWS, device)

    def rows(first: int, stop: int) -> Tensor:
        own = None if residual is None else residual[first:stop].clone()
        return multiply(launcher, product, x[first:stop], weights, own, target=target)

    ours = rows(0, NUM_ROWS)
    theirs = multiply_reference(product, x, weights, residual).float()
    difference = ((ours.float() - theirs).abs() / theirs.abs().clamp_min(1)).max().item()
    faults = [
        f"rows {first} to {stop - 1} have other bits alone than among {NUM_ROWS}"
        for first, stop in BATCHES
        if not rows(first, stop).equal(ours[first:stop])
    ]
    return KernelCheck(name, difference, BOUNDS[product.dtype], tuple(faults))
