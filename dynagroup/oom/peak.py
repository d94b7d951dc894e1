"""The device's own word on how close a batch came to its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PeakWatch", "watch_of"]


def watch_of(model: Any) -> PeakWatch | None:
    """A watch on the model's device; None where there is nothing to read."""
    import torch

    return PeakWatch(next(model.parameters()).device) if torch.cuda.is_initialized() else None


class PeakWatch:
    """Reads the allocator's peak without resetting it: the statistics are the user's.

    A peak is known only when it is a new one, since an old one belongs to an earlier batch; and new ones are what matter.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._highest = self._peak()

    def new_peak(self) -> tuple[int | None, int | None]:
        """(peak bytes since the process started, bytes the device has) if the peak is new; else (None, None)."""
        import torch

        peak = self._peak()
        if peak <= self._highest:
            return None, None
        self._highest = peak
        return peak, int(torch.cuda.get_device_properties(self._device).total_memory * _allowed_share(self._device))

    def _peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


def _allowed_share(device: torch.device) -> float:
    import torch

    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and later
    return 1.0 if read is None else read(device)
