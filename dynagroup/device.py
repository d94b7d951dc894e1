"""Is this error "out of memory"? One table, asked by everything that retries."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Final

from dynagroup.errors import BudgetError

__all__ = ["chain_of", "is_out_of_memory"]

_DEVICES = "CUDA|HIP|XPU|MPS|NPU|HPU|MUSA|MLU"

# What each allocator or library says, as source and bug reports show it. A smaller batch helps against all of them.
_MESSAGES: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"\b(?:{_DEVICES})\b[^\n]{{0,40}}out of memory",  # caching allocators; "CUDA error", "CUDA driver error"; MPS
        r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b",
        r"\b(?:CUBLAS|CUBLASLT|CUSPARSE|CUSOLVER|CUDNN|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED\b",
        r"\bCUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED\b",  # cuDNN 9
        r"\b(?:CUFFT|HIPFFT)_ALLOC_FAILED\b|\brocblas_status_memory_error\b|\bmiopenStatusAllocFailed\b",
        r"(?i)\b(?:cuda|hip) failure\b[^\n]{0,20}'out of memory'",  # NCCL and RCCL, with and without the number
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",  # Linux, Windows
        r"\[enforce fail at alloc_cpu\.cpp",
        r"std::bad_alloc",
        r"Cannot allocate memory",  # strerror(ENOMEM), e.g. from mmap of shared memory
        r"(?i)\bRESOURCE[_ ]EXHAUSTED\b[^\n]*(?:out of memory|allocat|reserve|hbm)",  # XLA; gRPC has other quotas
    )
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device or the host had too little memory, so that a smaller batch may pass.

    The errors an error was explicitly raised from (``raise ... from``) are asked too. ``torch.OutOfMemoryError`` and
    ``MemoryError`` count by class; ``RuntimeError`` and its subclasses (``torch.AcceleratorError``, NCCL's, XLA's) by
    message; ``OSError`` by ``ENOMEM``.

    Not out of memory: cuDNN's ``NOT_SUPPORTED`` and cuFFT's ``INTERNAL_ERROR`` (both also say "this shape never works",
    which a retry would hide), Triton's ``OutOfResources`` (a kernel's shared memory: the batch does not matter), a
    killed worker (nothing is left to retry in), and a :class:`~dynagroup.BudgetError` (dynagroup has tried already).

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    return any(_speaks_for_itself(link) for link in chain_of(error))


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was explicitly raised from, up to a verdict of dynagroup's own."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and not isinstance(link, BudgetError):
        seen.add(id(link))
        yield link
        link = link.__cause__


def _speaks_for_itself(error: BaseException) -> bool:
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(pattern.search(str(error)) for pattern in _MESSAGES)
