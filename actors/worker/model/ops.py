"""Small building blocks of the layers, written for few kernel launches on small batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32, in ``x``'s dtype.

    ``weight`` is float32 and broadcasts. The norm and its square cost fewer kernels than a mean of squares.
    """
    wide = x.float()
    scale = inverse_root(torch.linalg.vector_norm(wide, 2, -1, True), 1.0 / x.shape[-1], eps)
    return (wide * scale).mul_(weight).to(x.dtype)


def inverse_root(norm: torch.Tensor, factor: float, eps: float) -> torch.Tensor:
    """``1 / sqrt(factor · norm² + eps)``; changes ``norm``."""
    return norm.square_().mul_(factor).add_(eps).rsqrt_()


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` for [N, in] and [out, in]."""
    return F.linear(x, weight)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [N, 2·inner] → [N, inner]."""
    inner = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])
