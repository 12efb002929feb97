"""The compiled kernels (``kernels.c``) for few tokens in float32 on the CPU: where they are, and when they can be used.

Without them (another processor, no compiler when the package was installed) everything takes the torch path, which
computes the same. A call releases the interpreter lock and uses torch's thread count and, where both link the same
OpenMP library, its threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch

TOKENS_MAX: Final = 64
"""Up to so many tokens the kernels beat oneDNN's blocked products (measured, AVX2: 32 rows in 20 ms against 31)."""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, if they were built and this processor can run them; None otherwise."""
    built = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not built or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        kernels = ctypes.CDLL(str(built[0]))
        kernels.kvferry_linear.argtypes = [POINTER, POINTER, POINTER, INT, INT, INT, INT]
        kernels.kvferry_linear.restype = None
        kernels.kvferry_halves.argtypes = [POINTER, INT, POINTER, INT, POINTER, POINTER]
        kernels.kvferry_halves.restype = None
        kernels.kvferry_scratch.argtypes = [POINTER, INT, POINTER]
        kernels.kvferry_scratch.restype = INT
    except (OSError, AttributeError):  # built for another system, or from an older kernels.c
        return None
    return kernels


def linear(kernels: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` for ``x`` [N, in] and ``weight`` [out, in] contiguous, both float32 on the CPU."""
    x = x.contiguous()
    tokens, out = x.shape[0], weight.shape[0]
    product = torch.empty(tokens, out)
    threads = torch.get_num_threads()
    kernels.kvferry_linear(x.data_ptr(), weight.data_ptr(), product.data_ptr(), tokens, x.shape[1], out, threads)
    return product
