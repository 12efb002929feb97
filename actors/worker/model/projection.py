"""Matrix products with a weight, in the layouts that make them fast on the device at hand.

On the CPU decoding is bound by reading weights, and the plain product of a few rows with a row-major matrix reads them
two to three times slower than memory allows (measured, AVX2: 2 to 8 rows of a 2048 x 512 float32 product took 1.1 to
1.3 ms plain, 0.6 to 0.8 ms blocked; one row 0.42 ms plain, 0.26 ms with the longer side contiguous). So a weight is
kept blocked for oneDNN, and, while the model is small enough to afford it, once more for single rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

BLOCKING_ROWS = 8
"""Batch rows that the blocked layout is made for; it is good from 2 to hundreds of rows."""


class Projection:
    """``x @ weight.T`` for ``x`` [N, in]; ``weight`` [out, in] is consumed."""

    def __init__(self, weight: torch.Tensor, *, single_row_copy: bool = True) -> None:
        """``single_row_copy``: keep a second layout on the CPU, for products with one row."""
        self.out_features, self.in_features = weight.shape
        self._plain: torch.Tensor | None = weight
        self._blocked: Any = None
        self._transposed: torch.Tensor | None = None
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        self._blocked = _blocked(weight)
        if self._blocked is None:
            return
        if not single_row_copy:
            self._plain = None
        elif self.out_features > self.in_features:
            self._plain, self._transposed = None, weight.t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] → [N, out]."""
        if self._blocked is None:
            assert self._plain is not None
            return F.linear(x, self._plain)
        if x.shape[0] == 1:
            if self._transposed is not None:
                return torch.mm(x, self._transposed)
            if self._plain is not None:
                return F.linear(x, self._plain)
        product: torch.Tensor = _multiply_blocked(x, self._blocked, None, "none", [], "")
        return product


def _find_operators() -> tuple[Any, Any]:
    """oneDNN's blocked product, if this build of torch has it (the compiler's CPU backend uses the same operators)."""
    try:
        namespace = torch.ops.mkldnn
        return namespace._reorder_linear_weight.default, namespace._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None, None


_reorder, _multiply_blocked = _find_operators()


def _blocked(weight: torch.Tensor) -> Any:
    if _reorder is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        return _reorder(weight.contiguous(), BLOCKING_ROWS)
    except RuntimeError:  # a shape or build that oneDNN refuses: the plain product always works
        return None
