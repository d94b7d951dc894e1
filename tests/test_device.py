import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynagroup.device import CudaDevice, free_bytes
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.oom import is_out_of_memory

ALLOC = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 40000000000 bytes. Error code 12 (Cannot allocate)"

accelerator_error = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and later

SAID = [  # what RuntimeErrors say
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity)",
    "hipHostMalloc: out of memory",
    "HIP out of memory. Tried to allocate 2.00 GiB",
    "RCCL: HIP failure 'out of memory'",
    "std::bad_alloc",
    "XPU out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.91 GiB total capacity)",
    "MPS backend out of memory (MPS allocated: 17.96 GB, other allocations: 1.01 MB, max allowed: 18.13 GB)",
    "NPU out of memory. Tried to allocate 2.00 GiB",
    "Triton Error [CUDA]: out of memory",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "NCCL error: unhandled cuda error, NCCL version 2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    f"[enforce fail at alloc_cpu.cpp:117] err == 0. {ALLOC}",
    "[enforce fail at alloc_cpu.cpp:80] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "unable to mmap 1024 bytes from file </torch_12_34>: Cannot allocate memory (12)",
    "Resource exhausted: Failed to allocate request for 1.00GiB (1073741824B) on device ordinal 0",
    "RESOURCE_EXHAUSTED: Attempting to reserve 3.22G at the bottom of memory. That was not possible.",
]
OUT_OF_MEMORY = [
    *map(RuntimeError, SAID),
    torch.OutOfMemoryError("any text"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    accelerator_error("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to ..."),
]
SAID_OF_OTHERS = [
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    "nonzero is not supported for tensors with more than INT_MAX elements",
    "out of resource: shared memory, Required: 264192, Hardware limit: 232448. Reducing block sizes may help.",
    "DataLoader worker (pid 17) is killed by signal: Killed.",
    "RESOURCE_EXHAUSTED: Received message larger than max (5000000 vs. 4194304)",
    "unable to write to file </torch_12_34>: No space left on device (28)",
]
LOOK_ALIKES = [
    *map(RuntimeError, SAID_OF_OTHERS),
    accelerator_error("CUDA error: device-side assert triggered"),
    ValueError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyboardInterrupt(),
    BudgetError("sample 3 does not fit even alone. The allocator said: CUDA out of memory"),
]


@pytest.mark.parametrize(
    "error", [*OUT_OF_MEMORY, *LOOK_ALIKES], ids=lambda e: f"{type(e).__name__}: {e}"[:60]
)
def test_out_of_memory_is_told_from_what_looks_alike(error: BaseException) -> None:
    assert is_out_of_memory(error) == (error in OUT_OF_MEMORY)


def raised(
    error: BaseException, cause: BaseException | None, context: BaseException | None = None
) -> BaseException:
    error.__cause__ = cause
    error.__context__ = context or cause
    return error


def test_a_stated_cause_counts_and_dynagroups_own_verdict_is_final() -> None:
    reason = torch.OutOfMemoryError("x")
    assert is_out_of_memory(raised(RuntimeError("worker failed"), reason))
    verdict = raised(BudgetError("sample 0 does not fit"), reason)
    assert not is_out_of_memory(verdict)
    assert not is_out_of_memory(raised(RuntimeError("outer"), verdict))
    while_handling = raised(RuntimeError("clean-up is broken"), None, context=reason)
    assert not is_out_of_memory(while_handling)
    circle = RuntimeError("a")
    circle = raised(circle, raised(RuntimeError("b"), circle))
    assert not is_out_of_memory(circle)


def test_a_real_allocation_fails_as_told() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A CUDA device of 2,000 bytes whose counters stand where the test puts them."""
    counters = SimpleNamespace(peak=100, free=700, reserved=300, share=1.0)
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 3,
        "mem_get_info": lambda at: (counters.free, 2000),
        "memory_reserved": lambda at: counters.reserved,
        "max_memory_allocated": lambda at: counters.peak,
        "get_device_properties": lambda at: SimpleNamespace(total_memory=2000),
        "get_per_process_memory_fraction": lambda at: counters.share,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    return counters


def test_what_is_free_or_held_says_what_a_process_can_have(
    cuda: SimpleNamespace,
) -> None:
    for device in (None, "cuda", 1):
        assert free_bytes(device) == 1000
    cuda.share = 0.25  # set_per_process_memory_fraction
    assert free_bytes() == 500


def test_without_an_accelerator_the_memory_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "device 'cpu' does not report its memory; .* e.g. memory='24GB'"
    with pytest.raises(ConfigError, match=message):
        free_bytes("cpu")
    for name in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cpu' does not report"):
        free_bytes()
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        CudaDevice()
