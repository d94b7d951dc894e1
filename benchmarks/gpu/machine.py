"""The device that a part runs on: its clock, its memory, its limit of time. ``dry`` is the CPU with sizes that mean nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Machine"]


@dataclass
class Machine:
    """What every part is handed.

    Args:
        minutes: a part begins nothing that may end after so many.
    """

    dry: bool
    minutes: float = 8.5
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not self.dry and not torch.cuda.is_available():
            raise SystemExit("no CUDA device here; --dry tries the campaign on the CPU, with figures that mean nothing")
        self.device = torch.device("cpu" if self.dry else "cuda")
        self.dtype = torch.float32 if self.dry else torch.bfloat16

    def left_s(self) -> float:
        """Seconds until nothing more may run."""
        return self.began + 60 * self.minutes - time.monotonic()

    def seconds(self, run: Callable[[], Any]) -> float:
        """How long it takes, until the device is done."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def warm_up(self, seconds: float = 2.0) -> None:
        """Bring the device to the clock that it keeps under load, so that what is timed first is not timed slower."""
        if self.dry:
            return
        square = torch.randn(4096, 4096, device=self.device, dtype=self.dtype)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(20):
                square @ square
            self.wait()
        del square
        self.free()

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give unused memory back, forget earlier peaks, and lift a limit that a part has set."""
        if not self.dry:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Most bytes allocated since :meth:`free`."""
        return 0 if self.dry else torch.cuda.max_memory_allocated()

    @property
    def total_bytes(self) -> int:
        return 1 << 30 if self.dry else torch.cuda.get_device_properties(0).total_memory
