"""Small building blocks of the layers, written for few kernel launches on small batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis, computed in float32, in ``x``'s dtype.

    ``weight`` is float32 and broadcasts; None: it is folded into what follows. ``eps`` is a float32 scalar tensor.
    """
    wide = x.float()
    normed = wide * inverse_root(wide, 1.0 / x.shape[-1], eps)
    if weight is not None:
        normed.mul_(weight)
    return normed.to(x.dtype)


def inverse_root(x: torch.Tensor, factor: float, eps: torch.Tensor) -> torch.Tensor:
    """``1 / sqrt(factor · sum(x²) + eps)`` over the last axis, which is kept with length 1.

    A norm and its square are fewer kernels than a mean of squares; ``eps`` as a tensor saves a scalar conversion.
    """
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(eps, norm, norm, value=factor).rsqrt_()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of [N, 2·inner] → [N, inner]."""
    inner = gate_up.shape[-1] // 2
    return F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])
