"""The compiled kernels (``kernels.c``) for few tokens in float32 on the CPU: where they are, and when they can be used.

Weights may be kept in bfloat16 where that loses nothing (those of a bfloat16 checkpoint, usually): decoding is bound by
reading them, and half as many bytes take half as long.

Without them (another processor, no compiler when the package was installed) everything takes the torch path, which
computes the same. A call releases the interpreter lock and uses torch's thread count and, where both link the same
OpenMP library, its threads.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import torch

TOKENS_MAX: Final = 64
"""Up to so many tokens the kernels beat oneDNN's blocked products (measured, AVX2: 32 rows in 20 ms against 31)."""

HUGE_PAGE: Final = 1 << 21

INTERFACE: Final = 2
"""What ``kvferry_interface`` must say: kernels that were built from another kernels.c take other structures."""

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Matrix(ctypes.Structure):
    """A weight [out, in] as the kernels take it."""

    _fields_ = [("values", POINTER), ("narrow", INT)]

    @classmethod
    def of(cls, weight: torch.Tensor) -> Matrix:
        """``weight`` contiguous, float32 or bfloat16, on the CPU; whoever calls keeps it alive."""
        assert weight.is_contiguous() and weight.dtype in (torch.float32, torch.bfloat16)
        return cls(weight.data_ptr(), int(weight.dtype == torch.bfloat16))


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, if they were built from this kernels.c and this processor can run them; None otherwise."""
    built = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not built or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    try:
        kernels = ctypes.CDLL(str(built[0]))
        kernels.kvferry_interface.restype = INT
        if kernels.kvferry_interface() != INTERFACE:
            return None
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
    """``x @ weight.T``, float32, for ``x`` [N, in] float32 and ``weight`` [out, in] contiguous, on the CPU."""
    x = x.contiguous()
    tokens, out = x.shape[0], weight.shape[0]
    product = torch.empty(tokens, out)
    threads = torch.get_num_threads()
    matrix = Matrix.of(weight)
    address = ctypes.addressof(matrix)
    kernels.kvferry_linear(x.data_ptr(), address, product.data_ptr(), tokens, x.shape[1], out, threads)
    return product


def in_huge_pages(weight: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of ``weight`` in memory of which the system is asked to keep each whole 2 MiB in one page.

    The kernels read weights as fast as memory gives them, and walks of small pages' tables cost 6 to 8 % (measured, 2
    threads: 107 MB for 8 rows in 7.5 ms against 8.0). A weight smaller than a page stays where it is.
    """
    size = weight.numel() * weight.element_size()
    whole = size // HUGE_PAGE * HUGE_PAGE
    if not whole or not hasattr(mmap, "MADV_HUGEPAGE"):
        return weight.contiguous()
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE
    with suppress(OSError):  # a kernel that was built without them: small pages do
        memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    copy = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=begin).view(weight.shape)
    return copy.copy_(weight)
