"""The memory of a device: which errors mean that it ran out, how much is free, and the counters of its allocator."""

import errno
import gc
import re
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dynagroup.errors import BudgetError, ConfigError

_DEVICES = "CUDA|HIP|XPU|MPS|NPU|HPU|MUSA|MLU"

# Out-of-memory messages of allocators and libraries, as their source and bug reports show them.
_MESSAGES = (
    rf"\b(?:{_DEVICES})\b[^\n]{{0,40}}out of memory",  # PyTorch's caching allocators; "CUDA error", "CUDA driver error"
    r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory)\b",
    r"\b(?:CUBLAS|CUBLASLT|CUSPARSE|CUSOLVER|CUDNN|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED\b",
    r"\bCUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED\b",  # cuDNN 9
    r"\b(?:CUFFT|HIPFFT)_ALLOC_FAILED\b|\brocblas_status_memory_error\b|\bmiopenStatusAllocFailed\b",
    r"(?i)\b(?:cuda|hip) failure\b[^\n]{0,20}'out of memory'",  # NCCL and RCCL, with and without an error number
    r"\b(?:cuda|hip)(?:Host)?(?:Malloc|Alloc)\w*\b[^\n]{0,40}out of memory",  # libraries with their own allocator
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",  # Linux, Windows
    r"\[enforce fail at alloc_cpu\.cpp|std::bad_alloc|Cannot allocate memory",  # strerror(ENOMEM), as of shared memory
    r"(?i)\bRESOURCE[_ ]EXHAUSTED\b[^\n]*(?:out of memory|allocat|reserve|hbm)",  # XLA; gRPC reports quotas with it too
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that a device or the host ran out of memory, so that a smaller batch may succeed.

    The errors that it was raised from (``raise ... from``) are checked as well. ``torch.OutOfMemoryError`` and
    ``MemoryError`` are recognised by class, ``RuntimeError`` and its subclasses by message, ``OSError`` by ``ENOMEM``.

    Not recognised: cuDNN's ``NOT_SUPPORTED`` and cuFFT's ``INTERNAL_ERROR`` (a shape may never work), Triton's
    ``OutOfResources`` (a kernel lacks shared memory), a killed worker, and :class:`~dynagroup.BudgetError`.

    >>> is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    return any(_is_memory_error(cause) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields the error and the errors that it was explicitly raised from, up to the first BudgetError."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and not isinstance(error, BudgetError):
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and any(re.search(known, message) for known in _MESSAGES)


def free_bytes(device: torch.device | str | int | None = None) -> int:
    """Returns the bytes that this process can use on a device: free ones, and those that it has already reserved.

    Bytes of a model that is already on the device count as usable, because budgets subtract the model themselves. None
    as device: the current CUDA device, else another accelerator.

    Raises ConfigError if no such device is available, or it does not report its memory (such as a CPU)."""
    if device is None:
        device = _default_device()
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    backend: Any = getattr(torch, place.type, None)
    reports = "recommended_max_memory" if place.type == "mps" else "mem_get_info"
    if not hasattr(backend, reports) or not backend.is_available():
        raise ConfigError(
            f"device {str(place)!r} does not report its memory; give the memory, e.g. memory='24GB'"
        )
    if place.type == "mps":
        return int(backend.recommended_max_memory())
    if place.index is None:
        place = torch.device(place.type, backend.current_device())
    free, total = backend.mem_get_info(place)
    return int(min(free + backend.memory_reserved(place), total * _allowed_share(place)))


def _default_device() -> str:
    for name in ("cuda", "xpu", "mps"):
        if getattr(torch, name).is_available():
            return name
    return "cpu"


def _allowed_share(device: torch.device) -> float:
    """Returns the fraction that ``set_per_process_memory_fraction`` allows; 1.0 before torch 2.8, which reports it."""
    if device.type != "cuda" or not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return 1.0
    return torch.cuda.get_per_process_memory_fraction(device)


class Device(Protocol):
    """Counters of a device's allocator, in bytes: allocated now; most allocated and most reserved since ``reset``."""

    @property
    def device(self) -> torch.device: ...
    def reset(self) -> None: ...
    def allocated(self) -> int: ...
    def peaks(self) -> tuple[int, int]: ...


class CudaDevice:
    """PyTorch's caching allocator on the current CUDA device; measuring resets its statistics. ConfigError: no CUDA."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "measure() needs a CUDA device, but none is available; use simulate(), which needs none"
            )
        self.device = torch.device("cuda", torch.cuda.current_device())

    def reset(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peaks(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        allocated = torch.cuda.max_memory_allocated(self.device)
        reserved = torch.cuda.max_memory_reserved(self.device)
        return allocated, reserved

    def about(self) -> dict[str, str]:
        """Returns what the measurements ran on: device name, CUDA version, torch version."""
        return {
            "device": torch.cuda.get_device_name(self.device),
            "cuda": torch.version.cuda or "",
            "torch": torch.__version__,
        }
