"""Matrix products with a weight, in the layouts that make them fast on the device at hand.

On the CPU decoding is bound by reading weights, and torch's product of a few rows with a row-major matrix reads them
two to three times slower than memory allows. The compiled kernels (see ``kernels.py``) read them as fast as it does,
for up to ``TOKENS_MAX`` rows; larger batches are bound by arithmetic, for which a second layout, blocked for oneDNN, is
kept while the model is small enough to afford it. Of a larger model whose weights are bfloat16 only those are kept, and
widened for every larger batch (a third more time for a chunk of 512 tokens, less for longer ones).

Where the kernels were not built, the blocked layout is the main one (measured, AVX2: 2 to 8 rows of a 2048 x 512
float32 product took 1.1 to 1.3 ms plain, 0.6 to 0.8 ms blocked; one row 0.42 ms plain, 0.26 ms with the longer side
contiguous).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from actors.worker.model import kernels

BLOCKING_ROWS = 8
"""Batch rows that the blocked layout is made for; it is good from 2 to hundreds of rows."""


class Projection:
    """``x @ weight.T`` for ``x`` [N, in]; ``weight`` [out, in] is consumed.

    ``plain``: it, while it is kept; for the kernels in bfloat16, if all of its numbers are such numbers.
    """

    def __init__(self, weight: torch.Tensor, *, two_layouts: bool = True) -> None:
        """``two_layouts``: keep a second layout on the CPU, so that few and many rows are both fast."""
        self.out_features, self.in_features = weight.shape
        self.plain: torch.Tensor | None = weight.contiguous()
        self._blocked: Any = None
        self._transposed: torch.Tensor | None = None
        self._kernels = None
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        self._kernels = kernels.library()
        if self._kernels is not None:
            self.plain = kernels.in_huge_pages(narrowed(weight))
            self._blocked = _blocked(weight) if two_layouts else None
            return
        self._blocked = _blocked(weight)
        if self._blocked is None:
            return
        if not two_layouts:
            self.plain = None
        elif self.out_features > self.in_features:
            self.plain, self._transposed = None, weight.t().contiguous()

    @property
    def is_compiled(self) -> bool:
        """Whether the kernels multiply by this weight."""
        return self._kernels is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[N, in] → [N, out]."""
        if self._kernels is not None and x.shape[0] <= kernels.TOKENS_MAX:
            assert self.plain is not None
            return kernels.linear(self._kernels, x, self.plain)
        if self._blocked is None:
            assert self.plain is not None
            return F.linear(x, self.plain.to(x.dtype))
        if x.shape[0] == 1:
            if self._transposed is not None:
                return torch.mm(x, self._transposed)
            if self.plain is not None:
                return F.linear(x, self.plain)
        product: torch.Tensor = _multiply_blocked(x, self._blocked, None, "none", [], "")
        return product


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight in bfloat16, if that loses nothing."""
    narrow = weight.bfloat16()
    return narrow if torch.equal(narrow.float(), weight) else weight


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
